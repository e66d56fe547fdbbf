"""Ceilings of caching: the most hits that any cache could have on a recorded run, and simpler references beside it.

A step is a set of experts, and each that is in memory is a hit. Keeping an expert from one use to the next is an
interval over the gaps between steps; a cache of C experts keeps at most C at any gap, so the most hits are the most
intervals of which no more than C overlap. Taking intervals as they come and giving up the one that ends last whenever
C + 1 overlap is optimal: Belady's rule (1966), with bypass, since what is given up may be the newcomer.

    steps     [(layer, {expert: tokens}), …], in the order of the run
    capacity  experts in memory, of the whole model (scope "model") or of each layer (scope "layer")

All are exact counts, from an empty cache. Ceilings that follow from geometry alone are in `moelab.offloading.limits`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from moelab.specs import ExpertKey

Steps = Sequence[tuple[int, Mapping[int, int]]]


def request_count(steps: Steps) -> int:
    """Experts that the steps request; hits divided by this is a hit rate."""
    return sum(len(tokens) for _, tokens in steps)


def compulsory_misses(steps: Steps) -> int:
    """Different experts that the steps request: each must be read once."""
    return len({(layer, expert) for layer, tokens in steps for expert in tokens})


def belady_hits(steps: Steps, capacity: int, scope: str = "model") -> int:
    """The most hits that any replacement decisions reach, bypass allowed.

    Raises
    ------
    ValueError : a negative capacity or an unknown scope.
    """
    return sum(_belady(part, capacity) for part in _parts(steps, capacity, scope))


def static_hits(steps: Steps, capacity: int, scope: str = "model") -> int:
    """Hits of the best fixed set: the experts used most are kept from their first use on, all others never.

    Raises
    ------
    ValueError : a negative capacity or an unknown scope.
    """
    hits = 0
    for part in _parts(steps, capacity, scope):
        uses = Counter(ExpertKey(layer, expert) for layer, tokens in part for expert in tokens)
        hits += sum(count - 1 for _, count in uses.most_common(capacity))
    return hits


def _parts(steps: Steps, capacity: int, scope: str) -> Iterable[Steps]:
    """The steps as one run, or each layer's by themselves."""
    if capacity < 0:
        raise ValueError(f"the capacity is {capacity} experts; it must be 0 or more")
    if scope == "model":
        return [steps]
    if scope == "layer":
        return [[step for step in steps if step[0] == layer] for layer in {layer for layer, _ in steps}]
    raise ValueError(f"unknown scope {scope!r}; a capacity is either of the whole 'model' or of each 'layer'")


def _belady(steps: Steps, capacity: int) -> int:
    following: list[dict[ExpertKey, int]] = []                  # step → expert → the next step that uses it
    upcoming: dict[ExpertKey, int] = {}
    for number in range(len(steps) - 1, -1, -1):
        keys = [ExpertKey(steps[number][0], expert) for expert in steps[number][1]]
        following.append({key: upcoming[key] for key in keys if key in upcoming})
        upcoming.update(dict.fromkeys(keys, number))
    following.reverse()
    hits = 0
    kept: dict[ExpertKey, int] = {}                             # kept expert → its next use
    furthest: list[tuple[int, ExpertKey]] = []                  # the same as a heap; past uses lie at its bottom
    for (layer, tokens), nexts in zip(steps, following):
        hits += sum(kept.pop(ExpertKey(layer, expert), None) is not None for expert in tokens)
        for key, use in nexts.items():
            kept[key] = use
            heapq.heappush(furthest, (-use, key))
        while len(kept) > capacity:
            del kept[heapq.heappop(furthest)[1]]
    return hits
