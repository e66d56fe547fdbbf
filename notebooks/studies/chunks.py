"""Loads of prefill chunks in a trace (NPUMoE §4.1).

A chunk is B consecutive prefill tokens, prompts packed; its loads [L, E] are the tokens that each
expert gets."""

from __future__ import annotations

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
