"""A Jetson Orin, ZipMoE's board (§5), simulated from its card: orders of one layer's step, and a
model of its size.

Assumptions: the SSD and the memory of the card, no latency of a read, no contention; exponents
compress to 2.65 of 8 bits (Fig. 2); `decode_gbs` of exponents a second and thread, which no card
has (Fig. 4: three threads are faster than the SSD). No routing of Qwen3-30B-A3B is recorded: each
layer and step draws 8 of 128 experts from a popularity curve that is stretched over them, with
ranks dealt at random in each layer, independently of the step before. Real routing has more
temporal locality, so real hit rates of LRU are higher."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from moelab.bench.cache_planning import Curve, tpot
from moelab.cache.pools import Pools
from moelab.cache.residency import Request, Residency
from moelab.cards import load_card, load_device, load_model
from moelab.simulation.costs import RHO, Machine, delays_of
from moelab.simulation.simulator import Simulation, flat, ordered, simulate
from moelab.specs import ExpertKey, State
from moelab.zipmoe.affinity import naive_order, order
from moelab.zipmoe.planning import CachePlan, plan
from moelab.zipmoe.selection import sample, selection_probabilities
from moelab.zipmoe.tasks import execute

BOARD = "jetson-agx-orin-32gb"
MODEL = "Qwen3-30B-A3B"


def layer_step(states: Sequence[str]) -> list[Request]:
    """One layer's step of experts 0, 1, … in these states, none of which is kept."""
    return [Request(ExpertKey(0, i), 1, State(s), State.MISSED) for i, s in enumerate(states)]


class There(NamedTuple):
    """The model on the board: {way of caching: {GB: simulation}}, plans by GB, seconds a plan, TPOT
    without reading."""

    runs: dict[str, dict[int, Simulation]]
    plans: dict[int, CachePlan]
    planning: float
    nothing_read: float

    def curves(self) -> dict[str, Curve]:
        """By the way of caching."""
        return {
            way: [(gb * 1e9, tpot(x), x.counters.hit_rate()) for gb, x in of.items()]
            for way, of in self.runs.items()
        }


class Board:
    """workers : threads that decompress, of the board's cores."""

    def __init__(self, workers: int, decode_gbs: float) -> None:
        self.device, self.model, self.workers, self.gbs = (
            load_device(BOARD),
            load_model(MODEL),
            workers,
            decode_gbs,
        )
        # all but experts and the input embedding
        self.dense = 2 * (
            load_card(MODEL)["figures"]["total_params"]["value"]
            - self.model.vocab * self.model.H
            - self.model.L * self.model.E * self.model.expert_params
        )
        self.delays, self.other = delays_of(
            self.device, self.model, RHO, self.dense, decompress_gbs=decode_gbs
        )

    # ---- orders

    def orders(self, states: str) -> tuple[Any, Any]:
        """Events of one layer's step in Algorithm 1's order, and by ascending expert."""
        asked = layer_step(states)
        return tuple(
            execute(asked, how, self.delays, self.workers)[0]
            for how in (order(asked, self.delays, self.workers), naive_order(asked))
        )

    def step(self, states: str) -> float:
        """Seconds of one layer's step in Algorithm 1's order."""
        asked = layer_step(states)
        return execute(asked, order(asked, self.delays, self.workers), self.delays, self.workers)[1]

    def gains(self, instances: int, seed: int) -> tuple[dict[int, np.ndarray], float]:
        """(naive order ÷ Algorithm 1 on random steps of eight experts, by threads; seconds of
        ordering, measured)."""
        rng = random.Random(seed)
        found = {}
        for n in (1, 3, self.workers):
            steps = [layer_step(rng.choices("MESCF", k=8)) for _ in range(instances)]
            found[n] = np.array(
                [
                    execute(s, naive_order(s), self.delays, n)[1]
                    / execute(s, order(s, self.delays, n), self.delays, n)[1]
                    for s in steps
                ]
            )
        began = time.perf_counter()
        for step in steps:
            order(step, self.delays, self.workers)
        return found, (time.perf_counter() - began) / len(steps)

    # ---- models

    def _run(
        self, steps: Any, forwards: Any, cache: Residency, delays: Any, other: Any
    ) -> Simulation:
        machine = Machine(delays, self.workers, other)
        return simulate(
            steps,
            forwards,
            cache,
            machine,
            staging=self.workers + 2,
            order=ordered("default", machine),
        )

    def large_model(self, f: np.ndarray, gbs: Sequence[int], tokens: int, seed: int) -> There:
        """Four ways of caching `MODEL` within so many GB, by a popularity curve f [ranks]; five
        times as many tokens as are timed warm the cache."""
        model = self.model
        n = 6 * tokens
        stretched, steps = self._drawn(f, n, seed)
        full = model.expert_bytes
        sm = self.delays.sm_bytes
        e = self.delays.e_bytes
        began = time.perf_counter()
        plans = {
            gb: plan(
                stretched,
                gb * 10**9,
                (full, sm, e),
                model.K,
                self.delays,
                self.workers,
                layers=model.L,
            )
            for gb in gbs
        }
        planning = (time.perf_counter() - began) / len(gbs)
        # an uncompressed store has nothing to decode
        raw = replace(
            delays_of(self.device, model, 1.0, self.dense, decompress_gbs=self.gbs)[0],
            decompress=0.0,
            recover=0.0,
        )
        ways = {
            "uncompressed, LRU": (raw, "lru", lambda gb: Pools(F=gb * 10**9 // full)),
            "compressed on disk, F, LRU": (
                self.delays,
                "lru",
                lambda gb: Pools(F=gb * 10**9 // full),
            ),
            "only C, LRU": (self.delays, "lru", lambda gb: Pools(C=gb * 10**9 // (sm + e))),
            "planned, ZipMoE's rule": (self.delays, "zipmoe", lambda gb: plans[gb].pools),
        }

        def run(delays: Any, policy: str, pools: Pools) -> Simulation:
            cache = Residency(model.L, model.E, pools, policy)
            for step in flat(steps[:-tokens]):
                cache.begin(*step)
            return self._run(steps[-tokens:], [(1, "decode")] * tokens, cache, delays, self.other)

        return There(
            {
                way: {gb: run(delays, policy, pools(gb)) for gb in gbs}
                for way, (delays, policy, pools) in ways.items()
            },
            plans,
            planning,
            model.L * (sum(self.other) + model.K * self.delays.expert(1)),
        )

    def _drawn(self, f: np.ndarray, n: int, seed: int) -> tuple[np.ndarray, Any]:
        """(f stretched over the experts of `MODEL` [E], n tokens drawn by it)."""
        model = self.model
        stretched = np.interp(
            (np.arange(model.E) + 0.5) / model.E, (np.arange(len(f)) + 0.5) / len(f), f
        )
        stretched *= model.K / stretched.sum()
        drawn = sample(selection_probabilities(stretched, model.K), model.K, n * model.L, seed)
        dealt = [
            np.random.default_rng(seed + layer).permutation(model.E) for layer in range(model.L)
        ]
        steps = [
            [
                (layer, {int(e): 1 for e in sorted(dealt[layer][drawn[t * model.L + layer]])})
                for layer in range(model.L)
            ]
            for t in range(n)
        ]
        return stretched, steps
