"""What was hot in earlier sessions is there when the next one begins, and changes nothing else."""

import os

import pytest
import torch

from moelab import open_model, simulate
from moelab.base.specs import State

IDS = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache in which nothing is known."""
    monkeypatch.setenv("MOELAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MOELAB_WARM")
    return tmp_path / "cache" / "heat"


def session(model, n=65, **options):
    """(tokens, experts it began with, its run, a replay of that), of a session that decodes n."""
    with open_model(model, memory="50%", **options) as lm:
        out = lm.generate(IDS, do_sample=False, min_new_tokens=n, max_new_tokens=n)
        run = lm.moelab.run
        return out, run.settings.first, run, simulate(run)


@pytest.mark.parametrize("scope", ["model", "layer"])
@pytest.mark.parametrize("store", [False, True])
def test_the_next_session_begins_with_what_was_hot(qwen, store, scope):
    wanted, first, cold, _ = session(qwen[store], scope=scope)
    assert not first
    out, first, run, replayed = session(qwen[store], scope=scope)
    assert torch.equal(out, wanted)
    uses = {}
    for step in cold.steps:
        for layer, tokens in step:
            for expert, n in tokens.items():
                uses[layer, expert] = uses.get((layer, expert), 0) + n
    least = min(uses[key] for key in first)
    others = [n for (layer, e), n in uses.items() if (layer, e) not in first]
    assert 0 < len(first) == cold.settings.pools.F * (1 if scope == "model" else 2)
    assert scope == "layer" or max(others) <= least
    assert run.counters == replayed.counters and run.counters.misses < cold.counters.misses


def test_what_is_read_for_it_is_no_tokens_read(qwen):
    session(qwen[0], prefetch="none")
    _, first, run, replayed = session(qwen[0], prefetch="none")
    assert run.metrics().read_bytes == replayed.metrics().read_bytes
    read = [(of.layer, of.expert) for of in run.events if of.kind == "warm"]
    assert len({*read}) == len(read) and {*read} <= {*first}


def test_it_can_be_left(qwen, cache, monkeypatch):
    session(qwen[0], warm=False)
    assert not cache.exists()
    session(qwen[0])
    (file,) = cache.iterdir()
    kept = file.read_bytes()
    _, first, *_ = session(qwen[0], warm=False)
    assert not first and file.read_bytes() == kept
    monkeypatch.setenv("MOELAB_WARM", "0")
    _, first, *_ = session(qwen[0])
    assert not first and file.read_bytes() == kept


def test_a_few_tokens_say_nothing(qwen, cache):
    session(qwen[0], n=40)
    assert not [*cache.iterdir()]


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: b"{}"])
def test_a_damaged_file_is_told_and_made_again(qwen, cache, damage):
    session(qwen[0])
    (file,) = cache.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(UserWarning, match=file.name):
        _, first, *_ = session(qwen[0])
    assert not first
    _, first, *_ = session(qwen[0])
    assert first


def test_another_models_is_refused(qwen, cache):
    session(qwen[0])
    (file,) = cache.iterdir()
    session(qwen[1])
    (other,) = {*cache.iterdir()} - {file}
    os.replace(other, file)
    with pytest.warns(UserWarning, match=f"{file.name}.*it is of {other.stem}"):
        session(qwen[0])


def test_a_policy_that_knows_the_run_begins_as_it_was_told(qwen):
    from moelab.cache.policies import LRU

    session(qwen[0])
    _, first, *_ = session_of(qwen[0], LRU())
    assert not first


def session_of(model, policy):
    with open_model(model, memory="50%", cache=policy) as lm:
        lm.generate(IDS, max_new_tokens=4)
        return None, lm.moelab.run.settings.first


def test_resizes_and_errors_while_it_is_read(qwen):
    wanted, *_ = session(qwen[0])
    with open_model(qwen[0], memory="50%", bandwidth=2e6) as lm:
        assert lm.moelab.engine.loader.queue.late
        for budget in ("25%", "100%", "40%"):
            lm.moelab.resize(budget)
            out = lm.generate(IDS, do_sample=False, min_new_tokens=3, max_new_tokens=3)
            assert torch.equal(out, wanted[:, : out.shape[1]])
        residents = lm.moelab.residency.resident(State.FULL)
        assert residents
