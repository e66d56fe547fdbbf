"""What fills a checkpoint, read as it is, tensor by tensor: bytes, how compressible, what a few-bit
format would lose.

A tensor is looked at by a sample of whole rows at four places, so that a checkpoint of any size is
surveyed within a few hundred megabytes of reading per thousand tensors, and never more than one
sample is in memory. Tensors that fit their sample are counted whole. Stacked experts [E, …] are
told apart."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

from moelab.store.fewbit import find_format
from moelab.store.headers import DTYPES, Stored, read_folder, read_header
from moelab.zipmoe.entropy import FORMATS, describe, joint_counts

#: bytes of a tensor that are read at most, and of all tensors together where there are many
SAMPLE = 4 << 20
TOTAL = 4 << 30
LEAST = 64 << 10
PLACES = 4
LAYER = re.compile(r"(.*?\.\d+)\.(.+)$")
EXPERT = re.compile(r"\bexperts\.(\d+)\.")


@dataclass(frozen=True)
class Part:
    """A tensor, or an expert's part of a stacked one. layer : its prefix, "" outside. expert : None
    if it is none's."""

    name: str
    layer: str
    expert: int | None
    stored: Stored

    @property
    def label(self) -> str:
        """The name after layer and expert."""
        rest = self.name.removeprefix(self.layer).lstrip(".")
        return EXPERT.sub("", rest)


def parts(checkpoint: str | Path) -> list[Part]:
    """Of a checkpoint folder or a .safetensors file, by layer and expert; headers are read, no
    weights.

    Raises FileNotFoundError, ValueError: there are no safetensors files, or one is damaged.
    """
    path = Path(checkpoint)
    tensors = read_header(path) if path.is_file() else read_folder(path)[1]
    found = []
    for name, stored in tensors.items():
        layer = match[1] if (match := LAYER.match(name)) else ""
        if number := EXPERT.search(name):
            found.append(Part(name, layer, int(number[1]), stored))
        elif "experts" in name and len(stored.shape) == 3 and stored.shape[0] > 1:
            found += [
                Part(f"{name}[{e}]", layer, e, stored.slice(e)) for e in range(stored.shape[0])
            ]
        else:
            found.append(Part(name, layer, None, stored))
    return sorted(
        found,
        key=lambda part: (
            _numbers(part.layer),
            part.expert is not None,
            part.expert or 0,
            part.name,
        ),
    )


def _numbers(name: str) -> list[str | int]:
    """Sorts layer 10 behind layer 9."""
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", name)]


def sample_size(found: Iterable[Part]) -> int:
    """Bytes of each tensor that a survey of them reads."""
    return max(LEAST, min(SAMPLE, TOTAL // max(1, len(list(found)))))


def sample(stored: Stored, most: int = SAMPLE) -> torch.Tensor:
    """Rows [r, n] of a tensor, about `most` bytes of it: all of them, or runs of neighbours from
    four places."""
    dtype = DTYPES[stored.dtype]
    n = stored.shape[-1] if stored.shape else 1
    row = n * dtype.itemsize
    rows = prod(stored.shape[:-1])
    if not stored.nbytes:
        return torch.empty(0, n, dtype=dtype)
    if rows < 2:
        return torch.from_numpy(stored.read(0, min(stored.nbytes, most // 64 * 64))).view(dtype)[
            None
        ]
    if stored.nbytes <= most:
        return torch.from_numpy(stored.read(0, stored.nbytes)).view(dtype).view(rows, n)
    run = min(max(1, most // row // PLACES), max(1, rows // PLACES))
    first = np.linspace(0, rows - run, min(PLACES, rows)).astype(int).tolist()
    read = np.concatenate([stored.read(at * row, run * row) for at in first])
    return torch.from_numpy(read).view(dtype).view(-1, n)


def bound(part: Part, most: int = SAMPLE) -> float | None:
    """Compressed size over size with only the exponents coded (`moelab.zipmoe.entropy`); None for
    integers."""
    if part.stored.dtype not in FORMATS or not part.stored.nbytes:
        return None
    return describe(histogram(part, most), part.stored.dtype).bound


def histogram(part: Part, most: int = SAMPLE) -> np.ndarray:
    """Of the bit patterns, int64 [65536]."""
    return joint_counts(sample(part.stored, most), part.stored.dtype)


def error(part: Part, form: str, most: int = SAMPLE) -> float | None:
    """‖w − w'‖ ÷ ‖w‖ of weights w that become w' in a few-bit format; None where it leaves a tensor
    as it is."""
    if part.stored.dtype not in ("BF16", "F16", "F32") or not part.stored.nbytes:
        return None
    w = sample(part.stored, most)
    if len(part.stored.shape) < 2 or (blob := find_format(form).compress(w)) is None:
        return None
    made = torch.empty_like(w)
    find_format(form).decompress(blob, made)
    w = w.double()
    return float((w - made.double()).norm() / w.norm()) if w.any() else 0.0


def popularity(found: Iterable[Part], counts: np.ndarray) -> list[float | None]:
    """How often each part's expert is chosen, over the mean of its layer; None for what is no
    expert's.

    counts : [L, E], as of a trace or a calibration; the layers that have experts are its rows.

    Raises ValueError: the checkpoint has other layers or experts than were counted.
    """
    found = list(found)
    layers = list(dict.fromkeys(part.layer for part in found if part.expert is not None))
    E = 1 + max((part.expert for part in found if part.expert is not None), default=-1)
    if np.shape(counts) != (len(layers), E):
        raise ValueError(
            f"counts are {list(np.shape(counts))}, and the checkpoint has {len(layers)} layers of {E} "
            f"experts; count on this model: moelab.record(model, prompts).counts()"
        )
    counts = np.asarray(counts, float)
    over = counts / np.maximum(counts.mean(1, keepdims=True), 1e-12)
    return [
        None if part.expert is None else float(over[layers.index(part.layer), part.expert])
        for part in found
    ]
