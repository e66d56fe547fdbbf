"""The space of ways to run a model, simulated: form × cache × prefetcher × workers × executor ×
memory.

Every form is played once, with the default cache. Then the fastest that lose no more than allowed,
and the fastest of all, are changed in one respect after another, and a change that is faster stays.
That is some forty simulations of the thousands that there are; what pays together but not alone is
missed. Tokens are the model's own, recorded here, or are drawn by popularity, each by itself; a
real token repeats more of the one before.

What an expert costs in each form is a `Costs`: measured here (`moelab.advice.sample`), or by a
card's figures. Left out: predictors that have to be trained or fitted first; predictions more than
one layer ahead, which the engine does not make; scopes and margins of a cache; sampling between two
forwards."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from moelab import registry
from moelab.advice.model import AS_IS, DECODED, FORMS, Model
from moelab.advice.question import Question
from moelab.advice.ways import PROMPT, TIMED, WARM, Way, fitted
from moelab.bench.profile import Profile
from moelab.cache.policies import NEEDS
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.evaluation.intervals import typical
from moelab.offloading.prefetch_gate import PrefetchGate
from moelab.offloading.slots import Sizes, divide
from moelab.progress import progress
from moelab.simulation.costs import RHO, Machine, delays_in_place, delays_of
from moelab.simulation.simulator import (
    Predictions,
    Prefetching,
    Simulation,
    Steps,
    flat,
    ordered,
    simulate,
)
from moelab.specs import DeviceSpec, MoESpec
from moelab.store import fewbit
from moelab.store.layout import aligned
from moelab.table import size
from moelab.zipmoe.planner import best_pools, drawn

#: of a search
SECONDS = 20.0
#: plans of a compressed cache, and tokens, by which its division is chosen
FEW = 4
#: the prefetcher that needs no preparation, and the share of experts that it finds where nothing
#: was recorded: about what it finds of the small model's (notebook 04)
PREFETCH, RECALL = "router", 0.75


@dataclass(frozen=True)
class Costs:
    """What a form costs on a machine; bytes of a slot, bytes of an expert on disk; seconds of a
    token without any experts where all are in memory and nothing is decided (None: as the machine
    says)."""

    machine: Machine
    sizes: Sizes
    disk: int
    rest: float | None = None


@dataclass(frozen=True)
class Scene:
    """The tokens that every way plays: a prompt, `WARM` steps, `TIMED` steps.

    forwards : (tokens, phase) of each.    predictions : of the prefetcher.    batch : sequences.
    shares : [L, E] of tokens that need each expert.
    """

    steps: Steps
    forwards: list[tuple[int, str]]
    predictions: Predictions
    shares: np.ndarray
    batch: int

    def part(self, first: int, end: int | None = None) -> Scene:
        """The forwards from `first` to `end`."""
        at = slice(first, end)
        return replace(
            self,
            steps=self.steps[at],
            forwards=self.forwards[at],
            predictions=self.predictions[at],
        )


class Look(NamedTuple):
    """What a model showed when it ran here once: its tokens, its profile, and what `verify.run`
    reported."""

    seen: Scene
    itself: Profile
    ran: dict[str, Any]


def predicted(steps: Steps, E: int, recall: float = RECALL, seed: int = 0) -> Predictions:
    """Predictions that find such a share of each step's experts; others are random."""
    rng = np.random.default_rng(seed)
    return [
        [
            (layer, [e if rng.random() < recall else int(rng.integers(E)) for e in experts])
            for layer, experts in step[1:]
        ]
        for step in steps
    ]


def scene(shares: np.ndarray, batch: int = 1, seed: int = 0) -> Scene:
    """Tokens drawn by popularity, and predictions that find `RECALL` of their experts; shares [L,
    E]."""
    tokens = iter(drawn(shares, batch * (PROMPT + WARM + TIMED), seed))
    steps, forwards = [], []
    for n, phase in [(PROMPT, "prefill")] + [(1, "decode")] * (WARM + TIMED):
        counts = [Counter() for _ in shares]
        for _ in range(batch * n):
            for layer, experts in next(tokens):
                counts[layer].update(experts)
        steps.append([(layer, dict(sorted(count.items()))) for layer, count in enumerate(counts)])
        forwards.append((batch * n, phase))
    return Scene(steps, forwards, predicted(steps, shares.shape[1]), shares, batch)


def play(model: Model, way: Way, costs: Costs, seen: Scene, context: int) -> Way | None:
    """A way with what the simulator finds; None where its memory holds no expert beside those that
    are loaded."""
    spec, sizes, batch = model.spec, costs.sizes, seen.batch
    # of one token and of a whole prompt: no line goes through both exactly
    other, head = (
        (base + token * batch, 0.0) for base, token in (costs.machine.other, costs.machine.head)
    )
    if way.resident and costs.rest is not None:
        other, head = (costs.machine.other[1] * (batch - 1), 0.0), (costs.rest, 0.0)
    machine = replace(costs.machine, workers=way.workers, other=other, head=head)
    pools, ahead, staging = Pools(F=spec.L * spec.E), 0, 1
    if not way.resident:
        if way.budget < sizes.in_flight + sizes.full:
            return None
        pools, staging = divide(way.budget, sizes, spec.L, spec.E, None, "model", way.workers, None)
        ahead = min(spec.K, staging - 1) if way.prefetch else 0
        if sizes.sm:
            pools = way.pools or _best_pools(way, costs, seen, machine, staging)
    gate = PrefetchGate()

    def run(residency: Residency, tokens: Scene, machine: Machine = machine) -> Simulation:
        prefetching = Prefetching(tokens.predictions, ahead, gate=gate) if ahead else None
        return simulate(
            tokens.steps,
            tokens.forwards,
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
    prompt = run(long, _prompt(seen, batch * context), linear)
    first, gone = 1 + WARM, 0 if ahead else WARM  # the gate has to learn, a cache just to be filled
    for step in flat(seen.steps[:gone]):
        residency.begin(*step)
    run(residency, seen.part(gone, first))
    timed = run(residency, seen.part(first))
    found, tpot = timed.metrics(), typical(end - start for start, end, *_ in timed.forwards)
    return replace(
        way,
        hit_rate=timed.counters.hit_rate(),
        read=found.read_bytes / len(timed.forwards),
        tpot=tpot,
        ttft=prompt.ttft,
        pools=pools if sizes.sm and not way.resident else None,
        kind="simulated",
        limited_by="loading" if (found.stall_per_step or 0) > tpot / 2 else "computing",
        written=0 if way.form == AS_IS else spec.L * spec.E * costs.disk + model.others,
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
    played : of each way what it gives, which another search of the same memory may share.
    left : names of what was not tried, as time was over or nobody knows what it costs.

    costs_of : (form, executor) → its costs, or None where they are not known.
    loss : form → relative increase of language loss; None: unknown.
    """

    def __init__(
        self,
        asked: Question,
        costs_of: Callable[[str, str], Costs | None],
        seen: Scene,
        loss: Callable[[str], float | None],
    ) -> None:
        self.asked, self.costs_of, self.seen, self.loss = asked, costs_of, seen, loss
        self.found: list[Way] = []
        self.elsewhere: list[Way] = []
        self.played: dict[Way, Way | None] = {}
        self.left: list[str] = []
        self.end = time.monotonic() + SECONDS

    def late(self, what: str) -> bool:
        """Whether time is over, and `what` is left."""
        if late := time.monotonic() > self.end:
            self.left.append(what)
        return late

    def way(self, form: str, memory: int | None = None, executor: str = "fast") -> Way | None:
        """The plain way of a form; None if it does not fit, or nobody knows what it costs."""
        if (costs := self.costs_of(form, executor)) is None:
            self.left.append(form)
        return costs and fitted(
            self.asked.model,
            form,
            self.loss(form),
            costs.sizes.full,
            memory or self.asked.memory,
            self.asked.context,
            self.asked.batch,
        )

    def play(self, way: Way, kept: list[Way]) -> Way | None:
        """What a way gives, simulated once and appended to `kept`; None if it does not fit."""
        if way not in self.played:
            if (costs := self.costs_of(way.form, way.executor)) is None:
                self.left.append(way.name)
                return None
            self.played[way] = play(self.asked.model, way, costs, self.seen, self.asked.context)
        if played := self.played[way]:
            kept.append(played)
        return played

    def run(self, forms: Iterable[str]) -> None:
        """Find what there is to be found among some forms."""
        for form in progress(list(forms), "simulating", unit="forms"):
            if (way := self.way(form)) is not None:
                self.play(way, self.found)
        for way in progress(self.leaders(), "changing the fastest", unit="ways"):
            self.change(way)
        for way in progress(self.leaders(), "in other memory", unit="ways"):
            if self.asked.loss == 0 and not way.lossless:
                continue
            for memory in (round(share * self.asked.memory) for share in (0.5, 0.75, 1.5)):
                if not self.late(f"{way.name} in {size(memory)}"):
                    self.other(way, memory)

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
        caches = [
            name
            for name, (_, use) in registry.describe("cache").items()
            if use == "use" and name not in NEEDS
        ]
        groups: list[list[dict[str, Any]]] = (
            []
            if way.resident
            else [
                [{"cache": name} for name in caches if name != way.cache],
                [{"prefetch": PREFETCH, "pools": None}],
                # a core is left for what computes: beside it, so many threads wait for each other
                [
                    {"workers": n, "pools": None}
                    for n in (2, 4)
                    if n < (os.cpu_count() or 1) and way.pools
                ],
            ]
        )
        for group in [*groups, [{"executor": "exact"}]]:
            tried = [
                self.play(other, self.found)
                for change in group
                if not self.late((other := replace(way, **change)).name)
            ]
            way = min([way, *filter(None, tried)], key=lambda one: one.tpot)

    def other(self, way: Way, memory: int) -> Way | None:
        """The same way in other memory."""
        there = self.way(way.form, memory, way.executor)
        return there and self.play(
            replace(there, cache=way.cache, prefetch=way.prefetch, workers=way.workers),
            self.elsewhere,
        )


def card_costs(device: DeviceSpec, model: Model) -> Callable[..., Costs | None]:
    """What forms cost by the figures of a card: kernels multiply each as it lies, at the rate of
    memory, but a Huffman code, which is left out if nobody says how fast a thread decodes it."""
    spec = model.spec.with_dtype("bfloat16")

    def costs_of(form: str, executor: str = "fast") -> Costs | None:
        if executor != "fast" or form == DECODED and "decompress_gbs" not in device.figures:
            return None
        if form == DECODED:
            delays, other = delays_of(device, spec, RHO, model.dense)
            return Costs(
                Machine(delays, other=other),
                Sizes(spec.expert_bytes, aligned(delays.e_bytes), aligned(delays.sm_bytes)),
                delays.e_bytes + delays.sm_bytes,
            )
        full = stored_bytes(model.spec, form)
        delays, other = delays_in_place(device, spec, full, full, model.dense)
        return Costs(Machine(delays, other=other), Sizes(full, 0, 0, True), full)

    return costs_of


def stored_bytes(spec: MoESpec, form: str) -> int:
    """Bytes of an expert as it is computed: as it is, in bf12, or in a few-bit format."""
    if form in fewbit.FORMATS and spec.H % fewbit.GROUP == spec.I % fewbit.GROUP == 0:
        wide, back = (
            fewbit.find_format(form).nbytes(shape) for shape in ((spec.I, spec.H), (spec.H, spec.I))
        )
        return (1 + spec.gated) * wide + back
    return round(FORMS[form][0] / 8 * spec.expert_params) if form in FORMS else spec.expert_bytes


def forms_of(model: Model) -> list[str]:
    """As it is, and whatever else its experts may be stored as."""
    few = model.spec.H % fewbit.GROUP == model.spec.I % fewbit.GROUP == 0
    offered = [form for form in model.forms() if few or form not in fewbit.FORMATS] or [AS_IS]
    return [
        *offered,
        *([DECODED] if model.spec.dtype == "bfloat16" and model.stored is None else []),
    ]


def at_rate(
    costs_of: Callable[..., Costs | None], rate: float, late: float = 0.0
) -> Callable[..., Costs | None]:
    """The same machine with reads throttled to so many bytes a second, which then wake up `late` by
    so many seconds."""

    def slower(seconds: float, nbytes: float) -> float:
        return max(seconds, nbytes and nbytes / rate + late)

    return _reading(costs_of, slower)


def twice_as_fast(costs_of: Callable[..., Costs | None]) -> Callable[..., Costs | None]:
    """The same machine with a disk twice as fast."""
    return _reading(costs_of, lambda seconds, _: seconds / 2)


def _reading(
    costs_of: Callable[..., Costs | None], change: Callable[[float, float], float]
) -> Callable[..., Costs | None]:
    """The same costs but for reads, whose seconds, of so many bytes, are changed."""

    def changed(form: str, executor: str = "fast") -> Costs | None:
        if (costs := costs_of(form, executor)) is None:
            return None
        d = costs.machine.delays
        e, sm = change(d.e_read, d.e_bytes), change(d.sm_read, d.sm_bytes)
        return replace(
            costs, machine=replace(costs.machine, delays=replace(d, e_read=e, sm_read=sm))
        )

    return changed
