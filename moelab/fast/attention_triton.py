"""Attention of a single token on a GPU, in Triton, with the cache where it lies.

Of each key head, programs share the keys, each with sums of its own, as in Flash-Decoding; a second
kernel adds those up. Where the cache is and how long, they read from memory: so a CUDA graph of
them is good for every cache and token.

    q [heads, D], k and v [kv heads, D], and cos and sin [D] of the token
    where : int64 [4] on the GPU: addresses of keys and values, S with the new token, the distance of heads
    →  [heads, D], and k and v in the cache
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS = 64  # that a program takes at a time
PROGRAMS = 128  # about as many as a GPU has processors


@triton.jit
def _wide(at, mask):
    """fp32 of what lies there, 0 beyond the mask."""
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _turned(x, at, mask, d, cos, sin, D: tl.constexpr):
    """fp32 x at rotary angles; the other half of a head is added or taken away."""
    other = _wide(x + at + tl.where(d < D // 2, D // 2, -(D // 2)), mask)
    return _wide(x + at, mask) * cos + tl.where(d < D // 2, -other, other) * sin


@triton.jit
def _attend_kernel(
    q,
    k,
    v,
    cos,
    sin,
    where,
    sums,
    ends,
    scaling,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """sums [heads, SPLITS, D] and ends [heads, SPLITS, 2]: a largest score, and the total of
    weights beside it."""
    h, split = tl.program_id(0), tl.program_id(1)
    kind: tl.constexpr = q.dtype.element_ty
    g, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    old, from_head = tl.load(where + 2) - 1, h * tl.load(where + 3)
    keys = tl.multiple_of(tl.load(where).to(tl.pointer_type(kind)) + from_head, 16)
    values = tl.multiple_of(tl.load(where + 1).to(tl.pointer_type(kind)) + from_head, 16)
    c, s = _wide(cos + d, d < D), _wide(sin + d, d < D)
    head = h * GROUP + g
    mine = (g[:, None] < GROUP) & (d[None, :] < D)
    place = head[:, None] * D + d[None, :]
    x = _turned(q, place, mine, d[None, :], c[None, :], s[None, :], D).to(kind).to(tl.float32)
    new = _turned(k, h * D + d, d < D, d, c, s, D).to(kind)
    value = tl.load(v + h * D + d, mask=d < D, other=0.0)
    first = split == 0  # has the new token, too
    tl.store(keys + old * D + d, new, mask=d < tl.where(first, D, 0))
    tl.store(values + old * D + d, value, mask=d < tl.where(first, D, 0))
    score = tl.sum(x * new.to(tl.float32)[None, :], 1) * scaling
    largest = tl.where(first, score, float("-inf"))
    total = tl.where(first, tl.full([ROWS], 1.0, tl.float32), 0.0)
    whole = tl.zeros([ROWS, WIDTH], tl.float32) + value.to(tl.float32)[None, :]
    mixed = tl.where(first, whole, 0.0)
    each = tl.cdiv(tl.cdiv(old, SPLITS), KEYS) * KEYS
    begin, end = split * each, tl.minimum(split * each + each, old)
    while begin < end:
        i = begin + tl.arange(0, KEYS)
        there = (i[:, None] < old) & (d[None, :] < D)
        at = i[:, None].to(tl.int64) * D + d[None, :]
        scores = tl.dot(x, tl.trans(_wide(keys + at, there)), input_precision=PRECISION) * scaling
        scores = tl.where(i[None, :] < old, scores, float("-inf"))
        before, largest = largest, tl.maximum(largest, tl.max(scores, 1))
        less, weights = tl.exp(before - largest), tl.exp(scores - largest[:, None])
        total = total * less + tl.sum(weights, 1)
        seen = tl.dot(weights, _wide(values + at, there), input_precision=PRECISION)
        mixed = mixed * less[:, None] + seen
        begin += KEYS
    to = head * SPLITS + split
    tl.store(sums + to[:, None] * D + d[None, :], mixed, mask=mine)
    tl.store(ends + 2 * to, largest, mask=g < GROUP)
    tl.store(ends + 2 * to + 1, total, mask=g < GROUP)


@triton.jit
def _together_kernel(sums, ends, out, D: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    head, split, d = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    at = head * SPLITS + split
    largest, total = tl.load(ends + 2 * at), tl.load(ends + 2 * at + 1)
    less = tl.exp(largest - tl.max(largest, 0))
    mixed = tl.load(sums + at[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0)
    mixed = tl.sum(mixed * less[:, None], 0) / tl.sum(total * less, 0)
    tl.store(out + head * D + d, mixed.to(out.dtype.element_ty), mask=d < D)


def attend(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, where: Tensor, scaling: float
) -> Tensor:
    """Attention of a token whose q, k and v are given before their rotation. All are contiguous, D
    a multiple of 8, and a head of the cache begins on a multiple of 16 bytes."""
    (heads, D), kv_heads, pow2 = q.shape, len(k), triton.next_power_of_2
    splits, width, group = pow2(max(PROGRAMS // kv_heads, 1)), max(16, pow2(D)), heads // kv_heads
    sums = q.new_empty(heads, splits, D, dtype=torch.float32)
    ends, out = q.new_empty(heads, splits, 2, dtype=torch.float32), torch.empty_like(q)
    precision = "ieee" if q.dtype == torch.float32 else "tf32"  # which has q, k, v whole
    sizes = D, group, splits, max(16, pow2(group)), width, KEYS, precision
    _attend_kernel[(kv_heads, splits)](q, k, v, cos, sin, where, sums, ends, scaling, *sizes)
    _together_kernel[(heads,)](sums, ends, out, D, splits, width)
    return out
