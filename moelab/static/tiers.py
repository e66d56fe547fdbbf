"""Static capacity tiers and groups of experts (NPUMoE §4.1, §4.2).

Each layer gets a few capacities (tiers) for a chunk of B tokens, from the mean load up to the most
popular expert's, and each expert the smallest that holds its expected load. Experts of equal tier
form groups of up to G that run as one graph, the popular together and the rare together.

The paper's highest load is r · B/E, with the imbalance r = max_e n_e / mean_e n_e. With K experts a
token the mean load is K·B/E, so taken literally (`rule="paper"`) the capacities are K times too
small; the default "topk" has the factor. Tiers lie in a geometric sequence, which the paper does
not say, its example apart ("top quartile gets 4x base capacity", §1). `slack` scales all
capacities: less drops more tokens, more pads more. Where loads vary much, 1 gives the drops and
padding of NPUMoE's Table 3 (10–22 %, 32–37 %); the shipped small model drops that much at 0.75.

    counts [L, E]     tokens: how many tokens were counted
    capacity [E], each one of `levels`, multiples of 16 (NPUMoE §3.2)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moelab.base.registry import require
from moelab.base.specs import MoESpec

RULES = ("topk", "paper")
MULTIPLE = 16  # of capacities


@dataclass(frozen=True)
class Tiers:
    levels: tuple[
        int, ...
    ]  # the capacities there are, largest first; fewer than asked for where two coincide
    capacity: tuple[int, ...]  # [E], each expert's, one of `levels`


@dataclass(frozen=True)
class Group:
    """Experts that run as one graph of len(experts) · capacity rows, in this order."""

    experts: tuple[int, ...]
    capacity: int


def capacity_tiers(
    counts: Any,
    tokens: int,
    chunk: int,
    *,
    levels: int = 3,
    rule: str = "topk",
    slack: float = 1.0,
    capacities: Sequence[int] = (),
) -> list[Tiers]:
    """Tiers of every layer from calibrated counts (NPUMoE §4.1).

    counts : [L, E], routings to each expert (numpy or torch), e.g. `calibration.counts(PREFILL)`.
    tokens : tokens that were counted; chunk : B, tokens of a prefill chunk.
    rule : "topk", levels from K·B/E to r·K·B/E; "paper", the literal B/E to r·B/E. Expected loads,
        which choose the tier, have the factor K in both; an expert above the largest level gets the
        largest.
    capacities : fixed levels of all layers instead, multiples of 16 such as (32, 64, 128) (§5.1).
    """
    require("rule", rule, RULES)
    if any(C < MULTIPLE or C % MULTIPLE for C in capacities):
        raise ValueError(
            f"capacities {', '.join(map(str, capacities))}: each must be a multiple of {MULTIPLE}"
        )
    counts = np.asarray(counts, dtype=float)
    routed = counts.ndim == 2 and counts.min(initial=0) >= 0 and counts.any(1).all()
    if min(tokens, chunk, levels) < 1 or slack <= 0 or not routed:
        raise ValueError(
            f"tokens={tokens}, chunk={chunk} and levels={levels} must be at least 1, slack={slack} "
            f"above 0, and counts, {list(counts.shape)}, [L, E], not negative, with something routed "
            "in every layer: calibrate on prompts that pass all layers"
        )
    expected = slack * counts * (chunk / tokens)  # [L, E], sums to slack·K·B
    r = counts.max(1) / counts.mean(1)
    base = expected.mean(1) if rule == "topk" else [slack * chunk / counts.shape[1]] * len(counts)
    return [
        _tiers(wanted, capacities or low * ratio ** np.linspace(1, 0, levels), chunk)
        for wanted, low, ratio in zip(expected, base, r)
    ]


def form_groups(
    tiers: Tiers, counts: Any, size: int, experts: Collection[int] | None = None
) -> list[Group]:
    """Groups from the largest tier to the smallest, within a tier from hot to cold (NPUMoE §4.2,
    §4.3).

    counts : [E], routings to each expert; equal ones in order of their ids.
    size : G, experts a group at most. experts : which experts to group; None for all.
    """
    hot_first = np.argsort(-np.asarray(counts, dtype=float), kind="stable").tolist()
    if experts is not None:
        hot_first = [e for e in hot_first if e in experts]
    groups = []
    for level in tiers.levels:
        of_tier = [e for e in hot_first if tiers.capacity[e] == level]
        groups += [Group(tuple(of_tier[i : i + size]), level) for i in range(0, len(of_tier), size)]
    return groups


def round_up(n: float, multiple: int) -> int:
    """The smallest positive multiple that is at least n."""
    return max(-int(-n // multiple), 1) * multiple


def _tiers(wanted: Sequence[float], levels: Sequence[float], chunk: int) -> Tiers:
    """The levels as capacities of a chunk, and for each wanted load the smallest that holds it."""
    ceiling = round_up(chunk, MULTIPLE)  # a token visits an expert once at most
    ordered = sorted({min(round_up(round(level, 6), MULTIPLE), ceiling) for level in levels})
    capacity = tuple(
        next((level for level in ordered if load <= level), ordered[-1]) for load in wanted
    )
    return Tiers(tuple(reversed(ordered)), capacity)


def executor_options(name: str, spec: MoESpec, calibration: Any = None) -> dict[str, Any]:
    """Options of the executors "tiered" and "grouped" for a model: capacities that follow from a
    calibration or, without, from a uniform popularity, and that pad rather than drop."""
    counts = np.ones((spec.L, spec.E)) if calibration is None else calibration.counts()
    tiers = capacity_tiers(counts, int(counts[0].sum()) // spec.K or 1, 256)
    if name == "tiered":
        return {"overflow": "pad", "capacities": [of.capacity for of in tiers]}
    groups = [form_groups(of, layer, size=4) for of, layer in zip(tiers, counts)]
    return {"overflow": "pad", "groups": groups}
