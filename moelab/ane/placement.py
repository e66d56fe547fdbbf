"""Which experts' graphs live on the Neural Engine, and which on the CPU (NPUMoE §4.3).

A graph on the ANE costs its launch and all its rows, whether tokens come or not; on the CPU an expert costs what its
tokens cost, and nothing without any. So experts that are rarely chosen, and groups of so few expected tokens that
these do not pay a launch, go to the CPU. The paper gives the criterion and one example (a group of 2 × 8 is too
small), no threshold: `cold_share` and `min_rows` are ours.

    counts [E]     expected [E], tokens that each expert gets in a chunk on average
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moelab.ane.operators import Unit
from moelab.experts.tiers import Group, Tiers, form_groups


def cold_experts(counts: Sequence[float], cold_share: float) -> frozenset[int]:
    """The least popular experts that together get at most `cold_share` of the routings; the busiest never is one."""
    counts = np.asarray(counts, dtype=float)
    order = np.argsort(-counts, kind="stable")[::-1]                        # rarest first, of equals the later
    cumulative = np.cumsum(counts[order])
    within = int((cumulative <= cold_share * cumulative[-1] * (1 + 1e-12)).sum())
    return frozenset(order[:min(within, len(order) - 1)].tolist())


def place(tiers: Tiers, counts: Sequence[float], expected: Sequence[float], size: int, max_experts: int | None,
          cold_share: float, min_rows: float) -> list[tuple[Group, Unit]]:
    """Groups with their units: hot ones first, those of cold experts (always on the CPU) last.

    Parameters
    ----------
    size, max_experts : as in `form_groups`.
    cold_share : share of the routings that cold experts may have together; 0 makes cold only what is never chosen.
    min_rows : expected tokens below which a group does not pay a launch.
    """
    cold = cold_experts(counts, cold_share)
    hot = [e for e in range(len(tiers.capacity)) if e not in cold]
    placed: list[tuple[Group, Unit]] = [
        (group, "ane" if sum(expected[e] for e in group.experts) >= min_rows else "cpu")
        for group in form_groups(tiers, counts, size, max_experts, hot)]
    return placed + [(group, "cpu") for group in form_groups(tiers, counts, size, max_experts, cold)]
