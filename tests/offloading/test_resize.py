"""A running model's memory is resized: what is computed stays what it was, memory is the system's
again."""

import sys
import threading

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab import convert, open_model, simulate
from moelab.base.specs import State
from moelab.cache.policies import POLICIES
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.simulation.costs import Delays
from tests.depth import depth
from tests.models import tiny

IDS = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(0))


def in_parts(model, memory, delays):
    """A plan of all four pools: a quarter of the memory for each."""
    copies = memory.store.spec.L if memory.how.scope == "layer" else 1
    part, sizes = memory.kept // copies // 4, memory.sizes
    each = sizes.full, sizes.sm + sizes.e, sizes.sm, sizes.e
    return Pools(*(min(part // size, 4) for size in each))


DELAYS = Delays(3e-4, 7e-4, 1e-5, 1e-5, 1e-5, 0.0)
#: name → options of `open_model`
WAYS = {
    **{policy: {"cache": policy} for policy in POLICIES if policy != "belady"},
    "layers": {"scope": "layer"},
    "on demand": {"prefetch": "none"},
    "deep": {"ahead": 3, "staging": 6, "workers": 2},
    "parts": {"plan": in_parts, "delays": DELAYS},
    "parts, layers": {"plan": in_parts, "scope": "layer", "delays": DELAYS},
}


@pytest.fixture(scope="module")
def logits(qwen):
    """Of each position of IDS, by a model in memory."""
    with open_model(qwen[0]) as lm, torch.no_grad():
        return token_by_token(lm, lambda at: None)


def token_by_token(lm, before):
    """Logits, with `before(i)` called before the i-th token: a prompt of four, then one by one."""
    cache, found = None, []
    with torch.no_grad():
        for at in range(4, IDS.shape[1] + 1):
            before(at)
            new = IDS[:, :4] if cache is None else IDS[:, at - 1 : at]
            out = lm(new, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits[:, -1])
    return torch.cat(found)


def generate(lm, n=24, **options):
    options = {"do_sample": False, "min_new_tokens": n, "max_new_tokens": n} | options
    return lm.generate(IDS, **options)


BUDGETS = st.sampled_from(["30%", 0.6, 1.0, "90%", "45%"])
MOVES = st.lists(st.dictionaries(st.integers(4, 12), BUDGETS, min_size=2), min_size=1, max_size=2)


@pytest.mark.parametrize(
    "way", depth(["lru", "layers", "on demand", "deep", "parts, layers"], WAYS)
)
@settings(max_examples=2)
@given(moves=MOVES)
def test_any_resizes_between_tokens_leave_every_bit(qwen, logits, way, moves):
    with open_model(qwen["plan" in WAYS[way]], memory="60%", **WAYS[way]) as lm:
        for those in moves:
            found = token_by_token(lm, lambda at: at in those and lm.moelab.resize(those[at]))
            assert torch.equal(found, logits)


@pytest.mark.parametrize("opened", ["60%", "100%"])
@settings(max_examples=3)
@given(
    way=st.sampled_from(sorted(WAYS)),
    moves=st.dictionaries(st.integers(4, 12), st.lists(BUDGETS, min_size=1, max_size=2)),
)
def test_a_replay_finds_what_the_engine_found(qwen, opened, way, moves):
    def move(at):
        for to in moves.get(at, ()):
            lm.moelab.resize(to)

    with open_model(qwen["plan" in WAYS[way]], memory=opened, **WAYS[way]) as lm:
        token_by_token(lm, move)
        run = lm.moelab.run
        assert [at + 4 for at, _ in run.set_up[1:]] == sorted(at for at in moves for _ in moves[at])
        for of in (run, run.since()):
            assert simulate(of).counters == run.counters


def test_twenty_resizes_by_another_thread_within_a_generation(qwen):
    with open_model(qwen[0], memory="50%") as lm:
        wanted = generate(lm, 60)
        turns, moves = iter(range(60)), iter(["20%", "100%", "35%", "80%"] * 5)
        applied = []

        def told(*_):
            """Between two tokens somebody moves a slider."""
            if next(turns) % 3 == 2 and (to := next(moves, None)) is not None:
                slider = threading.Thread(target=lm.moelab.resize, args=(to,))
                slider.start()
                slider.join()
                applied.append(to)
            return False

        assert torch.equal(generate(lm, 60, stopping_criteria=[told]), wanted)
        assert len(applied) == 20
        run, now = lm.moelab.run, lm.moelab.run.settings.pools
        assert simulate(run).counters == run.counters
        assert simulate(run, pools=now).counters.requests == run.counters.requests
        lm.moelab.reset()
        generate(lm)
        assert len(simulate(lm.moelab.run).forwards) == 24


def test_from_within_a_forward_pass_it_waits_for_its_end(qwen, logits):
    with open_model(qwen[0], memory="50%") as lm:
        before = lm.moelab.budget
        seen = []

        def within(*_):
            lm.moelab.resize("25%")
            seen.append(lm.moelab.budget)

        hook = lm.model.layers[1].register_forward_hook(within)
        assert torch.equal(token_by_token(lm, lambda at: None), logits)
        hook.remove()
        assert seen[0] == before > lm.moelab.budget


@pytest.mark.parametrize("options", [{"executor": "fast"}, {"executor": "fast", "hybrid": 1}])
def test_drafts_hybrid_and_kernels_go_on(qwen, tmp_path, options):
    raw = convert(qwen[0], tmp_path / "raw", codec="raw")
    with open_model(raw, memory="50%", **options) as lm:
        wanted = generate(lm, drafts=2)
        turns = iter(["25%", "100%", "40%"] * 40)
        moved = [lambda *_: bool(lm.moelab.resize(next(turns)))]
        assert torch.equal(generate(lm, drafts=2, stopping_criteria=moved), wanted)


def test_what_is_refused_leaves_all_as_it_was(qwen):
    with open_model(qwen[1], memory="50%") as lm:
        wanted, before = generate(lm), lm.moelab.budget
        for budget, said in (("1000B", "are the least that works"), ("much", "must be bytes")):
            with pytest.raises(ValueError, match=said):
                lm.moelab.resize(budget)
        assert lm.moelab.budget == before
        assert torch.equal(generate(lm), wanted)
        lm.moelab.resize("auto")
        assert lm.moelab.residency.holds_all
        least = lm.moelab.engine.loader.slots.sizes.in_flight * 2
        lm.moelab.resize(least + 2**20)
        assert f"{lm.moelab.budget / 1e9:.3g} GB" in repr(lm.moelab)
        assert torch.equal(generate(lm), wanted)
    with open_model(qwen[0]) as lm, pytest.raises(ValueError, match="offloaded for a CPU"):
        lm.moelab.resize("50%")


@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux does")
def test_memory_is_the_systems_again(tmp_path):
    sizes = {"hidden_size": 256, "moe_intermediate_size": 1024, "num_hidden_layers": 8}
    folder = tiny.save("qwen3_moe", tmp_path, torch.bfloat16, **sizes)
    rss = psutil.Process().memory_info
    with open_model(folder, memory="100%") as lm:
        wanted, there, full = generate(lm, 4), lm.moelab.tiers["memory"], rss().rss
        for budget in ("40%", "70%", "20%", "90%", "30%"):
            lm.moelab.resize(budget)
            freed = there - lm.moelab.tiers["memory"]
            assert full - rss().rss > 0.8 * freed - 2**20  # which torch may have taken since
            assert torch.equal(generate(lm, 4), wanted)
            assert rss().rss < full + 2**20


@pytest.mark.parametrize("policy", ["lru", "lfu", "lrfu"])
def test_who_was_hottest_stays(policy):
    residency = Residency(1, 8, Pools(F=8), policy)
    for expert, times in zip(range(8), (1, 9, 2, 8, 3, 7, 4, 6)):
        for _ in range(times):
            residency.begin(0, {expert: 1})
    for expert in 6 * (1, 3, 5):  # often and lately
        residency.begin(0, {expert: 1})
    assert len(residency.resize(Pools(F=3))) == 5
    assert residency.full(0) == [1, 3, 5]
    residency.resize(Pools(F=4))
    residency.begin(0, {0: 1})
    assert residency.full(0) == [0, 1, 3, 5]


@given(st.lists(st.builds(Pools, *[st.integers(0, 6)] * 4), max_size=6))
def test_pools_hold_no_more_than_they_are_told_to(sizes):
    residency = Residency(2, 4, Pools(F=3, C=2))
    states = State.FULL, State.COMPRESSED, State.SM, State.E
    for pools in sizes:
        before = {key for state in states for key in residency.resident(state)}
        evicted = residency.resize(pools)
        after = {key for state in states for key in residency.resident(state)}
        assert before - after == {*evicted} and after <= before
        for layer in (0, 1):
            assert all(len(residency.resident(state)) <= pools[state] for state in states)
            residency.begin(layer, {0: 2, 1: 1, 3: 1})
