"""Whether a timeline is possible at all, real or simulated."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

from moelab.base.specs import Event


def check(events: Iterable[Event]) -> list[str]:
    """What is impossible about a timeline, in words; [] for a sound one.

    No event ends before it starts, what is read or sent has bytes and nothing else does, only compute waits, and
    no resource does two things at once. Events that touch do not overlap; an event of no duration
    overlaps nothing."""
    problems, by_resource = [], defaultdict(list)
    for event in events:
        if not (
            math.isfinite(event.start) and math.isfinite(event.end) and event.start <= event.end
        ):
            problems.append(f"{event} does not end after it starts")
        if (event.bytes > 0) != event.kind.startswith(("read", "send")):
            problems.append(f"{event}: reads and what is sent have bytes, other events none")
        if event.kind == "wait" and "compute" not in event.resource:
            problems.append(f"{event}: only compute waits")
        if event.end > event.start:
            by_resource[event.resource].append(event)
    for found in by_resource.values():
        found.sort(key=lambda event: event.start)
        problems += [
            f"{after} begins before {before} ends"
            for before, after in pairwise(found)
            if after.start < before.end
        ]
    return problems


def at_most(spans: Iterable[tuple[float, float]], limit: int, tiny: float = 1e-9) -> bool:
    """Whether at no moment more than `limit` of the (start, end) overlap, by more than `tiny`."""
    long = [(start, end) for start, end in spans if end - start > 3 * tiny]
    edges = sorted([(end - tiny, -1) for _, end in long] + [(start, 1) for start, _ in long])
    running = 0
    for _, step in edges:
        running += step
        if running > limit:
            return False
    return True
