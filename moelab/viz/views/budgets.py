"""The budget explorer: what so much memory for experts gives, simulated.

TPOT here is the mean of the decode steps. The first third of a run only fills the cache. Every
budget that was simulated is kept, and is a point of the curves; no rule that evicts whole experts
misses less than Belady's. Another machine has the rates of its card and this machine's software:
what moelab itself takes a token is as measured here. Left out: prefetching, and pools of chunks
(`moelab advise`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from plotly.graph_objects import Figure

from moelab.advice.machine import here
from moelab.base.records import Rows
from moelab.base.registry import names
from moelab.base.table import duration, size
from moelab.cache.policies import DEFAULT_POLICY, Belady
from moelab.cache.residency import Residency
from moelab.offloading.budget import kv_bytes
from moelab.offloading.slots import Sizes, divide
from moelab.simulation.costs import Machine
from moelab.simulation.simulator import flat, machine_of
from moelab.store.layout import aligned
from moelab.viz.figures import budget_curve, memory_bar
from moelab.viz.views.base import View, menu, several, slider
from moelab.viz.views.command import command
from moelab.viz.views.recorded import (
    Recorded,
    recorded,
    replay,
    seconds_of,
)

#: budgets of a curve, per cent of what all experts take
SHARES = (1, 5, *range(10, 101, 10))
POLICIES = ("lru", DEFAULT_POLICY, "zipmoe")
HERE = "this machine"
#: cards that say all that is needed, most of all how fast their disk reads
DEVICES = ("jetson-agx-orin-32gb", "raspberry-pi-5", "m2-max")
BELADY = "belady"
ON_DISK = "experts on disk"


class Point(NamedTuple):
    """A budget in bytes, mean seconds of a decode step, share of experts found in memory."""

    memory_bytes: int
    tpot_s: float
    hit_rate: float


@dataclass(eq=False)
class Explorer:
    """A recorded run on one machine: simulates it within any budget, once."""

    found: Recorded
    machine: Machine

    def __post_init__(self) -> None:
        run, delays = self.found.run, self.machine.delays
        self.settings, self.spec = run.settings, run.settings.spec
        pairs = [pair for layer in delays.experts_bytes for pair in layer]
        e, sm = map(max, zip(*(pairs or [(delays.e_bytes, delays.sm_bytes)])))
        full = aligned(self.spec.expert_bytes)
        self.sizes = (
            Sizes(full, aligned(e), aligned(sm)) if sm else Sizes(aligned(e or full), 0, 0, True)
        )
        self.warm = max(1, len(run.forwards) // 3)
        self.points: dict[str, dict[int, Point]] = {}
        self._play = cache(self._played)

    @property
    def everything(self) -> int:
        """The smallest budget in which every expert is kept."""
        slots = (self.settings.workers + 2) * self.sizes.in_flight
        return self.spec.L * self.spec.E * self.sizes.full + slots

    def share(self, percent: float) -> int:
        """Bytes of so much of `everything`, but no less than an expert that is kept and one in
        flight."""
        least = self.sizes.in_flight + self.sizes.full
        return max(least, round(percent / 100 * self.everything))

    def divide(self, memory: int) -> tuple[Any, int]:
        """Pools and staging, as `moelab.open_model` divides so much."""
        spec, workers = self.spec, self.settings.workers
        return divide(memory, self.sizes, spec.L, spec.E, None, "model", workers, None)

    def play(self, policy: str, memory: int) -> Point:
        """The run within a budget under a policy, from a cache as it is opened."""
        point = Point(memory, *self._play(policy, *self.divide(memory)))
        self.points.setdefault(policy, {})[memory] = point
        return point

    def _played(self, policy: str, pools: Any, staging: int) -> tuple[float, float]:
        rule = Belady(flat(self.found.run.steps)) if policy == BELADY else policy
        residency = Residency(self.spec.L, self.spec.E, pools, rule)
        residency.fill()
        done = replay(self.found, residency, self.warm, self.machine, staging=staging)
        return fmean(seconds_of(done)), done.counters.hit_rate()

    def curve(self, policy: str) -> list[Point]:
        """What was simulated, by budget; at least `SHARES`."""
        for percent in SHARES:
            self.play(policy, self.share(percent))
        return sorted(self.points[policy].values())

    def parts(self, memory: int) -> dict[str, int]:
        """What memory there is for: bytes by what takes them, in this order."""
        pools, staging = self.divide(memory)
        tokens = sum(forward.tokens for forward in self.found.run.forwards)
        return {
            "other weights": self.settings.dense_bytes,
            f"KV cache, {tokens:,} tokens": kv_bytes(self.spec, tokens),
            "experts kept": pools.F * self.sizes.full,
            "in flight": staging * self.sizes.in_flight,
            ON_DISK: (self.spec.L * self.spec.E - pools.F) * self.sizes.full,
        }


class Budgets(NamedTuple):
    """What is seen: a budget of a run on a machine; each policy's point there, and its curve."""

    explorer: Explorer
    device: str
    memory: int
    at: dict[str, Point]
    curves: dict[str, list[Point]]


def budgets(explorer: Explorer, device: str, share: float, policies: Sequence[str]) -> Budgets:
    """The explorer's data: `share` of the memory that all experts take (per cent)."""
    memory = explorer.share(share)
    shown = [*policies, BELADY]
    at = {policy: explorer.play(policy, memory) for policy in shown}
    curves = {policy: explorer.curve(policy) for policy in shown}
    return Budgets(explorer, device, memory, at, curves)


def draw(found: Budgets) -> Iterator[Figure]:
    """TPOT and hit rate by budget, the chosen one marked; the memory bar."""
    curves = dict(found.curves)
    optimum = curves.pop(BELADY)
    yield budget_curve(curves, optimum, {size(found.memory): found.memory})
    yield memory_bar(found.explorer.parts(found.memory), ON_DISK)


def rows(found: Budgets) -> Rows:
    """Every point of the picture."""
    return [
        {"policy": policy} | point._asdict() | {"kind": "simulated", "machine": found.device}
        for policy, points in found.curves.items()
        for point in points
    ]


def words(found: Budgets) -> tuple[str, str]:
    source = found.explorer.found
    best = min(found.at, key=lambda policy: (policy == BELADY, found.at[policy].tpot_s))
    return (
        f"{source.name} on {found.device}, {size(found.memory)} for experts: with {best}, "
        f"{duration(found.at[best].tpot_s)} a token and {found.at[best].hit_rate:.0%} of the experts "
        f"found in memory. TPOT is the mean of decode steps (simulated; routing {source.how}).",
        "Above, TPOT falls as memory for experts grows, a line a policy; in the middle their hit "
        "rates rise; below, a bar of what takes the memory, hatched what stays on disk.",
    )


def budget(source: Any, prompt: Any = None, tokens: int | None = None, **kept: Any) -> View:
    """The budget explorer.

        with moelab.open_model(memory="50%") as lm:
            views.budget(lm)

    source, prompt, tokens, kept : see `moelab.viz.views.recorded.recorded`.

    Raises ValueError: no machine to simulate; what `recorded` raises.
    """
    found = recorded(source, prompt, tokens, **kept)
    explorers = {name: Explorer(found, on) for name, on in _machines(found).items()}
    if not explorers:
        raise ValueError(
            "nothing can be simulated: the run of a model in memory has no delays; open it with "
            "memory="
        )
    machine, first = next(iter(explorers.items()))
    had = 50 if found.memory is None else round(100 * found.memory / first.everything)
    had = min(max(had, 1), 100)  # of all that experts take
    return View(
        "budget",
        {
            "share": slider("memory for experts (% of all)", had, 1, 100, steps=SHARES),
            "policies": several(
                "cache policies", POLICIES, [name for name in names("cache") if name != "belady"]
            ),
            "machine": menu("machine", machine, [*explorers]),
        },
        lambda share, policies, machine: budgets(explorers[machine], machine, share, policies),
        draw,
        rows,
        command("budget", found),
        words,
        ("share",) if found.trace else ("share", "machine"),  # a trace's takes seconds a machine
    )


def _machines(found: Recorded) -> dict[str, Machine]:
    """Those on which a run can be simulated."""
    machines = {}
    own = None
    if found.trace is not None:  # nothing was measured
        machines[HERE] = machine_of(found.run, here())
    else:
        with suppress(ValueError):  # a model in memory has no delays
            machines[HERE] = own = machine_of(found.run)
    for name in DEVICES if machines else ():
        with suppress(ValueError):  # a card that lacks a figure
            made = machine_of(found.run, name)
            machines[name] = _with_overhead(made, own) if own else made
    return machines


def _with_overhead(device: Machine, own: Machine) -> Machine:
    """A card's machine whose software is no faster than it was here: between experts, a token
    takes at least as long."""
    other = tuple(map(max, device.other, own.other))
    return replace(device, other=other, head=own.head, decide=own.decide, handover=own.handover)
