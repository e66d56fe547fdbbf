"""Static capacity tiers: every expert its own fixed number of rows, set by calibration (NPUMoE §4.1).

One capacity for all experts either pads the cold ones or drops tokens of the hot ones. Tiers give each expert a
capacity near its expected load, fixed before the prompt is known; `moelab.experts.tiers` chooses them. An expert with
tokens is launched with its whole capacity of rows, padded with zeros; one without is not launched.

    capacities [L][E]    rows computed: Σ over experts with tokens of C_e, or of ⌈n_e/C_e⌉·C_e with overflow="pad"

Left out: launching experts together, which is `moelab.experts.grouped`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moelab.experts.overflow import StaticExecutor, rows_for
from moelab.experts.saliency import Saliency


class Tiered(StaticExecutor):
    """Experts with static capacities of their own; lossless with overflow="pad".

    Parameters
    ----------
    capacities : [L][E], e.g. `[tiers.capacity for tiers in capacity_tiers(…)]`; 0 is an expert that never runs
        (with "pad": that runs unpadded).
    overflow, order, saliency, chunk, seed : see `StaticExecutor`.

    Raises
    ------
    ValueError : no layer, a negative capacity, and what `StaticExecutor` objects to; when run, a layer or a number of
        experts that the capacities are not for.
    """

    def __init__(self, capacities: Sequence[Sequence[int]], overflow: str = "prune", order: str = "saliency",
                 saliency: Saliency | None = None, chunk: int | None = None, seed: int = 0) -> None:
        super().__init__(overflow, order, saliency, chunk, seed)
        self._capacities = [[int(c) for c in of] for of in capacities]
        if not self._capacities or any(c < 0 for of in self._capacities for c in of):
            raise ValueError("capacities must be a list for each MoE layer, and none of them negative")

    def capacities(self, layer: int, T: int, K: int, E: int) -> Sequence[int]:
        if not 0 <= layer < len(self._capacities) or len(self._capacities[layer]) != E:
            have = ", ".join(str(len(of)) for of in self._capacities)
            raise ValueError(f"layer {layer} has {E} experts, but these capacities are for {len(self._capacities)} "
                             f"layers with {have} experts: calibrate this model")
        return self._capacities[layer]

    def launches(self, layer: int, counts: list[int], capacity: Sequence[int]) -> Iterable[tuple[Sequence[int], int]]:
        return [((e,), rows_for(n, C)) for e, (n, C) in enumerate(zip(counts, capacity)) if n]
