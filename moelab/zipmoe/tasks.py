"""Tasks of a layer's step, as ZipMoE schedules them (§3.2, Fig. 6), and a step in simulated time.

A tensor's exponents lie on disk as K compressed shards (E-chunks), its signs and mantissas as one
SM-chunk. When all N tensors of an expert are recovered, it runs. What is in memory already need not
be read.

    read E 0 → decompress 0 ┐
    read E 1 → decompress 1 ┼→ recover → expert
                    read SM ┘

The letters K, N, u, v, c, p are the paper's. `execute` plays a layer's experts as the engine does;
the paper's own clock, chunk by chunk, is a study (`notebooks/studies/optimal_schedule.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from moelab.cache.residency import Step
from moelab.offloading.load_queue import KINDS, Order
from moelab.simulation.costs import Delays, Machine
from moelab.simulation.machine import SimulatedMachine
from moelab.specs import Event, State


class Task(NamedTuple):
    """One tensor to recover, or a whole expert as one, which is tensor 0."""

    expert: int
    tensor: int
    state: State  # what of it is in memory; never FULL in a schedule
    u: float  # seconds to read its SM-chunk
    v: float  # seconds to read one of its K E-chunks; the paper's ρu/K
    c: float  # seconds to decompress one E-chunk
    K: int
    p: float  # seconds that its expert computes, once all tensors are there

    @property
    def type_1(self) -> bool:
        """Whether the SM-chunk must be read (§3.3)."""
        return self.state is State.MISSED or self.state is State.E

    @property
    def reads_e(self) -> bool:
        return self.state is State.MISSED or self.state is State.SM


Block = list[Task]


def whole(request: Any, delays: Delays) -> Task:
    """A request, which has `.key.expert`, `.tokens` and `.state`, as one task of one chunk, which is
    what the engine's threads handle; recovery is a worker's."""
    return Task(
        request.key.expert,
        0,
        request.state,
        delays.sm_read,
        delays.e_read,
        delays.decode,
        1,
        delays.expert(request.tokens),
    )


def execute(
    requests: Iterable[Any],
    order: Order,
    delays: Delays,
    workers: int,
    start: float = 0.0,
    layer: int = 0,
) -> tuple[list[Event], float]:
    """One layer's step in simulated time, with slots for all its experts, as the engine executes
    it.

    requests : objects with `.key`, `.tokens`, `.state` and `.keep`. Returns the events in order of
    their start, and the time at which the last expert is computed. ValueError without workers, or
    for an order that was made for other requests."""
    step = Step(layer, sorted(requests, key=lambda request: request.key.expert), [])
    simulated = SimulatedMachine(
        Machine(delays, workers),
        dict.fromkeys(KINDS, 2 * len(step.requests)),
        ((request.key, request.state) for request in step.requests),
        start=start,
    )
    simulated.begin(step)
    simulated.queue.begin(layer, step.loads, [], simulated.ready, lambda _: order)
    simulated.run()
    return simulated.timeline(), simulated.now
