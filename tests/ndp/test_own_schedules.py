"""Schedules of one's own: the recipe's, state and time, what is in GPU memory, links."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import Costs
from moelab.ndp.plans import make_plan
from moelab.ndp.routing import simulated_routing
from moelab.ndp.simulation import simulate
from moelab.ndp.systems import SYSTEMS, OnDemand, System
from notebooks.studies.ndp_events import event_seconds, timeline
from tests.ndp import toy
from tests.timelines import check

RECIPE = (Path(__file__).parents[2] / "docs/extending/ndp_system.md").read_text(encoding="utf-8")


def recent():
    names: dict = {}
    (block,) = re.findall(r"```python\n(.*?)```", RECIPE, re.S)
    exec(block.rpartition("\nfound")[0], names)
    return names["Recent"]()


def test_the_recipe_is_what_a_loop_counts():
    """Two experts a layer, last used last; the prompt's hottest are its last."""
    spec = toy.spec(L=2, E=40, K=3)
    routing, machine = simulated_routing(spec, 3, prompt=12, answer=9, zipf=0.6), toy.machine(2)
    found = simulate(machine, recent(), routing)
    costs, hits, seconds = Costs(spec, machine), 0, []
    kept = []
    for layer in range(2):
        count = Counter(routing.prefill[:, layer].ravel().tolist())
        by = sorted(count, key=lambda e: (count[e], routing.history[layer, e]))
        kept.append(by[-2:])
    for ids in routing.decode:
        for layer, chosen in enumerate(ids.tolist()):
            missed = [e for e in chosen if e not in kept[layer]]
            hits += 3 - len(missed)
            work = float(costs.gpu(1))
            seconds.append(
                max(3 * work, len(missed) * costs.transfer() + work) if missed else 3 * work
            )
            order = sorted(chosen, key=lambda e: routing.history[layer, e])
            kept[layer] = ([e for e in kept[layer] if e not in chosen] + order)[-2:]
    assert found.hit_rate == hits / (9 * 2 * 3) and 0 < found.hit_rate < 1
    assert found.moe_decode == pytest.approx(sum(seconds)) and found.intermediate == 0


class Chooses(System):
    """Computes on the GPU what is there; `start` and `later` are in its memory, and `kept` after
    each plan."""

    def __init__(self, start=(), later=(), kept=None):
        self.start, self.later, self.kept = start, later, kept

    def resident(self, run):
        return np.isin(np.arange(8), self.start)[None].repeat(2, 0)

    def prefetched(self, run):
        return np.isin(np.arange(8), self.later)[None].repeat(2, 0)

    def plan(self, step, costs):
        return make_plan(step, costs.hardware.units, resident=step.resident)

    def after(self, plan, costs):
        return None if self.kept is None else np.isin(np.arange(8), self.kept)


def test_what_is_in_gpu_memory_is_the_systems_choice():
    routing, costs = toy.routing([[[0, 1], [0, 2]]] * 3, [[[0, 1], [2, 3]]] * 4), toy.costs(2)
    found = simulate(toy.machine(2), Chooses([5], [0, 5, 2]), routing)
    assert found.prefetched == 3 and found.intermediate == pytest.approx(
        4 * costs.transfer()
    )  # 5 was there
    assert found.hit_rate == 2 / 4
    events, forwards = timeline(toy.machine(2), Chooses(kept=[0, 1, 2]), routing, forwards=(2, 4))
    assert check(events) == [] and forwards[0][0] == 0 and forwards[1][0] == forwards[0][1]
    kept = simulate(toy.machine(2), Chooses(kept=[0, 1, 2]), routing)
    plain = simulate(toy.machine(2), Chooses(), routing)
    assert kept.moe_prefill - plain.moe_prefill == pytest.approx(
        2 * 3 * costs.transfer()
    )  # nothing was sent
    assert plain.hit_rate is None and kept.intermediate == pytest.approx(0)


@pytest.mark.parametrize(
    "system", [Chooses(range(8)), Chooses([], range(8)), Chooses(kept=range(8))]
)
def test_no_more_than_fits_is_in_gpu_memory(system):
    spec = toy.spec()
    room = spec.dense_bytes + 9 * spec.expert_bytes
    routing = simulated_routing(spec, 0, prompt=3, answer=2)
    with pytest.raises(ValueError, match="Chooses has .* experts in GPU memory"):
        simulate(toy.machine(gpu_memory=room), system, routing)
    with pytest.raises(ValueError, match=r"must be a mask, bool \[2, 8\]"):
        simulate(
            toy.machine(),
            type("Lists", (Chooses,), {"resident": lambda self, run: [1, 2]})(),
            routing,
        )


@pytest.mark.parametrize("latency", [0.0, 1e-4])
def test_every_message_has_its_latency(latency):
    machine = toy.machine(3, latency=latency)
    costs = Costs(toy.spec(K=4), machine)
    free = Costs(toy.spec(K=4), toy.machine(3))
    step = toy.step([1] * 4)
    for seconds in (layer_seconds, event_seconds):
        sent = seconds(OnDemand().plan(step, costs), costs) - seconds(
            OnDemand().plan(step, free), free
        )
        assert sent == pytest.approx(4 * latency)  # four experts in a message each
        pieces = [make_plan(step, 3, moved=1.0, split=True, pieces=3) for _ in range(2)]
        assert seconds(pieces[0], costs) - seconds(pieces[1], free) == pytest.approx(12 * latency)
        units = [seconds(SYSTEMS["NDP+TP"].plan(step, of), of) for of in (costs, free)]
        assert units[0] - units[1] == pytest.approx(
            4 * latency
        )  # one in to all, one out of each of three
