"""The budget explorer: what so much memory for experts gives, simulated; and, on a click, measured.

TPOT here is the mean of the decode steps, since a mean can be bounded: with no policy can more
experts be found than Belady's rule finds, even if the cache had begun with whatever it likes, and a
token cannot come faster than the disk reads the rest, nor than everything is computed. The first
third of a run only fills the cache. Every budget that was simulated is kept, and is a point of the
curves. Left out: prefetching, and pools of chunks (`moelab advise`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, log
from statistics import fmean
from typing import Any, NamedTuple

from moelab.bench.limits import belady_hits, request_count
from moelab.cache.policies import DEFAULT_POLICY, NEEDS, Belady
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.offloading.budget import kv_bytes
from moelab.offloading.slots import Sizes, divide
from moelab.records import Rows
from moelab.registry import names, require
from moelab.simulation.costs import Machine
from moelab.simulation.simulator import flat, machine_of, ordered, simulate
from moelab.specs import ExpertKey
from moelab.store.layout import aligned
from moelab.table import ms, size
from moelab.viz.figures import budget_curve, memory_bar
from moelab.viz.plotly_json import Figure
from moelab.viz.views.base import View, menu, several, slider
from moelab.viz.views.command import command
from moelab.viz.views.real import button
from moelab.viz.views.recorded import TOKENS, Recorded, recorded

#: budgets of a curve; policies that are shown at first; the machine where the run was recorded
GRID = 9
POLICIES = ("lru", DEFAULT_POLICY, "zipmoe")
HERE = "as measured here"
#: cards that say all that is needed, most of all how fast their disk reads
DEVICES = ("jetson-agx-orin-32gb", "raspberry-pi-5", "m2-max")
BELADY = "belady"
ON_DISK = "experts on disk"


class Point(NamedTuple):
    """A budget in bytes, mean seconds of a decode step, share of experts found in memory, and what
    the numbers are."""

    memory: int
    tpot: float
    hit_rate: float
    kind: str = "simulated"


@dataclass
class Explorer:
    """A recorded run on one machine: simulates it within any budget, once.

    run : what was recorded.
    device : a card's name, or None for what was measured where it was recorded.
    """

    found: Recorded
    device: str | None = None
    points: dict[tuple[str, Pools, int], Point] = field(default_factory=dict)
    ceilings: dict[int, float] = field(default_factory=dict)
    measured: list[tuple[str, Point]] = field(default_factory=list)
    machine: Machine | None = None

    def __post_init__(self) -> None:
        run = self.found.run
        self.spec, self.settings, self.warm = (
            run.settings.spec,
            run.settings,
            max(1, len(run.forwards) // 3),
        )
        self.machine = self.machine or machine_of(run, self.device)
        self.delays = self.machine.delays
        own = [pair for layer in self.delays.experts_bytes for pair in layer] or [
            (self.delays.e_bytes, self.delays.sm_bytes)
        ]
        e, sm = (max(pair[part] for pair in own) for part in (0, 1))
        full = aligned(self.spec.expert_bytes)
        self.sizes = (
            Sizes(full, aligned(e), aligned(sm)) if sm else Sizes(aligned(e or full), 0, 0, True)
        )
        self.steps = run.steps
        self.forwards = [forward[2:] for forward in run.forwards]
        self.decode = [
            n for n in range(self.warm, len(self.forwards)) if self.forwards[n][1] == "decode"
        ]

    @property
    def least(self) -> int:
        """The smallest budget: one expert that is kept beside one in flight."""
        return self.sizes.in_flight + self.sizes.full

    @property
    def everything(self) -> int:
        """The smallest budget in which every expert is kept."""
        return (
            self.spec.L * self.spec.E * self.sizes.full
            + (self.settings.workers + 2) * self.sizes.in_flight
        )

    def share(self, percent: float) -> int:
        """Bytes of so much of `everything`, but no less than the least."""
        return max(self.least, round(percent / 100 * self.everything))

    def divide(self, memory: int) -> tuple[Pools, int]:
        """Pools and staging, as `moelab.open_model` divides so much."""
        return divide(
            memory, self.sizes, self.spec.L, self.spec.E, None, "model", self.settings.workers, None
        )

    def play(self, policy: str, memory: int) -> Point:
        """The run within a budget under a policy, from a cache as it is opened."""
        pools, staging = self.divide(memory)
        if (policy, pools, staging) not in self.points:
            future = flat(self.steps)
            cache = Residency(
                self.spec.L, self.spec.E, pools, Belady(future) if policy == BELADY else policy
            )
            cache.fill()
            for step in flat(self.steps[: self.warm]):
                cache.begin(*step)
            done = simulate(
                self.steps[self.warm :],
                self.forwards[self.warm :],
                cache,
                replace(self.machine, workers=self.settings.workers),
                staging=staging,
                order=ordered(self.settings.scheduler, self.machine),
            )
            took = [of.end - of.start for of in done.forwards if of.phase == "decode"]
            self.points[policy, pools, staging] = Point(
                memory, fmean(took), done.counters.hit_rate()
            )
        return self.points[policy, pools, staging]._replace(memory=memory)

    def add(self, policy: str, memory: int, tpot: float, hit_rate: float) -> None:
        """Keep what a real run gave."""
        self.measured.append((policy, Point(memory, tpot, hit_rate, "measured")))

    def ceiling(self, memory: int) -> float:
        """The largest share of the timed requests that any cache can have, whatever it held before
        them."""
        timed = flat(self.steps[self.warm :])
        kept = self.divide(memory)[0].F
        if kept not in self.ceilings:
            anything = [
                (layer, dict.fromkeys(range(self.spec.E), 1)) for layer in range(self.spec.L)
            ]
            self.ceilings[kept] = belady_hits(anything + timed, kept) / request_count(timed)
        return self.ceilings[kept]

    def limit(self, memory: int) -> float:
        """Mean seconds of a decode step, than which none is less: the disk alone, or compute
        alone."""
        asked = [request_count(self.steps[n]) for n in self.decode]
        hits = self.ceiling(memory) * request_count(flat(self.steps[self.warm :]))
        return max(max(0.0, sum(asked) - hits) * self._read / len(asked), self._compute)

    @cached_property
    def _read(self) -> float:
        keys = {ExpertKey(layer, expert) for layer, tokens in flat(self.steps) for expert in tokens}
        return min(self.delays.read(key, True, self.delays.sm_bytes > 0)[0] for key in keys)

    @cached_property
    def _compute(self) -> float:
        """Seconds of a decode step in which compute does everything and waits for nothing."""

        def step(n: int) -> float:
            tokens = self.forwards[n][0]
            experts = sum(
                self.delays.expert(count)
                for _, counts in self.steps[n]
                for count in counts.values()
            )
            return (
                experts
                + len(self.steps[n]) * (self.machine.other[0] + self.machine.other[1] * tokens)
                + self.machine.head[0]
                + self.machine.head[1] * tokens
            )

        return fmean(map(step, self.decode))

    def grid(self) -> list[int]:
        """Budgets from the least to everything, evenly on a logarithmic scale."""
        low = log(self.least)
        high = log(self.everything)
        return [
            self.least,
            *(round(exp(low + i * (high - low) / (GRID - 1))) for i in range(1, GRID - 1)),
            self.everything,
        ]

    def curve(self, policy: str) -> list[Point]:
        """What was simulated, by budget; at least the grid."""
        for memory in self.grid():
            self.play(policy, memory)
        return sorted(point for (name, *_), point in self.points.items() if name == policy)

    def needs(self, policy: str, target: float) -> int | None:
        """The smallest budget simulated that gives `target` tokens/s; None if none does."""
        return next(
            (point.memory for point in self.curve(policy) if point.tpot * target <= 1), None
        )

    def parts(self, memory: int) -> dict[str, int]:
        """What memory there is for: bytes by what takes them, in this order."""
        pools, staging = self.divide(memory)
        tokens = sum(tokens for tokens, _ in self.forwards)
        return {
            "other weights": self.settings.dense_bytes,
            "KV cache": kv_bytes(self.spec, tokens),
            "experts kept": pools.F * self.sizes.full,
            "in flight": staging * self.sizes.in_flight,
            ON_DISK: (self.spec.L * self.spec.E - pools.F) * self.sizes.full,
        }


@dataclass(frozen=True)
class Budgets:
    """What is seen: one budget of a run on a machine, `at` each policy; and the curves that it lies
    on."""

    name: str
    device: str
    how: str
    memory: int
    target: float
    at: dict[str, Point]
    curves: dict[str, list[Point]]
    optimum: list[Point]  # Belady's policy, simulated
    ceiling: list[tuple[int, float]]  # (bytes, hit rate): exact
    limit: list[tuple[int, float]]  # (bytes, seconds): modelled
    needs: dict[str, int | None]
    parts: dict[str, int]
    measured: list[tuple[str, Point]]


def budgets(explorer: Explorer, share: float, policies: Sequence[str], target: float) -> Budgets:
    """The explorer's data: `share` of the memory that all experts take (per cent), and tokens/s
    that are wanted."""
    for policy in policies:
        require("cache", policy, set(names("cache")) - NEEDS.keys())
    memory = explorer.share(share)
    at = {policy: explorer.play(policy, memory) for policy in policies}
    curves = {policy: explorer.curve(policy) for policy in policies}
    optimum = explorer.curve(BELADY)
    every = [*explorer.grid(), memory]
    return Budgets(
        explorer.spec.name,
        explorer.device or HERE,
        explorer.found.how,
        memory,
        target,
        at,
        curves,
        optimum,
        sorted((size, explorer.ceiling(size)) for size in every),
        sorted((size, explorer.limit(size)) for size in every),
        {policy: explorer.needs(policy, target) for policy in (*policies, BELADY)},
        explorer.parts(memory),
        list(explorer.measured),
    )


def draw(found: Budgets) -> Iterator[Figure]:
    """TPOT and hit rate by budget, the chosen one marked; the memory bar."""
    yield budget_curve(
        found.curves,
        found.optimum,
        {"disk or compute alone": found.limit},
        {size(found.memory): found.memory},
        most_hits=found.ceiling,
        measured=found.measured,
        target=(1 / found.target, _rate(found.target)),
    )
    yield memory_bar(found.parts, ON_DISK)


def rows(found: Budgets) -> Rows:
    """Every point of the picture."""
    of = [
        (policy, point)
        for policy, points in (found.curves | {BELADY: found.optimum}).items()
        for point in points
    ]
    return [
        {
            "policy": policy,
            "memory_bytes": point.memory,
            "tpot_s": point.tpot,
            "hit_rate": point.hit_rate,
            "kind": point.kind,
            "machine": found.device,
        }
        for policy, point in [*of, *found.measured]
    ] + [
        {
            "policy": "limit",
            "memory_bytes": size,
            "tpot_s": seconds,
            "hit_rate": dict(found.ceiling)[size],
            "kind": "modelled",
            "machine": found.device,
        }
        for size, seconds in found.limit
    ]


def words(found: Budgets) -> tuple[str, str]:
    best = min(found.at, key=lambda policy: found.at[policy].tpot)
    reached = [
        f"{size(least)} with {policy}" for policy, least in found.needs.items() if least is not None
    ]
    told = (
        f"{found.name}, {size(found.memory)} for experts, {found.device}: {best} takes "
        f"{ms(found.at[best].tpot)} ms a token and finds {found.at[best].hit_rate:.0%} of the "
        f"experts in memory. {_rate(found.target)} need "
        f"{', '.join(reached) or 'more than memory: no budget gives them here'}. TPOT is the "
        f"mean of decode steps (simulated; routing {found.how})."
    )
    return (
        told,
        "Above, TPOT falls as memory for experts grows, a line a policy, all above Belady's "
        "and the grey limit; in the middle their hit rates rise below the ceiling; below, a "
        "bar of what takes the memory, with a line at what the budget holds.",
    )


def _rate(tokens: float) -> str:
    return f"{tokens:,.0f} tokens/s" if tokens >= 100 else f"{tokens:.3g} tokens/s"


def budget(
    *sources: Any,
    share: float = 50.0,
    policies: Sequence[str] = POLICIES,
    device: str | None = None,
    devices: Sequence[str] = DEVICES,
    target: float | None = None,
    prompt: Any = None,
    tokens: int = TOKENS,
    options: Mapping[str, Any] | None = None,
) -> View:
    """The budget explorer.

        with moelab.open_model(memory="50%") as lm:
            views.budget(lm)

    sources : what is looked at, a menu if there are several: opened models, runs (`lm.moelab.run`),
        names of model cards, see `moelab.viz.views.recorded.recorded`.
    share : the budget at first, per cent of what all experts take.
    policies : names of `moelab.names("cache")`.
    device : the machine at first: a card's name; None: the one that the run was measured on.
    devices : cards of the menu; those that lack a figure are left out.
    target : tokens/s that are wanted; None: a fifth more than there are at first.
    prompt, tokens : what an opened model generates.
    options : further ones of `open_model` for the real run.

    Raises ValueError: no source, an unknown policy, no machine to simulate; what `recorded` raises.
    """
    known = [name for name in names("cache") if name not in NEEDS]
    found = {one.name: one for one in (recorded(source, prompt, tokens) for source in sources)}
    if not found:
        raise ValueError("there is nothing to explore: give an opened model, as views.budget(lm)")
    explorers, machines = _explorers(found, device, devices)
    first = next(iter(found))
    if target is None:
        at = explorers[first, device or machines[0]]
        target = float(f"{1.2 / min(at.play(p, at.share(share)).tpot for p in policies):.2g}")

    def compute(share: float, policies: Any, model: str, machine: str, target: float) -> Budgets:
        return budgets(explorers[model, machine], share, policies, target)

    controls = {
        "share": slider("memory for experts (% of all)", share, 1.0, 100.0, log=True),
        "policies": several("cache policies", policies, known),
        "model": menu("model", first, list(found)),
        "machine": menu("machine", device or machines[0], machines),
        "target": _wanted(target),
    }
    return View(
        "budget",
        controls,
        compute,
        draw,
        rows,
        command("budget", found[first]),
        words,
        lambda view: button(view, lambda: explorers[_chosen(view)], options),
        lambda: _ahead(explorers.values(), dict.fromkeys([*policies, BELADY, *known])),
    )


def _chosen(view: View) -> tuple[str, str]:
    return view.values["model"], view.values["machine"]


def _ahead(explorers: Iterable[Explorer], policies: Iterable[str]) -> Iterator[Point]:
    """All that may be asked for, played before it is."""
    for policy in policies:
        for one in explorers:
            yield from (one.play(policy, memory) for memory in one.grid())


def _wanted(target: float) -> Any:
    least = min(target, 1.0) / 10
    most = max(target, 10.0) * 10
    return slider("wanted (tokens/s)", target, least, most, log=True, beyond=1e9)


def _explorers(
    found: Mapping[str, Recorded], device: str | None, devices: Sequence[str]
) -> tuple[dict[tuple[str, str], Explorer], list[str]]:
    """({(source, machine): its explorer}, the machines on which all sources can be simulated).
    ValueError: `device` is none of them, or there are none."""
    explorers = {
        (name, machine): made
        for name, one in found.items()
        for machine in dict.fromkeys([HERE, *devices])
        if (made := _explorer(one, machine)) is not None
    }
    machines = [
        machine
        for machine in dict.fromkeys([HERE, *devices])
        if all((name, machine) in explorers for name in found)
    ]
    if not machines or device not in (None, *machines):
        raise ValueError(
            f"device is {device!r}; what can be simulated: "
            f"{', '.join(machines) or 'nothing'}. The run of a model in memory has no delays, "
            "and a card needs rates of disk, memory and arithmetic"
        )
    return explorers, machines


def _explorer(found: Recorded, machine: str) -> Explorer | None:
    try:
        return Explorer(found, None if machine == HERE else machine)
    except ValueError:  # a card that lacks a figure, or a run that has no delays
        return None
