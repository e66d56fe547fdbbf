"""The most hits of any cache on a recorded run, which none can beat: one above is counted wrongly.

Keeping an expert from one use to the next is an interval
over the gaps between steps, so the most hits are the most intervals of which no more than C
overlap. Giving up the one that ends last whenever C + 1 overlap is optimal: Belady's rule (1966),
with bypass, since what is given up may be the newcomer. Steps are [(layer, {expert: tokens}), …] in
the order of the run, capacity is experts in memory. All are exact counts, from an empty cache; for
pools of each layer, ask layer by layer."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from moelab.base.specs import ExpertKey

Steps = Sequence[tuple[int, Mapping[int, int]]]


def request_count(steps: Steps) -> int:
    """Experts that the steps request; hits divided by this is a hit rate."""
    return sum(len(tokens) for _, tokens in steps)


def belady_hits(steps: Steps, capacity: int) -> int:
    """The most hits that any replacement decisions reach, bypass allowed."""
    if capacity < 0:
        raise ValueError(f"the capacity is {capacity} experts; it must be 0 or more")
    following: list[
        dict[ExpertKey, int]
    ] = []  # expert → the next step that uses it; last step first
    upcoming: dict[ExpertKey, int] = {}
    for number, (layer, tokens) in reversed(list(enumerate(steps))):
        keys = [ExpertKey(layer, expert) for expert in tokens]
        following.append({key: upcoming[key] for key in keys if key in upcoming})
        upcoming.update(dict.fromkeys(keys, number))
    hits = 0
    kept: dict[ExpertKey, int] = {}  # kept expert → its next use
    furthest: list[tuple[int, ExpertKey]] = []  # the same as a heap; past uses lie at its bottom
    for (layer, tokens), nexts in zip(steps, reversed(following)):
        hits += sum(kept.pop(ExpertKey(layer, expert), None) is not None for expert in tokens)
        for key, use in nexts.items():
            kept[key] = use
            heapq.heappush(furthest, (-use, key))
        while len(kept) > capacity:
            del kept[heapq.heappop(furthest)[1]]
    return hits
