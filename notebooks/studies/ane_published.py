"""What NPUMoE publishes about the Apple Neural Engine: its tables as `data/papers/npumoe.toml` holds
them, with what the device model is fitted to. M2 Ultra and PhiMoE (Phi-3.5-MoE) unless said
otherwise. Where the paper contradicts itself: docs/papers/npumoe.md."""

from __future__ import annotations

from typing import Literal, NamedTuple

from moelab.ane.systems import Unit
from moelab.base.papers import paper
from moelab.base.schema import Positive, Size


class Sample(NamedTuple):
    """One static configuration that was timed: G experts of capacity C in one graph, all of a
    layer's experts run."""

    G: Size
    C: Size
    mode: Literal["serial", "parallel"]  # parallel: all graphs at once
    ms: Positive  # of one expert slot, of which a layer has E·C
    mj: Positive | None = None


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


TABLES = paper("npumoe")
#: keys of `SYSTEMS`: Table 2, and the steps of Figure 17
TABLE_2 = ("cpu", "naive", "anemll", "npumoe")
ABLATION = ("base", "base+T", "base+TG", "npumoe")
#: NPUMoE Table 5; "C=1..512" has no capacity and is left out
TABLE_5 = tuple(Sample(*row) for row in TABLES["table_5"]["rows"])
#: a row whose energy no power of the others explains; only this very row, another machine's 1x128
#: is no outlier
OUTLIERS = frozenset(s for s in TABLE_5 if (s.G, s.C, s.mode) == (1, 128, "parallel"))
#: NPUMoE Table 3: data set → (share of routings dropped, share of rows padded, accuracy in per cent
#: of fp16, and with dropping)
TABLE_3 = {name: tuple(row) for name, row in TABLES["table_3"]["rows"].items()}
#: Table 4: row → ms of one layer, prompt of 1024 in chunks of 256, by system in the order of Table 2
TABLE_4 = TABLES["table_4"]["rows"]
#: Table 6, Qwen3-30B: system → seconds of (wall, experts, attention); the prompt is not said
TABLE_6 = TABLES["table_6"]["rows"]
#: Table 7, the same runs: system → joules of (all, CPU, ANE, communication)
TABLE_7 = TABLES["table_7"]["rows"]
#: Figure 7, the text: a matrix product on the CPU over one on the ANE, least and most
FIGURE_7 = TABLES["figure_7"]["values"]
#: §5.3: attention takes about 27.6 % longer on one of ANE and CPU than on the other
ATTENTION_CPU = 1 + TABLES["attention"]["value"]
