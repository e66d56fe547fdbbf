"""Capacity factor: every expert the same number of rows, set by the step's size (AWS Neuron MoE guide, "Dropping MoE").

With balanced routing an expert gets T·K/E tokens. A capacity factor cf gives each cf times that; what an expert gets
beyond it is dropped, the later token first. Every expert is computed with its whole capacity, with tokens or without,
as one static batch [E, C, H].

    C = min(⌈T·K·cf/E⌉, T)    rows computed: E·C    full, so that nothing can drop, from cf = E/K on

A batch is one step: its texts share the places, and its padding takes some, the first ones if it is on the left (see
`moelab.experts.overflow`). Left out: priority of first over second choices when dropping, as GShard has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from moelab.experts.overflow import StaticExecutor, rows_for


def capacity_of(T: int, K: int, E: int, factor: float) -> int:
    """C = min(⌈T·K·cf/E⌉, T); T, the full capacity, from cf = E/K on."""
    return T if factor >= E / K else min(math.ceil(T * K * factor / E), T)


class CapacityFactor(StaticExecutor):
    """One capacity for all experts, drops in token order.

    factor : cf > 0; 1.25 is the guide's example.

    Raises
    ------
    ValueError : a factor that is not above 0.
    """

    def __init__(self, factor: float = 1.25) -> None:
        super().__init__("prune", "token", saliency=None, chunk=None, seed=0)
        if not factor > 0:
            raise ValueError(f"the capacity factor is {factor}; it must be above 0, or use a lossless executor")
        self.factor = factor

    def capacities(self, layer: int, T: int, K: int, E: int) -> Sequence[int]:
        return [capacity_of(T, K, E, self.factor)] * E

    def launches(self, layer: int, counts: list[int], capacity: Sequence[int]) -> Iterable[tuple[Sequence[int], int]]:
        return [((e,), rows_for(n, C)) for e, (n, C) in enumerate(zip(counts, capacity))]
