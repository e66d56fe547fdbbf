"""Communication volumes of each variant: expected under uniform routing, and exact for given
routings.

Source: AWS Neuron's MoE guide, "Communication Optimization for Expert Parallelism with
All-to-All-v"; it has no formulas. A token's row is sent to the experts (dispatch) and its result
comes back (combine), as many rows each way. Rows a token, one way, over W ranks with E experts, K
of them chosen:

    all-gather               W − 1
    all-to-all-v             K·(1 − 1/W)
    deduplicated             (W − 1)·(1 − C(E − E/W, K) / C(E, K))

So all-to-all-v without deduplication sends more than an all-gather as soon as K > W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, nan

import torch
from torch import Tensor

from moelab.experts.sharding import share
from moelab.registry import require


def deduplicated(E: int, K: int, W: int) -> float:
    """Expected rows a token, one way: other ranks that hold any of its experts; E need not be a
    multiple of W."""
    return (1 - 1 / W) * sum(1 - comb(E - held, K) / comb(E, K) for held in share(E, W))


def expected(variant: str, E: int, K: int, W: int, tp: int = 1) -> float:
    """Expected rows a token, one way, for a name of `VARIANTS`."""
    made = {
        "ep": W - 1.0,
        "tp": W - 1.0,
        "ep-a2a": K * (1 - 1 / W),
        "ep-dedup": deduplicated(E, K, W),
        # gathered in the row of tp ranks, each of which sends its copy to its peers
        "tp-ep": tp - 1.0 + tp * deduplicated(E, K, W // tp),
    }
    require("variant", variant, made)
    return made[variant]


def exact(
    variant: str,
    ranks: Tensor,
    W: int,
    H: int,
    hidden: torch.dtype,
    weights: torch.dtype,
    tp: int = 1,
) -> dict[str, list[int]]:
    """Bytes that each rank sends in one layer, from the ep rank [T, K] of each choice (W/tp for
    none).

    As `Exchange` counts them, metadata included, for tokens that are spread (`run_own`) and then
    gathered ("result").
    hidden, weights : dtypes of the rows and of the routing weights.
    """
    T, K = ranks.shape
    own, ep = share(T, W), W // tp
    row = H * hidden.itemsize
    routed = row + K * (4 + weights.itemsize)  # ids are sent as int32
    single = row + 2 * 4 + weights.itemsize  # expert and which choice
    result = {"result": [(W - 1) * n * row for n in own]}
    if variant in ("ep", "tp"):
        return {
            "counts": [8 * (W - 1)] * W,
            "dispatch": [(W - 1) * n * routed for n in own],
            "combine": [(T - n) * row for n in own],
            **result,
        }
    to = pairs(variant != "ep-a2a", ranks, [sum(own[g * tp : (g + 1) * tp]) for g in range(ep)])
    away = [[n if a != b else 0 for b, n in enumerate(line)] for a, line in enumerate(to)]
    dispatch, combine = [], []
    for rank in range(W):
        g, n = rank // tp, own[rank]
        in_row = sum(own[g * tp : (g + 1) * tp])
        dispatch.append(
            (tp - 1) * n * routed + sum(away[g]) * (single if variant == "ep-a2a" else routed)
        )
        combine.append((in_row - n + sum(line[g] for line in away)) * row)
    return {
        "counts": [8 * (ep - 1 + tp - 1)] * W,
        "dispatch": dispatch,
        "combine": combine,
        **result,
    }


def pairs(deduplicate: bool, ranks: Tensor, own: Sequence[int]) -> list[list[int]]:
    """[W][W]: rows from each rank to each, for tokens that are owned in order."""
    W = len(own)
    here = ranks[:, None, :] == torch.arange(W)[:, None]  # [T, W, K]
    rows = here.any(-1) if deduplicate else here.sum(-1)  # [T, W]
    return [part.sum(0).tolist() for part in rows.split(list(own))]


@dataclass(frozen=True)
class GatherVolume:
    """Bytes that all ranks together receive in an all-gather of T tokens' routing."""

    logits: int  # gathered before selection
    weights: int  # these two after it
    ids: int

    @property
    def ratio(self) -> float:
        """Bytes before selection over those after it; nan for one rank."""
        return self.logits / (self.weights + self.ids) if self.logits else nan


def gather_volume(
    T: int,
    E: int,
    K: int,
    ranks: int,
    dtype: torch.dtype = torch.bfloat16,
    ids: torch.dtype = torch.int64,
) -> GatherVolume:
    """What gathering a router's selection instead of its logits saves, for any split of T tokens
    over the ranks.

    Source: Neuron MoE guide, "Router execution in sequence parallel mode". The guide's E/K (16× for
    128 experts, 8 a token) counts the weights alone; with the ids it is 3.2× in bf16 with int64
    ids, 5.3× with int32, 10.7× with uint8."""
    rows = (ranks - 1) * T
    return GatherVolume(
        rows * E * dtype.itemsize, rows * K * dtype.itemsize, rows * K * ids.itemsize
    )
