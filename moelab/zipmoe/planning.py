"""Planning: how to divide a budget between the pools F, C, S and E, from expert popularity.

Source: ZipMoE §3.4 and appendix C (Algorithms 2 and 4; `makespan` in place of Algorithm 3, which
`moelab bench zipmoe` compares). The most popular experts of a layer lie in pool F, the next in C,
then S, then E, so each pool is an interval of ranks. A step's hits in the intervals follow
conditional Bernoulli sampling (`moelab.zipmoe.selection`); every pattern of hits has a time, and the
division with the least expected time is chosen; of equally good ones, to 1e-9, that with more in F,
then C, then S.

Shapes: f [E]; distributions of hits [..., k + 1]; patterns [n, 4] of hits in F, C, S and E. The
order of steps does not count (simulate the `best` few to bring it in, as
`moelab.zipmoe.planner` does); an engine's buffers are not part of the budget, and prompts not
of the time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, product
from typing import NamedTuple

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
    last expert; all decoding, after the first E-read if no exponents are there, then computation of
    the last; all computations, after the first decoding if nothing is ready. What comes after the
    last read is its decoding, or only recovery if its exponents were there before: where SM-chunks
    are read, and read apart."""
    F, C, S, E = hits.T
    compute = delays.expert(1)
    decode = delays.decode / workers
    exponents_last = (E == 0) & (by_expert(delays) | (k == F + C + S))
    last = np.where(exponents_last, decode, delays.recover / workers)
    disk = reading(hits, k, delays) + np.where(k > F + C, last + compute, 0)
    first = np.where(C + E == 0, delays.e_read, 0)
    work = (k - F) * decode + np.where(k > F, first + compute, 0)
    return np.maximum(np.maximum(disk, work), k * compute + np.where(F == 0, decode, 0))


class CachePlan(NamedTuple):
    """A division of the budget: its pools, and the expected seconds of a layer's step, or the
    simulated ones of a token."""

    pools: Pools
    seconds: float


def plans(
    f: np.ndarray,
    budget_bytes: int,
    sizes: tuple[int, int, int],
    delays: Delays,
    workers: int,
    pools: str = "FCSE",
    layers: int = 1,
    parts: int = 20,
    estimate: Callable[..., np.ndarray] = makespan,
) -> list[CachePlan]:
    """All divisions of a budget whose pools differ, least expected time first (ZipMoE Algorithm 4).

    For pools of each layer (scope "layer"), `budget_bytes` is a layer's. For pools that `layers`
    share (scope "model"), it is theirs together: the division is found for one layer's equal share
    and applied to the whole budget.

    f : [E], share of steps that need the expert of each rank, falling; k experts a step is its sum,
        rounded.
    sizes : bytes of an expert's (full tensors, SM-chunks, E-chunks).
    delays : seconds of one expert. workers : decode workers.
    pools : which pools may be used, letters of "FCSE". parts : equal ones that are given to them.
    estimate : of a layer's time, as `makespan`.

    Raises ValueError: pools that there cannot be."""
    full, sm, e = sizes
    bytes_of = dict(zip(HIERARCHY, (full, sm + e, sm, e)))
    kept = "".join(p for p in HIERARCHY if bytes_of[p])
    if not pools or not set(pools) <= set(kept):
        raise ValueError(f"pools is {pools!r}; of this store there can be {kept}")
    q, k = selection_probabilities(f)
    hits = interval_hits(q, k)
    patterns = hit_patterns(k)
    seconds = estimate(patterns, k, delays, workers)
    n_bytes = [max(1, bytes_of[p]) for p in HIERARCHY]
    known = {}  # experts of a layer in the pools → seconds
    found = {}  # pools → seconds
    # all integers that sum to `parts`, 0 outside `pools`, the largest first numbers first
    for first in product(*(range(parts if of in pools else 0, -1, -1) for of in "FCS")):
        last = parts - sum(first)
        if last < 0 or last and "E" not in pools:
            continue
        division = *first, last
        shares = [part * budget_bytes // parts for part in division]
        layer = _filled([s // (layers * size) for s, size in zip(shares, n_bytes)], len(f))
        total = _filled([s // size for s, size in zip(shares, n_bytes)], len(f) * layers)
        if layer not in known:  # many divisions of a small budget hold the same experts
            known[layer] = float(pattern_probabilities(hits, patterns, layer) @ seconds)
        found[Pools(*total)] = min(known[layer], found.get(Pools(*total), np.inf))
    limit = min(found.values()) * (1 + 1e-9)  # equally good ones stay in the order of divisions
    by_time = sorted(found.items(), key=lambda one: one[1] if one[1] > limit else 0.0)
    return [CachePlan(*one) for one in by_time]


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
