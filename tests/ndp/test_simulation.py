"""Whole runs: the cached decode against a plain loop, the timeline against the metrics' rules, traces as routing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import Costs, NotSupported
from moelab.ndp.prefetch import (calibrated, compare, dataset_free, experts_that_fit, hit_rate, most_used,
                                 utilisation)
from moelab.ndp.routing import count, recorded_routing, simulated_routing
from moelab.ndp.simulation import Run, event_seconds, place, simulate, timeline
from moelab.ndp.systems import PAPER, SYSTEMS
from moelab.runtime.metrics import check, metrics
from moelab.trace import RoutingTrace
from tests.ndp import toy


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(SYSTEMS)), st.integers(1, 4), st.integers(0, 999),
       st.sampled_from(("id", "popularity")))
def test_a_run_is_the_sum_of_its_steps(name, N, seed, placement):
    spec, machine, system = toy.spec(L=2, K=3), toy.machine(N), SYSTEMS[name]
    routing = simulated_routing(spec, seed, prompt=9, answer=6, zipf=0.8)
    routing.decode[2, 1, 0] = spec.E
    result = simulate(spec, machine, system, routing, placement=placement)
    run = Run(spec, machine, system, routing, placement)
    for layer in range(2):
        step = run.prefill_step(layer, count(routing.prefill, spec.E)[layer])
        assert result.moe_prefill_layers[layer] == pytest.approx(layer_seconds(system.plan(step, run.costs), run.costs))
    for d, token in enumerate(routing.decode):
        steps = [run.decode_step(layer, ids) for layer, ids in enumerate(token)]
        total = sum(layer_seconds(system.plan(step, run.costs), run.costs) for step in steps)
        assert result.moe_decode_steps[d] == pytest.approx(total)
    assert result.end_to_end == pytest.approx(result.prefill + result.decode + result.intermediate)
    assert result.intermediate == result.prefetched * 2 * Costs(spec, machine).transfer()


@pytest.mark.parametrize("name", PAPER)
def test_a_timeline_obeys_the_rules_of_all_timelines(name):
    spec, machine = toy.spec(K=3), toy.machine(3)
    routing = simulated_routing(spec, 1, prompt=5, answer=4)
    events, forwards = timeline(spec, machine, SYSTEMS[name], routing, forwards=range(5))
    assert check(events) == []
    found = metrics(events, forwards)
    result = simulate(spec, machine, SYSTEMS[name], routing, seconds=event_seconds)
    assert found["ttft_s"] == pytest.approx(result.prefill)
    assert sum(f[1] - f[0] for f in forwards[1:]) == pytest.approx(result.decode)
    assert found["wall_s"] == pytest.approx(result.end_to_end) and found["decode_tokens"] == 4


def test_what_does_not_fit_is_not_simulated():
    spec = toy.spec(E=64)
    routing = simulated_routing(spec, prompt=3, answer=2)
    small = toy.machine(2, unit_memory=1e8)
    with pytest.raises(NotSupported):
        simulate(spec, small, SYSTEMS["NDP+TP"], routing)
    simulate(spec, small, SYSTEMS["Fiddler"], routing)                  # its experts are in host memory


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.floats(1e6, 1e9), st.integers(1, 30))
def test_x_grows_until_memory_is_full(E, memory, limit):
    costs = Costs(toy.spec(E=E, K=1), toy.machine(gpu_memory=memory))
    x = experts_that_fit(costs, 64, limit)
    room = lambda x: x * 2 * costs.spec.expert_bytes <= costs.free_gpu_bytes(64)    # noqa: E731
    assert (x == 0 or room(x)) and (x == min(limit, E) or not room(x + 1))


def test_prefetching_by_hand():
    routing = toy.routing([[[0, 1]], [[0, 2]]], [[[0, 1]], [[3, 0]], [[2, 8]]], history=[[0, 0, 0, 5, 4, 0, 0, 0]])
    free, known = dataset_free(routing, 2), calibrated(routing, 2)
    assert np.flatnonzero(free[0]).tolist() == [0, 1] and np.flatnonzero(known[0]).tolist() == [3, 4]
    assert utilisation(free, routing.decode) == 3 / 6 and hit_rate(free, routing.decode) == 3 / 5
    assert utilisation(known, routing.decode) == 1 / 6
    assert np.isnan(utilisation(dataset_free(routing, 0), routing.decode))


def test_a_prompts_own_bias_favours_its_own_counts():
    spec = toy.spec(E=32, K=4)
    gains = []
    for seed in range(6):
        routing = simulated_routing(spec, seed, 200, 100, zipf=0.2, bias=0.8)
        gains.append(utilisation(dataset_free(routing, 4), routing.decode)
                     - utilisation(calibrated(routing, 4), routing.decode))
    assert min(gains) > 0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.floats(0, 2), st.floats(0, 1))
def test_simulated_routing_is_routing(seed, zipf, bias):
    spec = toy.spec(E=6, K=3)
    one, two = (simulated_routing(spec, seed, 7, 5, zipf, bias) for _ in range(2))
    for ids in (one.prefill, one.decode):
        assert ((ids >= 0) & (ids < 6)).all() and all(len(set(row)) == 3 for row in ids.reshape(-1, 3).tolist())
    assert (one.prefill == two.prefill).all() and (one.decode == two.decode).all()


def test_popularity_has_the_exponent_that_was_asked_for():
    spec = toy.spec(L=1, E=8, K=1)
    routing = simulated_routing(spec, 3, 40_000, 1, zipf=1.0, bias=0.0)
    share = np.sort(routing.counts()[0] / 40_000)[::-1]
    assert np.allclose(share, 1 / np.arange(1, 9) / (1 / np.arange(1, 9)).sum(), atol=0.01)


def make_trace(sequences=3, S=6, D=4):
    spec = toy.spec()
    rng = torch.Generator().manual_seed(0)
    T = sequences * (S + D)
    ids = torch.stack([torch.randperm(8, generator=rng)[:2] for _ in range(T * 2)]).view(T, 2, 2).short()
    column = {"phase": torch.tensor(([0] * S + [1] * D) * sequences, dtype=torch.uint8),
              "sequence": torch.arange(sequences, dtype=torch.int32).repeat_interleave(S + D),
              "position": torch.arange(T, dtype=torch.int32), "tokens": torch.zeros(T, dtype=torch.int32)}
    return RoutingTrace(ids, torch.full((T, 2, 2), 0.5), **column, spec=spec, model_id="toy")


def test_a_recorded_sequence_is_what_was_recorded():
    trace = make_trace()
    routing = recorded_routing(trace, 1)
    assert (routing.prefill == trace.ids[10:16].numpy()).all() and (routing.decode == trace.ids[16:20].numpy()).all()
    others = torch.cat([trace.ids[:10], trace.ids[20:]])
    assert routing.history[1, 3] == int((others[:, 1] == 3).sum()) and routing.kind == "measured"
    simulate(trace.spec, toy.machine(2), SYSTEMS["NDP+TP+LB+PRE"], routing)
    with pytest.raises(ValueError, match="sequences 0 to 2"):
        recorded_routing(trace, 5)


def test_comparison_of_prefetchers_on_a_trace():
    found = compare(make_trace(), 3)
    mean, low, high = found["difference"]
    assert low <= mean <= high
    assert mean == pytest.approx(found["dataset-free"][0] - found["calibrated"][0])
    prompts = make_trace().prefill
    with pytest.raises(ValueError, match="record a generation"):
        compare(prompts, 2)


def test_experts_are_dealt_out_in_turn():
    history = np.array([[1.0, 9.0, 5.0, 7.0]])
    assert place(history, 2).tolist() == [[0, 1, 0, 1]]
    assert place(history, 2, "popularity").tolist() == [[1, 0, 0, 1]]       # ranks 3, 0, 2, 1
    with pytest.raises(ValueError, match="known are id, popularity"):
        place(history, 2, "random")


def test_most_used_prefers_lower_ids_among_equals():
    assert most_used(np.array([[2, 5, 2, 2]]), 2).tolist() == [[True, True, False, False]]
