"""What NPUMoE publishes about the Apple Neural Engine: its tables as `data/papers/npumoe.toml` holds
them, with what the device model is fitted to. M2 Ultra and PhiMoE (Phi-3.5-MoE) unless said
otherwise. Where the paper contradicts itself: docs/papers/npumoe.md."""

from __future__ import annotations

from typing import Literal, NamedTuple

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


#: the expert that Table 5 was timed on, PhiMoE's in fp16: H, I, weights and bytes
REFERENCE_H = 4096
REFERENCE_I = 6400
REFERENCE_PARAMS = 3 * REFERENCE_H * REFERENCE_I
REFERENCE_BYTES = 2 * REFERENCE_PARAMS
TABLES = paper("npumoe")
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
