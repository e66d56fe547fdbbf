"""How compressible a checkpoint is: the entropy of its signs, exponents and mantissas, and the bound that follows.

Source: ZipMoE §2.2 and Fig. 2 (exponents of MoE weights have 2.55–2.65 bits of entropy and use 11–15 % of the 256
symbols), Fig. 3 (the bound). A histogram of the 65,536 values of a 16-bit weight holds all that is needed: its
sums are the histograms of the three fields. The files are read in slices of at most 64 MB into one buffer, so
memory does not grow with the checkpoint; layers and kinds of tensor add up the histograms of their tensors.

Shapes: counts int64 [65536], as [2, 2^e, 2^m] for a type of e exponent and m mantissa bits. Of fp32 the upper 16
bits are counted, so its `mantissa` and `joint` are those of the leading 7 mantissa bits.
Left out: entropy of order 1 or more, integer tensors, checkpoints that are not safetensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moelab.progress import progress
from moelab.store.bits import as_bytes, numba

SLICE = 64 << 20                # bytes read at a time
_BLOCK = 1 << 18                # weights counted at a time by numpy, which widens them to 8 bytes


class Format(NamedTuple):
    """A float type: its width in bits, how many of them are exponent, and how many mantissa bits are counted."""

    bits: int
    exponent: int
    mantissa: int


#: float types by the names that safetensors gives them
FORMATS = {"BF16": Format(16, 8, 7), "F16": Format(16, 5, 10), "F32": Format(32, 8, 7),
           "F8_E4M3": Format(8, 4, 3), "F8_E5M2": Format(8, 5, 2)}


@dataclass(frozen=True)
class EntropyRow:
    """Entropy of one tensor, or of all tensors of a type in one layer, of one kind, or in the checkpoint.

    Attributes
    ----------
    scope : "tensor", "layer", "kind" or "all".
    name : the tensor; the layer's prefix ("model.layers.3"); the kind; "all".
    layer : index of the layer, or None.
    kind : a tensor's name after its layer, without its expert's number ("mlp.experts.up_proj.weight"), or "".
    dtype : a key of `FORMATS`.
    weights : how many weights were counted.
    sign, exponent, mantissa, joint : entropy in bits; joint is that of whole weights.
    support : fraction of all possible exponents that occur at all.
    bound : compressed size over size if the exponents are coded at their entropy and nothing else is compressed;
        (8 + exponent) / 16 for bf16.
    """

    scope: str
    name: str
    layer: int | None
    kind: str
    dtype: str
    weights: int
    sign: float
    exponent: float
    mantissa: float
    joint: float
    support: float
    bound: float


def _count_numpy(words: np.ndarray, counts: np.ndarray) -> None:
    for i in range(0, len(words), _BLOCK):
        counts += np.bincount(words[i:i + _BLOCK], minlength=len(counts))


def _count_loop(words, counts):
    for i in range(len(words)):
        counts[words[i]] += 1


#: implementation → function that adds the values of `words` to `counts`; the first one is used
KERNELS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {"numpy": _count_numpy}
if numba is not None:
    from moelab.kernels.compile import kernel
    KERNELS = {"numba": kernel(_count_loop), **KERNELS}


def joint_counts(weights: Any, dtype: str = "BF16", counts: np.ndarray | None = None) -> np.ndarray:
    """Histogram of the bit patterns of `weights` (fp32: of their upper 16 bits): int64 [65536].

    Parameters
    ----------
    weights : contiguous CPU tensor, array or bytes-like object.
    dtype : what its bytes are, a key of `FORMATS`.
    counts : histogram to add to; by default a new one.
    """
    if dtype not in FORMATS:
        raise ValueError(f"no float type {dtype!r}; the entropy analysis knows {', '.join(FORMATS)}")
    counts = np.zeros(1 << 16, np.int64) if counts is None else counts
    data, bits = as_bytes(weights), FORMATS[dtype].bits
    words = data if bits == 8 else data.view(np.uint16)[1::2] if bits == 32 else data.view(np.uint16)
    next(iter(KERNELS.values()))(words, counts)
    return counts


def marginals(counts: np.ndarray, dtype: str = "BF16") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Histograms of sign [2], exponent [2^e] and (counted) mantissa [2^m] from a joint one [65536]."""
    _, e, m = FORMATS[dtype]
    table = counts[:1 << (1 + e + m)].reshape(2, 1 << e, 1 << m)
    return table.sum((1, 2)), table.sum((0, 2)), table.sum((0, 1))


def entropy(counts: np.ndarray) -> float:
    """Shannon entropy, in bits a symbol, of a histogram; 0 for an empty one."""
    p = counts[counts > 0] / max(counts.sum(), 1)
    return float(abs((p * np.log2(p)).sum()))       # abs: −0.0 for a single symbol


def describe(counts: np.ndarray, dtype: str = "BF16", *, scope: str = "tensor", name: str = "",
             layer: int | None = None, kind: str = "") -> EntropyRow:
    """The row of a joint histogram."""
    sign, exponent, mantissa = marginals(counts, dtype)
    bits, e, _ = FORMATS[dtype]
    H = entropy(exponent)
    return EntropyRow(scope, name, layer, kind, dtype, int(counts.sum()), entropy(sign), H, entropy(mantissa),
                      entropy(counts), float((exponent > 0).mean()), (bits - e + H) / bits)


def analyse(checkpoint: str | Path, select: Callable[[str], bool] | None = None) -> list[EntropyRow]:
    """Entropy of a safetensors checkpoint: a row for each float tensor, layer, kind of tensor, and for all.

    Parameters
    ----------
    checkpoint : a folder with one or many .safetensors files, or one such file. It is only read.
    select : tensor name → whether to count it, e.g. `lambda name: ".experts." in name`; by default all.

    Raises
    ------
    FileNotFoundError : there are no such files.
    ValueError : a file that is not safetensors or is shorter than it says; `select` leaves nothing.
    """
    found = [t for t in _tensors(Path(checkpoint)) if t.dtype in FORMATS and (select is None or select(t.name))]
    if not found:
        raise ValueError(f"{checkpoint} has no float tensor that `select` lets through; nothing to analyse")
    rows: list[EntropyRow] = []
    groups: dict[tuple, np.ndarray] = {}        # (scope, name, layer, kind, dtype) → joint counts
    buffer = bytearray(min(SLICE, max(t.end - t.begin for t in found)))
    with progress(total=sum(t.end - t.begin for t in found), desc="entropy", unit="B") as bar:
        for tensor in found:
            prefix, layer, kind = _place(tensor.name)
            counts = np.zeros(1 << 16, np.int64)
            for piece in _slices(tensor, buffer):
                joint_counts(piece, tensor.dtype, counts)
                bar.update(len(piece))
            rows.append(describe(counts, tensor.dtype, name=tensor.name, layer=layer, kind=kind))
            keys = [("kind", kind, None, kind), ("all", "all", None, "")]
            for key in keys if layer is None else [("layer", prefix, layer, ""), *keys]:
                groups.setdefault((*key, tensor.dtype), np.zeros(1 << 16, np.int64))[:] += counts
    order = {"layer": 0, "kind": 1, "all": 2}
    for key in sorted(groups, key=lambda key: (order[key[0]], -1 if key[2] is None else key[2], key[1], key[4])):
        scope, name, layer, kind, dtype = key
        rows.append(describe(groups[key], dtype, scope=scope, name=name, layer=layer, kind=kind))
    return rows


# ------------------------------------------------------------------------------------------------ reading slices

class _Tensor(NamedTuple):
    file: Path
    name: str
    dtype: str
    begin: int          # first byte in the file
    end: int


def _tensors(checkpoint: Path) -> Iterator[_Tensor]:
    """Every tensor of a checkpoint, in the order of the files' bytes."""
    index = checkpoint / "model.safetensors.index.json"
    if checkpoint.is_file():
        files = [checkpoint]
    elif index.is_file():       # a folder may hold a second copy of the weights that the index doesn't name
        files = [checkpoint / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = sorted(checkpoint.glob("*.safetensors"))
    if not files or not all(file.is_file() for file in files):
        missing = [file.name for file in files if not file.is_file()]
        raise FileNotFoundError(f"{checkpoint}: " + (f"{', '.join(missing)} is missing" if missing else
                                "no .safetensors file here; give a checkpoint's folder or one of its files"))
    for file in files:
        with open(file, "rb") as f:
            size = file.stat().st_size
            length = int.from_bytes(f.read(8), "little")
            try:
                if length > size - 8:
                    raise ValueError(f"its header should be {length} bytes long")
                header = json.loads(f.read(length))
                header.pop("__metadata__", None)
                entries = sorted((*entry["data_offsets"], name, entry["dtype"]) for name, entry in header.items())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{file} ({size} bytes) is not a safetensors file: {error}") from None
        for begin, end, name, dtype in entries:
            if not 0 <= begin <= end <= size - 8 - length:
                raise ValueError(f"{file} ({size} bytes) is cut off: {name} should end at byte {8 + length + end}; "
                                 f"download the file again")
            yield _Tensor(file, name, dtype, 8 + length + begin, 8 + length + end)


def _slices(tensor: _Tensor, buffer: bytearray) -> Iterator[memoryview]:
    """The tensor's bytes, read piece by piece into `buffer`."""
    with open(tensor.file, "rb", buffering=0) as f:
        f.seek(tensor.begin)
        left = tensor.end - tensor.begin
        while left:
            piece, filled = memoryview(buffer)[:min(left, len(buffer))], 0
            while filled < len(piece):
                n = f.readinto(piece[filled:])
                if not n:
                    raise ValueError(f"{tensor.file} became shorter while it was read: {tensor.name} is cut off")
                filled += n
            yield piece
            left -= len(piece)


def _place(name: str) -> tuple[str, int | None, str]:
    """(prefix of its layer, index of the layer, kind) of a tensor; the first number in a name is its layer."""
    match = re.match(r"(.*?\.(\d+))\.(.+)$", name)
    prefix, layer, rest = (match[1], int(match[2]), match[3]) if match else ("", None, name)
    return prefix, layer, re.sub(r"\.\d+(?=\.|$)", "", rest)
