"""Many small matrix products at once, y = x Wᵀ + b, each weight read once from where it lies: numba
kernels.

GEMV is memory-bound, so every core must read all the time: the rows of all matrices, given by their
addresses, are cut into pieces, and each thread takes the next piece. With several tokens a matrix,
tiles of `moelab.kernels.tiles` multiply each weight with all of them while it is in a register; no
weight is packed, converted or copied.

    x [T, n], tokens [N] rows of x, matrices [M] with first…last of tokens    →    y fp32 [N, R]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from moelab.kernels.compile import c_function, kernel
from moelab.kernels.emit import address, kept, pointer, read, take, together
from moelab.kernels.ggml import GGML
from moelab.kernels.instructions import Pairs, instruction
from moelab.kernels.threads import team
from moelab.kernels.tiles import (
    ROWS,
    add_rows,
    arranged,
    beside,
    decode,
    dots,
    given,
    place,
    prefetch,
    span,
    spread,
    step,
    weight,
    write,
)
from moelab.kernels.vectors import (
    BF12,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FP8,
    INT4,
    INT8,
    MXFP4,
    WIDTH,
    FewBits,
    Kind,
)

#: torch's types of weights → kinds
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
#: how weights are packed, see `moelab.store.bf12` and `fewbit` → kinds
PACKED = {"bf12": BF12, "int8": INT8, "int4": INT4, "mxfp4": MXFP4, "fp8": FP8, **GGML}
#: as kernels have them
F32 = FLOAT32.tag
BF16 = BFLOAT16.tag

#: what threads share of one call of `multiply_into`: how many pieces are taken, of `pieces` for each of
#: M matrices [R, n], each of so many `outputs`; and addresses: of matrices int64 [M, 4], of bounds
#: int64 [M + 1], of the addresses of fp32 inputs int64 [N], written by `spread`, and of y fp32 [N, R]
FIELDS = "taken", "M", "n", "R", "pieces", "outputs", "matrices", "bounds", "inputs", "y"
JOB = np.dtype([(field, np.int64) for field in FIELDS])
_IN_ORDER = np.empty(0, np.int64)
TILE = 4  # rows of a tile
TOKENS = 3 if WIDTH == 8 else 4  # of a tile: the sums leave registers for what is multiplied
MANY = 12  # tokens a matrix, for which codes are decoded once, to fp32
PAD = 16  # numbers between inputs: at a distance of 4 KB, few would have room in the L1
PIECE = 64  # rows that a thread takes at a time
SHARES = 16  # or more, where it still takes so many times
GROUP = 96  # tokens whose inputs stay in a core's second-level cache
OUTPUTS = 512  # the most, and what it takes of the transposed layout, whose sums stay in the L1
AHEAD = 4096  # bytes to ask for before they are needed; the hardware stops at the end of a page
SIZES = (8, 32, 128)  # tokens of one expert, or rows of a layer, that `crossover` tries
REPEATS = 3  # the best of so many counts: the others were disturbed
_MEASURED: dict[tuple, float] = {}


class Matrices(NamedTuple):
    """M matrices of the same kind and shape, wherever they lie; or [L, M] of L layers.

    kind : a value of `KINDS`, or of `PACKED` for weights whose last dimension is a multiple of 64,
        of K-quants of 256; of L layers one of each.
    rows : int64 [M, 4], addresses of weights [R, n], or [n, R] if `transposed`, and of biases, 0 for
        none: (w, 0, bias, 0); of bf12 (low bytes, codes, bias, number of escapes); of few-bit formats
        (codes, scales, bias, 0), always [R, n], and of GGML's (blocks, 0, bias, 0).
    biases : a value of `KINDS`; None for weights' own, of packed ones bf16.
    owner : has the memory, if nothing else keeps it.
    """

    kind: Kind | tuple[Kind, ...]
    rows: np.ndarray
    R: int
    transposed: bool = False
    owner: Any = None
    biases: Kind | None = None

    def plan(self, x: Kind, each: float = 1) -> np.ndarray:
        """Of `multiply_into`, for inputs x, so many a matrix: [3], or [L, 3]."""
        how = self.transposed, x, self.biases, each >= MANY
        if isinstance(self.kind, Kind):
            return plan_of(self.kind, *how)
        return np.stack([plan_of(kind, *how) for kind in self.kind])


def layers(of: Sequence[Matrices], rows: np.ndarray) -> Matrices:
    """Those of several layers, that have these rows [L, M, 4], as one."""
    return of[0]._replace(kind=tuple(one.kind for one in of), rows=rows, owner=None)


def multiply(
    of: Matrices,
    bounds: np.ndarray,
    x: Tensor,
    tokens: np.ndarray | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """All products: [N, R] of `dtype`, summed in fp32.

    bounds : int64 [M + 1], where each matrix's rows of the result begin, and the last one's end, N.
    x : [T, n]. tokens : int64 [N], the row of x of each row of the result; None for one after the
        other.
    """
    x = x.contiguous()
    y = torch.empty(int(bounds[-1]), of.R, dtype=torch.float32)
    kind = KINDS[x.dtype]
    inputs = x.data_ptr(), *x.shape, _IN_ORDER if tokens is None else tokens
    each = bounds[-1] / max(len(of.rows), 1)
    multiply_into(of.plan(kind, each), of.rows, bounds, *inputs, of.R, y.data_ptr(), team())
    return y.to(dtype)


def crossover(what: tuple, first: Callable[[int], Any], second: Callable[[int], Any]) -> float:
    """Up to how many tokens `first` is no slower than `second`: 1, the middle of two of the
    `SIZES`, or infinity. Measured once in a process for each `what`."""
    if what in _MEASURED:
        return _MEASURED[what]
    found = inf
    last = 0
    for size in SIZES:
        # In turn: what disturbs one disturbs the other. The first ones compile, pack, fill caches.
        runs = [(_seconds(first, size), _seconds(second, size)) for _ in range(1 + REPEATS)]
        ours, theirs = map(min, zip(*runs[1:]))
        if ours > theirs:
            found = (last + size) // 2 if last else 1
            break
        last = size
    _MEASURED[what] = found
    return found


def _seconds(function: Callable[[int], Any], size: int) -> float:
    start = time.perf_counter()
    function(size)
    return time.perf_counter() - start


@kernel
def multiply_one(plan, matrices, x, n, R, y, team):
    """Write fp32 [M, R] at y: each matrix times the same x [n]."""
    M = len(matrices)
    tokens = np.zeros(M, np.int64)
    multiply_into(plan, matrices, np.arange(M + 1), x, 1, n, tokens, R, y, team)


@kernel
def multiply_into(plan, matrices, bounds, x, T, n, tokens, R, y, team):
    """Write fp32 [N, R] at y; the other arguments are those of `multiply`, tokens [0] for one after
    the other.

    plan : of `plan_of`, int64 [3]: addresses of what puts inputs in order and of what a thread does,
        outputs at a time. A thread takes twice as many outputs while each still takes `SHARES`: at the
        begin of a piece it waits for memory.
    team : as of `moelab.kernels.threads`."""
    order, work, outputs = plan[0], plan[1], plan[2]
    M, N, (run, threads) = len(matrices), bounds[-1], team
    while 2 * outputs <= min(OUTPUTS, M * R // (SHARES * threads)):
        outputs *= 2
    wide = np.empty(T * (n + PAD) + 16, np.float32)
    inputs = np.empty(N, np.int64)
    begin = (address(wide) + 63) // 64 * 64  # no vector lies across two cache lines
    given = np.array((x, T, n, begin))
    together(run, order, 1, address(given))
    kept(given)
    for j in range(N):
        inputs[j] = begin + 4 * (n + PAD) * (tokens[j] if len(tokens) > 0 else j)
    pieces = (R + outputs - 1) // outputs
    where = address(matrices), address(bounds), address(inputs), y
    job = np.array((0, M, n, R, pieces, outputs) + where)  # in the order of `FIELDS`
    together(run, work, min(threads, M * pieces), address(job))
    kept(wide)
    kept(inputs)
    kept(job)


@kernel
def widen(kind, order, x, n, out):
    """Write n numbers of a kind at x as fp32, in `place`'s order for weights of the kind
    `order`."""
    whole = n - n % step(order)
    spread(kind, order, x, whole, out)
    for i in range(whole, n):
        write(F32, out, i, weight(kind, x, i))


@kernel
def _job_at(at):
    """The job at an address, and where its matrices, bounds and inputs lie."""
    jobs = carray(pointer(at), 1, JOB)
    job = jobs[0]
    bounds = carray(pointer(job.bounds), job.M + 1, np.int64)
    matrices = carray(pointer(job.matrices), (job.M, 4), np.int64)
    return jobs, matrices, bounds, carray(pointer(job.inputs), bounds[job.M], np.int64)


@kernel
def _rows(x_kind, kind, b_kind, at):
    """Pieces of the rows layout until none is left."""
    jobs, matrices, bounds, inputs = _job_at(at)
    job = jobs[0]
    while True:
        piece = take(at)
        if piece >= job.M * job.pieces:
            return
        m = piece // job.pieces
        begin = piece % job.pieces * job.outputs
        end = min(begin + job.outputs, job.R)
        for group in range(bounds[m], bounds[m + 1], GROUP):
            given = job, matrices[m], address(inputs), group, min(group + GROUP, bounds[m + 1])
            _rows_of_group(x_kind, kind, b_kind, *given, begin, end, True)
        if matrices[m, 3] > 0:
            mine = inputs[bounds[m] : bounds[m + 1]]
            _add_escapes(kind, kind, False, job, matrices[m], mine, bounds[m], begin, end)


@kernel
def _rows_of_group(x_kind, kind, b_kind, job, matrix, inputs, first, last, begin, end, far):
    """Rows begin…end of a matrix, which may be `far`, times the tokens first…last, by tiles."""
    n, R, (w, other, bias) = job.n, job.R, (matrix[0], matrix[1], matrix[2])
    whole = n - n % step(kind)
    table = w - 16
    r = begin
    near = AHEAD if span(kind, 2) < 4 else AHEAD // 2  # plain kinds the hardware follows, too
    several = last - first > 2 or span(kind, 2) == 1  # or rows in turn
    while r < end:
        rows = TILE if r + TILE <= end else 1
        at = w + span(kind, r * n)
        second = other + beside(kind, r, n)
        tile = span(kind, rows * n)
        ahead = (AHEAD + tile - 1) // tile * tile if rows == TILE and several else near
        ahead = ahead if far else 0
        token = first
        while token < last:
            x = inputs + 8 * token
            to = job.y + 4 * (token * R + r)
            tokens = 1
            if rows == 1:  # few matrices have rows beyond whole tiles
                dots(1, 1, x_kind, kind, x, at, second, table, n, to, R, ahead)
            elif last - token >= TOKENS:
                tokens = TOKENS
                dots(TOKENS, TILE, x_kind, kind, x, at, second, table, n, to, R, ahead)
            elif last - token >= 2:
                tokens = 2
                dots(2, TILE, x_kind, kind, x, at, second, table, n, to, R, ahead)
            else:
                dots(1, TILE, x_kind, kind, x, at, second, table, n, to, R, ahead)
            if whole < n or bias != 0:
                _add_rest(kind, b_kind, x, tokens, at, whole, n, bias, r, rows, to, R)
            token += tokens
        r += rows


@kernel
def _wide_rows(kind, b_kind, at):
    """`_rows` of codes that are decoded, a tile's at a time, for all tokens of a group."""
    jobs, matrices, bounds, inputs = _job_at(at)
    job = jobs[0]
    n = job.n
    tile = np.empty((TILE, n), np.float32)
    to = address(tile)
    here = np.zeros(4, np.int64)
    while True:
        piece = take(at)
        if piece >= job.M * job.pieces:
            return
        m = piece // job.pieces
        begin = piece % job.pieces * job.outputs
        end = min(begin + job.outputs, job.R)
        here[2] = matrices[m, 2]
        for group in range(bounds[m], bounds[m + 1], GROUP):
            last = min(group + GROUP, bounds[m + 1])
            for r in range(begin, end, TILE):
                here[0] = to - 4 * r * n
                rows = min(TILE, end - r)
                for i in range(rows):
                    w = matrices[m, 0] + span(kind, (r + i) * n)
                    second = matrices[m, 1] + beside(kind, r + i, n)
                    decode(0, kind, F32, w, second, 0, n, to + 4 * n * i)
                    for line in range(0, span(kind, n), 64):
                        prefetch(w + span(kind, TILE * n) + line)
                given = job, here, address(inputs), group, last
                _rows_of_group(F32, F32, b_kind, *given, r, r + rows, False)
        kept(tile)


@kernel
def _add_rest(kind, b_kind, x, tokens, w, whole, n, bias, r, rows, to, R):
    """Add to a tile what is beyond the whole steps, and the bias."""
    inputs = carray(pointer(x), tokens, np.int64)
    for t in range(tokens):
        for i in range(rows):
            total = weight(F32, to, t * R + i)
            for j in range(whole, n):
                total += weight(kind, w + span(kind, i * n), j) * weight(F32, inputs[t], j)
            if bias != 0:
                total += weight(b_kind, bias, r + i)
            write(F32, to, t * R + i, total)


@kernel
def _add_escapes(order, kind, transposed, job, matrix, inputs, first, begin, end):
    """Add to the outputs begin…end of all tokens what the weights of escapes lack to their true
    values: their codes are 0, which is the first of the table.

    order : the kind for which inputs are in order."""
    n = job.n
    R = job.R
    count = matrix[3]
    lowest = 0
    highest = matrix[3]
    escapes = carray(pointer(matrix[1] + span(kind, R * n) // 2), count, np.uint32)
    values = address(escapes) + 4 * count
    instead = weight(BF16, matrix[0] - 17, 0)
    if not transposed:  # they are sorted
        lowest = np.searchsorted(escapes, begin * n)
        highest = np.searchsorted(escapes, end * n)
    width = R if transposed else n
    for i in range(lowest, highest):
        row = escapes[i] // width
        column = escapes[i] % width
        r = column if transposed else row
        c = row if transposed else column
        missing = weight(BF16, values, i) - instead
        for t in range(len(inputs) if begin <= r < end else 0):
            total = weight(F32, job.y, (first + t) * R + r)
            write(F32, job.y, (first + t) * R + r, total + missing * given(order, inputs[t], c))


@kernel
def _columns(kind, b_kind, at):
    """Pieces of the transposed layout: sums of many outputs stay in the cache while rows of weights
    are read."""
    jobs, matrices, bounds, inputs = _job_at(at)
    job = jobs[0]
    sums = np.empty((8, OUTPUTS), np.float32)
    while True:
        piece = take(at)
        if piece >= job.M * job.pieces:
            return
        m = piece // job.pieces
        begin = piece % job.pieces * OUTPUTS
        end = min(begin + OUTPUTS, job.R)
        whole = (end - begin) // step(kind) * step(kind)
        for token in range(bounds[m], bounds[m + 1], len(sums)):
            mine = inputs[token : min(token + len(sums), bounds[m + 1])]
            sums[:] = 0
            _sum_columns(kind, job, matrices[m], mine, begin, whole, sums)
            _store_columns(kind, b_kind, job, matrices[m], mine, token, begin, end, whole, sums)
            if matrices[m, 3] > 0:
                _add_escapes(F32, kind, True, job, matrices[m], mine, token, begin, end)


@kernel
def _sum_columns(kind, job, matrix, inputs, begin, whole, sums):
    """Add to sums [tokens, whole] all rows of weights."""
    n = job.n
    R = job.R
    table = matrix[0] - 16
    w = matrix[0] + span(kind, begin)
    other = matrix[1] + span(kind, begin) // 2
    for i in range(0, n, ROWS):
        at = w + span(kind, i * R)
        second = other + span(kind, i * R) // 2
        for t in range(len(inputs)):
            x = inputs[t] + 4 * i
            to = address(sums) + 4 * OUTPUTS * t
            add_rows(kind, x, min(ROWS, n - i), at, second, table, R, whole, to)


@kernel
def _store_columns(kind, b_kind, job, matrix, inputs, token, begin, end, whole, sums):
    """Write the sums of the `whole` first outputs, those of the others, and biases."""
    w = matrix[0]
    bias = matrix[2]
    R = job.R
    for t in range(len(inputs)):
        for r in range(begin, end):
            total = sums[t, place(kind, r - begin)] if r < begin + whole else np.float32(0)
            for i in range(job.n if r >= begin + whole else 0):
                total += weight(F32, inputs[t], i) * weight(kind, w + span(kind, i * R), r)
            if bias != 0:
                total += weight(b_kind, bias, r)
            write(F32, job.y, (token + t) * R + r, total)


@cache
def plan_of(
    kind: Kind,
    transposed: bool = False,
    x: Kind = FLOAT32,
    biases: Kind | None = None,
    many: bool = False,
) -> np.ndarray:
    """Of `multiply_into`, for weights of a kind, inputs x, `many` a matrix, and biases, see
    `Matrices`."""
    in_pairs = x is BFLOAT16 and isinstance(instruction(kind), Pairs)
    tag = kind.tag
    x_tag = x.tag if in_pairs else F32
    b_tag = (biases or (kind if kind in KINDS.values() else BFLOAT16)).tag

    def rows(at):
        _rows(x_tag, tag, b_tag, at)

    def wide_rows(at):
        _wide_rows(tag, b_tag, at)

    def columns(at):
        _columns(tag, b_tag, at)

    if transposed:
        return np.array([_order(x, FLOAT32), c_function(columns), OUTPUTS])
    if many and isinstance(kind, FewBits) and not isinstance(instruction(kind), Pairs):
        return np.array([_order(x, kind, True), c_function(wide_rows), PIECE])
    return np.array([_order(x, kind), c_function(rows), PIECE])


@cache
def _order(x: Kind, kind: Kind, decoded: bool = False) -> int:
    """The address of what widens inputs x, in the order of weights of a kind."""
    x_tag = x.tag
    tag = kind.tag

    def order(job):
        n = read(job, 2)
        for t in range(read(job, 1)):
            to = read(job, 3) + 4 * (n + PAD) * t
            widen(x_tag, tag, read(job, 0) + span(x_tag, t * n), n, to)

    def of_decoded(job):
        n = read(job, 2)
        for t in range(read(job, 1)):
            to = read(job, 3) + 4 * (n + PAD) * t
            arranged(x_tag, tag, read(job, 0) + span(x_tag, t * n), n, to)

    return c_function(of_decoded if decoded else order)
