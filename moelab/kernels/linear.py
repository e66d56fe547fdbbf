"""Products of any number of rows with weights of any kind, y = x Wᵀ.

Few rows: `moelab.kernels.products`, weights as they lie. Many: a panel of weights after the other is
widened, to fp32 where torch's products in the inputs' own dtype are slow, as those in bf16 are on
processors without instructions for it; then torch multiplies. What is faster is measured, once for
each kind."""

from __future__ import annotations

import ctypes
import time
from functools import cache
from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moelab.kernels.compile import c_function
from moelab.kernels.emit import read, take
from moelab.kernels.products import KINDS, Matrices, crossover, multiply
from moelab.kernels.threads import TEAM, in_threads
from moelab.kernels.tiles import beside, decode, span, step, weight, write
from moelab.kernels.vectors import Kind

ROWS = 32  # that a thread widens at a time
PANEL = 1 << 20  # weights that are widened before they are multiplied
_PLAIN = {kind: dtype for dtype, kind in KINDS.items()}


def linear(x: Tensor, of: Matrices) -> Tensor:
    """`F.linear` of x [..., n] with one matrix, summed in fp32."""
    rows = x.reshape(-1, x.shape[-1])
    few = len(rows) == 1 or len(rows) <= few_rows(x.dtype, of, x.shape[-1])
    y = multiply(of, np.array([0, len(rows)]), rows) if few else product(of, 0, rows)
    return y.to(x.dtype).view(*x.shape[:-1], of.R)


@torch.inference_mode()
def few_rows(dtype: torch.dtype, of: Matrices, n: int) -> float:
    """Up to how many rows are multiplied with weights [R, n] as they lie."""
    return crossover(
        (dtype, of.kind, of.transposed, torch.get_num_threads()),
        lambda rows: multiply(of, np.array([0, rows]), torch.ones(rows, n, dtype=dtype)),
        lambda rows: product(of, 0, torch.ones(rows, n, dtype=dtype)),
    )


def product(of: Matrices, m: int, x: Tensor) -> Tensor:
    """The m-th matrix times many rows x [T, n], and its bias: [T, R] of `wide(x.dtype)`."""
    dtype = wide(x.dtype)
    x = x.to(dtype)
    n = x.shape[1]
    lines, width = (n, of.R) if of.transposed else (of.R, n)
    lies = of.kind is KINDS[dtype]
    size = lines if of.transposed or lies else min(lines, max(1, PANEL // n))
    parts = []
    panel = x.new_empty(0 if lies else size, width)
    for begin in range(0, lines, size):
        end = min(begin + size, lines)
        if lies:
            at = int(of.rows[m, 0]) + begin * width * dtype.itemsize
            w = memory(at, (end - begin, width), dtype)
        else:
            w = widened(of, m, begin, panel[: end - begin])
        parts.append(x @ w if of.transposed else F.linear(x, w))
    y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if (bias := int(of.rows[m, 2])) != 0:
        y += memory(bias, (of.R,), _PLAIN.get(of.biases or of.kind, torch.bfloat16))
    return y


@cache
def wide(dtype: torch.dtype) -> torch.dtype:
    """In what torch multiplies matrices of a dtype fastest on this machine: that, or fp32."""

    def seconds(dtype: torch.dtype) -> float:
        ones = torch.ones(256, 256, dtype=dtype)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            ones @ ones
            times.append(time.perf_counter() - start)
        return min(times)

    return dtype if seconds(dtype) < seconds(torch.float32) else torch.float32


def memory(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of what lies at an address, as long as that is valid."""
    raw = (ctypes.c_uint8 * (prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).view(shape)


def widened(of: Matrices, m: int, begin: int, out: Tensor) -> Tensor:
    """Write rows of the m-th matrix, as they lie, into a contiguous tensor [rows, n] of a dtype in
    `KINDS`, which is returned."""
    n = out.shape[-1]
    rows = out.numel() // n
    w, other, _, count = of.rows[m].tolist()
    _widen(of.kind, (w, other, 0, begin, rows), out)
    if count:  # bf12's escapes, behind its low bytes and half as many bytes of codes
        at = other + (other - w) // 2
        found = memory(at, (count,), torch.uint32).numpy()
        first, last = np.searchsorted(found, [begin * n, (begin + rows) * n])
        values = memory(at + 4 * count, (count,), torch.bfloat16)[first:last]
        places = torch.from_numpy(found[first:last].astype(np.int64) - begin * n)
        out.view(-1)[places] = values.to(out.dtype)
    return out


def gathered(of: Matrices, ids: Tensor, out: Tensor) -> Tensor:
    """Write these rows [N] of a matrix, which has no escapes, into a contiguous tensor [N, n], which is
    returned.

    Raises IndexError for rows that it does not have."""
    wanted = ids.flatten().long().contiguous().numpy()
    if not len(wanted):
        return out
    if not 0 <= wanted.min() <= wanted.max() < of.R:
        raise IndexError(f"there are rows 0 to {of.R - 1}, and one of the ids is another")
    _widen(of.kind, (*of.rows[0, :2].tolist(), wanted.ctypes.data, 0, len(wanted)), out)
    return out


def _widen(kind: Kind, rows: tuple, out: Tensor) -> None:
    """Widen rows: the matrix's two addresses, that of the rows' numbers, or 0 for one after another, the
    first, how many."""
    job = np.array([0, *rows, out.shape[-1], out.data_ptr()])
    work = _widening(kind, KINDS[out.dtype])
    in_threads(TEAM, work, min(-(-rows[-1] // ROWS), torch.get_num_threads()), job)


@cache
def _widening(kind: Kind, to: Kind) -> int:
    """The address of what a thread does to widen rows: some at a time until none is left."""
    tag = kind.tag
    to_tag = to.tag

    def work(job):
        w = read(job, 1)
        other = read(job, 2)
        ids = read(job, 3)
        begin = read(job, 4)
        R = read(job, 5)
        n = read(job, 6)
        out = read(job, 7)
        while True:
            first = take(job) * ROWS
            if first >= R:
                return
            for r in range(first, min(first + ROWS, R)):
                row = read(ids, r) if ids else begin + r
                at = w + span(tag, row * n)
                second = other + beside(tag, row, n)
                to_row = out + span(to_tag, r * n)
                whole = n - n % step(tag)
                decode(1, tag, to_tag, at, second, w - 16, whole, to_row)
                for i in range(whole, n):
                    write(to_tag, to_row, i, weight(tag, at, i))

    return c_function(work)
