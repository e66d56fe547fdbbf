"""A schedule in simulated time: disk, workers and compute each take the first operation that is ready.

Two clocks for two readers. `makespan` plays blocks of tasks chunk by chunk, as ZipMoE's analysis does (appendices A,
B: one serial disk, L workers, one serial accelerator, recovery for free), so that its bound can be checked.
`execute` plays experts as the engine does, on a `SimulatedPipeline`, and returns the same `Event` records as the
engine's own timeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

from moelab.schedule.affinity import Block, Order
from moelab.schedule.simulated_pipeline import SimulatedPipeline
from moelab.schedule.requests import Delays, Operation, operations
from moelab.specs import Event

RESOURCES = {"read E": "disk", "read SM": "disk", "decompress": "workers", "recover": "stream", "expert": "compute"}


def timetable(blocks: Sequence[Block], workers: int) -> dict[Operation, tuple[float, float]]:
    """Start and end in seconds of every operation of the tasks, chunk by chunk.

    Disk: block by block the E-chunks, then the SM-chunks, in the order of the tasks. Workers: the first ready chunk
    in the order of the tasks. Compute: experts as they become ready. Recovery takes no time.
    """
    seconds, rank, waits_for = {}, {}, {}
    for number, block in enumerate(blocks):
        for position, task in enumerate(block):
            costs = {"read E": task.v, "read SM": task.u, "decompress": task.c, "recover": 0.0, "expert": task.p}
            for operation, before in operations(task).items():
                waits_for.setdefault(operation, set()).update(before)
                seconds[operation] = costs[operation.kind]
                rank[operation] = (number, operation.kind == "read SM", position, operation.chunk)
    then: dict[Operation, list[Operation]] = {}
    for operation, before in waits_for.items():
        for earlier in before:
            then.setdefault(earlier, []).append(operation)

    ready: dict[str, list] = {resource: [] for resource in RESOURCES.values()}
    free = {"disk": 1, "workers": workers, "stream": len(rank), "compute": 1}

    def enqueue(operation: Operation) -> None:
        heappush(ready[RESOURCES[operation.kind]], (rank[operation], operation))

    for operation, before in waits_for.items():
        if not before:
            enqueue(operation)
    times: dict[Operation, tuple[float, float]] = {}
    running: list[tuple[float, Operation]] = []
    now = 0.0
    while True:
        for resource, queue in ready.items():
            while queue and free[resource]:
                operation = heappop(queue)[1]
                free[resource] -= 1
                times[operation] = now, now + seconds[operation]
                heappush(running, (now + seconds[operation], operation))
        if not running:
            return times
        now = running[0][0]
        while running and running[0][0] == now:         # all that end together, before anything starts
            operation = heappop(running)[1]
            free[RESOURCES[operation.kind]] += 1
            for later in then.get(operation, ()):
                waits_for[later].discard(operation)
                if not waits_for[later]:
                    enqueue(later)


def makespan(blocks: Sequence[Block], workers: int) -> float:
    """Seconds until the last expert of the blocks is computed."""
    return max((end for _, end in timetable(blocks, workers).values()), default=0.0)


def execute(requests: Iterable[Any], order: Order, delays: Delays, workers: int, staging: int | None = None,
            start: float = 0.0, layer: int = 0) -> tuple[list[Event], float]:
    """One layer's step in simulated time, as the engine executes it: see `SimulatedPipeline`.

    Parameters
    ----------
    requests : objects with `.key.expert`, `.tokens`, `.state` and `.keep`.
    staging : experts that may be in flight; None for no limit.
    start : seconds on the clock of the timeline; disk, workers and compute are all free then.

    Returns
    -------
    The events in order of their start, and the time at which the last expert is computed.

    Raises
    ------
    ValueError : no workers, no staging buffers, or an order that was made for other requests.
    """
    pipeline = SimulatedPipeline(delays, workers, staging, start=start)
    pipeline.load(pipeline.start(layer, requests), order)
    pipeline.run()
    return pipeline.timeline(), pipeline.now
