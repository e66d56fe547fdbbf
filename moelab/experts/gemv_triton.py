"""Decode by GEMV on a GPU, in Triton: one token's experts in a few launches, from where they lie, of
any kind of weights.

Source: as of `moelab.experts.gemv`, whose sums these are: in fp32, and what is between up and down
is not rounded. A GEMV is memory-bound, so what counts is how weights come from memory
(`moelab.kernels.tiles_triton`): in rows, each warp reads 512 bytes of a row at a time, 16 a lane,
and each lane sums products with the inputs of just these; lanes are added up once, at the end. In
the transposed layout lanes have outputs, of which each keeps its sums, and a program reads 128
bytes or more of each of many rows. Escapes of bf12 are added afterwards, in no order, so the last
bit of a sum may vary.

    up, down : banks of E experts    x [1, H]    ids and w [1, K]    →  [1, H]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moelab.kernels.gates import SILU, Gate
from moelab.kernels.products import Matrices
from moelab.kernels.tiles_triton import NAMES, TYPES, WIDTHS, escapes, instead, tile

#: of rows, that a program takes at a time: weights of a row at most, groups of all rows, and rows
WIDE = 1024
TILE = 512
ROWS = 128
#: of the transposed layout: groups, and rows
ACROSS = 8
DOWN = 32
ESCAPES = 256
COLUMNS = 1024  # of the result, that a program sums


class Bank(NamedTuple):
    """Matrices of E experts of a kind, by its name, of R rows, at int64 [E, 4] addresses on the GPU,
    as `moelab.kernels.products.Matrices` has them; address 0 for one that contributes nothing.

    escapes : the most that one of them has.
    gate : of what these are up matrices, where kernels compute that."""

    kind: str
    table: Tensor
    R: int
    escapes: int
    transposed: bool = False
    gate: Gate | None = SILU


def bank(of: Matrices, table: Tensor, gate: Gate | None = SILU) -> Bank:
    """Of matrices whose rows `table` has on the GPU."""
    return Bank(NAMES[of.kind], table, of.R, int(of.rows[:, 3].max()), of.transposed, gate)


def multiplies(of: Matrices) -> bool:
    """Whether matrices are multiplied here: of any kind but GGML's, but few bits in rows."""
    return of.kind in NAMES and not (of.transposed and hasattr(of.kind, "scales_of"))


@triton.jit
def matrix(table, e, E):
    """The numbers of expert e's matrix (its addresses, that of its bias, escapes); 0 for none."""
    there = (e >= 0) & (e < E)
    at = table + 4 * tl.where(there, e, 0)
    first = tl.where(there, tl.load(at), 0)
    there = first != 0
    bias = tl.where(there, tl.load(at + 2), 0)
    return first, tl.load(at + 1), bias, tl.where(there, tl.load(at + 3), 0)


@triton.jit
def _inputs(x, k, c, there, glu, C: tl.constexpr, INPUT: tl.constexpr):
    """fp32 inputs c of expert k: the token's x [C] ("x"), row k of [K, C] ("own"), or the gate
    (`moelab.kernels.gates.Gate`) of row k of [K, 2C]; NaN stays NaN."""
    if INPUT == "x":
        found = tl.load(x + c, mask=there, other=0.0).to(tl.float32)
    elif INPUT == "own":
        found = tl.load(x + k * C + c, mask=there, other=0.0).to(tl.float32)
    else:
        alpha, limit, shift = glu
        first = k * 2 * C + (2 * c if INPUT == "interleaved" else c)
        gate = tl.load(x + first, mask=there, other=0.0)
        up = tl.load(x + first + (1 if INPUT == "interleaved" else C), mask=there, other=0.0)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        found = gate * tl.sigmoid(alpha * gate) * (up + shift)
    return found


@triton.jit
def _multiply_kernel(
    x,
    ids,
    table,
    E,
    y,
    glu,
    R: tl.constexpr,
    C: tl.constexpr,
    INPUT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TYPE: tl.constexpr,
    KIND: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    G: tl.constexpr,
):
    """y[k, r] = Σ W_k[r, c] · x[c] + bias_k[r] for some outputs of expert k: ROWS, or G · V of
    W_k[c, r]."""
    k = tl.program_id(1).to(tl.int64)
    first, second, bias, _ = matrix(table, tl.load(ids + k).to(tl.int64), E)
    inputs = tl.where(first != 0, C, 0)
    if TRANSPOSED:
        g = tl.program_id(0) * G + tl.arange(0, G)
        r = g[:, None] * V + tl.arange(0, V)[None, :]
        sums = tl.zeros([ROWS, G, V], tl.float32)
        for begin in range(0, inputs, ROWS):
            c = begin + tl.arange(0, ROWS)
            values, scales = tile(first, second, c.to(tl.int64), g, c < C, R, KIND, V)
            scales *= _inputs(x, k, c, c < C, glu, C, INPUT)[:, None]
            sums += values * scales[:, :, None]
        total = tl.sum(sums, 0)
    else:
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        sums = tl.zeros([ROWS, G], tl.float32)
        for begin in range(0, inputs, G * V):
            g = begin // V + tl.arange(0, G)
            c = g[:, None] * V + tl.arange(0, V)[None, :]
            values, scales = tile(first, second, r.to(tl.int64), g, r < R, C, KIND, V)
            values *= _inputs(x, k, c, c < C, glu, C, INPUT)[None, :, :]
            sums += tl.sum(values, 2) * scales
        total = tl.sum(sums, 1)
    biases = tl.where(bias != 0, R, 0)
    at = bias.to(tl.pointer_type(TYPE)) + r
    total += tl.load(at, mask=r < biases, other=0.0).to(tl.float32)
    tl.store(y + k * R + r, total, mask=r < R)


@triton.jit
def _escapes_kernel(
    x,
    ids,
    table,
    E,
    y,
    glu,
    R: tl.constexpr,
    C: tl.constexpr,
    INPUT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ESCAPES: tl.constexpr,
):
    """What an escape's weight is more than that of code 0 and low byte 0, which was multiplied in
    its place."""
    k = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * ESCAPES + tl.arange(0, ESCAPES)
    first, second, _, count = matrix(table, tl.load(ids + k).to(tl.int64), E)
    if tl.program_id(0) * ESCAPES < count:
        at, value, there = escapes(first, second, count, i)
        r = at % R if TRANSPOSED else at // C
        c = at // R if TRANSPOSED else at % C
        more = tl.load(value, mask=there, other=0.0).to(tl.float32) - instead(first)
        more *= _inputs(x, k, c, there, glu, C, INPUT)
        tl.atomic_add(y + k * R + r, more, mask=there)


@triton.jit
def _combine_kernel(
    y,
    ids,
    w,
    out,
    refused,
    E,
    K,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[t] = Σ_k w[t, k] · y[t, k], in the order of k; NaN for a token with an id that there is
    not, of which `refused` tells."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    wrong = 0
    for k in range(0, K):
        choice = t * K + k
        e = tl.load(ids + choice).to(tl.int64)
        there = (e >= 0) & (e < E)
        wrong += tl.where((e < 0) | (e > E), 1, 0)
        part = tl.load(y + choice * H + h, mask=h < tl.where(there, H, 0), other=0.0)
        factor = tl.where(there, tl.load(w + choice).to(tl.float32), 0.0)
        total += factor * part
    total = tl.where(wrong > 0, float("nan"), total)
    tl.store(out + t * H + h, total.to(out.dtype.element_ty), mask=h < H)
    if wrong > 0:
        tl.store(refused.to(tl.pointer_type(tl.int32)), 1)


def feed_forward(
    up: Bank,
    down: Bank,
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    activate: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Σ_k w_k · down_k(gated(up_k(x))) as x, of the K experts of these ids; E for none.

    activate : of fp32 [K, R of up], where up has no gate."""
    ids = ids.contiguous()
    h = _multiply(up, x.contiguous(), ids, x.dtype)
    if activate:
        h = activate(h).float().contiguous()
    y = _multiply(down, h, ids, x.dtype, up.gate)
    return combine(y, ids, w, len(down.table), x.dtype)


def combine(y: Tensor, ids: Tensor, w: Tensor, E: int, dtype: torch.dtype) -> Tensor:
    """[T, H]: for each token, the sum of its choices' rows of y fp32 [T · K, H] times their weights w
    [T, K], in order. Wrong ids [T, K] are reported by `check`."""
    T, K = ids.shape
    H = y.shape[1]
    out = torch.empty(T, H, dtype=dtype, device=y.device)
    given = y, ids, w.contiguous(), out, _refused(y.device).data_ptr()
    columns = min(COLUMNS, triton.next_power_of_2(H))
    _combine_kernel[T, triton.cdiv(H, columns)](*given, E, K, H, columns)
    return out


def check(device: torch.device) -> None:
    """Raise ValueError if a kernel that has run on this device met an id that is no expert's. The GPU
    writes that to pinned memory, so nothing waits for it: that token's result is NaN, and the next
    call raises."""
    flag = _refused(device)
    if flag[0]:
        flag.zero_()
        raise ValueError(
            "there is an expert's id below 0 or above E, the number of experts: they must be 0 to "
            "E - 1, or E for no expert"
        )


@cache
def _refused(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")


def _multiply(
    of: Bank, x: Tensor, ids: Tensor, dtype: torch.dtype, gate: Gate | None = None
) -> Tensor:
    """fp32 [K, R], biases of `dtype` added, of x [1, C], of [K, C], or of what is to be gated."""
    K, C, how = ids.numel(), x.shape[1], "own" if len(x) > 1 else "x"
    if gate:
        C, how = C // 2, "interleaved" if gate.interleaved else "gated"
    V = WIDTHS[of.kind]
    y = torch.empty(K, of.R, dtype=torch.float32, device=x.device)
    glu = tuple(map(float, (gate or SILU)[1:]))
    given = x, ids, of.table, len(of.table), y, glu, of.R, C, how, of.transposed
    G = min(WIDE // V, 64, triton.next_power_of_2(triton.cdiv(C, V)))
    rows, G = (DOWN, ACROSS) if of.transposed else (min(TILE // G, ROWS), G)
    grid = triton.cdiv(of.R, G * V if of.transposed else rows), K
    _multiply_kernel[grid](*given, TYPES[dtype], of.kind, V, rows, G, num_warps=4)
    if of.escapes:
        grid = triton.cdiv(of.escapes, ESCAPES), K
        _escapes_kernel[grid](*given, ESCAPES)
    return y
