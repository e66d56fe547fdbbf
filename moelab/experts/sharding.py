"""Cutting experts along I or H (AWS Neuron MoE guide, "LNC2 sharding strategies"). Along I, gate
and up by columns, down by rows, so that the parts' results are added; along H the other way round,
so that what is before the activation is added, and the results put together.

    gate_up_proj [2I, H] (transposed [H, 2I]; gate and up one after the other, or interleaved)    down_proj [H, I]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: matrix → which of its dimensions is I, or twice I, where it is not transposed
I_AT = {"gate_up_proj": 0, "up_proj": 0, "wi.weight": 0, "down_proj": 1, "wo.weight": 1}
I_AT |= dict.fromkeys(("mlp.w1", "mlp.v1", "mlp.w2"), 0)
Weights = dict[str, Tensor]


def share(n: int, parts: int) -> list[int]:
    """How many of n tokens (or columns, or experts) each part gets: consecutive ones, as equal as
    can be."""
    return [(part + 1) * n // parts - part * n // parts for part in range(parts)]


def part_of(weights: Weights, part: int, parts: int, experts: Any, on: str = "I") -> Weights:
    """One of `parts` parts of an expert along I or H.

    Raises ValueError: experts behind which there is a norm."""
    if experts.has_post_expert_norm:
        raise ValueError(
            f"{type(experts.module).__name__} normalises each expert's output, which needs the whole of it: "
            f"spread its experts (ep), or blocks of tokens, instead of cutting them"
        )
    return {name: _part(name, w, part, parts, experts, on) for name, w in weights.items()}


def _part(name: str, tensor: Tensor, part: int, parts: int, experts: Any, on: str) -> Tensor:
    """One of `parts` parts of a tensor; a bias that cannot be cut is with part 0, and else zero."""
    matrix = name.removesuffix("_bias")
    if matrix not in I_AT:
        raise ValueError(
            f"no rule how to cut the experts' tensor {name!r}; known are {', '.join(I_AT)} and their "
            f"biases. Expert parallelism needs none"
        )
    dim = I_AT[matrix] if on == "I" else 1 - I_AT[matrix]
    if name != matrix:
        if dim:  # of outputs, all of which each part adds to
            return tensor if part == 0 else torch.zeros_like(tensor)
    elif experts.is_transposed:
        dim = 1 - dim
    if on == "H" or not (experts.has_gate and matrix == "gate_up_proj"):
        return _cut(tensor, dim, part, parts)
    concatenated = experts.is_concatenated is not False  # the same part of gate and of up
    apart = tensor.unflatten(dim, (2, -1) if concatenated else (-1, 2))
    return _cut(apart, dim + concatenated, part, parts).flatten(dim, dim + 1)


def _cut(tensor: Tensor, dim: int, part: int, parts: int) -> Tensor:
    sizes = share(tensor.shape[dim], parts)
    return tensor.narrow(dim, sum(sizes[:part]), sizes[part])
