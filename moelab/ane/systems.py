"""What of an MoE layer runs on which unit: architectures, and the systems that NPUMoE compares, as
data.

The Neural Engine runs dense operators of static shape; what indexes, compares or sorts by values
that are known only at run time stays on the CPU (NPUMoE §3.2 "Operator Partitioning", Figure 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UNITS = ("ane", "cpu")
Unit = Literal[UNITS]


#: architectures whose attention `moelab.ane.coreml.attention_graph` computes, each checked by a
#: test
ATTENTION_GRAPHS = ("mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe")
#: architectures whose experts no graph here can stand for → why
NO_EXPERT_GRAPHS = {
    "dbrx": "DBRX computes its experts by code of its own, of the rows of one matrix",
    "llama4_text": "in Llama 4 the routing weights scale the experts' input, and a graph's output "
    "is what is weighted",
    "switch_transformers": "Switch Transformers are encoder-decoders, and prefill in chunks is for "
    "decoders",
}


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


SYSTEMS = {
    "cpu": ANESystem("Core ML (CPU only)", "cpu", "cpu"),
    "naive": ANESystem("Core ML (naïve)", "cpu", "ane", managed=False),
    "anemll": ANESystem("ANEMLL", "ane", "cpu"),
    "base": ANESystem("Ours-base", "ane", "ane"),
    "base+T": ANESystem("Ours-T", "ane", "ane", tiers=True),
    "base+TG": ANESystem("Ours-TG", "ane", "ane", tiers=True, grouped=True),
    "npumoe": ANESystem(
        "NPUMoE (Ours-all)", "ane", "ane", tiers=True, grouped=True, placement=True
    ),
}
