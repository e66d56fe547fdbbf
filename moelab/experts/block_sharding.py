"""Sharing blocks between cores: on H, on I, or block by block (AWS Neuron MoE guide, "LNC2 sharding strategies").

A logical NeuronCore is two or more physical ones. They can split each block's product along the hidden dimension
(partial sums are added after the first product), along the intermediate dimension (added after the second), or take
different blocks and add their outputs at the end. Here the cores are virtual and run one after the other: every
partial sum is really formed, so the result can be held against that of one core and the exchange counted.

    H: [B, H/n] @ [H/n, 2I] → add → gate → [B, I] @ [I, H/n]        exchanged: (n − 1) · B · 2I values
    I: [B, H] @ [H, 2I/n] → gate → [B, I/n] @ [I/n, H] → add        exchanged: (n − 1) · B · H
    block: cores have an output [T, H] each → add                   exchanged: (n − 1) · T · H

Dimensions that n does not divide are split unevenly. Experts that are modules of their own (Switch) are sharded block
by block only: with H or I their blocks are computed whole, and nothing is exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sharding:
    """How the work is shared.

    on : "H", "I" or "block".
    cores : n.
    order : of blocks, for "block": "PING_PONG", core c takes blocks c, c + n, …; "HI_LO", each a run of consecutive
        ones, which keeps an expert's blocks together and so reloads fewer weights.

    Raises
    ------
    ValueError : an unknown way or order, or fewer than one core.
    """

    on: str = "H"
    cores: int = 2
    order: str = "PING_PONG"

    def __post_init__(self) -> None:
        if self.on not in ("H", "I", "block") or self.order not in ("PING_PONG", "HI_LO") or self.cores < 1:
            raise ValueError(f"on={self.on!r} must be H, I or block, order={self.order!r} PING_PONG or HI_LO, and "
                             f"cores={self.cores} at least 1")

    def split(self, blocks: list[int]) -> list[list[int]]:
        """The blocks of each core: n lists, some perhaps empty."""
        if self.order == "PING_PONG":
            return [blocks[c::self.cores] for c in range(self.cores)]
        share = -(-len(blocks) // self.cores)
        return [blocks[c * share:(c + 1) * share] for c in range(self.cores)]

    def weighted(self, rows: Tensor, w: Tensor, weights: dict[str, Tensor], experts: Any) -> tuple[Tensor, int]:
        """`experts.weighted(rows [n, H], w [n], weights)` in shards, and how many values they exchanged."""
        if not isinstance(getattr(experts, "has_gate", None), bool):
            return experts.weighted(rows, w, weights), 0
        shards = self._on_h if self.on == "H" else self._on_i
        exchanged = []

        def ffn(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
            y, values = shards(x, weights, experts)
            exchanged.append(values)
            return experts.post_expert_norm(y) if experts.has_post_expert_norm else y

        # How the architecture weighs an expert's input or output is its own business; only its FFN is replaced.
        y = type(experts).weighted(SimpleNamespace(ffn=ffn), rows, w, weights)
        return y, sum(exchanged)

    def _on_h(self, x: Tensor, weights: dict[str, Tensor], experts: Any) -> tuple[Tensor, int]:
        up, down, inputs, outputs = _layout(weights, experts)
        partial = [_product(part, W, experts) for part, W in zip(self._cut(x, 1), self._cut(weights[up], inputs))]
        h = _activate(_add(partial, weights.get(up + "_bias")), experts)
        y = torch.cat([_product(h, W, experts) for W in self._cut(weights[down], outputs)], dim=1)
        return _add([y], weights.get(down + "_bias")), sum(part.numel() for part in partial[1:])

    def _on_i(self, x: Tensor, weights: dict[str, Tensor], experts: Any) -> tuple[Tensor, int]:
        up, down, inputs, outputs = _layout(weights, experts)
        columns = self._cut_columns(weights[up], outputs, experts)
        bias = weights.get(up + "_bias")
        biases = [None] * len(columns) if bias is None else self._cut_columns(bias, 0, experts)
        partial = []
        for W, b, D in zip(columns, biases, self._cut(weights[down], inputs)):
            partial.append(_product(_activate(_add([_product(x, W, experts)], b), experts), D, experts))
        return _add(partial, weights.get(down + "_bias")), sum(part.numel() for part in partial[1:])

    def _cut(self, tensor: Tensor, dim: int) -> tuple[Tensor, ...]:
        return torch.tensor_split(tensor, self.cores, dim=dim)

    def _cut_columns(self, tensor: Tensor, dim: int, experts: Any) -> list[Tensor]:
        """Each core's columns of gate and up, in the architecture's own arrangement of the two."""
        if not experts.has_gate:
            return list(self._cut(tensor, dim))
        if getattr(experts, "is_concatenated", True):
            gate, up = tensor.chunk(2, dim)
            return [torch.cat(pair, dim) for pair in zip(self._cut(gate, dim), self._cut(up, dim))]
        pairs = tensor.unflatten(dim, (-1, 2))                          # gate, up, gate, up …
        return [part.flatten(dim, dim + 1) for part in self._cut(pairs, dim)]


def _layout(weights: dict[str, Tensor], experts: Any) -> tuple[str, str, int, int]:
    """Names of the two matrices, and which of their dimensions are inputs and outputs."""
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    return (up, "down_proj", 0, 1) if experts.is_transposed else (up, "down_proj", 1, 0)


def _product(x: Tensor, W: Tensor, experts: Any) -> Tensor:
    return x @ W if experts.is_transposed else F.linear(x, W)


def _activate(h: Tensor, experts: Any) -> Tensor:
    return experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)


def _add(parts: list[Tensor], bias: Tensor | None) -> Tensor:
    total = sum(parts[1:], parts[0])
    return total if bias is None else total + bias
