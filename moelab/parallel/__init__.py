"""Experts in parallel on torch.distributed: tensor parallelism, expert parallelism, and both,
behind the seam.

Source: AWS Neuron's MoE guide, "Parallelism Strategies for Routed Experts", "Configuring TP and EP"
and "Future Optimizations" (EPLB, all-to-all-v).

Adding a variant is a subclass of `moelab.parallel.executors.Parallel` and a line in `VARIANTS`.
"""

from __future__ import annotations

from moelab.parallel.exchange import Exchange, Grid
from moelab.parallel.executors import AllGather, AllToAll, Blocks, Deduplicated, Hidden, Parallel
from moelab.parallel.launch import PeerLost, connect, launch
from moelab.parallel.sharding import Placement, ShardedExperts
from moelab.registry import require

#: name → executor
VARIANTS = {
    "ep": AllGather,
    "ep-a2a": AllToAll,
    "ep-dedup": Deduplicated,
    "tp": AllGather,
    "tp-ep": Deduplicated,
    "hidden": Hidden,
    "blocks": Blocks,
}


def degree(variant: str, W: int, tp: int | None = None) -> int:
    """How many of W ranks share an expert: all for "tp" and "hidden", `tp` (or 2) for "tp-ep", 1
    for the others."""
    require("variant", variant, VARIANTS)
    if variant == "tp-ep":
        tp = 2 if tp is None else tp
        if tp < 1 or W % tp:
            raise ValueError(f"tp is {tp}; it must divide the {W} ranks")
        return tp
    fixed = W if variant in ("tp", "hidden") else 1
    if tp not in (None, fixed):
        raise ValueError(
            f"tp is {tp}, but {variant} on {W} ranks means {fixed}; tp-ep lets you choose"
        )
    return fixed


__all__ = [
    "VARIANTS",
    "AllGather",
    "AllToAll",
    "Blocks",
    "Deduplicated",
    "Exchange",
    "Grid",
    "Hidden",
    "Parallel",
    "PeerLost",
    "Placement",
    "ShardedExperts",
    "connect",
    "degree",
    "launch",
]
