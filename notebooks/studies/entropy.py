"""How compressible a checkpoint is: entropies of signs, exponents and mantissas of its tensors,
layers and kinds of tensors, and what a Gaussian's would be.

Source: ZipMoE §2.2 and Fig. 2: exponents of MoE weights have 2.55–2.65 bits of entropy and use
11–15 % of the 256 symbols. Of fp32 `mantissa` and `joint` are those of the leading 7 mantissa bits.

Files are read in slices of at most 64 MB. Integer tensors are left out."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moelab.base.progress import progress
from moelab.store.codecs import entropy
from moelab.store.headers import read_folder, read_header
from moelab.zipmoe.entropy import FORMATS, bound, joint_counts

SLICE = 64 << 20  # bytes read at a time


@dataclass(frozen=True)
class EntropyRow:
    """Entropy of weights, in bits."""

    dtype: str  # a key of `FORMATS`
    weights: int  # how many were counted
    sign: float
    exponent: float
    mantissa: float
    joint: float  # of whole weights
    support: float  # fraction of all possible exponents that occur
    bound: float  # compressed size over size with only the exponents coded: (8 + exponent) / 16 for bf16


def marginals(counts: np.ndarray, dtype: str = "BF16") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Histograms of sign [2], exponent [2^e] and (counted) mantissa [2^m] from a joint one
    [65536]."""
    _, e, m = FORMATS[dtype]
    table = counts[: 1 << (1 + e + m)].reshape(2, 1 << e, 1 << m)
    return table.sum((1, 2)), table.sum((0, 2)), table.sum((0, 1))


def describe(counts: np.ndarray, dtype: str = "BF16") -> EntropyRow:
    """The row of a joint histogram."""
    sign, exponent, mantissa = marginals(counts, dtype)
    return EntropyRow(
        dtype=dtype,
        weights=int(counts.sum()),
        sign=entropy(sign),
        exponent=entropy(exponent),
        mantissa=entropy(mantissa),
        joint=entropy(counts),
        support=float((exponent > 0).mean()),
        bound=bound(counts, dtype),
    )


@dataclass(frozen=True, kw_only=True)
class Scoped(EntropyRow):
    """Of one tensor, or of all tensors of a type in one layer, of one kind, or in the checkpoint."""

    scope: str = "tensor"  # or "layer", "kind", "all"
    name: str  # the tensor; the layer's prefix ("model.layers.3"); the kind; "all"


def gaussian_exponents(sigma: float) -> np.ndarray:
    """Probability of each stored exponent of a bf16 weight that is normal with this standard
    deviation: [256]."""
    edges = [math.erf(2.0**x / (sigma * math.sqrt(2))) for x in range(-127, 2)] + [1.0] * 128
    return np.diff(edges)


def analyse(checkpoint: str | Path) -> list[Scoped]:
    """Entropy of a safetensors checkpoint: a row for each float tensor, layer, kind of tensor, and
    for all.

    checkpoint : a folder with one or many .safetensors files, or one such file.

    Raises FileNotFoundError: there are no such files.    ValueError : a damaged file, or no float tensor.
    """
    path = Path(checkpoint)
    tensors = read_header(path) if path.is_file() else read_folder(path)[1]
    found = [(name, tensor) for name, tensor in tensors.items() if tensor.dtype in FORMATS]
    if not found:
        raise ValueError(f"{checkpoint} has no float tensor; nothing to analyse")
    found.sort(key=lambda item: (item[1].file, item[1].begin))
    rows: list[Scoped] = []
    groups: dict[tuple, np.ndarray] = {}  # (scope, layer, name, dtype) → joint counts
    with progress(total=sum(tensor.nbytes for _, tensor in found), desc="entropy", unit="B") as bar:
        for name, tensor in found:
            prefix, layer, kind = _place(name)
            counts = np.zeros(1 << 16, np.int64)
            for begin in range(0, tensor.nbytes, SLICE):
                piece = tensor.read(begin, min(SLICE, tensor.nbytes - begin))
                counts += joint_counts(piece, tensor.dtype)
                bar.update(len(piece))
            rows.append(Scoped(**vars(describe(counts, tensor.dtype)), name=name))
            keys = [(1, "kind", -1, kind), (2, "all", -1, "all")]
            for key in keys if layer is None else [(0, "layer", layer, prefix), *keys]:
                groups.setdefault((*key, tensor.dtype), np.zeros(1 << 16, np.int64))[:] += counts
    for key in sorted(groups):
        _, scope, _, name, dtype = key
        rows.append(Scoped(**vars(describe(groups[key], dtype)), scope=scope, name=name))
    return rows


def _place(name: str) -> tuple[str, int | None, str]:
    """(prefix of its layer, index of the layer, kind) of a tensor; the first number in a name is
    its layer."""
    match = re.match(r"(.*?\.(\d+))\.(.+)$", name)
    prefix, layer, rest = (match[1], int(match[2]), match[3]) if match else ("", None, name)
    return prefix, layer, re.sub(r"\.\d+(?=\.|$)", "", rest)
