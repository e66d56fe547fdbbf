"""Megatron-LM's router trace (--moe-routing-trace-path): JSON lines, one for each step and layer of a
rank.

    {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
     "num_tokens": 128, "topk": 22, "top_indices": [[12, 45, …], …]}

A step of several tokens begins a sequence and is prefill; steps of one token go on with it. A step
does not say which of its tokens belong to which request, so a batch counts as one sequence. Layers
for predicting several tokens (block "mtp") and files of hidden states and logits beside it are left
out. Source: megatron/core/transformer/moe/router_trace.py, pull request 5220."""

from __future__ import annotations

from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from moelab.base.schema import Count, Size, parse_json, typed
from moelab.trace.foreign import Columns, bounded, integers
from moelab.trace.routing_trace import DECODE, PREFILL

SIDECARS = ("hs_", "logit_")


class Record(TypedDict):
    """A line: what a layer's router chose in a step."""

    step: Count
    layer: Count
    num_tokens: Size
    topk: Size
    top_indices: list
    block: NotRequired[str]
    stage: NotRequired[str]
    rank: NotRequired[int]
    mtp_idx: NotRequired[int]


def read(path: Path) -> Columns:
    """The routing of all steps. Raises ValueError."""
    steps: dict[int, dict[int, np.ndarray]] = {}  # step → layer → ids [tokens, K]
    ignored = set()
    for number, line in enumerate(bounded(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        record = typed(parse_json(line), Record, f"line {number}")
        ignored |= {
            key for key in record.keys() - Record.__annotations__ if not key.startswith(SIDECARS)
        }
        if record.get("block", "decoder") != "decoder":
            ignored.add(f"the block {record['block']}")
            continue
        ids = integers(f"top_indices of line {number}", record["top_indices"], 2)
        if ids.shape != (record["num_tokens"], record["topk"]):
            raise ValueError(
                f"line {number} has top_indices {ids.shape}, which is not what it says"
            )
        layers = steps.setdefault(record["step"], {})
        if record["layer"] in layers:
            raise ValueError(
                f"line {number} has step {record['step']}, layer {record['layer']} again"
            )
        layers[record["layer"]] = ids
    if not steps:
        raise ValueError("it has no record of a decoder's layer")
    return _columns(dict(sorted(steps.items())), tuple(sorted(ignored)))


def _columns(steps: dict[int, dict[int, np.ndarray]], ignored: tuple[str, ...]) -> Columns:
    layers = sorted(next(iter(steps.values())))
    for step, found in steps.items():
        if sorted(found) != layers or len({ids.shape for ids in found.values()}) > 1:
            raise ValueError(
                f"step {step} has other layers, or layers of other sizes, than the first: the file is cut "
                "off, or a pipeline's ranks must be joined"
            )
    ids = [np.stack([found[layer] for layer in layers], 1) for found in steps.values()]
    counts = np.array([len(one) for one in ids])
    begins = (counts > 1) | (np.arange(len(counts)) == 0)
    return Columns(
        ids=np.concatenate(ids),
        phase=np.repeat(np.where(counts > 1, PREFILL, DECODE), counts),
        sequence=np.repeat(begins.cumsum() - 1, counts),
        layers=tuple(layers),
        ignored=ignored,
    )
