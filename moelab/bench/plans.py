"""Is a cache that ZipMoE's planner divides faster than one of a single state? Measured warm, at
several budgets.

ZipMoE §3.4. Each division has an engine of its own with the same memory and the rule "zipmoe", and
all run the same held-out prompts: first a stretch that only fills their caches, read as fast as the
disk can, then, from a slowed-down disk and in turn, prompt by prompt, what is timed; where memory
is limited, one engine after the other. Popularity is of other prompts. Their tokens, hits and
evictions are equal to the simulator's on the same steps, or nothing is measured; so a plan that
loses in both loses by its division, and one that loses in measurement only by what the clock leaves
out.

"plan" is the paper's (Algorithms 2–4), "auto" the fastest in simulation of its ten best and of the
single states; of these, the ones that take more than `WITHIN` times the fastest there are not run.
The best single state is the one that came out best, so a lead of 1 or more is against hindsight.
Ratios have 95 % intervals over prompts.

`--ablation` instead takes one thing away after the other (Fig. 10), warm as well: Algorithm 1's
order, the plan, compression, the rule."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from moelab.arguments import number, several, whole
from moelab.bench import measure
from moelab.bench.cache_planning import POLICY, Bench, tpot
from moelab.cache.pools import HIERARCHY, Pools
from moelab.cache.residency import Residency
from moelab.evaluation.intervals import Interval, ratio
from moelab.records import Numbers, Records
from moelab.simulation.costs import Delays, Machine
from moelab.simulation.fit import fitted
from moelab.simulation.simulator import flat

STATES = "FCSE"
WITHIN = 1.3


class Arm(NamedTuple):
    """What an engine keeps, by which rule, and in which order it reads."""

    pools: Pools
    policy: str = POLICY
    order: str = "default"


#: of an ablation: what is taken away → without it, with it
ABLATION = {
    "Algorithm 1's order": ("plan, naive order", "plan, Algorithm 1"),
    "our default order": ("plan, Algorithm 1", "plan"),
    "the plan": ("C", "plan"),
    "compression": ("F", "C"),
    "ZipMoE's rule": ("F, LRU", "F"),
    "all of it": ("F, LRU", "plan"),
}


class Warm(NamedTuple):
    """One budget. By "plan", "auto", the single states and an ablation's: arms, of which some may
    be equal; mean seconds of a decode step of each prompt [P], measured; the mean of all,
    simulated: reads as profiled, all else as it was while its caches filled."""

    arms: dict[str, Arm]
    took: dict[str, np.ndarray]
    simulated: Numbers
    since: dict[str, Numbers]  # of `since_start`

    @property
    def best(self) -> str:
        """The single state that is fastest, measured."""
        return min(self.took.keys() & set(STATES), key=lambda state: self.took[state].sum())

    def lead(self, name: str = "plan") -> Interval:
        """Best single state ÷ this one, measured."""
        return ratio(self.took[self.best], self.took[name])

    def rows(self) -> Records:
        """Arm → its pools, its TPOT measured and simulated, and its lead, as a table has them."""
        rows = {}
        for name, arm in self.arms.items():
            over, low, high = self.lead(name)
            rows[name] = {
                "pools F/C/S/E": "/".join(str(arm.pools[state]) for state in HIERARCHY),
                "TPOT ms": 1e3 * self.took[name].mean(),
                "simulated ms": 1e3 * self.simulated[name],
                "best single state ÷ it": over,
                "95 % from": low,
                "to": high,
            }
        return rows

    def ablation(self) -> dict[str, Numbers]:
        """TPOT without a part over that with it; of `ABLATION`, those that ran."""
        return {
            part: dict(
                zip(
                    ("without ÷ with", "95 % from", "to"),
                    ratio(self.took[without], self.took[with_]),
                )
            )
            for part, (without, with_) in ABLATION.items()
            if {without, with_} <= self.took.keys()
        }


def since_start(
    bench: Bench, filled: Any, forwards: Any, arms: dict[str, Arm]
) -> dict[str, Numbers]:
    """Tokens since the start, from an empty cache → best single state's time over the plan's,
    simulated: what a plan that takes popularity as known gains before its cache has learned it."""
    taken = {}
    for name, arm in arms.items():
        played = bench.simulated(
            filled, forwards, Residency(bench.L, bench.E, arm.pools, arm.policy), arm.order
        )
        taken[name] = np.array(
            [end - start for start, end, _, phase in played.forwards if phase == "decode"]
        )
    each = len(bench.unseen[::2])  # sequences that are decoded together
    parts = np.array_split(np.arange(len(taken["plan"])), min(4, len(taken["plan"])))
    return {
        f"{each * (part[0] + 1)} to {each * (part[-1] + 1)}": {
            "best single state ÷ plan (simulated)": float(
                min(taken[state][part].sum() for state in taken.keys() & set(STATES))
                / taken["plan"][part].sum()
            )
        }
        for part in parts
    }


def at_disk(machine: Machine, profiled: Delays) -> Machine:
    """A machine with another one's reads, here those of the disk that is throttled."""
    reads = {"e_read": profiled.e_read, "sm_read": profiled.sm_read}
    return replace(machine, delays=replace(machine.delays, **reads))


def stationary(
    bench: Bench, share: float, before: int, tokens: int, ablation: bool = False
) -> Warm:
    """One budget: every other test prompt, all at once, with `before` new tokens in all fills the
    caches, the others with `tokens` each are timed one by one. RuntimeError: an engine decided
    otherwise than another, or than the simulator."""
    arms = _arms(bench, share, ablation)
    fill = bench.unseen[::2]
    timed = bench.unseen[1::2].split(1)
    took: dict[Arm, list[float]] = {of: [] for of in arms.values()}
    played: dict[Arm, Any] = {}
    steps = []
    later = []
    cold = []
    for group in [[of] for of in took] if bench.limited else [list(took)]:
        with ExitStack() as stack:
            models = {of: stack.enter_context(bench.open(*of)) for of in group}
            engines = {}
            for of, model in models.items():
                session = model.moelab
                _fill(bench, model, fill, before)
                steps.append(session.steps)
                cold.append(session.forwards)
                engines[of] = steps[-1], at_disk(fitted(session.run), bench.delays)
                session.reset()
            for i, of in measure.turns(group, len(timed), f"{share:.0%} of the memory", "prompt"):
                bench.text(models[of], timed[i], tokens)
                forwards = models[of].moelab.forwards[1 - tokens :]
                took[of].append(float(np.mean([x.end - x.start for x in forwards])))
            for of, (filled, machine) in engines.items():
                session = models[of].moelab
                later.append(session.steps)
                measure.agree("the experts that tokens need", filled, steps[0])
                measure.agree("the experts that tokens need", session.steps, later[0])
                played[of] = _played(bench, of, session, filled, machine)
    return Warm(
        arms,
        {name: np.array(took[of]) for name, of in arms.items()},
        {name: tpot(played[of]) for name, of in arms.items()},
        since_start(bench, steps[0], cold[0], arms),
    )


def _arms(bench: Bench, share: float, ablation: bool) -> dict[str, Arm]:
    """The plan of a budget, and what it is compared with."""
    planned = bench.plan(share).pools
    alone = {state: bench.plan(share, state).pools for state in STATES}
    if ablation:
        return {
            "plan": Arm(planned),
            "plan, Algorithm 1": Arm(planned, order="affinity"),
            "plan, naive order": Arm(planned, order="naive"),
            "C": Arm(alone["C"]),
            "F": Arm(alone["F"]),
            "F, LRU": Arm(alone["F"], "lru"),
        }
    tried = {of.pools: of.tpot for of in bench.tried(share)}
    least = min(tried[of] for of in alone.values())
    return {"plan": Arm(planned), "auto": Arm(next(iter(tried)))} | {
        state: Arm(of) for state, of in alone.items() if tried[of] <= WITHIN * least
    }


def _fill(bench: Bench, model: Any, prompts: Any, before: int) -> None:
    """Fill a model's cache by `before` new tokens after prompts, as fast as the disk is."""
    reader = model.moelab.engine.loader.reader
    model.moelab.reset()
    reader.bandwidth = None
    bench.text(model, prompts, max(2, before // len(prompts)))
    reader.bandwidth = bench.disk


def _played(bench: Bench, of: Arm, session: Any, filled: Any, machine: Any) -> Any:
    """A run in the simulator, from the cache that the same tokens filled; RuntimeError where the
    engine decided otherwise."""
    residency = Residency(bench.L, bench.E, of.pools, of.policy)
    for step in flat(filled):
        residency.begin(*step)
    played = bench.simulated(session.steps, session.forwards, residency, of.order, machine)
    measure.agree(
        "hits and evictions of the engine and the simulator",
        session.run.counters,
        played.counters,
    )
    return played


def run(
    budgets: Sequence[float] = (0.2, 0.35, 0.5, 0.65, 0.8),
    disk_mbs: float = 20.0,
    prompts: int = 8,
    before: int = 512,
    tokens: int = 6,
    ablation: bool = False,
    seed: int = 0,
) -> Records:
    sections = {}
    with measure.torch_threads(1):  # tiny matrices; the other cores read and decompress
        bench = Bench(
            "", "", disk_mbs * 1e6, 40, 24, 2 * prompts, min(budgets), 1, 1, seconds=2, seed=seed
        )
        for share in budgets:
            found = stationary(bench, share, before, tokens, ablation)
            title = f"{share:.0%} of the experts' bytes, {disk_mbs:g} MB/s (measured)"
            sections |= (
                {f"ablation, {title}": found.ablation()}
                if ablation
                else {title: found.rows(), f"tokens since the start, {title}": found.since}
            )
    return sections


OPTIONS = {
    "budgets": (several(number(above=0)), "shares of the experts"),
    "disk_mbs": (number(above=0), "MB/s"),
    "prompts": (whole(4), "that are timed; as many fill the caches"),
    "before": (whole(2), "tokens that fill the caches"),
    "tokens": (whole(2), "new tokens of each timed prompt"),
    "ablation": ({"action": "store_true"}, "without order, plan, compression, rule"),
    "seed": (whole(), "picks the prompts"),
}
