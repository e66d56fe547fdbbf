"""Parts of an attention graph, so written that fp16 rounds little: rotation, the norm of q and k, scores.

Source: our own, from three identities; shifting the scores is what SageAttention does with all keys' mean (arXiv
2410.02367 §3.1), here with a number for each query. fp16 rounds an operation's result by up to 2^-11 of its size, and
softmax turns what a score is off by into a share's relative error. So large terms are made exact, and what is rounded
is small and added first:

    product   x·a = x·p + x·(a − p) with p the power of two nearest to a: x·p is exact, and |a − p| ≤ |a|/3
    norm      y = x·rsqrt(mean x² + eps), as rounded, is too long by a factor 1 + u that a whole key shares. One step
              of Newton's method takes y·u/2 off, and u is a mean of differences from 1, which fp16 holds well
    scores    softmax(q·k) = softmax(q·k − m) with any m for each query; with m near its largest score, the scores that
              count are near 0, and the matrix product subtracts m before it rounds

All three hold in any arithmetic, and help wherever products with powers of two are exact and sums within a reduction or
a matrix product have more digits than fp16. Left out: a second fp16 number for each of q and k, which would double the
products of the scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def powers(values: Tensor) -> tuple[Tensor, Tensor]:
    """(The power of two nearest to each value, with its sign; what remains); (0, 0) for a 0."""
    mantissa, exponent = torch.frexp(values)                                    # |mantissa| in [1/2, 1)
    power = torch.ldexp(mantissa.sign(), torch.where(mantissa.abs() < 0.75, exponent - 1, exponent)).to(values.dtype)
    return power, values - power


def normalised(mb: Any, x: Any, axis: int, eps: float) -> tuple[Any, Any]:
    """RMS norm over an axis, without a weight: (y, c), and y + y·c is the norm; c is nothing but a repair."""
    eps = np.float16(eps)
    factor = mb.rsqrt(x=mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[axis], keep_dims=True), epsilon=eps)
    y = mb.mul(x=x, y=factor)
    wanted = mb.sub(x=np.float16(1), y=mb.mul(x=factor, y=mb.mul(x=factor, y=eps)))    # mean y²: 1 but for eps
    excess = mb.reduce_mean(x=mb.sub(x=mb.mul(x=y, y=y), y=wanted), axes=[axis], keep_dims=True)
    return y, mb.mul(x=excess, y=np.float16(-0.5))


def rotated(mb: Any, x: Any, repair: Any, cos: Any, sin: Any, weight: np.ndarray | None, **name: str) -> Any:
    """The rotary embedding of (x + x·repair)·weight, (1, heads, D, S).

    x : (1, heads, D, S). repair : from `normalised`, or None. weight : the norm's, (1, 1 or heads, D, 1), or None.
    cos, sin : (1, 2, D, S), the `powers` of the tables: powers of two, then what remains.
    """
    half = x.shape[2] // 2
    first, second = mb.split(x=x, num_splits=2, axis=2)
    turned = mb.concat(values=[mb.mul(x=second, y=np.float16(-1)), first], axis=2)
    swapped = None if weight is None else np.roll(weight, half, axis=2)
    (cos, cos_rest), (sin, sin_rest) = _weighted(mb, cos, weight), _weighted(mb, sin, swapped)
    large, other = mb.mul(x=x, y=cos), mb.mul(x=turned, y=sin)
    small = mb.add(x=mb.mul(x=x, y=cos_rest), y=mb.mul(x=turned, y=sin_rest))
    if repair is not None:
        whole = mb.add(x=large, y=mb.add(x=other, y=small))
        small = mb.add(x=small, y=mb.mul(x=whole, y=repair))
    return mb.add(x=large, y=mb.add(x=other, y=small), **name)


def _weighted(mb: Any, table: Any, weight: np.ndarray | None) -> tuple[Any, Any]:
    """(p + a)·(v + b), p and v powers of two, as (p·v, exact, and p·b + a·(v + b), small)."""
    power, rest = mb.split(x=table, num_splits=2, axis=1)
    if weight is None:
        return power, rest
    v, b = (part.numpy() for part in powers(torch.from_numpy(weight)))
    return mb.mul(x=power, y=v), mb.add(x=mb.mul(x=power, y=b), y=mb.mul(x=rest, y=weight))


def with_ones(mb: Any, keys: Any) -> Any:
    """Keys (1, KV, D, n) with further channels of 1, for `shifted`; their number makes D a multiple of 16 again."""
    _, heads, D, n = keys.shape
    return mb.concat(values=[keys, np.ones((1, heads, 16 - D % 16, n), dtype=np.float16)], axis=2)


def shifted(mb: Any, q: Any, keys: Any, some: Any) -> Any:
    """Scores q·k − m, (1, heads, S, n), where m is a query's largest score among `some` keys.

    q (1, heads, D, S); keys (1, heads, D + ones, n), from `with_ones`; some (1, heads, D, any number).
    """
    ones = keys.shape[2] - q.shape[2]
    m = mb.reduce_max(x=mb.matmul(x=some, y=q, transpose_x=True), axes=[2], keep_dims=True)         # (1, heads, 1, S)
    part = mb.mul(x=m, y=np.float16(-1 / ones))
    return mb.matmul(x=mb.concat(values=[q, *[part] * ones], axis=2), y=keys, transpose_x=True, name="scores")
