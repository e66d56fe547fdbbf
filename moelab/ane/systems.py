"""What of an MoE layer runs on which unit: architectures, and the systems that NPUMoE compares, as
data.

The Neural Engine runs dense operators of static shape; what indexes, compares or sorts by values
that are known only at run time stays on the CPU (NPUMoE §3.2 "Operator Partitioning", Figure 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moelab.base.files import beside

UNITS = ("ane", "cpu")
Unit = Literal[UNITS]

ATTENTION_GRAPHS, NO_EXPERT_GRAPHS, _SYSTEMS = beside(__file__).values()


def why_no_graph(block: str, model_type: str) -> str:
    """Why the "attention" or the "experts" of an architecture have no graph for the ANE; "" where
    they have one."""
    if block == "attention" and model_type not in ATTENTION_GRAPHS:
        return (
            f"there is no graph for the attention of {model_type!r}, only for that of "
            f"{', '.join(ATTENTION_GRAPHS)}"
        )
    return NO_EXPERT_GRAPHS.get(model_type, "") if block == "experts" else ""


@dataclass(frozen=True)
class ANESystem:
    """How a plan is made."""

    title: str  # the paper's name
    attention: Unit
    experts: Unit
    tiers: bool = (
        False  # without, all experts have the largest tier's capacity, the "worst case" of §4.1
    )
    grouped: bool = False  # several experts a graph
    placement: bool = False  # cold experts and small groups on the CPU
    managed: bool = (
        True  # the program places graphs itself; else Core ML does, at a dispatch per graph
    )


SYSTEMS = {name: ANESystem(**of) for name, of in _SYSTEMS.items()}
