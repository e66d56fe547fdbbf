"""BigMoeOnEdge's route trace (--route-trace): CSV, one line for each slot of a token in a layer.

    # model=…/Qwen3-30B-A3B-Q4_K_M.gguf arch=qwen3moe n_layer=48 n_expert=128 n_expert_used=6
    turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
    0,0,0,0,0,49,0.221297,0,3059712

Phase 0 is prefill, step counts the tokens of a turn. Lines stand in the order of execution, prefill
layer by layer over all tokens; here a trace has its tokens in their own order. A turn is a sequence.
`residency`, whether the engine had the expert, and bytes are left out. Source:
github.com/Helldez/BigMoeOnEdge, docs."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np

from moelab.trace.foreign import Columns, bounded

#: columns of integers that are read; `weight` is a float
NEEDED = ("turn", "phase", "step", "layer", "slot", "expert")
KNOWN = (*NEEDED, "weight", "residency", "expert_bytes")


def read(path: Path) -> Columns:
    """The routing of all turns. Raises ValueError."""
    lines = bounded(path).read_text(encoding="utf-8").splitlines()
    rows = csv.reader(line for line in lines if line and not line.startswith("#"))
    head = next(rows, [])
    if missing := {*NEEDED} - {*head}:
        raise ValueError(
            f"it lacks the columns {', '.join(missing)} of a route trace. Counts of experts without order "
            "are a calibration: moelab.Calibration.load"
        )
    fields = dict(zip(head, zip(*rows, strict=True)))
    turn, phase, step, layer, slot, expert = (np.array(fields[name], np.int64) for name in NEEDED)
    # the tokens (turn, step) in order, with −1 in cells that have no line
    tokens, token = np.unique(np.stack([turn, step, phase], 1), axis=0, return_inverse=True)
    layers, layer = np.unique(layer, return_inverse=True)
    shape = len(tokens), len(layers), int(slot.max()) + 1
    at = np.ravel_multi_index((token.ravel(), layer, slot), shape)
    if np.prod(shape, dtype=float) > 64 * len(token) or len(np.unique(at)) < len(at):
        raise ValueError(
            f"its numbers are of {shape} tokens, layers and slots; few of them are there, or one twice"
        )
    ids = np.full(shape, -1)
    ids.flat[at] = expert
    weights = None
    if "weight" in fields:
        weights = np.zeros(shape, np.float32)
        weights.flat[at] = np.array(fields["weight"], np.float32)
    said = re.search(r"^#.*\bn_expert=(\d+)", "\n".join(lines), re.MULTILINE)
    return Columns(
        ids=ids,
        weights=weights,
        sequence=tokens[:, 0],
        position=tokens[:, 1],
        phase=tokens[:, 2],
        layers=tuple(layers.tolist()),
        experts=int(said[1]) if said else None,
        ignored=tuple(name for name in head if name not in KNOWN),
    )
