"""Planning: how to divide a budget between the pools F, C, S and E, from expert popularity.

Source: ZipMoE §3.4 and appendix C (Algorithms 2 and 4; `makespan` in place of 3, which reads a miss
twice and leaves out computing). The most popular experts of a layer lie in pool F, the next in C,
then S, then E, so each pool is an interval of ranks. A step's hits in the intervals follow
conditional Bernoulli sampling (`moelab.zipmoe.selection`); every pattern of hits has a time, and the
division with the least expected time is chosen; of equally good ones, to 1e-9, that with more in F,
then C, then S.

Shapes: f [E]; distributions of hits [..., k + 1]; patterns [n, 4] of hits in F, C, S and E. The
order of steps does not count (simulate the `best` few to bring it in, as
`moelab.zipmoe.planner` does); an engine's buffers are not part of the budget, and prompts not
of the time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, NamedTuple

import numpy as np

from moelab.cache.pools import HIERARCHY, Pools
from moelab.simulation.costs import Delays
from moelab.zipmoe.affinity import by_expert
from moelab.zipmoe.selection import add_one, selection_probabilities


def reading(hits: np.ndarray, k: int, delays: Delays) -> np.ndarray:
    """What a layer's step reads, as engine and simulator do it (`Delays.miss_read`): [n, 4] →
    seconds [n]."""
    _, _, S, E = hits.T
    return (k - hits.sum(1)) * delays.miss_read + S * delays.e_read + E * delays.sm_read


def makespan(hits: np.ndarray, k: int, delays: Delays, workers: int) -> np.ndarray:
    """A layer's time when reading, decoding and computing overlap, beyond the paper: [n, 4] →
    seconds [n].

    The longest of three lower bounds of any schedule: all reads, then what is left to do of the
    last expert; all decoding, then computation of the last; all computations, after the first
    decoding if nothing is ready. What comes after the last read is its decoding, or only recovery
    if its exponents were there before."""
    F, C, _, E = hits.T
    compute = delays.expert(1)
    decode = delays.decode / workers
    last = np.where(by_expert(delays) & (E == 0), decode, delays.recover / workers)
    disk = reading(hits, k, delays) + np.where(k > F + C, last + compute, 0)
    work = (k - F) * decode + np.where(k > F, compute, 0)
    return np.maximum(np.maximum(disk, work), k * compute + np.where(F == 0, decode, 0))


class Configuration(NamedTuple):
    """One division of the budget: parts of it for F, C, S and E, the pools that gives, expected
    seconds a layer."""

    ratios: tuple[float, float, float, float]
    pools: Pools
    seconds: float


@dataclass(frozen=True)
class CachePlan:
    """The chosen division, as in `Configuration`, and `table`, all that were considered, in grid
    order."""

    ratios: tuple[float, float, float, float]
    pools: Pools
    seconds: float
    table: tuple[Configuration, ...]

    def best(self, n: int) -> list[Configuration]:
        """The `n` best configurations whose pools differ, best first."""
        different: dict[Pools, Configuration] = {}
        for configuration in sorted(self.table, key=lambda c: c.seconds):
            different.setdefault(configuration.pools, configuration)
        return list(different.values())[:n]


def plan(
    f: np.ndarray,
    budget_bytes: int,
    sizes: tuple[int, int, int],
    k: int,
    delays: Delays,
    workers: int,
    pools: str = "FCSE",
    step: float = 0.05,
    layers: int = 1,
) -> CachePlan:
    """The division of a budget with the least expected time a layer (ZipMoE Algorithm 4).

    For pools of each layer (scope "layer"), `budget_bytes` is a layer's. For pools that `layers`
    share (scope "model"), it is theirs together: the division is found for one layer's equal share
    and applied to the whole budget.

    f : [E], share of steps that need the expert of each rank, falling, summing to k: a row of
        `moelab.zipmoe.inclusion`, or the mean of its rows. See `selection.whole`
        for batches.
    sizes : bytes of an expert's (full tensors, SM-chunks, E-chunks). k : experts a step.
    delays : seconds of one expert. workers : decode workers.
    pools : which pools may be used, letters of "FCSE". step : of the ratios; 1 / step must be
        whole.

    Raises ValueError: no pool could hold even one expert a layer; unknown pools; an impossible
    step; unfit f."""
    full, sm, e = sizes
    bytes_of = dict(zip(HIERARCHY, (full, sm + e, sm, e)))
    n = _require_a_plan(bytes_of, budget_bytes, workers, pools, step, layers)
    f = np.asarray(f, np.float64)
    hits = interval_hits(selection_probabilities(f, k), k)
    patterns = hit_patterns(k)
    seconds = makespan(patterns, k, delays, workers)
    n_bytes = [max(1, bytes_of[p]) for p in HIERARCHY]
    table = []
    known = {}
    for parts in _compositions(n, pools):
        shares = [part * budget_bytes // n for part in parts]
        layer = _filled([s // (layers * size) for s, size in zip(shares, n_bytes)], len(f))
        total = _filled([s // size for s, size in zip(shares, n_bytes)], len(f) * layers)
        if layer not in known:  # many divisions of a small budget hold the same experts
            known[layer] = float(pattern_probabilities(hits, patterns, layer) @ seconds)
        table.append(Configuration(tuple(part / n for part in parts), Pools(*total), known[layer]))
    limit = min(c.seconds for c in table) * (1 + 1e-9)
    return CachePlan(*next(c for c in table if c.seconds <= limit), tuple(table))


def _require_a_plan(
    bytes_of: dict[Any, int], budget: int, workers: int, pools: str, step: float, layers: int
) -> int:
    """The parts that a budget is divided into; ValueError as of `plan`."""
    if not pools or len(set(pools)) != len(pools) or not set(pools) <= set(HIERARCHY):
        raise ValueError(f"pools is {pools!r}; it must be letters of 'FCSE', each at most once")
    n = round(1 / step) if 0 < step <= 1 else 0
    if not n or abs(n * step - 1) > 1e-9:
        raise ValueError(f"step is {step}; it must divide 1 into equal parts, such as 0.05 or 0.25")
    if workers < 1 or layers < 1:
        raise ValueError(
            f"there are {workers} workers and {layers} layers; each must be at least 1"
        )
    sizes = ", ".join(f"{bytes_of[pool]:,} in pool {pool}" for pool in HIERARCHY)
    if empty := [p for p in pools if bytes_of[p] < 1]:
        raise ValueError(f"an expert has {sizes} bytes; leave pool {empty[0]} out of the pools")
    least = min(bytes_of[p] for p in pools) * layers
    if budget < least:
        raise ValueError(
            f"a budget of {budget:,} bytes holds not one expert a layer in any of the pools {pools}: an "
            f"expert has {sizes} bytes, and {layers} layer(s) share the budget, so it must be at "
            f"least {least:,} bytes"
        )
    return n


def interval_hits(q: np.ndarray, k: int) -> np.ndarray:
    """Φ of Algorithm 2 for every interval of ranks: [u, v, h] = P(h hits among the ranks u … v−1),
    h ≤ k, u ≤ v."""
    E = len(q)
    hits = np.zeros((E + 1, E + 1, k + 1))
    hits[np.arange(E + 1), np.arange(E + 1), 0] = 1
    for v in range(E):
        hits[: v + 1, v + 1] = add_one(hits[: v + 1, v], q[v])
    return hits


def hit_patterns(k: int) -> np.ndarray:
    """All (h_F, h_C, h_S, h_E) of at most k hits in all: int64 [n, 4], n = (k + 4 choose 4)."""
    grid = np.stack(np.meshgrid(*[np.arange(k + 1)] * 4, indexing="ij"), -1).reshape(-1, 4)
    return grid[grid.sum(1) <= k]


def pattern_probabilities(
    hits: np.ndarray, patterns: np.ndarray, sizes: tuple[int, ...]
) -> np.ndarray:
    """P(h_F, h_C, h_S, h_E | k hits in all), §3.4, for pools of `sizes` experts from rank 0 on:
    [n]."""
    E = len(hits) - 1
    k = hits.shape[2] - 1
    u = 0
    probability = 1 / hits[0, E, k]
    for size, h in zip(sizes, patterns.T):
        probability = probability * hits[u, u + size][h]
        u += size
    return probability * hits[u, E][k - patterns.sum(1)]  # the rest are missed


def _filled(capacities: list[int], experts: int) -> tuple[int, ...]:
    """What pools of these capacities hold if there are only so many experts, the first pools
    first."""
    ends = [min(end, experts) for end in accumulate(capacities)]
    return tuple(end - begin for begin, end in zip([0, *ends], ends))


def _compositions(n: int, pools: str) -> Iterator[tuple[int, ...]]:
    """All (F, C, S, E) of integers that sum to `n`, 0 outside `pools`, those with the largest first
    numbers first."""
    for F, C, S in product(*(range(n if name in pools else 0, -1, -1) for name in "FCS")):
        E = n - F - C - S
        if E == 0 or E > 0 and "E" in pools:
            yield F, C, S, E
