"""The cross-token predictor: which experts the next token will choose at the first MoE layer, from
routing alone.

Layer by layer a router's input can be predicted; the first layer of a forward pass has nobody
before it. While the head and sampling run the disk rests, so its experts are predicted from what
followed the same experts in earlier tokens:

    score[e] = Σ over i, chosen by the token before, of (times e followed i + popularity of e) /
    (times i came + 1)

Shapes: E experts of one layer. Left out: batches as separate sequences, whose tokens count as one.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

#: experts predicted for each that may be prefetched: many of the likeliest are resident
CANDIDATES = 2


class CrossToken:
    """What followed what at the first layer of decode passes; told every step of a run, in order.

    first, last : layers with which the pass before began and ended; None before there was one.
    """

    def __init__(self, E: int) -> None:
        self.first: int | None = None
        self.last: int | None = None
        self._decode, self._now, self._chosen = False, None, []
        self._follows, self._after, self._popular = np.zeros((E, E)), np.ones(E), np.ones(E)

    @property
    def starts(self) -> int | None:
        """The layer that the next pass will begin with."""
        return self.first if self._now is None else self._now[0]

    def begin(self, phase: str) -> None:
        """A forward pass begins, "prefill" or "decode"."""
        if self._now is not None:
            self.first, self.last = self._now
        self._decode, self._now = phase == "decode", None

    def came(self, layer: int, experts: Collection[int]) -> None:
        """A layer of this pass chooses these experts."""
        if self._now is not None:
            self._now = self._now[0], layer
            return
        self._now, chosen = (layer, layer), list(experts)
        self._popular[chosen] += 1
        if self._decode and self.first == layer:
            self._after[self._chosen] += 1
            self._follows[np.ix_(self._chosen, chosen)] += 1
        self._chosen = chosen

    def ends(self, layer: int) -> bool:
        """Whether this is the last layer of a decode pass, as of the pass before, and not its only
        one."""
        return (
            self._decode and layer == self.last != self.first and self._now == (self.first, layer)
        )

    def predict(self) -> list[int]:
        """All experts of layer `first`; those that the next token will most probably choose
        first."""
        prior = self._popular / self._popular.sum()
        score = ((self._follows[self._chosen] + prior) / self._after[self._chosen, None]).sum(0)
        return np.argsort(-score, kind="stable").tolist()
