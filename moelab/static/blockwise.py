"""Blockwise matrix multiplication: any routing in blocks of fixed size (AWS Neuron MoE guide,
"BWMM").

Tokens are packed into blocks of B, each of one expert; a static number N of blocks holds every
routing. Padded slots load no token, consecutive blocks of one expert load its weights once and are
one product [m·B, H], and blocks without any token are not computed, unless `skip_blocks` is off.

    blocks_e = ⌈n_e/B⌉    slot of a choice = rank within its expert + B · (blocks before that expert)
    block_to_expert [N]    token position table [N, B], −1 where a slot is empty

A logical NeuronCore is two physical ones ("LNC2 sharding strategies"), which share each block's
product along H or I, or the blocks, even and odd ones. Here they are virtual, run one after the
other, and form every partial sum; what they would exchange is counted.

    H        [B, H/2] @ [H/2, 2I] → add → gate → [B, I] @ [I, H/2]        B · 2I values a block
    I        [B, H] @ [H, I] → gate → [B, I/2] @ [I/2, H] → add           B · H values a block
    block    each core sums its blocks in an output [T, H] → add          T · H values
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moelab.base.registry import require
from moelab.experts.executor import Executor, add_padded, dispatch, names, usual, zeros
from moelab.experts.located import weighted
from moelab.experts.sharding import part_of, share
from moelab.static.parallelism import blocks_by_code

SHARDINGS = ("H", "I", "block")
CORES = 2  # physical ones of a logical NeuronCore


@dataclass(frozen=True, eq=False)
class BlockMap:
    block_to_expert: (
        Tensor  # int64 [N]; blocks that no token needs are the last expert's, as in the SDK
    )
    tokens: Tensor  # [N, B], whose choice is in a slot; −1 in empty slots
    choices: Tensor  # [N, B], which of its K

    @property
    def live(self) -> Tensor:
        """bool [N], whether a block holds any token."""
        return (self.tokens >= 0).any(1)


def block_map(ids: Tensor, E: int, B: int) -> BlockMap:
    """Map the choices ids [T, K] to blocks of B; within an expert, tokens keep their order."""
    T, K = ids.shape
    d = dispatch(ids, E)
    N = blocks_by_code(T, K, E, B) if T else 0
    before = torch.cat([d.counts.new_zeros(1), (-(-d.counts // B)).cumsum(0)])  # [E + 1]
    # The blocks of experts 0 … e end at before[e + 1]: a block's expert is how many of these ends
    # it has passed.
    block_to_expert = torch.bucketize(torch.arange(N, device=ids.device), before[1:E], right=True)
    expert = torch.arange(E, device=ids.device).repeat_interleave(d.counts)
    slot = before[expert] * B + torch.arange(len(d), device=ids.device) - d.offsets[expert]
    empty = d.tokens.new_full((N * B,), -1)
    tokens, choices = (empty.index_copy(0, slot, of).view(N, B) for of in (d.tokens, d.choices))
    return BlockMap(block_to_expert, tokens, choices)


class Blockwise(Executor):
    """Experts in blocks of fixed size; lossless.

    block_size : B. The SDK's is 512; a CPU needs tens of rows a weight.
    skip_blocks : whether blocks without a token are left out.
    sharding : what two cores share, "H", "I" or "block"; None for one core.

    Attributes, summed over calls:
    weight_loads : of an expert's weights; with "block" those of both cores, with "H" and "I" each core
        loads half.
    exchanged : values that one core sends the other.
    """

    def __init__(
        self, block_size: int = 64, *, skip_blocks: bool = True, sharding: str | None = None
    ) -> None:
        super().__init__()
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be at least 1")
        if sharding is not None:
            require("sharding", sharding, SHARDINGS)
        self.block_size, self.skip_blocks, self.sharding = block_size, skip_blocks, sharding
        self.weight_loads = self.exchanged = 0

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        m = block_map(ids, experts.num_experts, self.block_size)
        live = m.live
        todo = (live.nonzero().flatten() if self.skip_blocks else torch.arange(len(live))).tolist()
        executed = int((m.tokens >= 0).sum())
        self.count(executed, executed, len(todo) * self.block_size)
        cores = CORES if self.sharding == "block" else 1
        parts = [self._sum(m, todo[core::cores], x, weights, experts) for core in range(cores)]
        for part in parts[1:]:
            parts[0] += part
            self.exchanged += part.numel()
        return parts[0].to(x.dtype)

    def _sum(
        self, m: BlockMap, todo: list[int], x: Tensor, weights: Tensor, experts: Any
    ) -> Tensor:
        """What one core makes of its blocks: [T, H]."""
        out = zeros(x, weights, experts)
        for expert, group in groupby(todo, key=m.block_to_expert.tolist().__getitem__):
            run = list(group)
            used = m.tokens[run] >= 0  # slots behind them are empty
            tokens = m.tokens[run][used]
            w = weights[tokens, m.choices[run][used]]
            compute = partial(self._weighted, experts, expert)
            add_padded(out, x, tokens, w, used.numel(), compute)
            self.weight_loads += 1
        return out

    def _weighted(self, experts: Any, expert: int, rows: Tensor, w: Tensor) -> Tensor:
        """An expert's contribution, its product shared along H or I; the architecture's own
        weighting of input or output stays."""
        if self.sharding in (None, "block"):
            return weighted(experts, expert, rows, w)

        def ffn(x: Tensor, weights: Any) -> Tensor:
            parts = [part_of(weights, of, CORES, experts, self.sharding) for of in range(CORES)]
            if self.sharding == "I":
                made = [experts.ffn(x, part) for part in parts]
                self.exchanged += made[0].numel()
                return sum(made)
            up, down = names(experts)
            columns = x.split(share(x.shape[1], CORES), 1)
            made = [experts.linear(of, part, up) for of, part in zip(columns, parts)]
            self.exchanged += made[0].numel()
            h = experts.activate(sum(made))
            return torch.cat([experts.linear(h, part, down) for part in parts], 1)

        if self.sharding == "H" and not usual(experts):
            raise ValueError(
                f"{type(experts.module).__name__} computes an expert in code of its own, which is not cut "
                f"along H: sharding is to be I or block"
            )
        shared = SimpleNamespace(ffn=ffn)
        return type(experts).weighted(shared, rows, w, experts.weights(expert))
