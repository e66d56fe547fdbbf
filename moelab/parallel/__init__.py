"""Experts in parallel on torch.distributed: tensor parallelism, expert parallelism, and both,
behind the seam.

Source: AWS Neuron's MoE guide, "Parallelism Strategies for Routed Experts", "Configuring TP and EP"
and "Future Optimizations" (EPLB, all-to-all-v).

Adding a variant is a subclass of `moelab.parallel.executors.Parallel` and a line in `VARIANTS`.
"""

from __future__ import annotations

from moelab.base.registry import require
from moelab.parallel.executors import AllGather, AllToAll, Deduplicated
from moelab.parallel.launch import PeerLost, connect, launch

#: name → executor
VARIANTS = {
    "ep": AllGather,
    "ep-a2a": AllToAll,
    "ep-dedup": Deduplicated,
    "tp": AllGather,
    "tp-ep": Deduplicated,
}


def degree(variant: str, W: int, tp: int | None = None) -> int:
    """How many of W ranks share an expert: all for "tp", `tp` (or 2) for "tp-ep", 1 for the
    others."""
    require("variant", variant, VARIANTS)
    fixed = {"tp": W, "tp-ep": 2 if tp is None else tp}.get(variant, 1)
    if fixed < 1 or W % fixed:
        raise ValueError(f"tp is {fixed}; it must divide the {W} ranks")
    if tp not in (None, fixed):
        raise ValueError(
            f"tp is {tp}, but {variant} on {W} ranks means {fixed}; tp-ep lets you choose"
        )
    return fixed


__all__ = ["VARIANTS", "PeerLost", "connect", "degree", "launch"]
