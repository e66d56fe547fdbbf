"""The space of ways to run a model, simulated: form × cache × prefetcher × memory.

Every form is played once, with the default cache. Then the fastest that lose no more than allowed,
and the fastest of all, are changed in one respect after another, and a change that is faster stays.
That is some forty simulations of the thousands that there are; what pays together but not alone is
missed. Tokens are the model's own, recorded here, or those of routing that is assumed.

What an expert costs in each form is a `Costs`: measured here (`moelab.advice.sample`), or by a
card's figures. Left out: predictors that have to be trained or fitted first; predictions more than
one layer ahead, which the engine does not make; scopes and margins of a cache; sampling between two
forwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moelab.advice.assumed import SHARES, TEXTS, Assumed, counted, hit_rate, steps_of
from moelab.advice.kept import Kept
from moelab.advice.machine import freed
from moelab.advice.model import AS_IS, DECODED, LOSSLESS, Model
from moelab.advice.question import Question
from moelab.advice.ways import PROMPT, TIMED, WARM, Way
from moelab.base import registry
from moelab.base.progress import progress
from moelab.base.records import Record
from moelab.base.specs import DeviceSpec
from moelab.base.table import size
from moelab.bench.profile import Profile
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.evaluation.intervals import typical
from moelab.offloading.prefetch_gate import PrefetchGate
from moelab.offloading.slots import Sizes, divide
from moelab.simulation.costs import Machine, delays_in_place
from moelab.simulation.simulator import (
    Predictions,
    Prefetching,
    Simulation,
    Steps,
    flat,
    ordered,
    simulate,
)
from moelab.zipmoe.planner import best_pools

#: of a search
SECONDS = 20.0
#: plans of a compressed cache, and tokens, by which its division is chosen
FEW = 4
#: the prefetcher that needs no preparation, and the share of experts that it finds where nothing
#: was recorded: the lower of 88.6 % of Qwen3-30B-A3B and 80.7 % of Qwen3.6-35B-A3B, which
#: BigMoeOnEdge publishes (docs/expert-prediction.md)
PREFETCH, RECALL = "router", 0.807


@dataclass(frozen=True)
class Costs:
    """What a form costs on a machine; bytes of a slot, bytes of an expert on disk; seconds of a
    token without any experts where all are in memory and nothing is decided (None: as the machine
    says); cores that others used while it was measured."""

    machine: Machine
    sizes: Sizes
    disk: int
    rest: float | None = None
    others: float = 0.0


#: form → what it costs, None where nobody knows
CostsOf = Callable[[str], Costs | None]


@dataclass(frozen=True)
class Scene:
    """The tokens that every way plays: a prompt, `WARM` steps, `TIMED` steps.

    forwards : (tokens, phase) of each.    predictions : of the prefetcher.    batch : sequences.
    """

    steps: Steps
    forwards: list[tuple[int, str]]
    predictions: Predictions
    E: int
    batch: int

    @cached_property
    def shares(self) -> np.ndarray:
        """[L, E] of tokens that need each expert; of one more token than there are, which needs all
        alike, as few tokens do not show all experts that a long prompt has."""
        counts = np.zeros((len(self.steps[0]), self.E))
        for layer, experts in flat(self.steps):
            counts[layer, list(experts)] += list(experts.values())
        tokens = sum(n for n, _ in self.forwards)
        return (counts + counts.mean(1, keepdims=True) / tokens) / (tokens + 1)


class Look(NamedTuple):
    """What a model showed when it ran here once: its tokens, its profile, and what `verify.run`
    reported."""

    seen: Scene
    itself: Profile
    ran: Record


def predicted(steps: Steps, E: int, recall: float = RECALL) -> Predictions:
    """Predictions that find such a share of each step's experts; others are random."""
    rng = np.random.default_rng(0)
    return [
        [
            (layer, [e if rng.random() < recall else int(rng.integers(E)) for e in experts])
            for layer, experts in step[1:]
        ]
        for step in steps
    ]


def scenes(assumed: Assumed) -> list[Scene]:
    """Texts of routing that is assumed, and predictions that find `RECALL` of their experts; first
    that of which a cache finds as much as of the middle one."""
    spec, batch = assumed.spec, assumed.batch
    tokens = PROMPT + WARM + TIMED
    forwards = [(PROMPT * batch, "prefill")] + [(batch, "decode")] * (WARM + TIMED)
    found = []
    for ids in assumed.texts(spec.L, [tokens] * batch):
        prompt = ids.reshape(batch, tokens, spec.L, -1)[:, :PROMPT]
        steps = steps_of(ids, batch, spec.E)[PROMPT:]
        first = [(n, counted(prompt[:, :, n].ravel(), spec.E)) for n in range(spec.L)]
        steps = [first, *steps]
        found.append(Scene(steps, forwards, predicted(steps, spec.E), spec.E, batch))
    own = sorted(found[:TEXTS], key=lambda text: hit_rate(text.steps, spec.E, SHARES[1]))
    middle = own.pop(len(own) // 2)
    return [middle, *own, *found[TEXTS:]]


def play(asked: Question, way: Way, costs: Costs, seen: Scene) -> Way | None:
    """A way with what the simulator finds; None where its memory holds no expert beside those that
    are loaded."""
    spec, sizes, batch = asked.model.spec, costs.sizes, seen.batch
    # of one token and of a whole prompt: no line goes through both exactly
    other, head = (
        (base + token * batch, 0.0) for base, token in (costs.machine.other, costs.machine.head)
    )
    if way.resident and costs.rest is not None:
        other, head = (costs.machine.other[1] * (batch - 1), 0.0), (costs.rest, 0.0)
    machine = replace(costs.machine, other=other, head=head)
    pools, ahead, staging = Pools(F=spec.L * spec.E), 0, 1
    if not way.resident:
        if way.budget < sizes.in_flight + sizes.full:
            return None
        pools, staging = divide(way.budget, sizes, spec.L, spec.E, None, "model", 1, None)
        ahead = min(spec.K, staging - 1) if way.prefetch else 0
        if sizes.sm:
            pools = way.pools or _best_pools(way, costs, seen, machine, staging)
    gate = PrefetchGate()

    def run(
        residency: Residency, of: Scene, at: slice = slice(None), machine: Machine = machine
    ) -> Simulation:
        prefetching = Prefetching(of.predictions[at], ahead, gate=gate) if ahead else None
        return simulate(
            of.steps[at],
            of.forwards[at],
            residency,
            machine,
            staging=staging,
            order=ordered("default", machine),
            prefetching=prefetching,
        )

    # a prompt of the context's length, for its TTFT, is of another sequence than the tokens
    long, residency = (Residency(spec.L, spec.E, pools, way.cache) for _ in range(2))
    if way.resident:  # all is read when the model is opened
        residency.fill()
        long.fill()
    linear = replace(machine, other=costs.machine.other, head=costs.machine.head)
    prompt = run(long, _prompt(seen, batch * asked.context), machine=linear)
    first, gone = 1 + WARM, 0 if ahead else WARM  # the gate has to learn, a cache just to be filled
    for step in flat(seen.steps[:gone]):
        residency.begin(*step)
    run(residency, seen, slice(gone, first))
    timed = run(residency, seen, slice(first, None))
    found, tpot = timed.metrics(), typical(end - start for start, end, *_ in timed.forwards)
    return replace(
        way,
        hit_rate=timed.counters.hit_rate(),
        tpot=tpot,
        ttft=prompt.ttft,
        pools=pools if sizes.sm and not way.resident else None,
        kind="simulated",
        limited_by="loading" if (found.stall_per_step or 0) > tpot / 2 else "computing",
        written=0 if way.form == AS_IS else spec.L * spec.E * costs.disk + asked.model.others,
    )


def _prompt(seen: Scene, tokens: int) -> Scene:
    """One forward of so many tokens, of which each expert gets its share."""
    step = [
        (layer, {e: n for e, share in enumerate(row) if (n := round(tokens * share))})
        for layer, row in enumerate(seen.shares)
    ]
    return replace(seen, steps=[step], forwards=[(tokens, "prefill")], predictions=[[]])


def _best_pools(way: Way, costs: Costs, seen: Scene, machine: Machine, staging: int) -> Pools:
    """How a compressed cache is divided, by a few tokens."""
    return best_pools(
        seen.shares,
        seen.steps[: 1 + WARM + FEW],
        way.budget - staging * costs.sizes.in_flight,
        costs.sizes,
        machine,
        most=FEW,
        staging=staging,
        policy=way.cache,
        warm=1 + WARM,
    )[0].pools


class Search:
    """Plays ways in the space: one of every form, then others until `SECONDS` are over.

    found, elsewhere : the ways that were played, in the memory that is given and in other memory.
    left : names of what was not tried, as time was over or nobody knows what it costs.
    kept : what was measured of the model.
    """

    def __init__(
        self,
        asked: Question,
        costs_of: CostsOf,
        seen: Scene,
        kept: Kept,
        seconds: float = SECONDS,
    ) -> None:
        self.asked, self.costs_of, self.seen, self.kept = asked, costs_of, seen, kept
        self.found: list[Way] = []
        self.elsewhere: list[Way] = []
        self.left: list[str] = []
        self.end = time.monotonic() + seconds
        for form in progress(forms_of(asked.model), "simulating", unit="forms"):
            self.found += filter(None, [self.play(self.plain(form, asked.memory))])
        for way in progress(self.leaders(), "changing the fastest", unit="ways"):
            self.change(way)
        for way in progress(self.leaders(), "in other memory", unit="ways"):
            for memory in (round(share * asked.memory) for share in (0.5, 0.75, 1.5)):
                if way.lossless or asked.loss:
                    self.find(self.elsewhere, self.other(way, memory))

    def loss(self, form: str) -> float | None:
        """Relative increase of language loss; None: unknown."""
        return 0.0 if form in LOSSLESS else self.kept.loss(form)

    def corrected(self, way: Way) -> Way:
        """A simulated way by what was measured; it may be faster on a machine without others."""
        way = self.kept.corrected(way, self.asked.batch)
        least, most = way.between
        costs = self.costs_of(way.form)
        alone = freed(costs.others) if costs and way.kind == "simulated" else 1.0
        return replace(way, between=(least / alone, most))

    def plain(self, form: str, memory: int) -> Way | None:
        """A form in so much memory; None if it does not fit, or nobody knows what it costs."""
        if (costs := self.costs_of(form)) is None:
            self.left.append(form)
            return None
        return replace(self.asked, memory=memory).way(form, self.loss(form), costs.sizes.full)

    def other(self, way: Way, memory: int) -> Way | None:
        """The same way in other memory."""
        there = self.plain(way.form, memory)
        return there and replace(there, cache=way.cache, prefetch=way.prefetch)

    def play(self, way: Way | None) -> Way | None:
        """What a way gives, simulated; None if it does not fit."""
        return way and play(self.asked, way, self.costs_of(way.form), self.seen)

    def find(self, kept: list[Way], way: Way | None) -> list[Way]:
        """Simulate a way if time is left, and add it to `kept`: [the result], else []."""
        if way and time.monotonic() > self.end:
            self.left.append(f"{way.name} in {size(way.memory)}")
            return []
        new = list(filter(None, [self.play(way)]))
        kept += new
        return new

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
        for group in (caches, [{"prefetch": PREFETCH, "pools": None}]):
            tried = [new for one in group for new in self.find(self.found, replace(way, **one))]
            way = min([way, *tried], key=lambda one: one.tpot)


def forms_of(model: Model) -> list[str]:
    """As experts are, and whatever else they may be stored as; lossless forms first."""
    decoded = [DECODED] * (model.spec.dtype == "bfloat16" and model.stored is None)
    offered = [*decoded, *(model.forms() or [AS_IS])]
    return sorted(offered, key=lambda form: form not in LOSSLESS)


def card_costs(device: DeviceSpec, model: Model) -> CostsOf:
    """What forms cost by the figures of a card: kernels multiply each as it lies, at the rate of
    memory; how fast a Huffman code is decoded there is not known."""
    spec = model.spec.with_dtype("bfloat16")

    def costs_of(form: str) -> Costs | None:
        if form == DECODED:
            return None
        full = model.expert_bytes(form)
        delays, other = delays_in_place(device, spec, full, full, model.dense)
        return Costs(Machine(delays, other=other), Sizes(full, 0, 0, True), full)

    return costs_of
