"""Cache-affinity scheduling: ZipMoE §3.3, Algorithm 1 and Definition A.1.

Tasks whose SM-chunk must be read (type I) keep the disk busy, those whose SM-chunk is in memory
(type II) only the workers. Blocks are built around a type-I task: type-II tasks, then further
type-I tasks are inserted until the workers lag so far behind the disk that the next block's
E-chunks arrive before a worker runs dry. Within a block all E-chunks are read before all SM-chunks;
disk and workers always take the first operation of this order that is ready.

A tensor's exponents lie on disk as K compressed shards (E-chunks), its signs and mantissas as one
SM-chunk (§3.2, Fig. 6); what is in memory already need not be read. The letters K, u, v, c, p are the
paper's; its clock, chunk by chunk, is a study (`notebooks/studies/optimal_schedule.py`).

Where the listing has gaps:
- All chunks of a layer have the same delays, so "a position that introduces no additional idle
  period" (line 13) exists everywhere in a block or nowhere. The earliest would be the block's head,
  against the order by p of lines 4 and 5; here a task never goes ahead of one of its own type with
  as large a p, which is nearer to the optimum.
- Type-II tasks that are left when σ_I is empty found blocks of their own.
- Lines 16 and 18 need a task i* with p_i* ≥ p_j*; without one, j* goes to the head.
- Times count from the start of the layer, not of the block, as the proof needs what earlier blocks
left behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapreplace
from typing import Any, NamedTuple

from moelab.base.registry import Entry
from moelab.base.specs import State
from moelab.offloading.load_queue import Order, given_order
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


def order(requests: Iterable[Any], delays: Delays, workers: int) -> Order:
    """Algorithm 1 for a layer's requests, an expert as one task.

    requests : objects with `.key.expert`, `.tokens` and `.state`; those in state FULL have nothing
        to order.
    workers : decompression threads; ValueError below 1.
    """
    blocks = schedule(
        [whole(request, delays) for request in requests if request.state is not State.FULL], workers
    )
    io = [
        (task.expert, part)
        for block in blocks
        for part in ("E", "SM")
        for task in block
        if (task.reads_e if part == "E" else task.type_1)
    ]
    return Order(io, [task.expert for block in blocks for task in block])


def order_by_expert(requests: Iterable[Any], delays: Delays, workers: int) -> Order:
    """Algorithm 1's order of experts, but the chunks of each in one request, so that they are
    decoded in one go."""
    by_id = {request.key.expert: request for request in requests}
    return given_order(by_id[i] for i in order(by_id.values(), delays, workers).decode)


def default_order(requests: Iterable[Any], delays: Delays, workers: int) -> Order:
    """`order_by_expert` where `by_expert` says so, else `order`."""
    return (order_by_expert if by_expert(delays) else order)(requests, delays, workers)


def by_expert(delays: Delays) -> bool:
    """Whether the chunks of a miss had better be one request. Read apart, the exponents are
    decompressed while SM-chunks are read, which pays for two requests and two passes over the
    weights only where decompressing takes longer than a measured SM-read, its request included."""
    return delays.decompress <= delays.sm_read or not delays.sm_read


def naive_order(requests: Iterable[Any], delays: Delays | None = None, workers: int = 1) -> Order:
    """The baseline: experts in ascending id."""
    return given_order(sorted(requests, key=lambda r: r.key.expert))


#: name → how to order a layer's reads and decoding: (requests, delays, workers) → `Order`
SCHEDULERS = {
    "default": Entry(
        default_order, "Algorithm 1, or by expert where reading is slower than decompressing"
    ),
    "affinity": Entry(
        order, "ZipMoE's Algorithm 1: E-chunks of a block first, SM-chunks behind them"
    ),
    "expert": Entry(
        order_by_expert, "Algorithm 1's order of experts, each in one read and one decode"
    ),
    "naive": Entry(naive_order, "ascending experts, the baseline", teaching=True),
}


def schedule(tasks: Sequence[Task], workers: int) -> list[Block]:
    """Algorithm 1: tasks, none of them FULL, all with the same u, v, c and K, as blocks, in order of
    execution. ValueError without workers."""
    if workers < 1:
        raise ValueError(f"{workers} workers; decompression needs at least 1")
    if not tasks:
        return []
    u, v, c, K = tasks[0][3:7]
    ranked = sorted(tasks, key=lambda task: (-task.p, task.expert, task.tensor))
    sigma_1 = deque(task for task in ranked if task.type_1)  # line 4
    sigma_2 = deque(task for task in ranked if not task.type_1)  # line 5
    blocks: list[Block] = []
    clock, threads = 0.0, [0.0] * workers  # when disk and workers are done with the blocks so far
    while sigma_1 or sigma_2:
        base = (sigma_1 or sigma_2).popleft()  # line 10
        block = [base]
        ready, reads, sms = (0, K, base.type_1) if base.reads_e else (K, 0, base.type_1)
        idle, busy_until = _decompress(threads, clock, ready, reads, v, c)
        while (sigma_2 or sigma_1) and not _compute_dominant(
            busy_until, clock + reads * v + sms * u, v, K
        ):  # lines 11, 22
            task = (sigma_2 or sigma_1).popleft()  # lines 12, 21
            reads, ready = (reads + K, ready) if task.reads_e else (reads, ready + K)
            sms += task.type_1
            before = idle
            idle, busy_until = _decompress(threads, clock, ready, reads, v, c)
            _insert(block, task, adds_idle=idle > before + 1e-9 * (v + c))
        blocks.append(block)  # line 26
        clock = clock + reads * v + sms * u
        threads = sorted(busy_until)
    return blocks


def _decompress(
    threads: list[float], clock: float, ready: int, reads: int, v: float, c: float
) -> tuple[float, list[float]]:
    """A block's decompression: (idle seconds before its chunks, a heap of when each worker is
    done). `threads` is when the workers become free, ascending; `ready` chunks are in memory,
    `reads` more arrive every v s from `clock` on."""
    threads = threads.copy()
    idle = 0.0
    for _ in range(ready):
        heapreplace(threads, threads[0] + c)
    for chunk in range(1, reads + 1):
        begin = threads[0]
        arrival = clock + chunk * v
        if arrival > begin:
            idle += arrival - begin
            begin = arrival
        heapreplace(threads, begin + c)
    return idle, threads


def _compute_dominant(busy_until: list[float], io_end: float, v: float, K: int) -> bool:
    """Definition A.1, with v = ρu/K.

    The definition doesn't bind its k, and §3.3 prints "(l−p)/K·u" for the l-th earliest thread,
    where p must be ρ and the minus a product. k = l is what the proof of Lemma B.5 needs: the l-th
    E-chunk of the next block arrives l·ρu/K after the disk is done with this one, and the thread
    that comes free l-th must still be busy then."""
    return all(end - io_end >= k * v for k, end in enumerate(sorted(busy_until)[:K], 1))


def _insert(block: Block, task: Task, adds_idle: bool) -> None:
    """Lines 13 to 20: behind the tasks of its own type with as large a p; if it makes workers idle,
    also behind such type-II tasks or, where the block has none, such type-I tasks."""
    behind = {task.type_1}
    if adds_idle:
        behind.add(all(other.type_1 for other in block))
    position = len(block)
    while position and not (
        block[position - 1].type_1 in behind and block[position - 1].p >= task.p
    ):
        position -= 1
    block.insert(position, task)
