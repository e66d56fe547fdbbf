"""Cutting experts along H or I, and sharing blocks between cores (AWS Neuron MoE guide, "LNC2
sharding strategies").

Along I, gate and up are cut by columns and down by rows: the parts' results are added. Along H,
gate and up are cut by rows and down by columns: sums are completed before the activation.

    gate_up_proj [2I, H] (transposed [H, 2I]; gate and up one after the other, or interleaved)    down_proj [H, I]

The n physical cores of a logical NeuronCore split each block's product along H or I, or take
different blocks and add their outputs at the end. The cores of `Sharding` are virtual and run one
after the other, forming every partial sum.

    H: [B, H/n] @ [H/n, 2I] → add → gate → [B, I] @ [I, H/n]        exchanged: (n − 1) · B · 2I values
    I: [B, H] @ [H, 2I/n] → gate → [B, I/n] @ [I/n, H] → add        exchanged: (n − 1) · B · H
    block: cores have an output [T, H] each → add                   exchanged: (n − 1) · T · H
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moelab.experts.executor import activate, names

#: parameters that lead from H to I, and back
UP, DOWN = ("gate_up_proj", "up_proj", "wi.weight"), ("down_proj", "wo.weight")
Weights = dict[str, Tensor]


def share(n: int, parts: int) -> list[int]:
    """How many of n tokens (or columns, or experts) each part gets: consecutive ones, as equal as
    can be."""
    return [(part + 1) * n // parts - part * n // parts for part in range(parts)]


def cut(weights: Weights, on: str, part: int, parts: int, experts: Any) -> Weights:
    """One of `parts` parts of an expert along "H" or "I"; a bias that cannot be cut is with part 0,
    and else zero."""
    transposed, made = experts.is_transposed, {}
    for name, tensor in weights.items():
        matrix = name.removesuffix("_bias")
        if matrix not in UP + DOWN:
            raise ValueError(
                f"no rule how to cut the experts' tensor {name!r}; known are {', '.join(UP + DOWN)} and "
                f"their biases. Expert parallelism needs none"
            )
        if (matrix in UP) == (on == "I"):  # along its outputs
            dim = tensor.dim() - 1 if transposed else 0
            if matrix in UP and experts.has_gate:  # the same part of gate and of up
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
    """`cut` along I, so that the parts' `experts.ffn` add up; ValueError for experts behind which
    there is a norm."""
    if experts.has_post_expert_norm:
        raise ValueError(
            f"{type(experts.module).__name__} normalises each expert's output, which needs the whole of it: "
            f"spread its experts (ep) instead of cutting them (tp)"
        )
    return cut(weights, "I", part, parts, experts)


@dataclass(frozen=True)
class Sharding:
    """How virtual cores share the work of `moelab.static.blockwise.Blockwise`.

    order : of blocks, for "block": "PING_PONG", core c takes blocks c, c + n, …; "HI_LO", a run of
        consecutive ones, which reloads fewer weights.
    """

    on: str = "H"  # or "I", "block"
    cores: int = 2  # n
    order: str = "PING_PONG"

    def __post_init__(self) -> None:
        if (
            self.on not in ("H", "I", "block")
            or self.order not in ("PING_PONG", "HI_LO")
            or self.cores < 1
        ):
            raise ValueError(
                f"on={self.on!r} must be H, I or block, order={self.order!r} PING_PONG or HI_LO, and "
                f"cores={self.cores} at least 1"
            )

    def split(self, blocks: list[int]) -> list[list[int]]:
        """The blocks of each core."""
        if self.order == "PING_PONG":
            return [blocks[c :: self.cores] for c in range(self.cores)]
        size = -(-len(blocks) // self.cores)
        return [blocks[c * size : (c + 1) * size] for c in range(self.cores)]

    def weighted(
        self, rows: Tensor, w: Tensor, weights: Weights, experts: Any
    ) -> tuple[Tensor, int]:
        """`experts.weighted` in parts (whole for experts that are modules), and how many values
        were exchanged."""
        if not isinstance(experts.has_gate, bool):
            return experts.weighted(rows, w, weights), 0
        (up, down), exchanged = names(experts), 0

        def ffn(x: Tensor, weights: Weights) -> Tensor:
            nonlocal exchanged
            parts = [cut(weights, self.on, part, self.cores, experts) for part in range(self.cores)]
            if self.on == "H":
                columns = x.split(share(x.shape[1], self.cores), dim=1)
                partial = [experts._linear(of, part, up) for of, part in zip(columns, parts)]
                h = activate(experts, sum(partial))
                y = torch.cat([experts._linear(h, part, down) for part in parts], dim=1)
            else:
                partial = [
                    experts._linear(activate(experts, experts._linear(x, part, up)), part, down)
                    for part in parts
                ]
                y = sum(partial)
            exchanged += sum(of.numel() for of in partial[1:])
            return experts.post_expert_norm(y) if experts.has_post_expert_norm else y

        # The architecture's own weighting of an expert's input or output; only its FFN is replaced.
        return type(experts).weighted(SimpleNamespace(ffn=ffn), rows, w, weights), exchanged
