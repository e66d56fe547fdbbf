"""Sharing blocks between the physical cores of a logical NeuronCore (AWS Neuron MoE guide, "LNC2
sharding strategies").

The n cores split each block's product along H or I, or take different blocks and add their outputs
at the end. The cores here are virtual and run one after the other, forming every partial sum.

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

from moelab.experts.executor import names
from moelab.experts.sharding import Weights, cut, share


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
                partial = [experts.linear(of, part, up) for of, part in zip(columns, parts)]
                h = experts.activate(sum(partial))
                y = torch.cat([experts.linear(h, part, down) for part in parts], dim=1)
            else:
                partial = [
                    experts.linear(experts.activate(experts.linear(x, part, up)), part, down)
                    for part in parts
                ]
                y = sum(partial)
            exchanged += sum(of.numel() for of in partial[1:])
            return experts.module.post_expert_norm(y) if experts.has_post_expert_norm else y

        # The architecture's own weighting of an expert's input or output; only its FFN is replaced.
        return type(experts).weighted(SimpleNamespace(ffn=ffn), rows, w, weights), exchanged
