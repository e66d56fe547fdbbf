"""Decoder layers of a single token in one call: norms, attention and router, up to a layer's
experts or with them.

In transformers each of these takes many calls, attention about thirty, which are
overhead-dominated. Sums are in fp32 and rounded once, so results are transformers' within the
dtype's tolerance. `moelab.fast` is what calls these kernels.

    a router    x [H] → logits [E], weights and ids [1, K]
    layers      x [H] → x after L of them, ids and weights [L, K], times [L, 2]
"""

from __future__ import annotations

import time

import numpy as np

from moelab.kernels.attention import attend
from moelab.kernels.compile import c_library, kernel
from moelab.kernels.emit import address, kept, now
from moelab.kernels.feed_forward import gated, weigh
from moelab.kernels.norm import rms_norm
from moelab.kernels.products import F32, multiply_one, widen
from moelab.kernels.tiles import span, weight, write

#: the C library's clock_gettime, 0 where there is none, and the clock that it is asked for
CLOCK = c_library("clock_gettime"), getattr(time, "CLOCK_MONOTONIC", 0)


@kernel
def route(routing, x, w, E, H, logits, scores, ids, team):
    """The K largest of a softmax of w x: logits [E], scores [K], ids [1, K]; of ids that are given, not
    −1, the scores.

    routing : (kind of x and logits, kind of scores, plan of w, whether scores are normalised to a sum
    of one).
    Whether these are the only ones: False where another expert is as good as the last of them, or
    is not a number."""
    kind, score_kind, plan, normalised = routing
    K = ids.shape[1]
    matrix = np.zeros((1, 4), np.int64)
    p = np.empty(E, np.float32)
    chosen = np.empty(K, np.float32)
    matrix[0, 0] = w
    multiply_one(plan, matrix, x, H, E, address(p), team)
    for e in range(E):
        write(kind, logits, e, p[e])  # rounded before the softmax, as transformers does it
    widen(kind, F32, logits, E, address(p))
    p = np.exp(p - p.max())
    total = p.sum()
    given = ids[0, 0] >= 0
    for k in range(K):
        if not given:
            ids[0, k] = np.argmax(p)
        chosen[k] = p[ids[0, k]]
        p[ids[0, k]] = -1
    total = chosen.sum() if normalised else total
    for k in range(K):
        write(score_kind, scores, k, chosen[k] / total)
    return given or p.max() < chosen[K - 1] and total == total


@kernel
def to_experts(shape, weights, token, room, x, y, normed):
    """Write y [H] = x + attention(norm(x)) and its norm.

    shape : (plan of `attend`, H, what the norms add to mean squares). weights : those of `attend`;
    weights[0] has the addresses of the norms' weights, too."""
    plan, H, (first_eps, second_eps) = shape
    kind = plan[0]
    inside = np.empty(span(plan[0], H), np.uint8)
    at = address(inside)
    rms_norm(kind, x, kind, weights[0, 2], 1, H, first_eps, at)
    attend(plan, weights, token, room, at, H, at)
    for i in range(H):
        write(kind, y, i, weight(kind, x, i) + weight(kind, at, i))
    kept(inside)
    rms_norm(kind, y, kind, weights[0, 3], 1, H, second_eps, normed)


@kernel(error_model="numpy")
def decode_layers(plan, weights, routers, experts, token, rooms, x, chosen, clock, memory, first):
    """How many layers were computed, those before the `first` included; x [H] is written.

    It ends before experts that are elsewhere, or, with ids of −1, before a choice that is not its
    own: that is to be made of the logits in memory[3], and then this layer is the first.

    plan : (shape of `to_experts`, routing of `route`, plans of `gated`, of each layer).
    weights, rooms : of `to_experts`, for each layer. routers : addresses of their weights [L].
    experts : matrices [L, E, 4] of up and of down.
    chosen : (address of the scores [L, K], ids [L, K], times [L, 2]), which are written.
    memory : fp32 [4, max(H, E)].
    """
    (shape, routing, plans), (ups, downs), (w, ids, times) = plan, experts, chosen
    kinds, two_I, _, gate = plans
    kind = routing[0]
    score_kind = routing[1]
    H = shape[1]
    team = token[3]
    (L, K), E = ids.shape, ups.shape[1]
    bounds = np.arange(K + 1)
    tokens = np.zeros(K, np.int64)
    rows = np.arange(K).reshape(1, K)
    parts = np.empty((K, H), np.float32)
    y = address(memory[0])
    normed = address(memory[1])
    out = address(memory[2])
    logits = address(memory[3])
    for i in range(first, L):
        at = w + span(score_kind, i * K)
        mine = ids[i : i + 1]
        if ids[i, 0] < 0:
            to_experts(shape, weights[i], token, rooms[i], x, y, normed)
        if not route(routing, normed, routers[i], E, H, logits, at, mine, team):
            ids[i, 0] = -1
            return i
        up = ups[i][ids[i]]
        down = downs[i][ids[i]]
        if not np.all(up[:, 0]):
            return i
        times[i, 0] = now(*clock)
        gated(
            (kinds[i], two_I, H, gate),
            up,
            down,
            bounds,
            normed,
            1,
            H,
            tokens,
            address(parts),
            team,
        )
        weigh(score_kind, kind, parts, rows, at, out)
        times[i, 1] = now(*clock)
        for h in range(H):
            write(kind, x, h, weight(kind, y, h) + weight(kind, out, h))
    kept(memory)
    return L
