"""How often experts were chosen, without order, as other programs count it: a calibration, and no
trace.

    .gguf   llama.cpp's importance matrix (`llama-imatrix`): blk.N.ffn_…_exps.weight.counts [E] of
            every MoE layer, and of its router the tokens
    .csv    layer,expert[,count], one line an expert, or one a routing (`llama-moe-trace`, whose files
            are joined by cat, heads and all)"""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from moelab.base.specs import MoESpec
from moelab.store.gguf import read_gguf
from moelab.trace.foreign import MOST, bounded, unknown

HEADS = (["layer", "expert"], ["layer", "expert", "count"])


def has_counts(path: Path) -> bool:
    """Whether a file is one of these, by its name and, of CSV, its head."""
    if path.suffix.lower() != ".csv" or not path.is_file():
        return path.suffix.lower() == ".gguf"
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.readline(80).strip().split(",") in HEADS


def read(path: Path, spec: MoESpec | None, model_id: str) -> tuple[np.ndarray, int, MoESpec, str]:
    """(routings int64 [L, E], tokens, geometry, identity), of a model as `foreign.model_of` knows
    it. Raises ValueError."""
    cells, tokens = _imatrix(bounded(path)) if path.suffix.lower() == ".gguf" else _rows(path)
    number, expert, count = cells.T
    if not count.any() or cells.min() < 0:
        raise ValueError("it counts nothing, or less")
    layers, layer = np.unique(number, return_inverse=True)
    named = tuple(layers.tolist())
    if spec is None:
        if not tokens:
            raise ValueError("it does not say how many experts a token has: give model=")
        K = round(count[layer == 0].sum() / tokens)
        spec, model_id = unknown(path.stem, named, int(expert.max()) + 1, K)
    if not {*named} <= {*spec.moe_layers} or expert.max() >= spec.E:
        raise ValueError(
            f"it counts up to expert {expert.max()} of layers {named}; {spec.name} has {spec.E} in each of "
            f"{spec.moe_layers}"
        )
    spec = replace(spec, moe_layers=named)
    counts = np.zeros((spec.L, spec.E), np.int64)
    np.add.at(counts, (layer, expert), count)
    return counts, max(tokens, -(-int(counts.sum(1).max()) // spec.K)), spec, model_id


def _rows(path: Path) -> tuple[np.ndarray, int]:
    """As `_imatrix`, of CSV; tokens are not known."""
    with open(bounded(path), encoding="utf-8", newline="") as file:
        rows = [[*row, "1"][:3] for row in csv.reader(file) if row not in HEADS]
    return np.array(rows, np.int64).reshape(-1, 3), 0


def _imatrix(path: Path) -> tuple[np.ndarray, int]:
    """(layer, expert, count [n, 3]; tokens that a layer's router saw, 0 if it does not say)."""
    counts = {}
    tokens = 0
    for name, stored in read_gguf(path)[1].items():
        if not name.endswith(".counts") or stored.dtype != "F32":
            continue
        values = stored.read(0, stored.nbytes).view(np.float32)
        experts = r"blk\.(\d+)\.ffn_(?:down|up|gate|gate_up)_exps\.weight\.counts"
        if found := re.fullmatch(experts, name):
            if len(values) > MOST or (values != values.round()).any():
                raise ValueError(
                    f"{name} has {len(values)} counts, or some that are no whole numbers"
                )
            counts.setdefault(int(found[1]), values.astype(np.int64))
        elif re.fullmatch(r"blk\.\d+\.ffn_gate_inp\.weight\.counts", name):
            tokens = int(values.max())
    cells = [(layer, e, count) for layer, of in counts.items() for e, count in enumerate(of)]
    return np.array(cells, np.int64).reshape(-1, 3), tokens
