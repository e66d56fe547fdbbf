"""What surrounds the products of a step's experts, compiled: dispatch by expert, the gate, the
weighted sum.

As calls of torch these are overhead-dominated for a single token; where the gate is a `Gate`, whole
experts are one call.

    ids [T, K] → experts hit [M], rows [N]    x [T, H] → h fp32 [N, 2I] → silu(gate) · up [N, I] → y [N, H] → [T, H]
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moelab.kernels.compile import kernel
from moelab.kernels.emit import address, exponential, kept
from moelab.kernels.gates import SILU, Gate
from moelab.kernels.products import KINDS, Matrices, multiply_into
from moelab.kernels.threads import team
from moelab.kernels.tiles import weight, write
from moelab.kernels.vectors import FLOAT32, Kind


@kernel
def arrange(ids, E):
    """Choices int64 [T, K] sorted by expert: experts hit [M], bounds of their choices [M + 1],
    tokens [n] of these, and the row of each choice [T, K], −1 for "no expert" (E)."""
    T, K = ids.shape
    places = np.zeros(E + 1, np.int64)
    rows = np.full((T, K), -1)
    for t in range(T):
        for k in range(K):
            if ids[t, k] < 0 or ids[t, k] > E:  # a kernel would write past the end of its memory
                raise ValueError(
                    "there is an expert's id below 0 or above E, the number of experts: they must be "
                    "0 to E - 1, or E for no expert"
                )
            places[ids[t, k]] += 1
    M = 0
    n = 0
    hit = np.empty(E, np.int64)
    bounds = np.empty(E + 1, np.int64)
    for e in range(E):
        if places[e] > 0:
            hit[M] = e
            bounds[M] = n
            M += 1
        n, places[e] = n + places[e], n
    bounds[M] = n
    tokens = np.empty(n, np.int64)
    for t in range(T):
        for k in range(K):
            e = ids[t, k]
            if e < E:
                tokens[places[e]] = t
                rows[t, k] = places[e]
                places[e] += 1
    return hit[:M], bounds[: M + 1], tokens, rows


def combine(y: Tensor, rows: np.ndarray, w: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H]: for each token, the sum of its rows [T, K] of y fp32 [n, H] (−1 for none) times its
    weights w [T, K]."""
    out = torch.empty(len(rows), y.shape[1], dtype=dtype)
    w = _readable(w)
    kinds = KINDS[w.dtype].tag, KINDS[dtype].tag
    weigh(*kinds, y.numpy(), rows, w.data_ptr(), out.data_ptr())
    return out


def feed_forward(
    up: Matrices,
    down: Matrices,
    bounds: np.ndarray,
    x: Tensor,
    tokens: np.ndarray,
    gate: Gate = SILU,
) -> Tensor:
    """Experts down(gate(up)) of x [T, H], fp32 [n, H], in one call; bounds and tokens of `arrange`."""
    x = x.contiguous()
    y = torch.empty(len(tokens), down.R, dtype=torch.float32)
    both = plans(up, down, KINDS[x.dtype], gate, len(tokens) / len(up.rows)), up.rows, down.rows
    gated(*both, bounds, x.data_ptr(), *x.shape, tokens, y.data_ptr(), team())
    return y


def plans(up: Matrices, down: Matrices, x: Kind, gate: Gate = SILU, each: float = 1) -> tuple:
    """Of `gated`: how these matrices are multiplied, with inputs x, so many a matrix, int64 [2, 3],
    or [L, 2, 3] of L layers, how many rows they have, and what is between them."""
    return np.stack([up.plan(x, each), down.plan(FLOAT32, each)], -2), up.R, down.R, tuple(gate)


def _readable(w: Tensor) -> Tensor:
    """Routing weights as the kernels read them; some routers end in double precision."""
    return (w if w.dtype in KINDS else w.float()).contiguous()


@kernel
def weigh(w_kind, kind, y, rows, w, out):
    """`combine`, of weights and to outputs at addresses."""
    T, K = rows.shape
    total = np.empty(y.shape[1], np.float32)
    for t in range(T):
        total[:] = 0
        for k in range(K):
            if rows[t, k] >= 0:
                factor = weight(w_kind, w, t * K + k)
                row = y[rows[t, k]]
                for h in range(len(total)):
                    total[h] += factor * row[h]
        for h in range(len(total)):
            write(kind, out, t * len(total) + h, total[h])


@kernel
def _between(g, u, alpha, limit, plus):
    g = limit if g > limit else g
    u = limit if u > limit else -limit if u < -limit else u
    return g / (np.float32(1) + exponential(-alpha * g)) * (u + plus)


# A division that may raise an error keeps a loop from becoming vectors.
@kernel(error_model="numpy")
def gated(plans, up, down, bounds, x, T, n, tokens, y, team):
    """`feed_forward`, of matrices [M, 4] each, to fp32 at the address y."""
    both, two_I, H, (interleaved, alpha, limit, plus) = plans
    N = bounds[-1]
    I = two_I // 2
    shape = np.float32(alpha), np.float32(limit), np.float32(plus)
    h = np.empty((N, two_I), np.float32)
    a = np.empty((N, I), np.float32)
    multiply_into(both[0], up, bounds, x, T, n, tokens, two_I, address(h), team)
    for j in range(N):
        if interleaved:
            for i in range(I):
                a[j, i] = _between(h[j, 2 * i], h[j, 2 * i + 1], *shape)
        else:
            for i in range(I):
                a[j, i] = _between(h[j, i], h[j, I + i], *shape)
    multiply_into(both[1], down, bounds, address(a), N, I, tokens[:0], H, y, team)
    kept(a)
