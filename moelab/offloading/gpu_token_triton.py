"""What a GPU decides and fetches by itself for one layer of a token, in Triton.

`assign` finds where the chosen experts lie; of those that are not in GPU memory it says which are
fetched, and into which slots. `fetch` copies these from pinned memory, which a GPU reads as its own
(unified addressing), as they are stored. Both may be captured in a CUDA graph: all that changes from
token to token is read from memory. Times are of the GPU's own clock; in Triton's interpreter of the
CPU's.

    ids [K]  →  rows [2, K, 4] as `moelab.experts.gemv_triton` has them, 0 for what is computed elsewhere
"""

from __future__ import annotations

import time
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

WORDS = (
    1024  # of 4 bytes, that a program copies at a time; experts and slots are a multiple of them
)
BLOCK = 4 * WORDS
#: of `fetch`, for each expert: a link's bytes under way are a few hundred KB (as bandwidth × latency)
PROGRAMS = 64


class Tables(NamedTuple):
    """What `assign` reads and writes for one layer, int64 on the GPU.

    table, home : [E], addresses of experts in GPU memory and in pinned memory; 0 where they are not.
    share : [K + 1], of so many misses, how many are fetched.
    free, scratch : addresses of slots: of those that keep what is fetched, and [K] for the rest.
    counts : [2 or more], free slots that were taken in this token, and how many there are.
    begins : [2, E, 4], an expert's rows of up and down, if its bytes began at address 0; moves : [2, 4],
        1 for each number in them that is an address. sizes : [E], `BLOCK`s of an expert.
    rows : [2, K, 4], of this token. jobs : [3, K], where from, where to and `BLOCK`s to fetch.
    told : [2, K], ids of this token, and addresses of their experts' slots.
    away : [K], ids of those that the host computes, −1 for others.
    """

    table: Tensor
    home: Tensor
    share: Tensor
    free: Tensor
    scratch: Tensor
    counts: Tensor
    begins: Tensor
    moves: Tensor
    sizes: Tensor
    rows: Tensor
    jobs: Tensor
    told: Tensor
    away: Tensor


@triton.jit
def _assign_kernel(
    ids,
    table,
    home,
    share,
    free,
    scratch,
    counts,
    begins,
    moves,
    sizes,
    rows,
    jobs,
    told,
    away,
    E: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program, of one warp: so what it reads was not yet written by it."""
    k = tl.arange(0, WIDTH)
    expert = tl.load(ids + k, mask=k < K, other=-1).to(tl.int64)
    valid = (expert >= 0) & (expert < E)
    address = tl.load(table + expert, mask=valid, other=0)
    missed = valid & (address == 0)
    before = missed[None, :] & (expert[None, :] < expert[:, None])
    rank = tl.sum(before.to(tl.int32), 1)
    fetched = missed & (rank < tl.load(share + tl.sum(missed.to(tl.int32), 0)))
    taken = tl.load(counts)
    place = taken + rank
    room = tl.load(counts + 1)
    kept = fetched & (place < room)
    slot = tl.load(free + place, mask=kept, other=0)
    slot += tl.load(scratch + rank, mask=fetched & (place >= room), other=0)
    address += slot
    tl.store(table + expert, slot, mask=kept)
    tl.store(counts, taken + tl.sum(kept.to(tl.int64), 0))
    tl.store(jobs + k, tl.load(home + expert, mask=fetched, other=0), mask=k < K)
    tl.store(jobs + K + k, slot, mask=k < K)
    tl.store(jobs + 2 * K + k, tl.load(sizes + expert, mask=fetched, other=0), mask=k < K)
    tl.store(told + k, expert, mask=k < K)
    tl.store(told + K + k, address, mask=k < K)
    tl.store(away + k, tl.where(missed & (address == 0), expert, -1), mask=k < K)
    here = valid & (address != 0)
    for part in tl.static_range(2):
        for i in tl.static_range(4):
            row = tl.load(begins + (part * E + expert) * 4 + i, mask=here, other=0)
            row += tl.load(moves + part * 4 + i) * address
            tl.store(rows + (part * K + k) * 4 + i, row, mask=k < K)


@triton.jit
def _fetch_kernel(jobs, K: tl.constexpr, WORDS: tl.constexpr):
    """16 bytes a thread at a time: without a mask, as all are whole blocks."""
    k = tl.program_id(1)
    source = tl.load(jobs + k).to(tl.pointer_type(tl.int32))
    slot = tl.load(jobs + K + k).to(tl.pointer_type(tl.int32))
    blocks = tl.load(jobs + 2 * K + k)
    block = tl.program_id(0).to(tl.int64)
    while block < blocks:
        at = block * WORDS + tl.arange(0, WORDS)
        from_there = tl.multiple_of(source, 16) + at
        tl.store(tl.multiple_of(slot, 16) + at, tl.load(from_there))
        block += tl.num_programs(0)


@triton.jit
def _stamp_kernel(at):
    tl.store(at, cuda.globaltimer())


def assign(ids: Tensor, of: Tables) -> None:
    """Where the experts of these ids [1, K] of a layer lie; each at most once."""
    K = ids.numel()
    _assign_kernel[(1,)](ids, *of, len(of.table), K, triton.next_power_of_2(K), num_warps=1)


def fetch(jobs: Tensor) -> None:
    """Copy what `assign` has said."""
    K = jobs.shape[1]
    programs = PROGRAMS if jobs.is_cuda else 1
    _fetch_kernel[(programs, K)](jobs, K, WORDS, num_warps=4)


def stamp(at: Tensor) -> None:
    """Write the time, in ns, to int64 [1]."""
    if at.is_cuda:
        _stamp_kernel[(1,)](at, num_warps=1)
    else:
        at.fill_(time.perf_counter_ns())
