"""The space of ways to run a model, simulated: form × cache × prefetcher × memory.

Every form is played once, with the default cache. Then the fastest that lose no more than allowed,
and the fastest of all, are changed in one respect after another, and a change that is faster stays.
That is some forty simulations of the thousands that there are; what pays together but not alone is
missed. Tokens are the model's own, recorded here.

What an expert costs in each form is a `Costs`, measured here (`moelab.advice.sample`). Left out: predictors that have to be trained or fitted first; predictions more than
one layer ahead, which the engine does not make; scopes and margins of a cache; sampling between two
forwards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from moelab.advice.kept import Kept
from moelab.advice.question import PARTS, Question
from moelab.advice.ways import WARM, Way
from moelab.base import registry
from moelab.base.progress import progress
from moelab.base.records import Record
from moelab.base.table import size
from moelab.bench.profile import Profile
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.evaluation.intervals import typical
from moelab.offloading.prefetch_gate import PrefetchGate
from moelab.offloading.slots import Sizes, divide
from moelab.simulation.costs import Machine
from moelab.simulation.simulator import (
    Predictions,
    Prefetching,
    Simulation,
    Steps,
    flat,
    simulate,
)

#: of a search
SECONDS = 20.0
#: the prefetcher that needs no preparation, and the share of experts that it finds where nothing
#: was recorded: the lower of 88.6 % of Qwen3-30B-A3B and 80.7 % of Qwen3.6-35B-A3B, which
#: BigMoeOnEdge publishes (docs/expert-prediction.md)
PREFETCH, RECALL = "router", 0.807


@dataclass(frozen=True)
class Costs:
    """What a form costs on a machine; bytes of an expert in memory; seconds of a token without any
    experts where all are in memory and nothing is decided."""

    machine: Machine
    full: int
    rest: float


class Scene(NamedTuple):
    """The tokens that every way plays: a prompt, `WARM` steps, `TIMED` steps.

    forwards : (tokens, phase) of each.    predictions : of the prefetcher.
    """

    steps: Steps
    forwards: list[tuple[int, str]]
    predictions: Predictions


class Look(NamedTuple):
    """What a model showed when it ran here once: its tokens, its profile, and what `verify.run`
    reported."""

    seen: Scene
    itself: Profile
    ran: Record


def predicted(steps: Steps, E: int, recall: float) -> Predictions:
    """Predictions that find such a share of each step's experts; others are random."""
    rng = np.random.default_rng(0)
    return [
        [
            (layer, [e if rng.random() < recall else int(rng.integers(E)) for e in experts])
            for layer, experts in step[1:]
        ]
        for step in steps
    ]


def play(asked: Question, way: Way, costs: Costs, seen: Scene) -> Way:
    """A way with what the simulator finds."""
    spec, batch = asked.model.spec, asked.batch
    # of one token and of a whole prompt: no line goes through both exactly
    other, head = (
        (base + token * batch, 0.0) for base, token in (costs.machine.other, costs.machine.head)
    )
    if way.resident:
        other, head = (costs.machine.other[1] * (batch - 1), 0.0), (costs.rest, 0.0)
    machine = replace(costs.machine, other=other, head=head)
    pools, ahead, staging = Pools(F=spec.L * spec.E), 0, 1
    if not way.resident:
        sizes = Sizes(costs.full, 0, 0, True)
        pools, staging = divide(way.budget, sizes, spec.L, spec.E, None, "model", 1, None)
        ahead = min(spec.K, staging - 1) if way.prefetch else 0
    gate, residency = PrefetchGate(), Residency(spec.L, spec.E, pools, way.cache)

    def run(at: slice) -> Simulation:
        prefetching = Prefetching(seen.predictions[at], ahead, gate=gate) if ahead else None
        return simulate(
            seen.steps[at],
            seen.forwards[at],
            residency,
            machine,
            staging=staging,
            scheduler="default",
            prefetching=prefetching,
        )

    if way.resident:  # all is read when the model is opened
        residency.fill()
    first, gone = 1 + WARM, 0 if ahead else WARM  # the gate has to learn, a cache just to be filled
    for step in flat(seen.steps[:gone]):
        residency.begin(*step)
    run(slice(gone, first))
    timed = run(slice(first, None))
    found, tpot = timed.metrics(), typical(one.seconds for one in timed.forwards)
    return replace(
        way,
        hit_rate=timed.counters.hit_rate(),
        tpot=tpot,
        kind="simulated",
        limited_by="loading" if (found.stall_per_step or 0) > tpot / 2 else "computing",
    )


@dataclass(eq=False)
class Search:
    """Plays ways in the space: one of every form, then others until `SECONDS` are over.

    costs : what forms cost.
    found, elsewhere : the ways that were played, in the memory that is given and in other memory.
    left : names of what was not tried, as time was over.
    kept : what was measured of the model.
    """

    asked: Question
    costs: Mapping[str, Costs]
    seen: Scene
    kept: Kept
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        self.found: list[Way] = []
        self.elsewhere: list[Way] = []
        self.left: list[str] = []
        self.end = time.monotonic() + self.seconds
        for form in progress(self.costs, "simulating", unit="forms"):
            if way := self.within(self.asked.memory, form):
                self.found.append(self.play(way))
        for way in progress(self.leaders(), "changing the fastest", unit="ways"):
            self.change(way)
        for way, part in progress(
            [*product(self.leaders(), PARTS)], "in other memory", unit="ways"
        ):
            there = self.within(round(part * self.asked.memory), way.form)
            if there and (way.lossless or self.asked.loss):
                self.find(self.elsewhere, replace(there, cache=way.cache, prefetch=way.prefetch))

    def within(self, memory: int, form: str) -> Way | None:
        """A form in so much memory; None if it does not fit."""
        asked = replace(self.asked, memory=memory)
        return asked.way(form, self.costs[form].full, self.kept.loss(form))

    def play(self, way: Way) -> Way:
        """What a way gives, simulated."""
        return play(self.asked, way, self.costs[way.form], self.seen)

    def corrected(self, way: Way) -> Way:
        """A simulated way by what was measured."""
        return self.kept.corrected(way, self.asked.batch)

    def find(self, kept: list[Way], way: Way) -> list[Way]:
        """Simulate a way if time is left, and add it to `kept`: [the result], else []."""
        if time.monotonic() > self.end:
            self.left.append(f"{way.name} in {size(way.memory)}")
            return []
        kept.append(self.play(way))
        return kept[-1:]

    def leaders(self) -> list[Way]:
        """The two fastest that lose no more than allowed, and the fastest of all, each of another
        form."""
        best: dict[str, Way] = {}
        for way in sorted(self.found, key=lambda way: way.tpot):
            best.setdefault(way.form, way)
        allowed = [way for way in best.values() if way.within(self.asked.loss)][:2]
        return list(dict.fromkeys(allowed + list(best.values())[:1]))

    def change(self, way: Way) -> None:
        """Change a way in one respect after another; what is faster stays."""
        if way.resident:
            return
        caches = [
            {"cache": name}
            for name, (_, use) in registry.describe("cache").items()
            if use == "use" and name != way.cache
        ]
        for group in (caches, [{"prefetch": PREFETCH}]):
            tried = [new for one in group for new in self.find(self.found, replace(way, **one))]
            way = min([way, *tried], key=lambda one: one.tpot)
