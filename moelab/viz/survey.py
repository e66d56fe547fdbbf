"""What fills a checkpoint, read as it is, tensor by tensor: bytes, how compressible, what a few-bit
format would lose.

A tensor is looked at by whole rows from its middle, so that a checkpoint of any size is
surveyed within half a gigabyte of reading per thousand tensors, and never more than one
sample is in memory. Tensors that fit their sample are counted whole. Stacked experts [E, …] are
told apart."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moelab.store.fewbit import find_format
from moelab.store.gguf import read_shards
from moelab.store.headers import DTYPES, Stored, read_folder, read_header
from moelab.zipmoe import entropy

#: bytes of a tensor that are read at most
SAMPLE = 512 << 10
LAYER = re.compile(r"(.*?\.\d+)\.(.+)$")
EXPERT = re.compile(r"\bexperts\.(\d+)\.")


class Part(NamedTuple):
    """A tensor, or an expert's part of a stacked one. layer : its prefix, "" outside. expert : None
    if it is none's."""

    name: str
    layer: str
    expert: int | None
    stored: Stored

    @property
    def label(self) -> str:
        """The name after layer and expert."""
        return EXPERT.sub("", self.name.removeprefix(self.layer).lstrip("."))

    @property
    def place(self) -> tuple[Any, ...]:
        """Sorts layer 10 behind layer 9, and experts behind what is none."""
        words = re.split(r"(\d+)", self.layer)
        numbers = [int(word) if word.isdigit() else word for word in words]
        return numbers, -1 if self.expert is None else self.expert, self.name


def parts(checkpoint: str | Path) -> list[Part]:
    """Of a checkpoint folder, a .safetensors file or a model in GGUF, by layer and expert;
    headers are read, no weights.

    Raises FileNotFoundError, ValueError: there are no safetensors files, or one is damaged.
    """
    path = Path(checkpoint)
    if path.suffix == ".gguf":
        tensors = read_shards(path)[2]
    else:
        tensors = read_header(path) if path.is_file() else read_folder(path)[1]
    found = []
    for name, stored in tensors.items():
        layer = match[1] if (match := LAYER.match(name)) else ""
        number = EXPERT.search(name)
        every = range(stored.shape[0] if len(stored.shape) == 3 else 1)
        if not number and re.search("experts|_exps", name) and len(every) > 1:
            found += [Part(f"{name}[{e}]", layer, e, stored.slice(e)) for e in every]
        else:
            found.append(Part(name, layer, int(number[1]) if number else None, stored))
    return sorted(found, key=lambda part: part.place)


def sample(stored: Stored) -> torch.Tensor:
    """Rows [r, n] from the middle of a tensor, about `SAMPLE` bytes of it, or all of them."""
    dtype = DTYPES[stored.dtype]
    n = stored.shape[-1] if stored.shape else 1
    if not stored.nbytes:
        return torch.empty(0, n, dtype=dtype)
    row, rows = n * dtype.itemsize, prod(stored.shape[:-1])
    if rows < 2:
        row, rows = min(stored.nbytes, SAMPLE), 1
    run = min(rows, max(1, SAMPLE // row))
    read = stored.read((rows - run) // 2 * row, run * row)
    return torch.from_numpy(read).view(dtype).view(-1, row // dtype.itemsize)


def bound(part: Part) -> float | None:
    """Compressed size over size with only the exponents coded (`moelab.zipmoe.entropy`); None for
    integers."""
    if part.stored.dtype not in entropy.FORMATS or not part.stored.nbytes:
        return None
    dtype = part.stored.dtype
    return entropy.bound(entropy.joint_counts(sample(part.stored), dtype), dtype)


def error(part: Part, form: str) -> float | None:
    """‖w − w'‖ ÷ ‖w‖ of weights w that become w' in a few-bit format; None where it leaves a tensor
    as it is."""
    stored = part.stored
    if stored.dtype not in ("BF16", "F16", "F32") or len(stored.shape) < 2 or not stored.nbytes:
        return None
    w = sample(stored)
    packing = find_format(form)
    if (blob := packing.compress(w)) is None:
        return None
    made = torch.empty_like(w)
    packing.decompress(blob, made)
    w = w.double()
    return float((w - made.double()).norm() / w.norm()) if w.any() else 0.0
