"""Evicting what the next tokens will hardly choose, by an expectation of each layer's experts
(ours).

When layer l of token t has been routed, nobody needs its experts until token t + 1 comes to it.
Which ones that will be follows in part from what the router saw, s, and from what the layer used
lately, u; `moelab.speculate.next_token` fits an expectation to both. Every eviction takes the
expert of the smallest one. It covers the first layer, too, which has no layer before it to be
predicted from. Left out: the tokens of a batch apart from each other.

Shapes: s [T, H], u [E], where a use counts half after `half_life` turns of the layer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from moelab.base.specs import ExpertKey
from moelab.cache.policies import _ByPriority


class NextTokenPolicy(_ByPriority):
    """Experts that the next tokens will hardly choose go first, the newcomer included.

    fitted : a `moelab.speculate.NextToken`, or anything with its `expected(layer, s, u)`,
    `half_life` and `shape`."""

    selective = True

    def __init__(self, fitted: Any) -> None:
        super().__init__()
        self._fitted, self._decay, (L, E) = fitted, 0.5 ** (1 / fitted.half_life), fitted.shape
        self._uses, self._touched = np.zeros((L, E), np.float32), np.full((L, E), -1)
        self._turn = [-1] * L  # the step in which a layer last ran
        self._known: list[set[ExpertKey]] = [set() for _ in range(L)]
        self._inputs: dict[int, np.ndarray] = {}
        self._stale: set[int] = set()  # layers that ran since the last victim

    def see(self, layer: int, s: np.ndarray) -> None:
        self._inputs[layer] = s

    def touch(self, key: ExpertKey, step: int) -> None:
        layer, expert = key
        if layer not in self._inputs:
            raise ValueError(
                "the policy next-token decides by what routers see, and was not told: it runs with "
                "a model, not with a recorded run: moelab bench recall_and_misses compares it"
            )
        if self._turn[layer] != step:
            self._turn[layer] = step
            self._uses[layer] *= self._decay
        self._uses[layer, expert] += self._touched[layer, expert] != step
        self._touched[layer, expert] = step
        self._known[layer].add(key)
        self._stale.add(layer)

    def victim(self, resident: Collection[ExpertKey]) -> ExpertKey:
        for layer in self._stale:
            expected = self._fitted.expected(layer, self._inputs[layer], self._uses[layer]).tolist()
            for key in self._known[layer]:
                self.put(key, expected[key.expert])
        self._stale.clear()
        return super().victim(resident)

    def forget(self, key: ExpertKey) -> None:
        super().forget(key)
        self._known[key.layer].discard(key)
