"""Decoder layers of a single token in one call: norms, attention and router, up to a layer's
experts or with them.

In transformers each of these takes many calls, attention about thirty, which are
overhead-dominated. Here threads share the rows of q, k and v, then the key heads, then the rows of
the output, then the experts. Sums are in fp32 and rounded once, so results are transformers' within
the dtype's tolerance. `moelab.fast` is what calls these kernels.

    attention   x [H] → q [heads, D], k and v [kv heads, D] → the cache: [kv heads, S, D] → y [H]
    a norm      x [rows, H] → [rows, H]               a router    x [H] → logits [E], weights and ids [1, K]
    layers      x [H] → x after L of them, ids and weights [L, K], times [L, 2]
"""

from __future__ import annotations

import time
from functools import cache

import numpy as np

from moelab.kernels.compile import c_function, c_library, kernel
from moelab.kernels.emit import address, exponential, kept, now, read, take, together
from moelab.kernels.feed_forward import gated
from moelab.kernels.products import PIECE, job_of, widen
from moelab.kernels.tiles import add_rows, dots, place, span, spread, weight, write
from moelab.kernels.vectors import STEP

#: the C library's clock_gettime, 0 where there is none, and the clock that it is asked for
CLOCK = c_library("clock_gettime"), getattr(time, "CLOCK_MONOTONIC", 0)


@kernel(
    fastmath={"reassoc", "contract"}
)  # sums may be taken in any order, so that they are vectors
def rms_norm(kind, x, w_kind, w, rows, H, eps, out):
    """Norms of rows [H] at x, times the weight at w; `out` may be x."""
    row, scale = np.empty(H, np.float32), np.empty(H, np.float32)
    widen(w_kind, np.float32(0), w, H, address(scale))
    for r in range(rows):
        at, to = x + span(kind, r * H), out + span(kind, r * H)
        widen(kind, np.float32(0), at, H, address(row))
        total = np.float32(0)
        for i in range(H):
            total += row[i] * row[i]
        inverse = np.float32(1 / np.sqrt(total / H + eps))
        for i in range(H):
            write(
                kind, to, i, row[i] * inverse
            )  # rounded before the weight, as transformers does it
        widen(kind, np.float32(0), to, H, address(row))
        for i in range(H):
            write(kind, to, i, row[i] * scale[i])


@kernel
def route(kind, score_kind, x, w, E, H, K, normalised, logits, scores, ids, work, team, threads):
    """The K largest of a softmax of w x, `normalised` to a sum of one or not: logits [E], scores
    [K], ids [1, K].

    Whether these are the only ones: False where another expert is as good as the last of them, or
    is not a number."""
    p, chosen = np.empty(E, np.float32), np.empty(K, np.float32)
    matrix, bounds = np.zeros((1, 4), np.int64), np.arange(2)
    matrix[0, 0] = w
    job = job_of(
        kind,
        kind,
        matrix,
        bounds,
        x,
        np.int64(1),
        H,
        bounds[:0],
        E,
        address(p),
        np.int64(PIECE),
        threads,
    )
    together(team, work, min(threads, (E + PIECE - 1) // PIECE), job)
    for e in range(E):
        write(kind, logits, e, p[e])  # rounded before the softmax, as transformers does it
    widen(kind, np.float32(0), logits, E, address(p))
    p = np.exp(p - p.max())
    total = p.sum()
    for k in range(K):
        ids[0, k] = np.argmax(p)
        chosen[k] = p[ids[0, k]]
        p[ids[0, k]] = -1
    total = chosen.sum() if normalised else total
    for k in range(K):
        write(score_kind, scores, k, chosen[k] / total)
    return p.max() < chosen[K - 1] and total == total


@kernel
def attend(plan, weights, token, room, x, H, out):
    """Attention's output [H] for x [H], which may be the same memory; heads of keys are `stride`
    apart.

    weights : int64 [2 + heads of q, k and v, 4]: addresses of q's and k's norms; a matrix for each
    head; the output's."""
    kind, heads_work, kv_heads, D, (q_width, k_width, eps), order, last_order, work, last_work = (
        plan
    )
    cos, sin, scaling, team, threads = token
    keys, values, S, stride = room[0], room[1], room[2], room[3]
    q_norm, k_norm, rows, last = weights[0, 0], weights[0, 1], weights[1:-1], weights[-1:]
    heads, half, whole = len(rows) - 2 * kv_heads, D // 2, D - D % STEP
    y, q, turned = (
        np.empty((len(rows), D), np.float32),
        np.empty(heads * D, np.float32),
        np.empty(D, np.float32),
    )
    each, zeros, one, piece = (
        np.arange(len(rows) + 1),
        np.zeros(len(rows), np.int64),
        np.int64(1),
        np.int64(PIECE),
    )
    together(
        team,
        work,
        threads,
        job_of(kind, order, rows, each, x, one, H, zeros, D, address(y), piece, threads),
    )
    if q_norm != 0:
        at = address(y) + 4 * heads * D
        rms_norm(
            np.float32(0), address(y), kind, q_norm, heads * D // q_width, q_width, eps, address(y)
        )
        rms_norm(np.float32(0), at, kind, k_norm, kv_heads * D // k_width, k_width, eps, at)
    for m in range(heads + kv_heads):
        for i in range(half):
            a, b = y[m, i], y[m, i + half]
            turned[i] = a * weight(kind, cos, i) - b * weight(kind, sin, i)
            turned[i + half] = b * weight(kind, cos, i + half) + a * weight(kind, sin, i + half)
        if m < heads:  # scaled and in the order of `place`
            for i in range(D):
                turned[i] *= np.float32(scaling)
            spread(np.float32(0), kind, address(turned), whole, address(q) + 4 * m * D)
            for i in range(whole, D):
                q[m * D + i] = turned[i]
        else:  # the newest of the cache
            newest = (m - heads) * stride + (S - 1) * D
            for i in range(D):
                write(kind, keys, newest + i, turned[i])
                write(kind, values, newest + i, y[m + kv_heads, i])
    mixed, job = np.empty(heads * D, np.float32), np.empty(10, np.int64)
    job[0], job[1], job[2], job[3], job[4] = 0, kv_heads, heads // kv_heads, S, D
    job[5], job[6], job[7], job[8], job[9] = (
        address(q),
        keys,
        values,
        address(mixed),
        span(kind, stride),
    )
    together(team, heads_work, threads, job)
    kept(q)
    total = np.empty(H, np.float32)
    job = job_of(
        np.float32(0),
        last_order,
        last,
        each[:2],
        address(mixed),
        one,
        heads * D,
        each[:0],
        H,
        address(total),
        piece,
        threads,
    )
    kept(mixed)
    together(team, last_work, threads, job)
    for i in range(H):
        write(kind, out, i, total[i])


@kernel
def _heads(kind, job):
    """One key head after the other, with the query heads that share it, until none is left."""
    kv_heads, group, S, D = read(job, 1), read(job, 2), read(job, 3), read(job, 4)
    q, k, v, mixed, stride = read(job, 5), read(job, 6), read(job, 7), read(job, 8), read(job, 9)
    whole, row = D - D % STEP, span(kind, D)
    scores, sums, inputs = (
        np.empty((group, S), np.float32),
        np.empty(D, np.float32),
        np.empty(group, np.int64),
    )
    while True:
        h = take(job)
        if h >= kv_heads:
            return
        keys, values = k + h * stride, v + h * stride
        for g in range(group):
            inputs[g] = q + 4 * (h * group + g) * D
        for g in range(group):
            x, to = address(inputs) + 8 * g, address(scores) + 4 * g * S
            for s in range(0, S - 3, 4):
                dots(
                    1,
                    4,
                    np.float32(0),
                    kind,
                    x,
                    keys + s * row,
                    0,
                    0,
                    D,
                    whole,
                    to + 4 * s,
                    S,
                    16 * row,
                )
            for s in range(S - S % 4, S):
                dots(
                    1,
                    1,
                    np.float32(0),
                    kind,
                    x,
                    keys + s * row,
                    0,
                    0,
                    D,
                    whole,
                    to + 4 * s,
                    S,
                    16 * row,
                )
            for s in range(S if whole < D else 0):
                for i in range(whole, D):
                    scores[g, s] += weight(np.float32(0), inputs[g], i) * weight(
                        kind, keys, s * D + i
                    )
            largest, total = scores[g].max(), np.float32(0)
            for s in range(S):
                scores[g, s] = exponential(scores[g, s] - largest)
            for s in range(S):
                total += scores[g, s]
            sums[:] = 0
            for s in range(0, S - 3, 4):
                add_rows(
                    4,
                    kind,
                    address(scores) + 4 * (g * S + s),
                    values + s * row,
                    0,
                    0,
                    D,
                    whole,
                    address(sums),
                )
            for s in range(S - S % 4, S):
                add_rows(
                    1,
                    kind,
                    address(scores) + 4 * (g * S + s),
                    values + s * row,
                    0,
                    0,
                    D,
                    whole,
                    address(sums),
                )
            for i in range(whole, D):
                for s in range(S):
                    sums[i] += scores[g, s] * weight(kind, values, s * D + i)
            for i in range(D):
                write(
                    np.float32(0),
                    mixed,
                    (h * group + g) * D + i,
                    sums[place(kind, i) if i < whole else i] / total,
                )


@cache
def heads_entry(kind: type) -> int:
    """The address of what a thread does for a job of key heads."""

    def heads(job):
        _heads(kind(0), job)

    return c_function(heads)


@kernel
def to_experts(shape, weights, token, room, x, y, normed):
    """Write y [H] = x + attention(norm(x)) and its norm; where the norms' weights lie is in
    `weights[0]`, too."""
    plan, H, (first_eps, second_eps) = shape
    kind, inside = plan[0], np.empty(span(plan[0], H), np.uint8)
    at, one = address(inside), np.int64(1)
    rms_norm(kind, x, kind, weights[0, 2], one, H, first_eps, at)
    attend(plan, weights, token, room, at, H, at)
    for i in range(H):
        write(kind, y, i, weight(kind, x, i) + weight(kind, at, i))
    kept(inside)
    rms_norm(kind, y, kind, weights[0, 3], one, H, second_eps, normed)


@kernel(error_model="numpy")
def stretch(
    shape,
    routing,
    ways,
    weights,
    routers,
    ups,
    downs,
    token,
    rooms,
    x,
    w,
    ids,
    times,
    clock,
    memory,
    first,
):
    """How many layers were computed, those before the `first` included; x [H], w and ids [L, K] and
    times [L, 2] are written. It ends before experts that are elsewhere, or, with ids of −1, before
    a choice that is not its own: that is to be made of memory[1], and then this layer is the first.
    memory : [4, max(H, E)]."""
    (kind, H), (score_kind, normalised, work), (team, threads) = (
        (shape[0][0], shape[1]),
        routing,
        token[3:],
    )
    (L, K), E = ids.shape, ups.shape[1]
    up, down, each = np.empty((K, 4), np.int64), np.empty((K, 4), np.int64), np.arange(K + 1)
    tokens, rows = np.zeros(K, np.int64), each[:K].copy().reshape(1, K)
    y, normed, out, logits = (
        address(memory[0]),
        address(memory[1]),
        address(memory[2]),
        address(memory[3]),
    )
    for i in range(first, L):
        at = w + span(score_kind, i * K)
        if ids[i, 0] < 0:
            to_experts(shape, weights[i], token, rooms[i], x, y, normed)
            decided = route(
                kind,
                score_kind,
                normed,
                routers[i],
                E,
                H,
                K,
                normalised,
                logits,
                at,
                ids[i : i + 1],
                work,
                team,
                threads,
            )
            if not decided:
                ids[i, 0] = -1
                return i
        for k in range(K):
            for j in range(4):
                up[k, j], down[k, j] = ups[i, ids[i, k], j], downs[i, ids[i, k], j]
            if up[k, 0] == 0:
                return i
        times[i, 0] = now(*clock)
        gated(
            kind,
            ways,
            up,
            down,
            each,
            normed,
            np.int64(1),
            H,
            tokens,
            rows,
            score_kind,
            at,
            out,
            team,
            threads,
        )
        times[i, 1] = now(*clock)
        for h in range(H):
            write(kind, x, h, weight(kind, y, h) + weight(kind, out, h))
    kept(memory)
    return L
