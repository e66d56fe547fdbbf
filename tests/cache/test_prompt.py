"""`cache="prompt"` (GPU-NDP §III-D): what the prompt used most is there before the answer, and stays."""

from contextlib import closing
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab import convert, open_model
from moelab.base.specs import ExpertKey, State
from moelab.cache.residency import Pools, Residency
from moelab.offloading.offload import offload
from moelab.simulation.simulator import replay
from tests.models import tiny
from tests.offloading.test_offload import generate
from tests.timelines import check

L, E = 3, 6
EVERYONE = [ExpertKey(layer, expert) for layer in range(L) for expert in range(E)]
LAYERS = st.lists(
    st.tuples(
        st.integers(0, L - 1),
        st.dictionaries(st.integers(0, E - 1), st.integers(1, 4), min_size=1, max_size=E),
    ),
    max_size=9,
)
#: of one prompt or two: forward passes of prefill, of which there may be several, then an answer's
PROMPTS = st.lists(
    st.tuples(st.lists(LAYERS, min_size=1, max_size=3), st.lists(LAYERS, min_size=1, max_size=3)),
    min_size=1,
    max_size=3,
)


def most_used(counts, n, layers):
    """The n of the most tokens in these layers, by sorting all; equal counts: the lower key first."""
    used = [key for key in EVERYONE if key in counts and key.layer in layers]
    return set(sorted(used, key=lambda key: (-counts[key], key))[:n])


@pytest.mark.parametrize("scope", ["model", "layer"])
@given(PROMPTS, st.integers(1, 8))
def test_the_most_used_of_the_prompt_are_there_before_the_answer_and_stay(scope, prompts, places):
    residency = Residency(L, E, Pools(F=places), "prompt", scope)
    parts = [range(L)] if scope == "model" else [[layer] for layer in range(L)]
    for prefills, answers in prompts:
        counts = {}
        for forward in prefills:
            assert residency.begin_forward("prefill") == []
            for layer, tokens in forward:
                residency.begin(layer, tokens)
                for expert, n in tokens.items():
                    counts[layer, expert] = counts.get((layer, expert), 0) + n
        before, evictions = {*residency.resident(State.FULL)}, residency.counters.evictions
        steps = residency.begin_forward("decode")
        loads = {request.key for step in steps for request in step.loads}
        left = {key for step in steps for key in step.evicted}
        chosen = set.union(*(most_used(counts, places, layers) for layers in parts))
        assert {*residency.resident(State.FULL)} == before - left | loads >= chosen
        assert loads == chosen - before and not left & chosen
        assert residency.counters.evictions == evictions + len(left)
        assert len({step.layer for step in steps}) == len(steps)
        for forward in answers:
            assert residency.begin_forward("decode") == []
            for layer, tokens in forward:
                residency.begin(layer, tokens)
                assert {*residency.resident(State.FULL)} >= chosen
        most = places if scope == "model" else places * L
        assert len(residency.resident(State.FULL)) <= most


@given(st.dictionaries(st.integers(0, E - 1), st.integers(1, 4), min_size=1), st.integers(1, E))
def test_a_first_prompt_has_loaded_all_that_stays(tokens, places):
    residency = Residency(L, E, Pools(F=places), "prompt")
    residency.begin_forward("prefill")
    residency.begin(0, tokens)
    assert residency.begin_forward("decode") == []


@pytest.mark.parametrize("codec, scope", [("raw", "model"), ("huffman", "layer")])
def test_the_engine_loads_them_and_the_simulator_decides_the_same(codec, scope, tmp_path):
    folder = tiny.save("qwen3_moe", tmp_path / "model")
    store = convert(folder, tmp_path / "store", codec=codec)
    # a scheduler is free to read an expert in one request or two, by the seconds that were measured
    model = offload(store, 0.7, cache="prompt", scope=scope, scheduler=None)
    eager = open_model(folder)
    with closing(model.moelab) as session:
        for seed in range(3):
            for got, wanted in zip(generate(model, seed), generate(eager, seed)):
                assert got.equal(wanted)
        played = replay(session.run)
        assert played.counters == session.residency.counters
        assert check(session.timeline) == check(played.events) == []
        first, second = (
            [e for e in events if e.bytes] for events in (session.timeline, played.events)
        )
        assert sorted(e[2:4] for e in first) == sorted(e[2:4] for e in second)
        borders = [(a.end, b.start) for a, b in pairwise(session.forwards) if b.phase != a.phase]
        between = [
            e for e in first if any(end <= e.start and e.end <= begin for end, begin in borders)
        ]
        assert between or scope == "layer"
