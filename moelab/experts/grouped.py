"""Grouped execution: experts of one tier in one dense, static FFN (NPUMoE §4.2, Fig. 11).

Launching each expert's graph by itself costs more than small experts compute. A group's G experts share one launch: a
zero-padded buffer [G·C, H] in G contiguous slices, each expert on its own slice, and a weighted scatter of the valid
rows only. A group runs if any of its experts has a token, and then with all its slices.

    groups [L][…] of (experts, capacity C)    rows computed: G·C a launched group; with overflow="pad" the group is
    launched ⌈max n_e/C⌉ times

The slices are computed one after the other: their weights are different matrices. Left out: which groups run on which
processor (`moelab.ane`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moelab.experts.overflow import rows_for
from moelab.experts.saliency import Saliency
from moelab.experts.tiered import Tiered
from moelab.experts.tiers import Group


class Grouped(Tiered):
    """Groups of experts of equal capacity, each launched as one; lossless with overflow="pad".

    Parameters
    ----------
    groups : [L][…], e.g. from `moelab.experts.tiers.form_groups`; each layer's hold every expert once.
    overflow, order, saliency, chunk, seed : see `StaticExecutor`.

    Attributes
    ----------
    launched : launches of groups.

    Raises
    ------
    ValueError : as `Tiered`; a layer whose groups leave out an expert or name one twice.
    """

    def __init__(self, groups: Sequence[Sequence[Group]], overflow: str = "prune", order: str = "saliency",
                 saliency: Saliency | None = None, chunk: int | None = None, seed: int = 0) -> None:
        capacities = []
        for layer, of in enumerate(groups):
            capacity = {e: group.capacity for group in of for e in group.experts}
            if sorted(e for group in of for e in group.experts) != list(range(len(capacity))):
                raise ValueError(f"the groups of layer {layer} must hold every expert from 0 up exactly once, and hold "
                                 f"{sorted(e for group in of for e in group.experts)}")
            capacities.append([capacity[e] for e in range(len(capacity))])
        super().__init__(capacities, overflow, order, saliency, chunk, seed)
        self.groups = [list(of) for of in groups]
        self.launched = 0

    def launches(self, layer: int, counts: list[int], capacity: Sequence[int]) -> Iterable[tuple[Sequence[int], int]]:
        for group in self.groups[layer]:
            most = max((counts[e] for e in group.experts), default=0)
            if most:
                rows = rows_for(most, group.capacity)
                self.launched += rows // group.capacity if group.capacity else 1
                yield group.experts, rows
