"""Is a cache that ZipMoE's planner divides faster than one of a single state? Measured warm, at several budgets.

ZipMoE §3.4. Each division has an engine of its own with the same memory and the rule "zipmoe", and all run the same
held-out prompts: first a stretch that only fills their caches, read as fast as the disk can, then, from a slowed-down
disk and in turn, prompt by prompt, what is timed. Popularity is of other prompts. Their tokens, hits and evictions are
equal to the simulator's on the same steps, which is asserted; so a plan that loses in both loses by its division, and
one that loses in measurement only by what the clock leaves out.

"plan" is the paper's (Algorithms 2–4), "auto" the fastest in simulation of its ten best and of the single states; of
these, the ones that take more than `WITHIN` times the fastest there are not run. The best single state is the one that
came out best, so a lead of 1 or more is against hindsight. Ratios have 95 % intervals over prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from moelab.arguments import number, several, whole
from moelab.bench import measure
from moelab.bench.cache_planning import POLICY, Bench, tpot
from moelab.cache.pools import HIERARCHY, Pools
from moelab.cache.residency import Residency
from moelab.intervals import Interval, ratio
from moelab.offloading.observed import observed
from moelab.offloading.simulator import flat, simulate

STATES = "FCSE"
WITHIN = 1.3


class Warm(NamedTuple):
    """One budget. By "plan", "auto" and the single states, which may have the same pools: pools; mean seconds of a
    decode step of each prompt [P], measured; the mean of all, simulated: experts' parts as profiled, what the engine
    takes besides as it was while its caches filled."""

    pools: dict[str, Pools]
    took: dict[str, np.ndarray]
    simulated: dict[str, float]

    @property
    def best(self) -> str:
        """The single state that is fastest, measured."""
        return min(self.took.keys() & set(STATES), key=lambda state: self.took[state].sum())

    def lead(self, name: str = "plan") -> Interval:
        """Best single state ÷ this one, measured."""
        return ratio(self.took[self.best], self.took[name])

    def lead_simulated(self, name: str = "plan") -> float:
        return min(self.simulated[state] for state in self.simulated.keys() & set(STATES)) / self.simulated[name]

    def rows(self) -> dict[str, dict[str, Any]]:
        rows = {}
        for name, pools in self.pools.items():
            over, low, high = self.lead(name)
            rows[name] = {"pools F/C/S/E": "/".join(str(pools[state]) for state in HIERARCHY),
                          "TPOT ms": 1e3 * self.took[name].mean(), "simulated ms": 1e3 * self.simulated[name],
                          "best single state ÷ it": over, "95 % from": low, "to": high}
        return rows


def stationary(bench: Bench, share: float, before: int, tokens: int) -> Warm:
    """One budget: every other test prompt, all at once, with `before` new tokens in all fills the caches, the others
    with `tokens` each are timed one by one. AssertionError: an engine decided otherwise than another, or than the
    simulator."""
    tried = {of.pools: of.tpot for of in bench.tried(share)}
    alone = {state: bench.plan(share, state).pools for state in STATES}
    least = min(tried[of] for of in alone.values())
    pools = {"plan": bench.plan(share).pools, "auto": next(iter(tried))} | {
        state: of for state, of in alone.items() if tried[of] <= WITHIN * least}
    fill, timed = bench.unseen[::2], bench.unseen[1::2].split(1)
    took: dict[Pools, list[float]] = {of: [] for of in pools.values()}
    with ExitStack() as stack:
        models = {of: stack.enter_context(bench.open(of)) for of in took}
        filled = []
        for model in models.values():
            session, reader = model.moelab, model.moelab.engine.pipeline.reader
            session.reset()
            reader.bandwidth = None
            bench.text(model, fill, max(2, before // len(fill)))
            reader.bandwidth = bench.disk
            filled.append((session.steps, observed(session.run)))
            session.reset()
        for i, of in measure.turns(list(models), len(timed), f"{share:.0%} of the memory", "prompt"):
            bench.text(models[of], timed[i], tokens)
            took[of].append(float(np.mean([x.end - x.start for x in models[of].moelab.forwards[1 - tokens:]])))
        played = {}
        for (asked, engine), (of, model) in zip(filled, models.items()):
            session, residency = model.moelab, Residency(bench.L, bench.E, of, POLICY)
            assert asked == filled[0][0] and session.steps == next(iter(models.values())).moelab.steps, "other tokens"
            for step in flat(asked):
                residency.begin(*step)
            played[of] = simulate(session.steps, session.forwards, residency, engine.around(bench.delays),
                                  workers=bench.workers, staging=bench.staging, other=engine.other, head=engine.head,
                                  quiet=True)
            assert session.run.counters == played[of].counters, "other hits or evictions"
    return Warm(pools, {name: np.array(took[of]) for name, of in pools.items()},
                {name: tpot(played[of]) for name, of in pools.items()})


def run(budgets: Sequence[float] = (0.2, 0.35, 0.5, 0.65, 0.8), disk_mbs: float = 20.0, prompts: int = 8,
        before: int = 512, tokens: int = 6, seed: int = 0) -> dict[str, dict[str, Any]]:
    with measure.torch_threads(1):              # tiny matrices; the other cores read and decompress
        bench = Bench("", "", disk_mbs * 1e6, 40, 24, 2 * prompts, min(budgets), 1, 1, seconds=2, seed=seed)
        return {f"{share:.0%} of the experts' bytes, {disk_mbs:g} MB/s (measured)":
                stationary(bench, share, before, tokens).rows() for share in budgets}


OPTIONS = {"budgets": (several(number(above=0)), "shares of the experts"), "disk_mbs": (number(above=0), "MB/s"),
           "prompts": (whole(4), "that are timed; as many fill the caches"),
           "before": (whole(2), "tokens that fill the caches"), "tokens": (whole(2), "new tokens of each timed prompt"),
           "seed": (whole(), "picks the prompts")}
