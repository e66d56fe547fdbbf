"""How compressible a checkpoint is: the entropy of its signs, exponents and mantissas, and the
bound that follows.

Source: ZipMoE §2.2 and Fig. 2 (exponents of MoE weights have 2.55–2.65 bits of entropy and use
11–15 % of the 256 symbols), Fig. 3 (the bound). The histograms of the three fields are sums of that
of the 65,536 values of a 16-bit weight. Files are read in slices of at most 64 MB.

Shapes: counts int64 [65536], as [2, 2^e, 2^m] for a type of e exponent and m mantissa bits. Of fp32
the upper 16 bits are counted, so its `mantissa` and `joint` are those of the leading 7 mantissa
bits. Integer tensors are left out."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moelab.progress import progress
from moelab.store.bits import as_bytes, count
from moelab.store.codecs import entropy
from moelab.store.headers import read_folder, read_header

SLICE = 64 << 20  # bytes read at a time


class Format(NamedTuple):
    """A float type in bits: its width, its exponent, and how much of its mantissa is counted."""

    bits: int
    exponent: int
    mantissa: int


#: float types by the names that safetensors gives them
FORMATS = {
    "BF16": Format(16, 8, 7),
    "F16": Format(16, 5, 10),
    "F32": Format(32, 8, 7),
    "F8_E4M3": Format(8, 4, 3),
    "F8_E5M2": Format(8, 5, 2),
}


@dataclass(frozen=True)
class EntropyRow:
    """Entropy, in bits, of one tensor, or of all tensors of a type in one layer, of one kind, or in
    the checkpoint."""

    dtype: str  # a key of `FORMATS`
    weights: int  # how many were counted
    sign: float
    exponent: float
    mantissa: float
    joint: float  # of whole weights
    support: float  # fraction of all possible exponents that occur
    bound: float  # compressed size over size with only the exponents coded: (8 + exponent) / 16 for bf16
    scope: str = "tensor"  # or "layer", "kind", "all"
    name: str = ""  # the tensor; the layer's prefix ("model.layers.3"); the kind; "all"
    layer: int | None = None
    #: the name after the layer, without the expert's number ("mlp.experts.up_proj.weight")
    kind: str = ""


def joint_counts(weights: Any, dtype: str = "BF16", counts: np.ndarray | None = None) -> np.ndarray:
    """Histogram of the bit patterns of `weights` (fp32: of their upper 16 bits): int64 [65536].

    weights : contiguous CPU tensor, array or bytes-like object.
    dtype : what its bytes are, a key of `FORMATS`.
    counts : histogram to add to; by default a new one.
    """
    if dtype not in FORMATS:
        raise ValueError(
            f"no float type {dtype!r}; the entropy analysis knows {', '.join(FORMATS)}"
        )
    counts = np.zeros(1 << 16, np.int64) if counts is None else counts
    data = as_bytes(weights)
    bits = FORMATS[dtype].bits
    words = (
        data if bits == 8 else data.view(np.uint16)[1::2] if bits == 32 else data.view(np.uint16)
    )
    return count(words, 0, counts)


def marginals(counts: np.ndarray, dtype: str = "BF16") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Histograms of sign [2], exponent [2^e] and (counted) mantissa [2^m] from a joint one
    [65536]."""
    _, e, m = FORMATS[dtype]
    table = counts[: 1 << (1 + e + m)].reshape(2, 1 << e, 1 << m)
    return table.sum((1, 2)), table.sum((0, 2)), table.sum((0, 1))


def describe(counts: np.ndarray, dtype: str = "BF16", **of: Any) -> EntropyRow:
    """The row of a joint histogram. of : scope, name, layer, kind."""
    sign, exponent, mantissa = marginals(counts, dtype)
    bits, e, _ = FORMATS[dtype]
    return EntropyRow(
        dtype=dtype,
        weights=int(counts.sum()),
        sign=entropy(sign),
        exponent=(H := entropy(exponent)),
        mantissa=entropy(mantissa),
        joint=entropy(counts),
        support=float((exponent > 0).mean()),
        bound=(bits - e + H) / bits,
        **of,
    )


def gaussian_exponents(sigma: float) -> np.ndarray:
    """Probability of each stored exponent of a bf16 weight that is normal with this standard
    deviation: [256]."""
    edges = [math.erf(2.0**x / (sigma * math.sqrt(2))) for x in range(-127, 2)] + [1.0] * 128
    return np.diff(edges)


def analyse(checkpoint: str | Path) -> list[EntropyRow]:
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
    rows: list[EntropyRow] = []
    groups: dict[tuple, np.ndarray] = {}  # (scope, layer, name, dtype) → joint counts
    with progress(total=sum(tensor.nbytes for _, tensor in found), desc="entropy", unit="B") as bar:
        for name, tensor in found:
            prefix, layer, kind = _place(name)
            counts = np.zeros(1 << 16, np.int64)
            for begin in range(0, tensor.nbytes, SLICE):
                piece = tensor.read(begin, min(SLICE, tensor.nbytes - begin))
                joint_counts(piece, tensor.dtype, counts)
                bar.update(len(piece))
            rows.append(describe(counts, tensor.dtype, name=name, layer=layer, kind=kind))
            keys = [(1, "kind", -1, kind), (2, "all", -1, "all")]
            for key in keys if layer is None else [(0, "layer", layer, prefix), *keys]:
                groups.setdefault((*key, tensor.dtype), np.zeros(1 << 16, np.int64))[:] += counts
    for key in sorted(groups):
        _, scope, layer, name, dtype = key
        of = {"layer": {"layer": layer}, "kind": {"kind": name}}.get(scope, {})
        rows.append(describe(groups[key], dtype, scope=scope, name=name, **of))
    return rows


def _place(name: str) -> tuple[str, int | None, str]:
    """(prefix of its layer, index of the layer, kind) of a tensor; the first number in a name is
    its layer."""
    match = re.match(r"(.*?\.(\d+))\.(.+)$", name)
    prefix, layer, rest = (match[1], int(match[2]), match[3]) if match else ("", None, name)
    return prefix, layer, re.sub(r"\.\d+(?=\.|$)", "", rest)
