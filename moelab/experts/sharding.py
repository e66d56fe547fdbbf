"""Cutting experts along I (AWS Neuron MoE guide, "LNC2 sharding strategies"): gate and up by
columns, down by rows, so that the parts' results are added.

    gate_up_proj [2I, H] (transposed [H, 2I]; gate and up one after the other, or interleaved)    down_proj [H, I]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: parameters that lead from H to I, and back
UP = ("gate_up_proj", "up_proj", "wi.weight")
DOWN = ("down_proj", "wo.weight")
Weights = dict[str, Tensor]


def share(n: int, parts: int) -> list[int]:
    """How many of n tokens (or columns, or experts) each part gets: consecutive ones, as equal as
    can be."""
    return [(part + 1) * n // parts - part * n // parts for part in range(parts)]


def _part(weights: Weights, part: int, parts: int, experts: Any) -> Weights:
    """One of `parts` parts of an expert; a bias that cannot be cut is with part 0, and else
    zero."""
    transposed = experts.is_transposed
    made = {}
    for name, tensor in weights.items():
        matrix = name.removesuffix("_bias")
        if matrix not in UP + DOWN:
            raise ValueError(
                f"no rule how to cut the experts' tensor {name!r}; known are {', '.join(UP + DOWN)} and "
                f"their biases. Expert parallelism needs none"
            )
        if matrix in UP:  # along its outputs
            dim = tensor.dim() - 1 if transposed else 0
            if experts.has_gate:  # the same part of gate and of up
                concatenated = experts.is_concatenated is not False
                apart = tensor.unflatten(dim, (2, -1) if concatenated else (-1, 2))
                made[name] = _cut(apart, dim + 1 if concatenated else dim, part, parts).flatten(
                    dim, dim + 1
                )
            else:
                made[name] = _cut(tensor, dim, part, parts)
        elif name == matrix:  # along its inputs
            made[name] = _cut(tensor, 0 if transposed else 1, part, parts)
        else:
            made[name] = tensor if part == 0 else torch.zeros_like(tensor)
    return made


def _cut(tensor: Tensor, dim: int, part: int, parts: int) -> Tensor:
    sizes = share(tensor.shape[dim], parts)
    return tensor.narrow(dim, sum(sizes[:part]), sizes[part])


def on_intermediate(weights: Weights, part: int, parts: int, experts: Any) -> Weights:
    """One of `parts` parts of an expert, so that the parts' `experts.ffn` add up; ValueError for
    experts behind which there is a norm."""
    if experts.has_post_expert_norm:
        raise ValueError(
            f"{type(experts.module).__name__} normalises each expert's output, which needs the whole of it: "
            f"spread its experts (ep) instead of cutting them (tp)"
        )
    return _part(weights, part, parts, experts)
