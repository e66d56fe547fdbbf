"""Megatron-LM's router trace (--moe-routing-trace-path): JSON lines, one for each step and layer of a
rank.

    {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
     "num_tokens": 128, "topk": 22, "top_indices": [[12, 45, …], …]}

A step of several tokens begins a sequence and is prefill; steps of one token go on with it. A step
does not say which of its tokens belong to which request, so a batch counts as one sequence. Layers
for predicting several tokens (block "mtp"), files of hidden states and logits beside it and what else
a line has are left out. Source: megatron/core/transformer/moe/router_trace.py, pull request 5220."""

from __future__ import annotations

from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from moelab.base.schema import Count, Size, parse_json, typed
from moelab.trace.foreign import Columns, bounded, integers
from moelab.trace.routing_trace import DECODE, PREFILL


class Record(TypedDict):
    """A line: what a layer's router chose in a step."""

    step: Count
    layer: Count
    num_tokens: Size
    topk: Size
    top_indices: list
    block: NotRequired[str]


def read(path: Path) -> Columns:
    """The routing of all steps. Raises ValueError."""
    found = {}  # (step, layer) → ids [tokens, K]
    for number, line in enumerate(bounded(path).read_text(encoding="utf-8").splitlines(), 1):
        record = typed(parse_json(line), Record, f"line {number}") if line.strip() else None
        if not record or record.get("block", "decoder") != "decoder":
            continue
        at = record["step"], record["layer"]
        if at in found:
            raise ValueError(f"line {number} has step and layer {at} again")
        shape = record["num_tokens"], record["topk"]
        words = f"top_indices of line {number}"
        found[at] = integers(words, record["top_indices"], shape).numpy()
    steps, layers = (sorted({at[n] for at in found}) for n in (0, 1))
    if len(found) < max(len(steps) * len(layers), 1):
        raise ValueError(
            "it has no decoder's layers, or steps of different ones: the file is cut off, or a pipeline's "
            "ranks must be joined"
        )
    ids = [np.stack([found[step, layer] for layer in layers], 1) for step in steps]
    counts = np.array([len(one) for one in ids])
    begins = (counts > 1) | (np.arange(len(counts)) == 0)
    return Columns(
        ids=np.concatenate(ids),
        phase=np.repeat(np.where(counts > 1, PREFILL, DECODE), counts),
        sequence=np.repeat(begins.cumsum() - 1, counts),
        layers=tuple(layers),
    )
