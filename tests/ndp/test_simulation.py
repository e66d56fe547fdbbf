"""Whole runs: the cached decode against a plain loop, the timeline against the metrics' rules,
traces as routing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.ndp.assumptions import Assumptions
from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import Costs, NotSupported
from moelab.ndp.plans import make_plan, problem
from moelab.ndp.prefetch import experts_that_fit, most_used
from moelab.ndp.routing import PromptRouting, looked_up, simulated_routing
from moelab.ndp.simulation import NDPRun, simulate
from moelab.ndp.systems import PAPER, SYSTEMS, System
from moelab.offloading.metrics import metrics
from moelab.trace import RoutingTrace
from notebooks.studies.ndp_events import event_seconds, timeline
from tests.ndp import toy
from tests.timelines import check


@given(
    st.sampled_from(sorted(SYSTEMS)),
    st.integers(1, 4),
    st.integers(0, 999),
    st.sampled_from(("id", "popularity")),
)
def test_a_run_is_the_sum_of_its_steps(name, N, seed, placement):
    spec, machine, system = (
        toy.spec(L=2, K=3),
        toy.machine(N),
        Assumptions(monde_placement=placement).system(name),
    )
    routing = simulated_routing(spec, seed, prompt=9, answer=6, zipf=0.8)
    routing.decode[2, 1, 0] = spec.E
    result = simulate(machine, system, routing)
    run = NDPRun(machine, system, routing)

    def seconds(steps):
        return sum(layer_seconds(system.plan(step, run.costs), run.costs) for step in steps)

    assert result.moe_prefill == pytest.approx(
        seconds(
            run.prefill_step(
                layer, np.bincount(routing.prefill[:, layer].ravel(), minlength=spec.E)
            )
            for layer in range(2)
        )
    )
    tokens = run.decode_seconds(routing.decode, run.resident).sum(1)
    for token, found in zip(routing.decode, tokens, strict=True):
        assert found == pytest.approx(
            seconds(run.decode_step(layer, ids) for layer, ids in enumerate(token))
        )
    assert result.moe_decode == pytest.approx(tokens.sum())
    assert result.end_to_end == pytest.approx(result.prefill + result.decode + result.intermediate)
    loaded = run.resident.sum() * Costs(spec, machine).transfer()
    assert result.intermediate == pytest.approx(loaded)


@pytest.mark.parametrize("name", PAPER)
def test_a_timeline_obeys_the_rules_of_all_timelines(name):
    spec, machine = toy.spec(K=3), toy.machine(3)
    routing = simulated_routing(spec, 1, prompt=5, answer=4)
    events, forwards = timeline(machine, SYSTEMS[name], routing, forwards=range(5))
    assert check(events) == []
    found = metrics(events, forwards)
    result = simulate(machine, SYSTEMS[name], routing, seconds=event_seconds)
    assert found.ttft == pytest.approx(result.prefill)
    assert sum(f[1] - f[0] for f in forwards[1:]) == pytest.approx(result.decode)
    assert forwards[-1][1] - forwards[0][0] == pytest.approx(result.end_to_end)
    assert found.decode_tokens == 4


def test_what_does_not_fit_is_not_simulated():
    spec = toy.spec(E=64)
    routing = simulated_routing(spec, prompt=3, answer=2)
    small = toy.machine(2, unit_memory=1e8)
    with pytest.raises(NotSupported):
        simulate(small, SYSTEMS["NDP+TP"], routing)
    simulate(small, SYSTEMS["Fiddler"], routing)  # its experts are in host memory


@given(st.integers(1, 20), st.floats(1e6, 1e9))
def test_x_grows_until_memory_is_full(E, memory):
    """Memory is filled a layer at a time, beside weights, keys and values, and two in transit."""
    costs = Costs(toy.spec(E=E, K=1), toy.machine(gpu_memory=memory))
    expert, x = 3 * 512 * 1024 * 2, 0
    used = (
        costs.spec.dense_bytes + 64 * 2 * 2 * 2 * 2 * 64 + 2 * expert
    )  # K and V, 2 heads of 64, bf16
    while x < E and used + 2 * expert <= memory:
        used, x = used + 2 * expert, x + 1
    assert experts_that_fit(costs, 64) == x


def test_prefetching_by_hand():
    routing = toy.routing(
        [[[0, 1]], [[0, 2]]], [[[0, 1]], [[3, 0]], [[2, 8]]], history=[[0, 0, 0, 5, 4, 0, 0, 0]]
    )
    for counts, chosen, found in ((routing.counts(), [0, 1], 3), (routing.history, [3, 4], 1)):
        mask = most_used(counts, 2)
        assert np.flatnonzero(mask[0]).tolist() == chosen
        assert looked_up(mask, routing.decode, False).sum() == found


def test_what_is_prefetched_pays():
    """All tokens alike: prefetching saves the same for each, so x grows with the answer, and 0 if
    it is too short."""

    def chosen(answer):
        routing = toy.routing([[[0, 1]] * 2] * 8, [[[0, 1]] * 2] * answer)
        run = NDPRun(toy.machine(2), SYSTEMS["NDP+TP+PRE, improved"], routing)
        ours, paper = (
            simulate(toy.machine(2), SYSTEMS["NDP+TP+PRE" + version], routing)
            for version in (", improved", "")
        )
        assert ours.end_to_end <= paper.end_to_end * (1 + 1e-9) and ours.prefetched == run.x
        return run.x

    found = [chosen(answer) for answer in range(1, 12)]
    assert found[0] == 0 and found[-1] == 2 and found == sorted(found)
    a_hit = float(toy.costs().unit(1)) / 2 - float(
        toy.costs().gpu(1)
    )  # seconds saved; loading is twice unit(1)/2
    sure = 1 - 8**-0.5  # of eight uses, less their standard error
    assert found.index(2) == int(toy.costs().transfer() / (a_hit * sure))


def make_trace(sequences=3, S=6, D=4):
    spec = toy.spec()
    rng = torch.Generator().manual_seed(0)
    T = sequences * (S + D)
    ids = (
        torch.stack([torch.randperm(8, generator=rng)[:2] for _ in range(T * 2)])
        .view(T, 2, 2)
        .short()
    )
    column = {
        "phase": torch.tensor(([0] * S + [1] * D) * sequences, dtype=torch.uint8),
        "sequence": torch.arange(sequences, dtype=torch.int32).repeat_interleave(S + D),
        "position": torch.arange(T, dtype=torch.int32),
        "tokens": torch.zeros(T, dtype=torch.int32),
    }
    return RoutingTrace(ids, torch.full((T, 2, 2), 0.5), **column, spec=spec, model_id="toy")


def test_a_recorded_sequence_is_what_was_recorded():
    trace = make_trace()
    routing = PromptRouting.of(trace, 1)
    assert (routing.prefill == trace.ids[10:16].numpy()).all() and (
        routing.decode == trace.ids[16:20].numpy()
    ).all()
    others = torch.cat([trace.ids[:10], trace.ids[20:]])
    assert routing.history[1, 3] == int((others[:, 1] == 3).sum())
    assert simulate(toy.machine(2), SYSTEMS["NDP+TP+LB+PRE"], routing).moe_decode > 0
    with pytest.raises(ValueError, match="sequences 0 to 2"):
        PromptRouting.of(trace, 5)


class Spoilt(System):
    """A user's schedule that spoils what another plans, in one phase."""

    def __init__(self, inner, spoil, prompt):
        self.inner, self.spoil, self.prompt = inner, spoil, prompt
        self.home, self.whole, self.prefetches = inner.home, inner.whole, inner.prefetches

    def situations(self, homes, resident, costs):
        return self.inner.situations(homes, resident, costs)

    def plan(self, step, costs):
        plan = self.inner.plan(step, costs)
        return self.spoil(plan) if (step.S > 1) == self.prompt else plan


def _first(values, value):
    return np.array([value, *values[1:]])


COLUMNS = ("units", "moved", "host", "resident")
SPOILS = {
    "computed 0.5 times": lambda p: replace(p, **{name: getattr(p, name) / 2 for name in COLUMNS}),
    "can compute 0 to": lambda p: replace(p, moved=_first(p.moved, np.nan)),
    "the GPU, from its memory, computes 1": lambda p: make_plan(p.step, 3, resident=1.0),
    "asked was for": lambda p: replace(p, step=replace(p.step, experts=_first(p.step.experts, 99))),
    "asked was for one": lambda p: make_plan(p.step.take(np.arange(1, len(p.step))), 3, moved=1.0),
    "for [0-9] experts": lambda p: replace(p, moved=p.moved[1:]),
    "on 3 units": lambda p: replace(p, units=np.column_stack([p.units, 0 * p.host])),
    "(host|unit [0-9]) computes": lambda p: (
        make_plan(p.step, 3, host=1.0) if p.units.any() else make_plan(p.step, 3, split=True)
    ),
    "in 0 pieces": lambda p: replace(p, pieces=0),
    "it is None": lambda p: None,
}


@pytest.mark.parametrize("name", ["NDP+TP+LB+PRE, improved", "MoNDE", "Fiddler"])
@pytest.mark.parametrize("words", SPOILS)
@pytest.mark.parametrize("prompt", [True, False])
def test_a_schedule_that_plans_wrongly_is_refused(name, words, prompt):
    routing = simulated_routing(toy.spec(L=2, K=3), 1, prompt=9, answer=6, zipf=0.8)
    simulate(toy.machine(3), Spoilt(SYSTEMS[name], lambda plan: plan, prompt), routing)
    spoilt = Spoilt(SYSTEMS[name], SPOILS[words], prompt)
    with pytest.raises(ValueError, match=f"(?s)Spoilt.plan of a step of .* is wrong: .*({words})"):
        simulate(toy.machine(3), spoilt, routing)


@given(st.data(), st.sampled_from(sorted(SYSTEMS)), st.integers(0, 99))
def test_any_one_share_that_is_changed_is_noticed(data, name, seed):
    """Every plan of ours passes, and none with one number of it changed."""
    routing = simulated_routing(toy.spec(L=2, K=3), seed, prompt=9, answer=2, zipf=0.8)
    run = NDPRun(toy.machine(3), SYSTEMS[name], routing)
    step = (
        run.prefill_step(0, routing.counts()[0])
        if data.draw(st.booleans())
        else run.decode_step(1, routing.decode[0, 1])
    )
    plan = run.plan(step)
    field = data.draw(st.sampled_from(COLUMNS))
    shares = getattr(plan, field).copy()
    at = tuple(data.draw(st.integers(0, n - 1)) for n in shares.shape)
    shares[at] += data.draw(st.sampled_from((-1.0, -0.5, -1e-6, 1e-6, 0.5, 1.0, np.inf, np.nan)))
    assert problem(replace(plan, **{field: shares}), step, 3, run.system.held)
