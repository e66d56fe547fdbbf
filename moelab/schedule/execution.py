"""A schedule in simulated time: disk, workers and compute each take the first operation that is ready.

Two clocks for two readers. `makespan` plays blocks of tasks chunk by chunk, as ZipMoE's analysis does (appendices A,
B: one serial disk, L workers, one serial accelerator, recovery for free), so that its bound can be checked.
`execute` plays experts as the engine does, with the requests that it makes, its staging buffers and recovery as a
worker's operation, and returns the same `Event` records as the engine's own timeline.

Left out: that reads and decompression slow each other down, and the cost of the threads' handshakes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from moelab.schedule.affinity import Block, Order
from moelab.schedule.requests import Delays, Operation, operations
from moelab.specs import Event, State

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
    """One layer's step in simulated time, as the engine executes it.

    - Disk: one read at a time, neighbouring E and SM of an expert as one; the first of the order whose expert has
      staging buffers or can get them. (Strictly in order, a block of more experts than buffers would be stuck: it
      reads all E-chunks before the first SM-chunk.)
    - Staging: an expert that isn't FULL takes one place when its first read or decompression starts. It gives the
      place back when it is decoded, if it is then kept as FULL in the pool's own buffer, else when it is computed.
    - Workers: the first expert in order of priority that has something ready: decompress (E is there), recover
      (decompressed, SM is there), or both as one, "decode".
    - Compute: FULL experts in ascending order, then the others as they become ready.

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
    by_expert = {request.key.expert: request for request in requests}
    missing = {expert for expert, request in by_expert.items() if request.state is not State.FULL}
    if workers < 1 or staging is not None and staging < 1:
        raise ValueError(f"{workers} workers and {staging} staging buffers: both must be at least 1")
    if set(order.decode) != missing:
        raise ValueError(f"the order has experts {sorted(order.decode)}, but the requests leave {sorted(missing)} to "
                         "decode; make the order from the same requests")

    events: list[Event] = []
    read_costs = {"E": ("read E", delays.e_read, delays.e_bytes), "SM": ("read SM", delays.sm_read, delays.sm_bytes),
                  "both": ("read", delays.e_read + delays.sm_read, delays.e_bytes + delays.sm_bytes)}
    work_costs = {"decompress": delays.decompress, "recover": delays.recover,
                  "decode": delays.decode_at_once}
    rank = {expert: position for position, expert in enumerate(order.decode)}
    has_sm = {expert for expert in missing if by_expert[expert].state.has_sm}
    decompressed: set[int] = set()
    work = [rank[expert] for expert in missing if by_expert[expert].state.has_e]     # heap of who has work for workers
    heapify(work)
    ready = deque(sorted(by_expert.keys() - missing))
    reads, holding, places = order.reads, set(), inf if staging is None else staging
    gives_back = {expert: ("decode", "recover") if by_expert[expert].keep is State.FULL else ("expert",)
                  for expert in missing}
    idle_workers = list(range(workers))
    disk_free = compute_free = True
    computed_until = now = start
    running: list[tuple[float, int, str, int]] = []     # end, resource (−1 disk, then workers, compute), kind, expert
    while True:
        if disk_free:
            for i, (expert, part) in enumerate(reads):
                if expert in holding or places:
                    if expert not in holding:
                        holding.add(expert)
                        places -= 1
                    kind, seconds, size = read_costs[part]
                    events.append(Event("disk", kind, layer, expert, now, now + seconds, size))
                    heappush(running, (now + seconds, -1, part, expert))
                    del reads[i]
                    disk_free = False
                    break
        without_place = []
        while work and idle_workers:
            expert = order.decode[heappop(work)]
            if expert not in holding:
                if not places:
                    without_place.append(rank[expert])
                    continue
                holding.add(expert)
                places -= 1
            worker = heappop(idle_workers)
            kind = "recover" if expert in decompressed else "decode" if expert in has_sm else "decompress"
            end = now + work_costs[kind]
            events.append(Event(f"worker {worker}", kind, layer, expert, now, end))
            heappush(running, (end, worker, kind, expert))
        for position in without_place:
            heappush(work, position)
        if compute_free and ready:
            expert = ready.popleft()
            if now > computed_until:
                events.append(Event("compute", "wait", layer, -1, computed_until, now))
            computed_until = now + delays.expert(by_expert[expert].tokens)
            events.append(Event("compute", "expert", layer, expert, now, computed_until))
            heappush(running, (computed_until, workers, "expert", expert))
            compute_free = False
        if not running:
            events.sort(key=lambda event: event.start)
            return events, computed_until

        now = running[0][0]
        while running and running[0][0] == now:             # all that end together, before anything starts
            _, resource, kind, expert = heappop(running)
            if kind == "expert":
                compute_free = True
            elif resource < 0:
                disk_free = True
                if kind != "E":
                    has_sm.add(expert)
                if kind != "SM" or expert in decompressed:
                    heappush(work, rank[expert])
            else:
                heappush(idle_workers, resource)
                if kind == "decompress":
                    decompressed.add(expert)
                    if expert in has_sm:
                        heappush(work, rank[expert])
                else:
                    ready.append(expert)
            if expert in holding and kind in gives_back[expert]:
                holding.remove(expert)
                places += 1
