"""Experts of a single token computed where they lie, and the loop that answers a mailbox
(`moelab.offloading.mailbox`), compiled: without the GIL, from the first layer of a token to its last.

    x [H], chosen [K] (−1: not here), w fp32 [K]    →    y fp32 [H] = Σ_k w_k · expert_k(x)
"""

from __future__ import annotations

import numpy as np
from numba import carray

from moelab.kernels.compile import c_library, kernel
from moelab.kernels.emit import acquired, address, now, pause, pointer, released, sleep
from moelab.kernels.feed_forward import gated, weigh
from moelab.kernels.layers import CLOCK
from moelab.kernels.products import F32

#: addresses of the C library's clock_gettime, its clock, and usleep; 0 where there is none
TIMER = *CLOCK, c_library("usleep")
#: nanoseconds that a thread looks for the next post without sleeping: several layers of a token
SPIN = 2_000_000
LONGEST = 1000  # microseconds that it sleeps at a time, and at most an eighth of what it has waited


@kernel
def compute_there(plan, experts, layer, x, chosen, w, y, team):
    """Write fp32 [H] at y; whether all experts are there: nothing is computed if not.

    plan : plans of `gated`, of each layer. experts : (matrices [2, L, E, 4] of up and of down, as if each
    expert's bytes began at 0, by how much they move with these [2, 4], where they begin [L, E]).
    x, w, y : addresses."""
    kinds, two_I, H, gate = plan
    rows, moves, home = experts
    K = len(chosen)
    tables = np.empty((2, K, 4), np.int64)
    places = np.full((1, K), -1)
    n = 0
    for k in range(K):
        e = chosen[k]
        if e >= home.shape[1] or e >= 0 and home[layer, e] == 0:
            return False
        if e >= 0:
            for side in range(2):
                for i in range(4):
                    moved = moves[side, i] * home[layer, e]
                    tables[side, n, i] = rows[side, layer, e, i] + moved
            places[0, k] = n
            n += 1
    up = tables[0, :n]
    down = tables[1, :n]
    bounds = np.arange(n + 1)
    tokens = np.zeros(n, np.int64)
    plans = kinds[layer], two_I, H, gate
    parts = np.empty((n, H), np.float32)
    gated(plans, up, down, bounds, x, 1, H, tokens, address(parts), team)
    weigh(F32, F32, parts, places, w, y)
    return True


@kernel
def serve(plan, experts, box, number, found, timer, team):
    """Answer what is posted of token `number`, until that is over or the mailbox is stopped; returns
    0, or minus one minus the layer of a post that cannot be answered.

    plan, experts : of `compute_there`. box : addresses of `Mailbox`, in the order of its `FIELDS`.
    found : (ids [L, K], times [L, 2] in nanoseconds), which are written."""
    posted, x, away, w, _, done, y, stop, over = box
    ids, times = found
    clock, which, _ = timer
    L, K = ids.shape
    chosen = carray(pointer(away), K, np.int64)
    last = acquired(done)
    while True:
        ticket = _next(posted, stop, over, last, number, timer)
        if ticket == last:
            return 0
        layer = ticket % L
        times[layer, 0] = now(clock, which)
        ids[layer] = chosen
        if ticket // L != number or not compute_there(
            plan, experts, layer, x, ids[layer], w, y, team
        ):
            return -1 - layer
        times[layer, 1] = now(clock, which)
        released(done, ticket)
        last = ticket


@kernel
def _next(posted, stop, over, last, number, timer):
    """Wait for the next ticket and return it; the last one again if the token is over or stopped."""
    clock, which, usleep = timer
    begun = now(clock, which)
    while True:
        if acquired(stop) != 0:
            return last
        ticket = acquired(posted)
        if ticket != last or acquired(over) >= number:
            return ticket
        waited = now(clock, which) - begun
        if usleep != 0 and waited > SPIN:
            sleep(usleep, min(waited // 8000, LONGEST))
        else:
            pause(posted)
