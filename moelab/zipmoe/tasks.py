"""Tasks of a layer's step, as ZipMoE schedules them (§3.2, Fig. 6).

A tensor's exponents lie on disk as K compressed shards (E-chunks), its signs and mantissas as one
SM-chunk. When all N tensors of an expert are recovered, it runs. What is in memory already need not
be read.

    read E 0 → decompress 0 ┐
    read E 1 → decompress 1 ┼→ recover → expert
                    read SM ┘

The letters K, N, u, v, c, p are the paper's. The paper's clock, chunk by chunk, is a study
(`notebooks/studies/optimal_schedule.py`)."""

from __future__ import annotations

from typing import Any, NamedTuple

from moelab.base.specs import State
from moelab.simulation.costs import Delays


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
