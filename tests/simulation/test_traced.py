"""A trace of another engine, without a model: as a run, in simulated time, and what its ids predict."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moelab
from moelab.base.specs import MoESpec
from moelab.cache.residency import Residency
from moelab.cards import load_model
from moelab.simulation.simulator import flat
from moelab.simulation.traced import GUESSES, forwards_of, guesses, kept, run_of
from moelab.trace import DECODE, PREFILL, RoutingTrace
from notebooks.studies.most_hits import belady_hits, request_count

CARD = "OLMoE-1B-7B"


def a_trace(seed=0, sizes=((5, 4), (0, 3), (6, 0)), L=3, E=8, K=2, spec=None, order=None):
    """Sequences of (prefill, decode) tokens; `order` shuffles them as a batch would."""
    torch.manual_seed(seed)
    spec = spec or MoESpec("bare", "", L, tuple(range(L)), E, K, H=4, I=4)
    columns = [
        (phase, sequence)
        for sequence, (prefill, decode) in enumerate(sizes)
        for phase in [PREFILL] * prefill + [DECODE] * decode
    ]
    phase, sequence = torch.tensor(columns).T
    ids = torch.rand(len(phase), spec.L, spec.E).topk(spec.K).indices
    trace = RoutingTrace.of_ids(ids, spec, phase=phase.byte(), sequence=sequence.int())
    return trace if order is None else trace.select(torch.tensor(order))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4),
    st.integers(0, 9),
)
def test_a_pass_is_a_prompt_or_a_token_and_nothing_is_lost(sizes, seed):
    if not any(map(sum, sizes)):
        sizes = [(1, 1)]
    trace = a_trace(seed, sizes)
    steps, forwards = forwards_of(trace)
    expected = []
    for prefill, decode in sizes:
        expected += [(prefill, "prefill")] * (prefill > 0) + [(1, "decode")] * decode
    assert [(of.tokens, of.phase) for of in forwards] == expected
    counts = torch.zeros_like(trace.counts())
    for layer, tokens in flat(steps):
        for expert, n in tokens.items():
            counts[layer, expert] += n
    assert torch.equal(counts, trace.counts())


def test_sequences_that_were_recorded_together_are_played_one_after_another():
    trace = a_trace(sizes=((0, 3), (0, 3)))
    mixed = a_trace(sizes=((0, 3), (0, 3)), order=[0, 3, 1, 4, 2, 5])
    assert forwards_of(mixed) == forwards_of(trace)


def test_layers_that_a_token_does_not_pass_are_not_asked():
    trace = a_trace(sizes=((0, 2),))
    trace.ids[0, 1] = trace.spec.E
    assert [layer for layer, _ in forwards_of(trace)[0][0]] == [0, 2]
    trace.ids[:] = trace.spec.E
    with pytest.raises(ValueError, match="no routing"):
        run_of(trace)


def test_a_budget_is_a_share_of_the_experts_or_bytes_of_them():
    spec = load_model(CARD)
    every = spec.L * spec.E
    assert kept(spec, None) == every and kept(spec, "25%") == kept(spec, 0.25) == every // 4
    assert kept(spec, f"{10 * spec.expert_bytes}B") == 10
    assert kept(spec, "1TB") == every
    for budget in ("0%", "1kB", "much"):
        with pytest.raises(ValueError, match="expert|budget"):
            kept(spec, budget)


@pytest.mark.parametrize("cache", ["lru", "lfu", "belady"])
def test_the_simulator_hits_as_a_plain_loop_over_the_trace(cache):
    spec = replace(load_model(CARD), moe_layers=(0, 1, 2))
    trace = a_trace(sizes=((6, 5), (3, 4)), spec=spec)
    found = moelab.simulate(trace, memory="25%", cache=cache, device="m2-max")
    asked, capacity = flat(forwards_of(trace)[0]), kept(spec, "25%")
    if cache == "belady":
        assert found.counters.misses >= request_count(asked) - belady_hits(asked, capacity)
    else:
        residency = Residency(spec.L, spec.E, moelab.Pools(F=capacity), cache)
        for step in asked:
            residency.begin(*step)
        assert found.counters == residency.counters
    assert found.ttft > found.tpot > 0 and found.kind == "simulated"


def test_on_a_gpu_each_decoded_token_goes_alone_and_the_cpu_takes_its_share():
    spec = replace(load_model(CARD), moe_layers=(0, 1, 2))
    trace = a_trace(sizes=((6, 5), (3, 9)), spec=spec)
    how = {"memory": "25%", "device": "rtx-4090"}
    link, both = moelab.simulate(trace, **how), moelab.simulate(trace, hybrid=True, **how)
    assert [one.path for one in link.forwards] == [
        "token" if one.phase == "decode" else "none" for one in link.forwards
    ]
    assert link.metrics().paths == {"token": 14} and link.counters.away == 0
    assert both.counters.away > 0 and both.tpot < link.tpot
    assert both.metrics().link_bytes < link.metrics().link_bytes
    with pytest.raises(ValueError, match="no memory beside it"):
        moelab.simulate(trace, memory="25%", device="m2-max", hybrid=True)
    with pytest.raises(ValueError, match="pools="):
        moelab.simulate(run_of(trace), hybrid=True, device="rtx-4090")


def test_time_needs_a_device_and_sizes_and_says_so():
    trace = a_trace()
    with pytest.raises(ValueError, match="device="):
        moelab.simulate(trace, memory="50%")
    bare = replace(trace, spec=replace(trace.spec, H=0, I=0))
    with pytest.raises(ValueError, match="model="):
        moelab.simulate(bare, memory="50%", device="m2-max")
    with pytest.raises(ValueError, match="model="):
        moelab.simulate(bare, memory="1MB", device="m2-max")
    with pytest.raises(TypeError, match="RoutingTrace"):
        moelab.simulate(trace.ids)
    with pytest.raises(ValueError, match="pools="):
        moelab.simulate(run_of(trace), memory="50%", device="m2-max")


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("name", GUESSES)
def test_ids_predict_as_naive_loops_do(name, ahead):
    trace = a_trace(3, sizes=((3, 6), (0, 4)), E=5)
    ids, E, K = trace.ids.tolist(), trace.spec.E, trace.spec.K
    rows = [t for t, phase in enumerate(trace.phase.tolist()) if phase == DECODE]
    told = [
        of
        for of, one in zip(guesses(trace, name, ahead), forwards_of(trace)[1])
        if one[3] == "decode"
    ]
    for t, said in zip(rows, told, strict=True):
        for layer in range(trace.spec.L):
            if layer < ahead:
                assert layer not in said
            elif name == "previous":
                assert said.get(layer, []) == (ids[t - 1][layer] if t else [])
            else:
                score = [
                    sum(
                        (e in ids[u][layer])
                        * len({*ids[u][layer - ahead]} & {*ids[t][layer - ahead]})
                        for u in range(t)
                    )
                    for e in range(E)
                ]
                best = sorted(range(E), key=lambda e: -score[e])[:K]
                assert said.get(layer, []) == [e for e in best if score[e]]
