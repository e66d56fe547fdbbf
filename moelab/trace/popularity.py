"""How often experts were chosen, without order, as other programs count it: a calibration, and no
trace.

    .gguf   llama.cpp's importance matrix (`llama-imatrix`): blk.N.ffn_…_exps.weight.counts [E] of
            every MoE layer, and of its router the tokens
    .csv    layer,expert[,count], one line an expert, or one a routing (`llama-moe-trace`, whose files
            are joined by cat, heads and all)"""

from __future__ import annotations

import csv
import re
import struct
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moelab.base.specs import MoESpec
from moelab.trace.foreign import MOST, bounded, digest

#: GGUF's number types → struct's
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
TEXT, ARRAY = 8, 9
F32 = 0
HEADS = (["layer", "expert"], ["layer", "expert", "count"])
#: more than any file has, of tensors, fields and letters
MANY = 1 << 20


def has_counts(path: Path) -> bool:
    """Whether a file is one of these, by its name and, of CSV, its head."""
    if path.suffix.lower() != ".csv" or not path.is_file():
        return path.suffix.lower() == ".gguf"
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.readline(80).strip().split(",") in HEADS


def read(path: Path, spec: MoESpec | None, model_id: str) -> tuple[np.ndarray, int, MoESpec, str]:
    """(routings int64 [L, E], tokens, geometry, identity), of a model as `foreign.model_of` knows
    it. Raises ValueError."""
    gguf = path.suffix.lower() == ".gguf"
    by_layer, tokens = _imatrix(bounded(path).read_bytes()) if gguf else (_rows(path), None)
    if not by_layer:
        raise ValueError("it counts no experts of any layer")
    layers = tuple(sorted(by_layer))
    if spec is None:
        if not tokens:
            raise ValueError("it does not say how many experts a token has: give model=")
        sizes = {len(counts) for counts in by_layer.values()}
        K = round(sum(by_layer[layers[0]]) / tokens)
        spec = MoESpec(path.stem, "", layers[-1] + 1, layers, max(sizes), K, H=0, I=0)
        model_id = digest("unknown", path.stem, spec.fingerprint())
    if not {*layers} <= {*spec.moe_layers}:
        raise ValueError(
            f"it counts layers {layers}; the MoE layers of {spec.name} are {spec.moe_layers}"
        )
    spec = replace(spec, moe_layers=layers)
    counts = np.zeros((spec.L, spec.E), np.int64)
    for row, layer in zip(counts, layers):
        if len(by_layer[layer]) > spec.E:
            raise ValueError(
                f"it counts expert {len(by_layer[layer]) - 1}; {spec.name} has {spec.E} a layer"
            )
        row[: len(by_layer[layer])] = by_layer[layer]
    if not counts.any() or counts.min() < 0:
        raise ValueError("its counts are all zero, or below it")
    least = -(-int(counts.sum(1).max()) // spec.K)
    return counts, max(tokens or 0, least), spec, model_id


def _rows(path: Path) -> dict[int, list[int]]:
    """Layer → counts of experts 0, 1, …"""
    found: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    with open(bounded(path), encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        if (head := next(rows, [])) not in HEADS:
            raise ValueError(
                f"its columns are {', '.join(head)[:200]}; layer,expert[,count] are read"
            )
        for number, row in enumerate(rows, 2):
            if row in HEADS:
                continue
            values = [int(one) for one in row] if all(one.isdecimal() for one in row) else []
            if len(values) not in (2, 3) or max(values[:2]) > MOST:
                raise ValueError(f"line {number} is {','.join(row)[:80]}; it must be whole numbers")
            found[values[0]][values[1]] += values[2] if len(values) > 2 else 1
    return {
        layer: [counts[expert] for expert in range(max(counts) + 1)]
        for layer, counts in found.items()
    }


def _imatrix(data: bytes) -> tuple[dict[int, list[int]], int | None]:
    """(layer → counts of experts, tokens that a layer's router saw)."""
    counts, tokens = {}, None
    for name, values in _tensors(data):
        if found := re.fullmatch(
            r"blk\.(\d{1,4})\.ffn_(?:down|up|gate|gate_up)_exps\.weight\.counts", name
        ):
            whole = (abs(values) < 2**53).all() and (values == values.round()).all()
            if not whole or len(values) > MOST:
                raise ValueError(
                    f"{name} has {len(values)} counts, or some that are no whole numbers"
                )
            counts.setdefault(int(found[1]), values.astype(np.int64).tolist())
        elif re.fullmatch(r"blk\.\d+\.ffn_gate_inp\.weight\.counts", name):
            tokens = int(values.max())
    return counts, tokens


def _tensors(data: bytes) -> list[tuple[str, np.ndarray]]:
    """Name and flat values of each tensor of 32-bit floats of a GGUF file, version 3."""
    file = _Reader(data)
    if file.take("4s") != b"GGUF" or file.take("I") not in (2, 3):
        raise ValueError("it is no GGUF file of version 2 or 3")
    tensors, fields = file.count(), file.count()
    alignment = 32
    for _ in range(fields):
        key, value = file.text(), file.value(file.take("I"))
        alignment = value if key == "general.alignment" else alignment
    found = []
    for _ in range(tensors):
        name, dims = file.text(), file.take("I")
        numbers = [file.count() for _ in range(dims)]
        kind, offset = file.take("I"), file.take("Q")
        if kind == F32:
            found.append((name, int(np.prod(numbers, dtype=object)), offset))
    begin = -(-file.at // alignment) * alignment
    if any(begin + offset + 4 * n > len(data) for _, n, offset in found):
        raise ValueError("it is cut off: a tensor lies beyond its end")
    return [(name, np.frombuffer(data, "<f4", n, begin + offset)) for name, n, offset in found]


class _Reader:
    """What lies one after the other in bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> Any:
        size = struct.calcsize("<" + form)
        if self.at + size > len(self.data):
            raise ValueError("it is cut off")
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += size
        return value

    def count(self) -> int:
        if (found := self.take("Q")) > MANY:
            raise ValueError(f"it has {found} of something, more than any file")
        return found

    def text(self) -> str:
        return self.take(f"{self.count()}s").decode()

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            inner = self.take("I")
            if inner == ARRAY:
                raise ValueError("it has arrays of arrays")
            return [self.value(inner) for _ in range(self.count())]
        if kind not in SCALARS:
            raise ValueError(f"it has a field of kind {kind}, which GGUF has not")
        return self.take(SCALARS[kind])
