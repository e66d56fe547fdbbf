"""Many small matrix products at once, y = x Wᵀ + b, each weight read once from where it lies: numba
kernels.

GEMV is memory-bound, so every core must read all the time: the rows of all matrices, given by their
addresses, are cut into pieces, and each thread takes the next piece. With several tokens a matrix,
tiles of `moelab.kernels.tiles` multiply each weight with all of them while it is in a register; no
weight is packed, converted or copied.

    x [T, n], tokens [N] rows of x, matrices [M] with first…last of tokens    →    y fp32 [N, R]
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from math import inf
from typing import Any

import numpy as np
import torch
from numba import carray
from numba.np.numpy_support import from_dtype
from torch import Tensor

from moelab.forks import in_children
from moelab.kernels.compile import c_function, c_library, kernel
from moelab.kernels.emit import address, kept, pointer, read, take, together
from moelab.kernels.tiles import (
    add_rows,
    beside,
    dots,
    given,
    place,
    span,
    spread,
    step,
    weight,
    write,
)
from moelab.kernels.vectors import PAIRED

#: torch's types of weights → numba's kinds
KINDS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}
#: how weights are packed, see `moelab.store.bf12` and `fewbit` → numba's kind
PACKED = {"bf12": np.int8, "int8": np.uint8, "int4": np.uint32, "mxfp4": np.int32, "fp8": np.uint64}
#: what a job begins with: pieces taken, M, n, R, address of y, pieces of a matrix, outputs of one;
#: matrices and inputs follow
HEADER = 7
_IN_ORDER = np.empty(0, np.int64)
TILE = 4  # tokens and rows of a tile: 16 sums leave registers for what is multiplied
PIECE, SHARES = (
    64,
    16,
)  # rows that a thread takes at a time, or more where it still takes so many times
GROUP = 96  # tokens whose inputs stay in a core's second-level cache
OUTPUTS = 512  # the most, and what it takes of the transposed layout, whose sums stay in the L1
AHEAD = 4096  # bytes to ask for before they are needed; the hardware stops at the end of a page
SIZES = (8, 32, 128)  # tokens of one expert, or rows of a layer, that `crossover` tries
REPEATS = 3  # the best of so many counts: the others were disturbed
_POOL, _C_FUNCTION = (
    ThreadPoolExecutor(),
    ctypes.CFUNCTYPE(None, ctypes.c_int64),
)  # where there is no OpenMP
in_children(lambda: globals().update(_POOL=ThreadPoolExecutor()))


def multiply(
    kind: type,
    matrices: np.ndarray,
    bounds: np.ndarray,
    x: Tensor,
    tokens: np.ndarray | None,
    R: int,
    transposed: bool,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """All products: [N, R] of `dtype`, summed in fp32.

    kind : a value of `KINDS`, or of `PACKED` for weights whose last dimension is a multiple of 64.
    matrices : int64 [M, 4], addresses of weights [R, n], or [n, R] if `transposed`, and of biases,
        0 for none: (w, 0, bias, 0); of bf12 (low bytes, codes, bias in bf16, number of escapes); of
        few-bit formats (codes, scales, bias in bf16, 0), always [R, n].
    bounds : int64 [M + 1], where each matrix's rows of the result begin, and the last one's end, N.
    x : [T, n]. tokens : int64 [N], the row of x of each row of the result; None for one after the
    other."""
    x, y, threads = (
        x.contiguous(),
        torch.empty(int(bounds[-1]), R, dtype=dtype),
        torch.get_num_threads(),
    )
    given = (
        KINDS[x.dtype](0),
        np.float32(0) if transposed else kind(0),
        matrices,
        bounds,
        x.data_ptr(),
        *x.shape,
        _IN_ORDER if tokens is None else tokens,
        R,
    )
    outputs, work = OUTPUTS if transposed else PIECE, entry(kind, transposed, KINDS[x.dtype])
    if TEAM or threads == 1:
        _multiply(KINDS[dtype](0), y.data_ptr(), *given, outputs, work, TEAM, threads)
        return y
    wide = torch.empty(y.shape)
    job, work = job_of(*given, wide.data_ptr(), outputs, threads), _C_FUNCTION(work)
    running = [_POOL.submit(work, job.ctypes.data) for _ in range(threads)]
    try:
        wait(running)
    finally:  # Ctrl-C meanwhile is raised when nobody uses the job's memory
        wait(running)
    return y.copy_(wide)


def crossover(first: Callable[[int], Any], second: Callable[[int], Any]) -> float:
    """Up to how many tokens `first` is no slower than `second`: 1, the middle of two of the
    `SIZES`, or infinity."""
    last = 0
    for size in SIZES:
        seconds: list[list[float]] = [[], []]
        for _ in range(1 + REPEATS):  # the first ones compile, pack, fill caches
            for function, runs in zip(
                (first, second), seconds
            ):  # in turn: what disturbs one disturbs the other
                start = time.perf_counter()
                function(size)
                runs.append(time.perf_counter() - start)
        if min(seconds[0][1:]) > min(seconds[1][1:]):
            return (last + size) // 2 if last else 1
        last = size
    return inf


@kernel
def widen(kind, order, x, n, out):
    """Write n numbers of a kind at x as fp32, in `place`'s order for weights of the kind
    `order`."""
    whole = n - n % step(order)
    spread(kind, order, x, whole, out)
    for i in range(whole, n):
        write(np.float32(0), out, i, weight(kind, x, i))


@kernel
def job_of(x_kind, order, matrices, bounds, x, T, n, tokens, R, y, outputs, threads):
    """All arguments of a kernel behind one address, at the end fp32 inputs in `place`'s order for
    the kind `order`. A thread takes `outputs` of R at a time, or twice as many while each still
    takes `SHARES`: at the begin of a piece it waits for memory. x must be `kept` until here, y
    until the job is done."""
    M, N = len(matrices), bounds[-1]
    while 2 * outputs <= min(OUTPUTS, M * R // (SHARES * threads)):
        outputs *= 2
    job = np.empty(HEADER + 6 * M + N + 8 + (T * n + 1) // 2, np.int64)
    job[0], job[1], job[2], job[3], job[4], job[5], job[6] = (
        0,
        M,
        n,
        R,
        y,
        (R + outputs - 1) // outputs,
        outputs,
    )
    for m in range(M):
        at = HEADER + 6 * m
        for i in range(4):  # as slices they might differ in shape: seconds to compile that error
            job[at + i] = matrices[m, i]
        job[at + 4], job[at + 5] = bounds[m], bounds[m + 1]
    wide = (
        (address(job) + 8 * (HEADER + 6 * M + N) + 63) // 64 * 64
    )  # no vector lies across two cache lines
    for j in range(N):
        job[HEADER + 6 * M + j] = wide + 4 * n * (tokens[j] if len(tokens) > 0 else j)
    for t in range(T):
        widen(x_kind, order, x + span(x_kind, t * n), n, wide + 4 * t * n)
    return job


@kernel
def _multiply(
    out_kind, out, x_kind, order, matrices, bounds, x, T, n, tokens, R, outputs, work, team, threads
):
    N, pieces = bounds[-1], len(matrices) * ((R + outputs - 1) // outputs)
    wide = span(out_kind, 1) == 4
    y = np.empty(0 if wide else N * R, np.float32)
    together(
        team,
        work,
        min(threads, pieces),
        job_of(
            x_kind,
            order,
            matrices,
            bounds,
            x,
            T,
            n,
            tokens,
            R,
            out if wide else address(y),
            outputs,
            threads,
        ),
    )
    for i in range(len(y)):
        write(out_kind, out, i, y[i])
    kept(y)


@kernel
def _rows(x_kind, kind, job):
    """Pieces of the rows layout until none is left."""
    M, n, R, y, pieces, outputs = (
        read(job, 1),
        read(job, 2),
        read(job, 3),
        read(job, 4),
        read(job, 5),
        read(job, 6),
    )
    whole, inputs = n - n % step(kind), job + 8 * (HEADER + 6 * M)
    near = AHEAD if span(kind, 2) < 4 else AHEAD // 2  # plain kinds the hardware follows, too
    while True:
        piece = take(job)
        if piece >= M * pieces:
            return
        matrix, begin = HEADER + 6 * (piece // pieces), piece % pieces * outputs
        w, other = read(job, matrix), read(job, matrix + 1)
        bias, escapes, table = read(job, matrix + 2), read(job, matrix + 3), w - 16
        first, last, end = read(job, matrix + 4), read(job, matrix + 5), min(begin + outputs, R)
        for group in range(first, last, GROUP):
            group_end, r = min(group + GROUP, last), begin
            while r < end:
                rows = TILE if r + TILE <= end else 1
                at, second = w + span(kind, r * n), other + beside(kind, r, n)
                several, tile = (
                    group_end - group > 2 or span(kind, 2) == 1,
                    span(kind, rows * n),
                )  # or rows in turn
                ahead = (AHEAD + tile - 1) // tile * tile if rows == TILE and several else near
                token = group
                while token < group_end:
                    left = (
                        group_end - token if rows > 1 else 1
                    )  # few matrices have rows beyond whole tiles
                    tokens = TILE if left >= TILE else 2 if left >= 2 else 1
                    x, to = inputs + 8 * token, y + 4 * (token * R + r)
                    if rows == 1:
                        dots(1, 1, x_kind, kind, x, at, second, table, n, whole, to, R, ahead)
                    elif tokens == TILE:
                        dots(TILE, TILE, x_kind, kind, x, at, second, table, n, whole, to, R, ahead)
                    elif tokens == 2:
                        dots(2, TILE, x_kind, kind, x, at, second, table, n, whole, to, R, ahead)
                    else:
                        dots(1, TILE, x_kind, kind, x, at, second, table, n, whole, to, R, ahead)
                    if whole < n or bias != 0:
                        _add_rest(kind, x, tokens, at, whole, n, bias, r, rows, to, R)
                    token += tokens
                r += rows
        if escapes > 0:
            indices = carray(pointer(other + span(kind, R * n) // 2), escapes, np.uint32)
            for i in range(np.searchsorted(indices, begin * n), np.searchsorted(indices, end * n)):
                r, c, missing = indices[i] // n, indices[i] % n, _missing(table, indices, i)
                for token in range(first, last):
                    total = weight(np.float32(0), y, token * R + r)
                    total += missing * given(kind, read(inputs, token), c)
                    write(np.float32(0), y, token * R + r, total)


@kernel
def _add_rest(kind, x, tokens, w, whole, n, bias, r, rows, to, R):
    """Add to a tile what is beyond the whole steps, and the bias."""
    for t in range(tokens):
        for i in range(rows):
            total = weight(np.float32(0), to, t * R + i)
            for j in range(whole, n):
                total += weight(kind, w + span(kind, i * n), j) * weight(
                    np.float32(0), read(x, t), j
                )
            if bias != 0:
                total += weight(kind, bias, r + i)
            write(np.float32(0), to, t * R + i, total)


@kernel
def _missing(table, indices, i):
    """What an escape's weight lacks to its true value: its codes are 0, which is the first of the
    table."""
    return weight(np.uint16(0), address(indices) + 4 * len(indices), i) - weight(
        np.uint16(0), table - 1, 0
    )


@kernel
def _columns(kind, job):
    """Pieces of the transposed layout: sums of many outputs stay in the cache while rows of weights
    are read."""
    M, n, R, y, pieces = read(job, 1), read(job, 2), read(job, 3), read(job, 4), read(job, 5)
    sums, inputs = np.empty((8, OUTPUTS), np.float32), job + 8 * (HEADER + 6 * M)
    while True:
        piece = take(job)
        if piece >= M * pieces:
            return
        matrix, begin = HEADER + 6 * (piece // pieces), piece % pieces * OUTPUTS
        w, other = read(job, matrix), read(job, matrix + 1)
        bias, escapes, table = read(job, matrix + 2), read(job, matrix + 3), w - 16
        first, last, columns = read(job, matrix + 4), read(job, matrix + 5), min(OUTPUTS, R - begin)
        whole = columns - columns % step(kind)
        indices = carray(pointer(other + span(kind, R * n) // 2), escapes, np.uint32)
        for token in range(first, last, len(sums)):
            tokens = min(len(sums), last - token)
            sums[:] = 0
            for i in range(0, n, 4):
                at, second = w + span(kind, i * R + begin), other + span(kind, i * R + begin) // 2
                for t in range(tokens):
                    x, to = read(inputs, token + t) + 4 * i, address(sums) + 4 * OUTPUTS * t
                    if i + 4 <= n:
                        add_rows(4, kind, x, at, second, table, R, whole, to)
                    else:
                        for j in range(n - i):
                            add_rows(
                                1,
                                kind,
                                x + 4 * j,
                                at + span(kind, j * R),
                                second + span(kind, j * R) // 2,
                                table,
                                R,
                                whole,
                                to,
                            )
                    for j in range(min(4, n - i) if whole < columns else 0):
                        value = weight(np.float32(0), x, j)
                        for c in range(whole, columns):
                            sums[t, c] += value * weight(kind, at + span(kind, j * R), c)
            for i in range(escapes):
                r, c = indices[i] // R, indices[i] % R - begin
                for t in range(tokens if 0 <= c < columns else 0):
                    sums[t, place(kind, c)] += _missing(table, indices, i) * weight(
                        np.float32(0), read(inputs, token + t), r
                    )
            for t in range(tokens):
                for c in range(columns):
                    total = sums[t, place(kind, c) if c < whole else c]
                    if bias != 0:
                        total += weight(kind, bias, begin + c)
                    write(np.float32(0), y, (token + t) * R + begin + c, total)


#: address of GOMP_parallel of torch's OpenMP, as two pools of threads would compete for cores; 0
#: where there is none
TEAM = c_library("GOMP_parallel")


@kernel
def in_threads(team, work, threads, job):
    """`together`, for callers that are no kernels."""
    together(team, work, threads, job)


def entry(kind: type, transposed: bool = False, x: type = np.float32) -> int:
    """The address of what a thread does for a job of this kind of weights, and of inputs that are
    pairs of bf16."""
    exact = x == np.uint16 and not transposed and from_dtype(np.dtype(kind)) in PAIRED
    return _entry(kind, transposed, np.uint16 if exact else np.float32)


@cache
def _entry(kind: type, transposed: bool, x: type) -> int:
    def rows(job):
        _rows(x(0), kind(0), job)

    def columns(job):
        _columns(kind(0), job)

    return c_function(columns if transposed else rows)
