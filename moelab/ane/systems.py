"""What of an MoE layer runs on which unit: operators, architectures, and the systems that NPUMoE
compares, as data.

The Neural Engine runs dense operators of static shape; what indexes, compares or sorts by values
that are known only at run time stays on the CPU (NPUMoE §3.2 "Operator Partitioning", Figure 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

UNITS = ("ane", "cpu")
Unit = Literal[UNITS]


class Operator(NamedTuple):
    """One operator of a layer, the best unit that can run it, and why, with its source."""

    name: str
    unit: Unit
    reason: str


OPERATORS = (
    Operator(
        "input and post-attention norm",
        "cpu",
        "LayerNorm is not supported on the ANE [§3.2; Fig. 4: Layernorm ×]",
    ),
    Operator(
        "Q, K, V and output projection",
        "ane",
        "dense, static once the prompt is cut into chunks; written as 1×1 convolutions [§3.2; Fig. 4: nn.Linear (as Conv2d) ✓]",
    ),
    Operator(
        "rotary embedding",
        "ane",
        "element-wise, positions come in as tensors [Fig. 4: Element-wise ✓]",
    ),
    Operator(
        "KV cache update",
        "ane",
        "the cache has a fixed shape, so no index is dynamic [§3.2 (stateful KV cache update; fixed-shape KV caches)]",
    ),
    Operator(
        "attention scores and values",
        "ane",
        "batched matrix products of static shape [§3.2; Fig. 4: Batched MatMul ✓]",
    ),
    Operator("softmax", "ane", "runs where the scores are [§3.2 (Q/K/V projections, softmax)]"),
    Operator(
        "attention mask",
        "cpu",
        "made by comparing positions; the graph only adds it [§3.2; Fig. 4: Comparison Ops ×]",
    ),
    Operator(
        "router projection",
        "cpu",
        "too small to launch, and its result is needed on the CPU [§3.2]",
    ),
    Operator(
        "top-k of the router",
        "cpu",
        "TopK and argmax are not supported [§3.2; Fig. 4: TopK sampling ×]",
    ),
    Operator("overflow ranking and pruning", "cpu", "sorts by saliency [§3.2 (performed on CPU)]"),
    Operator(
        "gather into expert buffers",
        "cpu",
        "indices are known at run time only [§3.2; Fig. 4: Scatter/Gather ×, Indexing ×]",
    ),
    Operator(
        "padding of expert buffers", "cpu", "fills what the gather leaves empty [§4.2, step 4]"
    ),
    Operator(
        "expert FFN",
        "ane",
        "dense and of static capacity; one graph a group of experts [§3.2, §4.2; Fig. 4: Standard Convolution ✓, Activations ✓, Element-wise ✓]",
    ),
    Operator(
        "scatter with routing weights",
        "cpu",
        "indices are known at run time only [§3.2 (weighted combine); Fig. 4: Scatter/Gather ×]",
    ),
    Operator("residual addition", "cpu", "follows the scatter [Table 4]"),
)

#: architectures whose attention `moelab.ane.coreml.attention_graph` computes, each checked by a
#: test
ATTENTION_GRAPHS = ("mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe")
#: those whose attention is grouped-query attention by its weights and operations, so that
#: a device model can cost it
GROUPED_QUERY = (*ATTENTION_GRAPHS, "deepseek", "gpt_oss", "llama4_text")
#: architectures whose experts no graph here can stand for → why
NO_EXPERT_GRAPHS = {
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
TABLE_2 = ("cpu", "naive", "anemll", "npumoe")
ABLATION = ("base", "base+T", "base+TG", "npumoe")
