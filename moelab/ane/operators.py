"""Which operator of an MoE layer runs where, as data (NPUMoE §3.2 "Operator Partitioning", Figure 4).

The Neural Engine runs dense operators of static shape; what indexes, compares or sorts by values that are known
only at run time stays on the CPU. Of the dense ones a system may still keep attention or experts on the CPU
(NPUMoE Table 2): `MOVABLE` names the two blocks that have a choice, every other operator has none.
"""

from __future__ import annotations

from dataclasses import dataclass

Unit = str                      # "ane" or "cpu"
UNITS = ("ane", "cpu")


@dataclass(frozen=True)
class Operator:
    """One operator of a layer.

    block : "attention", "router", "dispatch", "experts", "combine" or "norm": the step of the layer it belongs to.
    unit : the best unit that can run it.
    mil : operations of the Model Intermediate Language that it becomes; none where it is never converted.
    """

    name: str
    block: str
    unit: Unit
    reason: str
    source: str
    mil: tuple[str, ...] = ()


OPERATORS = (
    Operator("input and post-attention norm", "norm", "cpu", "LayerNorm is not supported on the ANE",
             "§3.2; Fig. 4: Layernorm ×"),
    Operator("Q, K, V and output projection", "attention", "ane", "dense, static once the prompt is cut into chunks; "
             "written as 1×1 convolutions", "§3.2; Fig. 4: nn.Linear (as Conv2d) ✓", ("conv",)),
    Operator("rotary embedding", "attention", "ane", "element-wise, positions come in as tensors",
             "Fig. 4: Element-wise ✓", ("mul", "add", "concat", "slice_by_index")),
    Operator("KV cache update", "attention", "ane", "the cache has a fixed shape, so no index is dynamic",
             "§3.2 (stateful KV cache update; fixed-shape KV caches)", ("matmul", "concat", "add", "mul")),
    Operator("attention scores and values", "attention", "ane", "batched matrix products of static shape",
             "§3.2; Fig. 4: Batched MatMul ✓", ("matmul",)),
    Operator("softmax", "attention", "ane", "runs where the scores are", "§3.2 (Q/K/V projections, softmax)",
             ("softmax",)),
    Operator("attention mask", "attention", "cpu", "made by comparing positions; the graph only adds it",
             "§3.2; Fig. 4: Comparison Ops ×", ("add",)),
    Operator("router projection", "router", "cpu", "too small to launch, and its result is needed on the CPU", "§3.2"),
    Operator("top-k of the router", "router", "cpu", "TopK and argmax are not supported",
             "§3.2; Fig. 4: TopK sampling ×"),
    Operator("overflow ranking and pruning", "dispatch", "cpu", "sorts by saliency", "§3.2 (performed on CPU)"),
    Operator("gather into expert buffers", "dispatch", "cpu", "indices are known at run time only",
             "§3.2; Fig. 4: Scatter/Gather ×, Indexing ×"),
    Operator("padding of expert buffers", "dispatch", "cpu", "fills what the gather leaves empty", "§4.2, step 4"),
    Operator("expert FFN", "experts", "ane", "dense and of static capacity; one graph a group of experts",
             "§3.2, §4.2; Fig. 4: Standard Convolution ✓, Activations ✓, Element-wise ✓",
             ("conv", "silu", "mul", "split", "concat")),
    Operator("scatter with routing weights", "combine", "cpu", "indices are known at run time only",
             "§3.2 (weighted combine); Fig. 4: Scatter/Gather ×"),
    Operator("residual addition", "combine", "cpu", "follows the scatter", "Table 4"),
)

#: blocks that run on either unit; a system says where (NPUMoE Table 2)
MOVABLE = ("attention", "experts")


def operators(unit: Unit | None = None, block: str | None = None) -> tuple[Operator, ...]:
    """The operators of a unit, of a block, or both."""
    return tuple(op for op in OPERATORS if unit in (None, op.unit) and block in (None, op.block))


def placement(attention: Unit, experts: Unit) -> dict[str, Unit]:
    """Where each operator runs in a system that puts attention and experts there (NPUMoE Table 2).

    Raises
    ------
    ValueError : a unit that there is not.
    """
    for unit in (attention, experts):
        if unit not in UNITS:
            raise ValueError(f"there is no unit {unit!r}; there are: {', '.join(UNITS)}")
    chosen = {"attention": attention, "experts": experts}
    return {op.name: chosen[op.block] if op.unit == "ane" else "cpu" for op in OPERATORS}
