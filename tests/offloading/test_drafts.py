"""Draft tokens: the same tokens in fewer passes, counted a token, and only where that is faster."""

import random
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

import moelab
from moelab.models.greedy import greedy
from moelab.offloading.drafts import COUNTS, DraftGate, PromptLookup
from tests.depth import in_turn

NEW = 24
#: a passage that recurs, so that its continuation can be looked up
IDS = torch.tensor([[7, 8, 9, 10, 11, 12, 13, 14] * 3])


def run(model, **options):
    """The new tokens."""
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW} | greedy(model) | options
    ids = options.pop("ids", IDS)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module", params=[{}, {"memory": "40%"}], ids=["resident", "offloaded"])
def opened(request):
    with moelab.open_model(dtype="float32", **request.param) as model:
        yield model


@pytest.mark.parametrize("drafts", [1, 3, 8, "auto"])
def test_tokens_are_those_of_greedy_decoding(opened, drafts):
    plain = run(opened)
    assert run(opened, drafts=drafts) == plain
    with moelab.using(opened, executor="fast"):
        assert run(opened, drafts=drafts) == plain


def test_a_token_is_counted_once_however_many_were_drafted(opened):
    run(opened)
    opened.moelab.reset()
    run(opened, drafts=4)
    forwards, found = opened.moelab.forwards, opened.moelab.metrics()
    assert [one.phase for one in forwards] == ["prefill"] + ["decode"] * (len(forwards) - 1)
    assert sum(one.drafts for one in forwards) > sum(one.right for one in forwards) > 0
    assert found.decode_tokens == NEW - 1 and found.prefill_tokens == IDS.shape[1]
    decoding = sum(one.end - one.start for one in forwards[1:])
    assert found.tpot == pytest.approx(decoding / (NEW - 1))


def test_a_simulation_of_a_run_with_drafts_counts_as_the_run_does():
    with moelab.open_model(dtype="float32", memory="40%") as model:
        run(model, drafts=4)
        measured, simulated = model.moelab.run, moelab.simulate(model.moelab.run)
    assert [one[2:6] for one in simulated.forwards] == [one[2:6] for one in measured.forwards]
    assert simulated.metrics().decode_tokens == measured.metrics().decode_tokens


def test_an_assistant_drafts(opened):
    plain = run(opened)
    with moelab.open_model(dtype="float32") as assistant:
        opened.moelab.reset()
        assert run(opened, assistant_model=assistant, drafts=3) == plain
        assert len(opened.moelab.forwards) < NEW / 2  # the same model guesses everything
        assert run(opened, assistant_model=assistant, drafts="auto") == plain
        assert run(opened, assistant_model=assistant) == plain


def test_options_may_be_a_configuration_and_come_by_place(opened):
    plain = run(opened)
    config = GenerationConfig(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    for places in ([IDS, config], [IDS]):
        options = {} if places[1:] else {"generation_config": config}
        opened.moelab.reset()
        out = opened.generate(*places, attention_mask=torch.ones_like(IDS), drafts=4, **options)
        assert out[0, IDS.shape[1] :].tolist() == plain
        assert any(one.drafts for one in opened.moelab.forwards)


def test_sampled_tokens_may_be_drafted(opened):
    torch.manual_seed(0)
    assert len(run(opened, drafts=3, do_sample=True)) == NEW


def test_auto_decodes_plainly_where_nothing_can_be_drafted(opened):
    ids = IDS.repeat(2, 1)
    opened.moelab.reset()
    run(opened, ids=ids, drafts="auto")
    assert not any(one.drafts for one in opened.moelab.forwards)
    with pytest.raises(ValueError, match="batch"):
        run(opened, ids=ids, drafts=2)


@pytest.mark.parametrize("drafts", [-1, "many", 1.5, None])
def test_no_such_drafts(opened, drafts):
    with pytest.raises(ValueError, match="drafts"):
        run(opened, drafts=drafts)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 9))
def test_what_is_looked_up_followed_the_latest_two_tokens_last(tokens, n, stride):
    lookup = PromptLookup()
    lookup.num_assistant_tokens = n
    for end in [*range(1, len(tokens), stride), len(tokens)]:
        found, _ = lookup.get_candidates(torch.tensor([tokens[:end]]))
        known, wanted = tokens[:end], []
        for at in range(2, end):
            if known[at - 2 : at] == known[-2:]:
                wanted = known[at : at + n]
        assert found[0].tolist() == known + wanted


def played(seconds, right, tokens=4_000, free=True, seed=0):
    """Tokens a second through a gate over those of one a pass: `seconds(n)` a pass with n drafts, of
    which `right(rng)` would be right, None where there is nothing to guess by."""
    rng, gate, took, made = random.Random(seed), DraftGate(free), 0.0, 0
    while made < tokens:
        good, n = right(rng), 0
        if good is not None:
            n = gate.choose(COUNTS[-1])
            if free or n:
                of = COUNTS[-1] if free else n
                gate.guessed(min(good, of), of)
        passed = seconds(n) * rng.uniform(0.9, 1.1)
        kept = min(good or 0, n)
        gate.verified(n, kept, passed)
        took += passed
        made += 1 + kept
    return made * seconds(0) / took


def passage(rng, found=1.0, all_right=0.8):
    """Eight drafts are right, or a few."""
    if rng.random() > found:
        return None
    return 8 if rng.random() < all_right else rng.randrange(3)


COSTS = [(0, 0.05), (0, 0.4), (2, 0.1), (8, 0.1), (0, 1.2)]
GUESSED = [*product([True, False], [0.2, 1.0], [0.9, 0.3, 0.0])]


@pytest.mark.parametrize("guessed, cost", in_turn(GUESSED, COSTS))
def test_drafts_are_never_slower_and_on_where_they_pay(guessed, cost):
    """With lookups, which cost nothing, or an assistant."""
    (free, found, all_right), (jump, each) = guessed, cost

    def seconds(n):
        return 1 + each * n + jump * (n > 0)

    right, rng = partial(passage, found=found, all_right=all_right), random.Random(1)
    drawn = [right(rng) for _ in range(1000)]

    def always(n):
        took = sum(seconds(0 if good is None else n) for good in drawn)
        return sum(1 + min(good or 0, n) for good in drawn) / took

    best = max(map(always, COUNTS))
    assert played(seconds, right, free=free) > (1 + 0.8 * (best - 1) if best > 1.3 else 0.99)
