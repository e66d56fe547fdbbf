"""Blockwise matrix multiplication: any routing in blocks of fixed size (AWS Neuron MoE guide,
"BWMM").

Tokens are packed into blocks of B, each of one expert; a static number N of blocks holds every
routing. Padded slots load no token, consecutive blocks of one expert load its weights once and are
one product [m·B, H], and blocks without any token are not computed, unless `skip_blocks` is off.

    blocks_e = ⌈n_e/B⌉    slot of a choice = rank within its expert + B · (blocks before that expert)
    block_to_expert [N]    token position table [N, B], −1 where a slot is empty
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from moelab.experts.executor import Executor, dispatch, zeros
from moelab.static.parallelism import blocks_by_code


@dataclass
class Loads:
    loaded: int = 0
    skipped: int = 0  # that an algorithm without skipping does, too

    @property
    def savings(self) -> float:
        return self.skipped / max(self.loaded + self.skipped, 1)

    def add(self, loaded: int, skipped: int) -> None:
        self.loaded, self.skipped = self.loaded + loaded, self.skipped + skipped


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

    Attributes, summed over calls:
    live : blocks with a token.
    row_loads, weight_loads : of token rows [H] for each slot, and of an expert's weights for each
        block computed.
    """

    def __init__(self, block_size: int = 64, *, skip_blocks: bool = True) -> None:
        super().__init__()
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be at least 1")
        self.block_size, self.skip_blocks, self.live = block_size, skip_blocks, 0
        self.row_loads, self.weight_loads = Loads(), Loads()

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        m = block_map(ids, experts.num_experts, self.block_size)
        live = m.live
        todo = (live.nonzero().flatten() if self.skip_blocks else torch.arange(len(live))).tolist()
        executed = int((m.tokens >= 0).sum())
        self.live += int(live.sum())
        self.count(executed, executed, len(todo) * self.block_size)
        out = zeros(x, weights, experts)
        for expert, group in groupby(todo, key=m.block_to_expert.tolist().__getitem__):
            run = list(group)
            tokens = m.tokens[run].flatten()
            used = (tokens >= 0).nonzero().flatten()
            t = tokens[used]
            w = weights.new_zeros(len(tokens))
            w[used] = weights[t, m.choices[run].flatten()[used]]
            rows = x.new_zeros(len(tokens), x.shape[1])
            rows[used] = x[t]
            y = experts.weighted(rows, w, experts.weights(expert))
            out.index_add_(0, t, y[used].to(out.dtype))
            self.row_loads.add(len(used), len(tokens) - len(used))
            self.weight_loads.add(1, len(run) - 1)
        return out.to(x.dtype)
