"""Delays, tasks and the graph of operations that an expert's state leaves to do: ZipMoE §3.2, Fig.
6.

A tensor's exponents lie on disk as K compressed shards (E-chunks), its signs and mantissas as one
SM-chunk. When all N tensors of an expert are recovered, it runs. What is in memory already need not
be read.

    read E 0 → decompress 0 ┐
    read E 1 → decompress 1 ┼→ recover → expert
                    read SM ┘

The letters K, N, u, v, c, p are the paper's, in this package only. Left out of the paper's graph
and of `Task` is that concurrent reads, decompression and computation slow each other down
(`Delays.beside`), and that a miss may be one read of both chunks, which is faster than two
(`Delays.read_both`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from moelab.specs import ExpertKey, State


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

    @property
    def io(self) -> float:
        """Seconds of reading that are left to do: v_j of Lemma B.3."""
        return self.reads_e * self.K * self.v + self.type_1 * self.u


class Operation(NamedTuple):
    """A node of the graph. `kind` is "read E", "read SM", "decompress", "recover" or "expert"; −1
    for no tensor or no chunk."""

    kind: str
    expert: int
    tensor: int = -1
    chunk: int = -1


def operations(task: Task) -> dict[Operation, tuple[Operation, ...]]:
    """What a task leaves to do (Fig. 6): each operation with those that must end before it starts,
    in such an order."""
    where = task.expert, task.tensor
    expert, recover, sm = (
        Operation("expert", task.expert),
        Operation("recover", *where),
        Operation("read SM", *where),
    )
    if task.state is State.FULL:
        return {expert: ()}
    graph: dict[Operation, tuple[Operation, ...]] = {}
    for chunk in range(task.K):
        read = (Operation("read E", *where, chunk),) if task.reads_e else ()
        graph |= dict.fromkeys(read, ()) | {Operation("decompress", *where, chunk): read}
    decompressed = tuple(operation for operation in graph if operation.kind == "decompress")
    if task.type_1:
        graph[sm] = ()
    return graph | {
        recover: (*decompressed, sm) if task.type_1 else decompressed,
        expert: (recover,),
    }


@dataclass(frozen=True)
class Delays:
    """What the operations of one expert cost on a machine, in seconds; measured, or taken from a
    device card.

    e_read, sm_read : reading all its E-chunks, all its SM-chunks.
    decompress, recover : all its exponents; joining them with signs and mantissas; in one thread.
    expert_base, expert_token : its computation takes `expert_base + expert_token · tokens`.
    computed : measured (tokens, seconds), ascending, which then go before these two: products with
        a vector and with a matrix are different code, so no line goes through them all.
    K, N : shards a tensor, tensors an expert.
    e_bytes, sm_bytes : what the two reads transfer, for the timeline.
    experts_bytes : [L][E] of the same two numbers for each expert; the seconds above are the mean
        expert's.
    decode : decompressing and joining in one go, which may be faster than one after the other; None
        for their sum.
    one_thread : one token's expert on one thread, which the engine leaves computing while
        `LoadQueue.keeps_up`; None if it does not.
    read_both : reading all chunks of an expert in one request; None for the sum of the two.
    together : measured (n, seconds) of one token's n experts in one call, which an executor makes
        for those in memory, ascending, n above 1; none if each is computed by itself.
    beside : how many times as long a "read", a "decode" (or a part of it) or an "expert" takes
        while another of the three runs, by "expert beside decode" and so on; beside several what
        was measured, such as "decode beside expert and read", or else all their factors.
    decide : measured (experts that must be loaded, seconds) of deciding about a layer's step,
        ascending.
    handover : until threads have woken up, between an expert's last read and its computation, if
    that waits for it."""

    e_read: float
    sm_read: float
    decompress: float
    recover: float
    expert_base: float
    expert_token: float
    K: int = 1
    N: int = 3
    e_bytes: int = 0
    sm_bytes: int = 0
    decode: float | None = None
    experts_bytes: Sequence[Sequence[Sequence[int]]] = ()
    computed: Sequence[tuple[int, float]] = ()
    one_thread: float | None = None
    beside: Mapping[str, float] = field(default_factory=dict)
    read_both: float | None = None
    together: Sequence[tuple[int, float]] = ()
    decide: Sequence[tuple[int, float]] = ()
    handover: float = 0.0

    def __post_init__(self) -> None:
        for name in ("e_read", "sm_read", "decompress", "recover", "expert_base", "expert_token"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)} s; a delay is a number of seconds, at least 0"
                )
        if self.K < 1 or self.N < 1:
            raise ValueError(
                f"K={self.K} shards a tensor and N={self.N} tensors an expert: both must be at least 1"
            )

    def read(self, key: ExpertKey, e: bool, sm: bool) -> tuple[float, int]:
        """(seconds, bytes) of reading an expert's E-chunks, SM-chunks or both, in proportion to its
        own bytes."""
        mean = self.e_bytes, self.sm_bytes
        own = self.experts_bytes[key.layer][key.expert] if self.experts_bytes else mean
        parts = [(self.e_read, own[0], mean[0])] * e + [(self.sm_read, own[1], mean[1])] * sm
        if e and sm and self.read_both is not None:
            parts = [(self.read_both, sum(own), sum(mean))]
        return sum(seconds * (n / usual if usual else 1) for seconds, n, usual in parts), sum(
            n for _, n, _ in parts
        )

    @property
    def by_expert(self) -> bool:
        """Whether the chunks of a miss had better be one request: reading all E-chunks first, as
        Algorithm 1 does, pays for two requests and two passes over the weights only where
        decompressing takes longer than reading SM-chunks. Experts that are read in place have
        none."""
        return self.decompress <= self.sm_read or not self.sm_read

    @property
    def miss_read(self) -> float:
        """Seconds of reading a missed expert, in one request or two."""
        at_once = self.by_expert and self.read_both is not None
        return self.read_both if at_once else self.e_read + self.sm_read

    @property
    def decode_at_once(self) -> float:
        """Seconds of decompressing and joining an expert whose chunks are all there."""
        return self.decompress + self.recover if self.decode is None else self.decode

    def expert(self, tokens: int) -> float:
        """Seconds that an expert computes for so many tokens: on straight lines between the
        measured ones, if there are at least two; beyond them, the last line goes on."""
        if len(self.computed) < 2:
            return self.expert_base + self.expert_token * tokens
        at = max(1, min(bisect_left(self.computed, (tokens,)), len(self.computed) - 1))
        (n0, low), (n1, high) = self.computed[at - 1 : at + 1]
        return max(low + (high - low) * (tokens - n0) / (n1 - n0), 0.0)

    def one_token(self, n: int) -> float:
        """Seconds of one token's n experts that are computed in one call: on straight lines between
        one's and those of `together`, if there are any."""
        alone = self.expert(1)
        return float(np.interp(n, *zip((1, alone), *self.together))) if self.together else n * alone

    def at_once(self, requests: Sequence[Any]) -> float:
        """Seconds of experts that are computed in one call, or, for more tokens than one, one after
        another."""
        if all(request.tokens == 1 for request in requests):
            return self.one_token(len(requests))
        return sum(self.expert(request.tokens) for request in requests)

    def deciding(self, loads: int) -> float:
        """Seconds of deciding about a layer's step that must load so many experts: see
        `moelab.simulation.observed`."""
        return float(np.interp(loads, *zip(*self.decide))) if self.decide else 0.0

    def whole(self, request: Any) -> Task:
        """A request, which has `.key.expert`, `.tokens` and `.state`, as one task of one chunk,
        which is what the engine's threads handle; recovery is a worker's."""
        return Task(
            request.key.expert,
            0,
            request.state,
            self.sm_read,
            self.e_read,
            self.decompress + self.recover,
            1,
            self.expert(request.tokens),
        )
