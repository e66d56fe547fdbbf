"""Decode by GEMV on a GPU, in Triton: one token's experts in a few launches, from where they lie,
bf16 or bf12.

Source: as of `moelab.experts.gemv`, whose sums these are: in fp32, and what is between up and down
is not rounded. The weights of bf12 are read as they lie; escapes are added afterwards, in no order,
so the last bit of a sum may vary.

    up, down : banks of E experts    x [1, H]    ids and w [K]    →  [1, H]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moelab.kernels.products import KINDS, PACKED, Matrices
from moelab.store.bf12_triton import high_bytes, quarters

#: of a matrix, that a program takes at a time
ROWS = 4
COLUMNS = 512
ESCAPES = 256
BFLOAT16 = KINDS[torch.bfloat16]
BF12 = PACKED["bf12"]


@triton.jit
def _input(x, k, h, there, C: tl.constexpr, GATED: tl.constexpr):
    """fp32 inputs of expert k: the token's or, gated, silu(gate) · up of [K, 2C]."""
    if GATED:
        gate = tl.load(x + k * 2 * C + h, mask=there, other=0.0)
        up = tl.load(x + k * 2 * C + C + h, mask=there, other=0.0)
        return gate * tl.sigmoid(gate) * up
    return tl.load(x + h, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _multiply_kernel(
    x,
    ids,
    table,
    y,
    R: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y[k, r] = Σ W_k[r, c] · x[c] for ROWS rows of expert k. A byte of codes has those of weights
    32 apart."""
    k = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    table += 4 * tl.load(ids + k)
    address = tl.load(table)
    row = r[:, None].to(tl.int64) * C
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if PACKED:
        low = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
        codes = tl.multiple_of(tl.load(table + 1).to(tl.pointer_type(tl.uint8)), 16)
        t0, t1, t2, t3 = quarters(address - 16)
        for begin in range(0, C // 2, COLUMNS):
            p = begin + tl.arange(0, COLUMNS)
            there = (r[:, None] < R) & (p[None, :] < C // 2)
            code = tl.load(codes + row // 2 + p[None, :], mask=there, other=0).to(tl.uint32)
            for half in tl.static_range(2):
                c = p // 32 * 64 + half * 32 + p % 32
                word = tl.load(low + row + c[None, :], mask=there, other=0).to(tl.uint32)
                word |= high_bytes(code >> (4 * half), t0, t1, t2, t3) << 8
                w = tl.where(there, (word << 16).to(tl.float32, bitcast=True), 0.0)
                total += w * _input(x, k, c, p < C // 2, C, GATED)[None, :]
    else:
        weights = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16)
        for begin in range(0, C, COLUMNS):
            c = begin + tl.arange(0, COLUMNS)
            there = (r[:, None] < R) & (c[None, :] < C)
            w = tl.load(weights + row + c[None, :], mask=there, other=0.0).to(tl.float32)
            total += w * _input(x, k, c, c < C, C, GATED)[None, :]
    tl.store(y + k * R + r, tl.sum(total, 1), mask=r < R)


@triton.jit
def _escapes_kernel(
    x, ids, table, y, R: tl.constexpr, C: tl.constexpr, GATED: tl.constexpr, ESCAPES: tl.constexpr
):
    """What an escape's weight is more than that of code 0 and low byte 0, which was multiplied in
    its place."""
    k = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * ESCAPES + tl.arange(0, ESCAPES)
    table += 4 * tl.load(ids + k)
    low = tl.load(table)
    codes = tl.load(table + 1)
    count = tl.load(table + 3)
    indices = (codes + (codes - low) // 2).to(tl.pointer_type(tl.uint32))
    values = (indices + count).to(tl.pointer_type(tl.bfloat16))
    at = tl.load(indices + i, mask=i < count, other=0).to(tl.int64)
    there = (i < count) & (at < codes - low)
    instead = (tl.load((low - 16).to(tl.pointer_type(tl.uint8))).to(tl.uint32) << 24).to(
        tl.float32, bitcast=True
    )
    more = tl.load(values + i, mask=there, other=0.0).to(tl.float32) - instead
    tl.atomic_add(y + k * R + at // C, more * _input(x, k, at % C, there, C, GATED), mask=there)


class Bank(NamedTuple):
    """Matrices of E experts, bf16 or `packed` as bf12, of R rows, at int64 [E, 4] addresses on the
    GPU, as `moelab.kernels.products.Matrices` has them; `escapes` is the most that one of them has."""

    packed: bool
    table: Tensor
    R: int
    escapes: int


def multiplies(of: Matrices) -> bool:
    """Whether matrices are multiplied here: bf16 or bf12, in rows, without biases."""
    return of.kind in (BFLOAT16, BF12) and not of.transposed and not of.rows[..., 2].any()


def bank(of: Matrices, table: Tensor) -> Bank:
    """Of matrices whose rows `table` has on the GPU."""
    return Bank(of.kind is BF12, table, of.R, int(of.rows[:, 3].max()))


def feed_forward(up: Bank, down: Bank, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Σ_k w_k · down_k(silu(gate_k(x)) · up_k(x)) as x, of the K experts of these ids."""
    between = _multiply(up, x, ids, x.shape[1], gated=False)
    y = _multiply(down, between, ids, up.R // 2, gated=True)
    return (w.float()[None, :] @ y).to(x.dtype)


def _multiply(of: Bank, x: Tensor, ids: Tensor, C: int, gated: bool) -> Tensor:
    K = len(ids)
    given = (x, ids, of.table)
    sizes = (of.R, C)
    y = torch.empty(K, of.R, dtype=torch.float32, device=x.device)
    grid = triton.cdiv(of.R, ROWS), K
    _multiply_kernel[grid](*given, y, *sizes, of.packed, gated, ROWS, COLUMNS, num_warps=4)
    if of.escapes:
        grid = triton.cdiv(of.escapes, ESCAPES), K
        _escapes_kernel[grid](*given, y, *sizes, gated, ESCAPES)
    return y
