"""Communication volumes of each variant, expected under uniform routing.

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

from math import comb

import torch

from moelab.experts.sharding import share
from moelab.registry import require


def deduplicated(E: int, K: int, W: int) -> float:
    """Expected rows a token, one way: other ranks that hold any of its experts; E need not be a
    multiple of W."""
    return (1 - 1 / W) * sum(1 - comb(E - held, K) / comb(E, K) for held in share(E, W))


def expected(variant: str, E: int, K: int, W: int, tp: int = 1) -> float:
    """Expected rows a token, one way, for a name of `VARIANTS`."""
    rows = {
        "ep": W - 1.0,
        "tp": W - 1.0,
        "ep-a2a": K * (1 - 1 / W),
        "ep-dedup": deduplicated(E, K, W),
        # gathered in the row of tp ranks, each of which sends its copy to its peers
        "tp-ep": tp - 1.0 + tp * deduplicated(E, K, W // tp),
    }
    require("variant", variant, rows)
    return rows[variant]


def gather_ratio(E: int, K: int, dtype: torch.dtype, ids: torch.dtype) -> float:
    """How many times fewer bytes are gathered if routers run on each rank's share of the tokens and
    their selection is gathered (K weights and K ids a token) instead of all E logits.

    Source: Neuron MoE guide, "Router execution in sequence parallel mode". The guide's E/K (16× for
    128 experts, 8 a token) counts the weights alone; with the ids it is 3.2× in bf16 with int64
    ids, 5.3× with int32, 10.7× with uint8."""
    return E * dtype.itemsize / (K * (dtype.itemsize + ids.itemsize))
