"""How compressible weights are: the entropy of its signs, exponents and mantissas, and the
bound that follows.

Source: ZipMoE §2.2 and Fig. 2 (exponents of MoE weights have 2.55–2.65 bits of entropy and use
11–15 % of the 256 symbols), Fig. 3 (the bound). The histograms of the three fields are sums of that
of the 65,536 values of a 16-bit weight.

Shapes: counts int64 [65536], as [2, 2^e, 2^m] for a type of e exponent and m mantissa bits. Of fp32
the upper 16 bits are counted, so its `mantissa` and `joint` are those of the leading 7 mantissa
bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moelab.store.bits import as_bytes, count
from moelab.store.codecs import entropy


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
    """Entropy of weights, in bits."""

    dtype: str  # a key of `FORMATS`
    weights: int  # how many were counted
    sign: float
    exponent: float
    mantissa: float
    joint: float  # of whole weights
    support: float  # fraction of all possible exponents that occur
    bound: float  # compressed size over size with only the exponents coded: (8 + exponent) / 16 for bf16


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


def describe(counts: np.ndarray, dtype: str = "BF16") -> EntropyRow:
    """The row of a joint histogram."""
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
    )
