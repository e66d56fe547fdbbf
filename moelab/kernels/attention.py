"""Attention of a single token in one call.

Threads share the rows of q, k and v, then the key heads, then the rows of the output. Sums are in
fp32 and rounded once, so results are transformers' within the dtype's tolerance.

    x [H] → q [heads, D], k and v [kv heads, D] → the cache: [kv heads, S, D] → [H]
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import carray

from moelab.kernels.compile import c_function, kernel
from moelab.kernels.emit import address, exponential, kept, pointer, take, together
from moelab.kernels.norm import rms_norm
from moelab.kernels.products import F32, multiply_one
from moelab.kernels.tiles import ROWS, add_rows, dots, place, span, spread, weight, write
from moelab.kernels.vectors import STEP, Kind

#: what threads share of one call of `attend`: how many key heads are taken, of `kv_heads`, each with a
#: `group` of query heads; S tokens, the new one included; `stride` bytes from one head of the cache to
#: the next; and addresses: of q fp32 [heads, D], written by `spread`, of keys, of values, and of what
#: is `mixed`, fp32 [heads, D]
FIELDS = "taken", "kv_heads", "group", "S", "D", "stride", "q", "keys", "values", "mixed"
HEADS = np.dtype([(field, np.int64) for field in FIELDS])


@kernel
def attend(plan, weights, token, room, x, H, out):
    """Write attention's output [H] for x [H], which may be the same memory.

    plan : (kind of x and the cache, D, heads, key heads, norms, address of `_heads`); norms : widths of
        q's and of k's, and what they add to mean squares.
    weights : int64 [9, 4]: addresses of q's and k's norms, 0 for none; the matrices of q, k, v and of
        the output; the plans of these four.
    token : (addresses of cos and sin [D], whose halves are alike, scaling, team). room : int64 [4],
        where the cache is: keys, values, S with the new token, numbers from one head to the next.
    """
    kind, D, heads, kv_heads, norms, work = plan
    team = token[3]
    y = np.empty((heads + 2 * kv_heads, D), np.float32)
    q = np.empty(heads * D, np.float32)
    mixed = np.empty(heads * D, np.float32)
    q_at = address(y)
    k_at = address(y) + 4 * heads * D
    multiply_one(weights[5], weights[1:2], x, H, heads * D, q_at, team)
    same = 1 + (weights[6, 1] == weights[7, 1])  # k and v at once, if they are of one kind
    for i in range(0, 2, same):
        to = k_at + 4 * i * kv_heads * D
        multiply_one(weights[6 + i], weights[2 + i : 2 + i + same], x, H, kv_heads * D, to, team)
    if weights[0, 0] != 0:
        q_width, k_width, eps = norms
        rms_norm(F32, q_at, kind, weights[0, 0], heads * D // q_width, q_width, eps, q_at)
        rms_norm(F32, k_at, kind, weights[0, 1], kv_heads * D // k_width, k_width, eps, k_at)
    _turn(kind, token, room, y, heads, kv_heads, D, q)
    stride = span(kind, room[3])
    group = heads // kv_heads
    where = address(q), room[0], room[1], address(mixed)
    job = np.array((0, kv_heads, group, room[2], D, stride) + where)
    together(team[0], work, team[1], address(job))
    kept(job)
    kept(q)
    total = np.empty(H, np.float32)
    multiply_one(weights[8], weights[4:5], address(mixed), heads * D, H, address(total), team)
    kept(mixed)
    for i in range(H):
        write(kind, out, i, total[i])


@kernel
def _turn(kind, token, room, y, heads, kv_heads, D, q):
    """Rotate the heads of y; q's are scaled and put in the order of `place`, k and v in the cache."""
    cos, sin, scaling, _ = token
    keys = room[0]
    values = room[1]
    S = room[2]
    stride = room[3]
    half = D // 2
    whole = D - D % STEP
    turned = np.empty(D, np.float32)
    for m in range(heads + kv_heads):
        for i in range(half):
            a = y[m, i]
            b = y[m, i + half]
            c = weight(kind, cos, i)
            s = weight(kind, sin, i)
            turned[i] = a * c - b * s
            turned[i + half] = b * c + a * s
        if m < heads:
            for i in range(D):
                turned[i] *= np.float32(scaling)
            spread(F32, kind, address(turned), whole, address(q) + 4 * m * D)
            for i in range(whole, D):
                q[m * D + i] = turned[i]
        else:
            newest = (m - heads) * stride + (S - 1) * D
            for i in range(D):
                write(kind, keys, newest + i, turned[i])
                write(kind, values, newest + i, y[m + kv_heads, i])


@kernel
def _heads(kind, at):
    """One key head after the other, with the query heads that share it, until none is left."""
    job = carray(pointer(at), 1, HEADS)[0]
    D = job.D
    whole = job.D - job.D % STEP
    scores = np.empty(job.S, np.float32)
    sums = np.empty(D, np.float32)
    while True:
        h = take(at)
        if h >= job.kv_heads:
            return
        for head in range(h * job.group, (h + 1) * job.group):
            _score(kind, job.q + 4 * head * D, job.keys + h * job.stride, D, scores)
            largest = scores.max()
            total = np.float32(0)
            for s in range(len(scores)):
                scores[s] = exponential(scores[s] - largest)
            for s in range(len(scores)):
                total += scores[s]
            _mix(kind, scores, job.values + h * job.stride, sums)
            for i in range(D):
                value = sums[place(kind, i) if i < whole else i] / total
                write(F32, job.mixed, head * D + i, value)


@kernel
def _score(kind, q, keys, D, scores):
    """Scores [S] of the keys [S, D] for a query head."""
    S = len(scores)
    whole = D - D % STEP
    row = span(kind, D)
    inputs = np.full(1, q)
    x = address(inputs)
    to = address(scores)
    for s in range(0, S - 3, 4):
        dots(1, 4, F32, kind, x, keys + s * row, 0, 0, D, to + 4 * s, S, 16 * row)
    for s in range(S - S % 4, S):
        dots(1, 1, F32, kind, x, keys + s * row, 0, 0, D, to + 4 * s, S, 16 * row)
    kept(inputs)
    for s in range(S if whole < D else 0):
        for i in range(whole, D):
            scores[s] += weight(F32, q, i) * weight(kind, keys, s * D + i)


@kernel
def _mix(kind, scores, values, sums):
    """sums [D], in the order of `place`: the values [S, D] times their scores."""
    S = len(scores)
    D = len(sums)
    whole = D - D % STEP
    row = span(kind, D)
    to = address(sums)
    sums[:] = 0
    for s in range(0, S, ROWS):
        x = address(scores) + 4 * s
        rows = min(ROWS, S - s)
        add_rows(kind, x, rows, values + s * row, 0, 0, D, whole, to)
    for i in range(whole, D):
        for s in range(S):
            sums[i] += scores[s] * weight(kind, values, s * D + i)


@cache
def heads_work(kind: Kind) -> int:
    """The address of what a thread does for a job of key heads."""
    tag = kind.tag

    def heads(at):
        _heads(tag, at)

    return c_function(heads)
