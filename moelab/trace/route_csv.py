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
    if missing := [name for name in NEEDED if name not in head]:
        raise ValueError(
            f"its columns are {', '.join(head)[:200]}; a route trace has {', '.join(missing)}, too. Counts "
            "of experts without order are a calibration: moelab.Calibration.load"
        )
    fields = dict(zip(head, zip(*rows, strict=True)))
    if not fields:
        raise ValueError("it has no routing below its head")
    cells = {name: np.array(fields[name], np.int64) for name in NEEDED}
    weights = np.array(fields.get("weight", ["nan"] * len(cells["turn"])), np.float32)
    if min(column.min() for column in cells.values()) < 0:
        raise ValueError("it has numbers below 0")
    said = re.search(r"\bn_expert=(\d+)", "\n".join(line for line in lines if line.startswith("#")))
    found = _columns(cells, weights if "weight" in fields else None)
    found.experts = int(said[1]) if said else None
    found.ignored = tuple(name for name in head if name not in KNOWN)
    return found


def _columns(cells: dict[str, np.ndarray], weights: np.ndarray | None) -> Columns:
    """The tokens (turn, step) in order, with −1 in cells that have no line."""
    tokens, token = np.unique(
        np.stack([cells["turn"], cells["step"], cells["phase"]], 1), axis=0, return_inverse=True
    )
    layers, layer = np.unique(cells["layer"], return_inverse=True)
    shape = len(tokens), len(layers), int(cells["slot"].max()) + 1
    if np.prod(shape, dtype=float) > 64 * len(token):
        raise ValueError(
            f"its numbers are of {shape} tokens, layers and slots, and few of them are there"
        )
    at = np.ravel_multi_index((token.ravel(), layer, cells["slot"]), shape)
    if len(np.unique(at)) != len(at):
        raise ValueError("it has a slot of a token twice")
    ids = np.full(shape, -1)
    ids.reshape(-1)[at] = cells["expert"]
    applied = None
    if weights is not None:
        applied = np.zeros(shape, np.float32)
        applied.reshape(-1)[at] = weights
    _, sequence = np.unique(tokens[:, 0], return_inverse=True)
    return Columns(
        ids=ids,
        weights=applied,
        sequence=sequence,
        position=tokens[:, 1],
        phase=tokens[:, 2],
        layers=tuple(layers.tolist()),
    )
