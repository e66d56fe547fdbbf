"""Static capacity tiers and groups of experts (NPUMoE §4.1, §4.2).

A machine that only runs fixed shapes must know in advance how many tokens each expert may get in a chunk of B. One
capacity for all wastes work on cold experts or drops tokens of hot ones, so each layer gets a few capacities (tiers),
from the mean load up to the most popular expert's, and each expert the smallest that holds its expected load. Experts
of equal tier form groups of up to G that run as one graph, the popular together and the rare together.

The paper's estimate of the highest load is r_l · B/E, with the imbalance r_l = max_e n_e / mean_e n_e and a base
capacity B/E. With K experts a token the mean load is K·B/E, so taken literally (`rule="paper"`) the capacities are K
times too small; `rule="topk"` has the factor, and is the default. How tiers lie in between the paper does not say, its
example apart ("top quartile gets 4x base capacity", §1); here they are a geometric sequence, and with r_l = 4 the three
are 1, 2 and 4 times the base. `slack` scales all capacities: less drops more tokens, more pads more. Where loads vary
much from chunk to chunk, 1 gives the drops and padding of NPUMoE's Table 3 (10–22 %, 32–37 %); the steadier loads of
the shipped small model drop that much at 0.75.

    counts [E] or [L, E]     tokens: how many tokens were counted     loads [n, L, E]: tokens in each of n chunks
    capacity [E], each one of `levels`, multiples of 16 (NPUMoE §3.2)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RULES = ("topk", "paper")


@dataclass(frozen=True)
class Tiers:
    """Static capacities of one layer."""

    levels: tuple[int, ...]         # the capacities there are, largest first; fewer than asked for where two coincide
    capacity: tuple[int, ...]       # [E], each expert's, one of `levels`


@dataclass(frozen=True)
class Group:
    """Experts that run as one graph of len(experts) · capacity rows, in this order."""

    experts: tuple[int, ...]
    capacity: int

    @property
    def slots(self) -> int:
        """Rows that the graph computes, G·C."""
        return len(self.experts) * self.capacity


def capacity_tiers(counts: Any, tokens: int, chunk: int, *, levels: int = 3, multiple: int = 16, rule: str = "topk",
                   slack: float = 1.0) -> list[Tiers]:
    """Tiers of every layer from calibrated counts (NPUMoE §4.1).

    counts : [E] or [L, E], routings to each expert (numpy or torch), e.g. `calibration.counts(PREFILL)`.
    tokens : tokens that were counted.
    chunk : B, tokens of a prefill chunk; no capacity is larger than all of them need.
    levels, multiple : tiers a layer; capacities are rounded up to multiples of this.
    rule : "topk", levels from K·B/E to r·K·B/E; "paper", the literal B/E to r·B/E. Expected loads, which choose the
        tier, have the factor K in both, being counted; an expert above the largest level gets the largest.
    slack : factor of expected loads and levels.
    """
    if rule not in RULES:
        raise ValueError(f"there is no rule {rule!r}; there are: {', '.join(RULES)}")
    if tokens < 1 or chunk < 1 or slack <= 0:
        raise ValueError(f"tokens={tokens} and chunk={chunk} must be at least 1, and slack={slack} above 0")
    counts = _layers_of(counts)
    if (counts.sum(1) == 0).any():
        raise ValueError(f"nothing was routed in layer {int((counts.sum(1) == 0).argmax())}; calibrate on prompts "
                         f"that pass all layers")
    expected = slack * counts * (chunk / tokens)                                    # [L, E], sums to slack·K·B
    r = counts.max(1) / counts.mean(1)
    base = expected.mean(1) if rule == "topk" else [slack * chunk / counts.shape[1]] * len(counts)
    return [_tiers(wanted, low, low * ratio, chunk, levels, multiple)
            for wanted, low, ratio in zip(expected, base, r)]


def capacity_tiers_of_loads(loads: Any, chunk: int, *, quantile: float = 0.9, levels: int = 3, multiple: int = 16
                            ) -> list[Tiers]:
    """Tiers of every layer that hold each expert's load in a share `quantile` of the calibrated chunks.

    Not in the paper: the mean load says nothing about how much it varies from chunk to chunk. `loads` [n, L, E] is
    `calibration.chunk_loads(trace, chunk)`; levels lie between the mean and the largest of the loads wanted.
    """
    loads = np.asarray(loads)
    if loads.ndim != 3 or not len(loads):
        raise ValueError(f"loads are chunks by layers by experts, [n, L, E] with n ≥ 1, not {list(loads.shape)}")
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile is {quantile}; it must lie between 0 and 1")
    wanted = np.quantile(loads, quantile, axis=0, method="inverted_cdf").astype(float)     # a load that occurred
    return [_tiers(row, row.mean(), row.max(), chunk, levels, multiple) for row in wanted]


def form_groups(tiers: Tiers, counts: Any, size: int, max_experts: int | None = None,
                experts: Iterable[int] | None = None) -> list[Group]:
    """Groups of experts of equal tier, the popular with the popular (NPUMoE §4.2, §4.3 "Grouping granularity").

    counts : [E], routings to each expert; equal ones in order of their ids.
    size : G, experts a group at most; the coldest of a tier may be a smaller group.
    max_experts : how many experts' weights one graph can hold, if that is less.
    experts : which experts to group; None for all.
    returns : groups from the largest tier to the smallest, and within a tier from hot to cold.
    """
    counts = _layers_of(counts)
    E = len(tiers.capacity)
    if counts.shape != (1, E):
        raise ValueError(f"counts must be [{E}], one number an expert, not {list(counts.shape)}")
    G = size if max_experts is None else min(size, max_experts)
    if G < 1:
        raise ValueError(f"a group holds at least one expert, not size={size}, max_experts={max_experts}")
    chosen = set(range(E) if experts is None else experts)
    hot_first = [e for e in np.argsort(-counts[0], kind="stable").tolist() if e in chosen]
    groups = []
    for level in tiers.levels:
        of_tier = [e for e in hot_first if tiers.capacity[e] == level]
        groups += [Group(tuple(of_tier[i:i + G]), level) for i in range(0, len(of_tier), G)]
    return groups


def round_up(n: float, multiple: int) -> int:
    """The smallest positive multiple that is at least n."""
    return max(-int(-n // multiple), 1) * multiple


def _tiers(wanted: Sequence[float], low: float, high: float, chunk: int, levels: int, multiple: int) -> Tiers:
    """Levels low · (high/low)^(j/(levels − 1)), and for each wanted load the smallest level that holds it."""
    if levels < 1 or multiple < 1:
        raise ValueError(f"levels={levels} and multiple={multiple} must be at least 1")
    ceiling = round_up(chunk, multiple)                     # a token visits an expert once at most
    steps = np.linspace(1, 0, levels) if levels > 1 else [1.0]
    of_level = {min(round_up(round(low * (high / low) ** step, 6) if low > 0 else 0, multiple), ceiling)
                for step in steps}
    ordered = sorted(of_level)
    capacity = tuple(next((level for level in ordered if load <= level), ordered[-1]) for load in wanted)
    return Tiers(tuple(reversed(ordered)), capacity)


def _layers_of(counts: Any) -> np.ndarray:
    """Counts as float64 [L, E]."""
    counts = np.asarray(counts, dtype=float)
    counts = counts[None] if counts.ndim == 1 else counts
    if counts.ndim != 2 or not counts.size or (counts < 0).any():
        raise ValueError(f"counts must be [E] or [L, E], not negative, and not {list(counts.shape)}")
    return counts
