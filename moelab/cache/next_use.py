"""Evicting the expert whose next use is furthest away, by an estimate that learns while it runs
(ours).

Belady's policy evicts what is needed last. How soon a layer needs an expert again follows in part
from how often it was needed lately (what LRFU goes by), and in part from which experts this step and
the one before it have just used: some follow others. The discounted time to the next use,
G = γ^(turns of its layer before it), is estimated from ids alone,

    G = σ(A ln(u + ε) + Σ_r W_r / √n),     r: the n experts of this step and of the step before it

where u is the share of the layer's turns that used the expert, a turn counting half after
`HALF_LIFE` further ones. When the layer runs again, an expert's G should have been 1 if it is used,
and γ times its new G if not (temporal differences: Sutton 1988, "Learning to predict by the methods
of temporal differences"). W follows by a step divided by √n (normalised least mean squares), so
that a token and a prefill's thousand learn at one pace. It begins at 0: an LRFU that may refuse.
The layer that ran last waits longest for its next turn. Left out: token ids, router scores, the
tokens of a batch apart from each other, learning that outlives the run.

Shapes: u, G [L, E]; W [2 E, E] of each layer, rows of this step's experts, then of the step before.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

import numpy as np

from moelab.base.specs import ExpertKey
from moelab.kernels.compile import kernel

DISCOUNT = (
    0.8  # γ; this and what follows were chosen on parts of four traces, before others were seen
)
PRIOR = 0.35  # A
LEAST = 0.002  # ε
HALF_LIFE = 8  # turns of a layer
RATE = 0.8  # of learning
WAIT = 0.2  # what a turn of all layers takes off ln G: about −ln γ


class NextUse:
    """Experts that will be used last go first, the newcomer included."""

    selective = True

    def shape(self, L: int, E: int) -> None:
        self._E = E
        self._known = np.zeros((L, E), np.bool_)  # whether its pool may have it
        self._value, self._recent = np.zeros((2, L, E))  # ln G, u
        self._turn = np.zeros(L, np.int64)  # step in which the layer last ran
        self._weights: dict[int, np.ndarray] = {}
        nothing = np.zeros(0, np.int64)
        self._rows = [nothing] * L  # of the layer's last turn
        self._now = -1
        self._layer = 0
        self._used: set[int] = set()  # experts of the step
        self._learnt = True  # whether it has been learnt from
        self._previous = nothing  # experts of the step before
        self._order: np.ndarray | None = None  # [L, E], lowest first to go

    def touch(self, key: ExpertKey, step: int) -> None:
        if step != self._now:
            self._learn()
            self._now, self._layer, self._used, self._learnt = step, key.layer, set(), False
        self._used.add(key.expert)  # no use if it comes late, from a better pool
        self._known[key] = True
        self._order = None

    def victim(self, resident: Collection[ExpertKey]) -> ExpertKey:
        self._learn()
        if self._order is None:
            self._order = _order(self._value, self._known, self._turn, self._now)
        order = self._order.reshape(-1)
        aside = []
        while (key := ExpertKey(*divmod(int(order.argmin()), self._E))) not in resident:
            aside.append((key, self._order[key]))
            self._order[key] = inf
        for other, value in aside:
            self._order[other] = value
        return key

    def forget(self, key: ExpertKey) -> None:
        self._known[key] = False
        if self._order is not None:
            self._order[key] = inf

    def _learn(self) -> None:
        """The step has used what it uses: once a step."""
        if self._learnt:
            return
        self._learnt = True
        layer = self._layer
        used = np.array(sorted(self._used))
        if layer not in self._weights:
            self._weights[layer] = np.zeros((2 * self._E, self._E), np.float32)
        rows = np.concatenate([used, self._previous + self._E])
        of = self._weights[layer], self._recent[layer], self._value[layer]
        _turn(*of, used, rows, self._rows[layer])
        self._rows[layer], self._previous = rows, used
        self._turn[layer] = self._now


@kernel
def _turn(W, u, value, used, rows, before):
    """ln G of a layer that runs, and what W learns from the last one.

    W [2 E, E], u and value = ln G [E] are updated; rows, before : rows of W of this turn and of the
    layer's last one, of which the first turn has none."""
    E = len(u)
    decay = 0.5 ** (1 / HALF_LIFE)
    uses = np.zeros(E)
    uses[used] = 1
    learnt = np.zeros(E)
    for row in rows:
        learnt += W[row]
    error = np.empty(E)
    for e in range(E):
        u[e] = decay * u[e] + (1 - decay) * uses[e]
        now = 1 / (1 + np.exp(-PRIOR * np.log(u[e] + LEAST) - learnt[e] / np.sqrt(len(rows))))
        error[e] = (1.0 if uses[e] else DISCOUNT * now) - np.exp(value[e])
        value[e] = np.log(now)
    for row in before:
        W[row] += (error * (RATE / np.sqrt(len(before)))).astype(np.float32)


@kernel
def _order(value, known, turn, now):
    """ln G less the wait for the layer's next turn, [L, E]; inf where unknown. A layer that the
    turns pass by, such as an encoder's while text is generated, waits ever longer."""
    L, E = value.shape
    order = np.full((L, E), np.inf)
    for layer in range(L):
        since = now - turn[layer]
        wait = (L - since if since < L else since) * (WAIT / L)
        for e in range(E):
            if known[layer, e]:
                order[layer, e] = value[layer, e] - wait
    return order
