"""Executors of routed experts. Here: the registry of executors.

Adding an executor is a subclass of `moelab.experts.executor.Executor` and a line in `EXECUTORS`.
"""

from __future__ import annotations

from moelab.base.registry import Entry

#: those that multiply weights in few bits as they lie in memory
AS_THEY_LIE = (
    "fast",
    "gemv",
    "blockwise",
    "neuron",
    "all_experts",
    "capacity",
    "tiered",
    "grouped",
)
EXECUTORS = {
    "exact": Entry("moelab.experts.executor:Exact", "transformers' own arithmetic, bit for bit"),
    "fast": Entry(
        "moelab.experts.fast:Fast", "GEMV for few tokens, GEMM for many, switched where measured"
    ),
    "gemv": Entry("moelab.experts.gemv:GEMV", "decode: each weight read once, from where it lies"),
    "sorted": Entry(
        "moelab.experts.executor:Sorted",
        "tokens sorted by expert, one product each; runs everywhere",
    ),
    "selective": Entry(
        "moelab.experts.executor:Sorted", "only the experts that a step chose (Neuron guide)", True
    ),
    "all_experts": Entry(
        "moelab.static.neuron:AllExperts", "every expert on every token (Neuron guide)", True
    ),
    "blockwise": Entry(
        "moelab.static.blockwise:Blockwise", "blocks of fixed size, dropless (Neuron guide)", True
    ),
    "neuron": Entry(
        "moelab.static.neuron:NeuronRule",
        "the Neuron SDK's choice among its algorithms, by sizes",
        True,
    ),
    "capacity": Entry(
        "moelab.static.static:CapacityFactor", "one capacity for all experts, drops tokens", True
    ),
    "tiered": Entry("moelab.static.static:Tiered", "calibrated static capacities (NPUMoE)", True),
    "grouped": Entry(
        "moelab.static.static:Grouped", "groups of experts in one static launch (NPUMoE)", True
    ),
}
