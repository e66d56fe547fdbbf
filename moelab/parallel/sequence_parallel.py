"""The router in sequence parallel: every rank routes its part of the tokens, and the selection is gathered.

Source: Neuron MoE guide, "Router execution in sequence parallel mode". The router's weights are small and replicated
(E·H: 0.74 MB a layer of GPT-OSS-120B in bf16, where the guide says 0.07), so a rank can route the tokens that it
holds; gathering ids and weights [T, K] instead of logits [T, E] then saves communication. Here the ranks are a list of
shards in one process, without collectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moelab.experts.routers import LinearRouter, Routing, Top1


def route_in_shards(shards: Sequence[Tensor], router: LinearRouter) -> Routing:
    """Route every shard [T_n, H] by itself and gather the selection [T, K].

    Equal bit for bit to gathering the ranks' logits and selecting from those, since a token's choice depends on its own
    logits only. It equals one router over all T tokens bit for bit wherever the logits do: a GEMM over other row counts
    may round fp32 logits differently in the last bit. So may torch's sigmoid where E is no multiple of 32: on CPUs it
    computes the end of a tensor in another way than the rest.

    Raises
    ------
    ValueError : the rule counts earlier tokens of the sequence (`Top1`), which a rank does not know.
    """
    if isinstance(router.rule, Top1):
        raise ValueError("a top-1 router with capacity cannot route shards of a sequence: who finds room depends on "
                         "the tokens before; split the batch by sequences instead")
    parts = [router(shard) for shard in shards]
    return Routing(torch.cat([part.ids for part in parts]), torch.cat([part.weights for part in parts]))


@dataclass(frozen=True)
class GatherVolume:
    """Bytes that all ranks together receive in an all-gather of T tokens' routing.

    logits : gathered before selection; weights and ids : gathered after it.
    """

    logits: int
    weights: int
    ids: int

    @property
    def ratio(self) -> float:
        """How many times fewer bytes the gather after selection takes; not a number for one rank."""
        return self.logits / (self.weights + self.ids) if self.logits else math.nan


def gather_volume(T: int, E: int, K: int, ranks: int, dtype: torch.dtype = torch.bfloat16,
                  ids: torch.dtype = torch.int64) -> GatherVolume:
    """What gathering after selection saves: exact for any split of T tokens over the ranks.

    Each rank receives the other ranks' rows: (ranks − 1)·T rows in all. The guide's E/K (16× for 128 experts, 8 a
    token) counts the weights alone. The ids must travel too: in bf16 it is then 3.2× with int64 ids, 5.3× with int32
    and 10.7× with one byte, which is enough up to E = 255 (`smallest_ids`).

    dtype : of logits and weights.
    """
    rows = (ranks - 1) * T
    return GatherVolume(rows * E * dtype.itemsize, rows * K * dtype.itemsize, rows * K * ids.itemsize)


def smallest_ids(E: int) -> torch.dtype:
    """The narrowest dtype that holds the ids 0 … E, "no expert" included."""
    return torch.uint8 if E <= 255 else torch.int16 if E <= 32767 else torch.int32
