"""Loads of prefill chunks in a trace, and the capacities that would have held them (NPUMoE §4.1, §5.8).

A chunk is B consecutive prefill tokens, prompts packed; its loads [L, E] are the tokens that each
expert gets."""

from __future__ import annotations

import math

import torch

from moelab.trace import PREFILL, RoutingTrace, counted


def chunk_loads(trace: RoutingTrace, B: int) -> torch.Tensor:
    """Tokens of each expert in each whole chunk of B consecutive prefill tokens, prompts packed:
    int64 [n, L, E]."""
    ids = trace.ids[trace.phase == PREFILL]
    n = len(ids) // B if B > 0 else 0
    if n == 0:
        raise ValueError(
            f"a chunk of B={B} tokens cannot be cut from {len(ids)} prefill tokens; "
            f"choose B between 1 and that, or record more prompts"
        )
    return loads_of_ids(ids[: n * B], B, trace.spec.E)


def loads_of_ids(ids: torch.Tensor, B: int, E: int) -> torch.Tensor:
    """The same of ids [T, L, K], the last chunk with what is left: int64 [⌈T/B⌉, L, E]."""
    return counted(ids, E, torch.arange(len(ids)) // B, -(-len(ids) // B))


def capacity_needed(loads: torch.Tensor, quantile: float = 1.0) -> torch.Tensor:
    """The capacity that would have held every expert's tokens in a share `quantile` of the chunks:
    [L, E].

    loads : int64 [n, L, E] from `chunk_loads`. The answer is a load that occurred, never
    interpolated."""
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile is {quantile}; it must lie between 0 and 1")
    return loads.sort(0).values[max(math.ceil(quantile * len(loads)), 1) - 1]


def overflow(loads: torch.Tensor, capacity: torch.Tensor | float) -> torch.Tensor:
    """Share of a layer's routings beyond the experts' capacity, d_e = max(0, n_e − C) (NPUMoE
    §4.1): [L].

    `loads` is int64 [n, L, E]; `capacity` one number, or one per layer [L, 1] or per expert [L, E].
    """
    return (loads.double() - capacity).clamp(min=0).sum((0, 2)) / loads.sum((0, 2))
