"""Several tokens' experts on a GPU, in Triton: a grouped GEMM over pointers, of any kind of weights.

Source: MegaBlocks (Gale et al. 2023), with vLLM's table of blocks. Choices are sorted by expert, and
each block of rows of one expert is multiplied by tiles of its matrix, which become the model's type
in registers (`moelab.kernels.tiles_triton`): nothing is gathered, padded or unpacked in memory. Which
block is whose is computed on the GPU, for as many blocks as there may be, so nothing waits for it.
Escapes of bf12 are further inputs of the tile that has them, the weight and, negative, what was
multiplied in its place. All sums are in fp32 and in a fixed order: the same bits each time.

    up, down : banks of E experts    x [T, H]    ids and w [T, K]    →  [T, H]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from moelab.experts.gemv_triton import Bank, combine, matrix
from moelab.kernels.tiles_triton import TYPES, WIDTHS, escapes, instead, weights

ROWS = 16, 128  # of a block: at least, as tensor cores have it, and at most
COLUMNS = 64  # outputs of a block
DEEP = 64  # inputs of a tile at most, and groups of them
GROUPS = 8


@triton.jit
def _between(first, second, count, begin, end):
    """How many escapes come before two indices."""
    low = 0
    high = 0
    for i in range(0, count, 1024):
        at, _, there = escapes(first, second, count, i + tl.arange(0, 1024))
        low += tl.sum((there & (at < begin)).to(tl.int32), 0)
        high += tl.sum((there & (at < end)).to(tl.int32), 0)
    return low, high


@triton.jit
def _lacking(
    first, second, count, k, high, r, R: tl.constexpr, C: tl.constexpr, ACROSS: tl.constexpr
):
    """(inputs c [32], whether there are such, weights fp32 [32, outputs r]) of the escapes k to
    k + 15, below `high`, each as its weight and as what was multiplied in its place."""
    j = tl.arange(0, 32)
    at, value, there = escapes(first, second, count, k + j % 16)
    there &= k + j % 16 < high
    output = at % R if ACROSS else at // C
    value = tl.load(value, mask=there, other=0.0).to(tl.float32)
    value = tl.where(j < 16, value, -instead(first))
    mine = there[:, None] & (output[:, None] == r[None, :])
    return at // R if ACROSS else at % C, there, tl.where(mine, value[:, None], 0.0)


@triton.jit
def _grouped_kernel(
    x,
    order,
    blocks,
    table,
    E,
    y,
    K,
    R: tl.constexpr,
    C: tl.constexpr,
    TYPE: tl.constexpr,
    DOT: tl.constexpr,
    GATHERS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    KIND: tl.constexpr,
    V: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y[i, r] = Σ x[i, c] · W[r, c] + bias[r] for a block's choices i of one expert, in their order;
    inputs are a token's if it `GATHERS`, and otherwise y is in the order of all choices."""
    block = blocks + 3 * tl.program_id(1)
    first, second, bias, count = matrix(table, tl.load(block), E)
    i = tl.load(block + 1) + tl.arange(0, ROWS)
    live = i < tl.load(block + 2)
    choice = tl.load(order + i, mask=live, other=0)
    t = choice // K if GATHERS else i
    to = i if GATHERS else choice
    begin = tl.program_id(0) * COLUMNS
    r = begin + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, tl.where(first != 0, C, 0), G * V):
        c = k + tl.arange(0, G * V)
        mask = live[:, None] & (c < C)[None, :]
        a = tl.load(x + t[:, None] * C + c[None, :], mask=mask, other=0.0)
        if TRANSPOSED:
            g = begin // V + tl.arange(0, COLUMNS // V)
            w = weights(first, second, c.to(tl.int64), g, c < C, R, KIND, V)
        else:
            g = k // V + tl.arange(0, G)
            w = tl.trans(weights(first, second, r.to(tl.int64), g, r < R, C, KIND, V))
        total = tl.dot(a.to(DOT), w.to(TYPE).to(DOT), total, input_precision="ieee")
    if KIND == "bf12" and count > 0:
        low, high = 0, count.to(tl.int32)
        if not TRANSPOSED:  # they are sorted by output
            low, high = _between(first, second, count, begin * C, (begin + COLUMNS) * C)
        for k in range(low, high, 16):
            c, there, w = _lacking(first, second, count, k, high, r, R, C, TRANSPOSED)
            mask = live[:, None] & there[None, :]
            a = tl.load(x + t[:, None] * C + c[None, :], mask=mask, other=0.0)
            total = tl.dot(a.to(DOT), w.to(TYPE).to(DOT), total, input_precision="ieee")
    biases = tl.where(bias != 0, R, 0)
    at = bias.to(tl.pointer_type(TYPE)) + r
    total += tl.load(at, mask=r < biases, other=0.0).to(tl.float32)[None, :]
    mask = live[:, None] & (r < R)[None, :]
    tl.store(y + to[:, None] * R + r[None, :], total.to(y.dtype.element_ty), mask=mask)


def feed_forward(
    up: Bank,
    down: Bank,
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    activate: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Σ_k w_k · down_k(gated(up_k(x))) as x, of each token's experts; ids of E for none. What is
    between up and down is rounded to x's type, and gated by torch.

    activate : of [T · K, R of up], where up has no gate."""
    T, K = ids.shape
    E = len(up.table)
    flat = ids.reshape(-1).long()
    known, order = torch.sort(torch.where((flat >= 0) & (flat < E), flat, E), stable=True)
    rows = min(max(triton.next_power_of_2(T * K // E), ROWS[0]), ROWS[1])
    blocks = _blocks(known, E, rows)
    x = x.contiguous()
    h = _multiply(up, x, order, blocks, K, rows, x.dtype)
    a = (activate or up.gate.of)(h).to(x.dtype).contiguous()
    y = _multiply(down, a, order, blocks, 0, rows, torch.float32)
    return combine(y, ids.contiguous(), w, E, x.dtype)


def _blocks(known: Tensor, E: int, rows: int) -> Tensor:
    """int64 [blocks, 3]: expert, first row and the end of its rows, of sorted ids [n]; E, n and n
    of those there may be beyond."""
    device = known.device
    bounds = torch.searchsorted(known, torch.arange(E + 1, device=device))
    ends = ((bounds.diff() + rows - 1) // rows).cumsum(0)
    most = len(known) // rows + min(E, len(known))
    b = torch.arange(most, device=device)
    expert = torch.searchsorted(ends, b, right=True)
    e = expert.clamp(max=E - 1)
    before = torch.where(e > 0, ends[e - 1], 0)
    begin = bounds[e] + (b - before) * rows
    return torch.stack([expert, begin, bounds[e + 1]], 1).contiguous()


def _multiply(
    of: Bank, x: Tensor, order: Tensor, blocks: Tensor, K: int, rows: int, dtype: torch.dtype
) -> Tensor:
    """[n, R] of a dtype, in the order of sorted choices, of whose tokens, with K choices each, inputs
    are; with K 0 inputs lie in that order, and the result in the tokens'."""
    C = x.shape[1]
    V = WIDTHS[of.kind]
    y = torch.empty(len(order), of.R, dtype=dtype, device=x.device)
    # The interpreter would multiply bf16's bits.
    kinds = TYPES[x.dtype], tl.float32 if triton.knobs.runtime.interpret else TYPES[x.dtype]
    how = K > 0, of.transposed, of.kind, V, min(DEEP // V, GROUPS), rows, COLUMNS
    grid = triton.cdiv(of.R, COLUMNS), len(blocks)
    given = x, order, blocks, of.table, len(of.table), y, K, of.R, C
    _grouped_kernel[grid](*given, *kinds, *how, num_warps=8 if rows > 64 else 4)
    return y
