"""How compressible weights are: the bound that follows from the entropy of their exponents.

Source: ZipMoE §2.2 and Fig. 3; signs, mantissas and whole checkpoints are notebook 02's
(`notebooks/studies/entropy.py`). The histogram of exponents is a sum of that of the 65,536 values of
a 16-bit weight.

Shapes: counts int64 [65536], as [2, 2^e, 2^m] for a type of e exponent and m mantissa bits. Of fp32
the upper 16 bits are counted."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moelab.base.files import beside
from moelab.store.bits import as_bytes, count
from moelab.store.codecs import entropy


class Format(NamedTuple):
    """A float type in bits: its width, its exponent, and how much of its mantissa is counted."""

    bits: int
    exponent: int
    mantissa: int


#: float types by the names that safetensors gives them
FORMATS = {name: Format(*bits) for name, bits in beside(__file__).items()}


def joint_counts(weights: Any, dtype: str = "BF16") -> np.ndarray:
    """Histogram of the bit patterns of `weights` (fp32: of their upper 16 bits): int64 [65536].

    weights : contiguous CPU tensor, array or bytes-like object.
    dtype : what its bytes are, a key of `FORMATS`."""
    if dtype not in FORMATS:
        raise ValueError(
            f"no float type {dtype!r}; the entropy analysis knows {', '.join(FORMATS)}"
        )
    data = as_bytes(weights)
    bits = FORMATS[dtype].bits
    words = (
        data if bits == 8 else data.view(np.uint16)[1::2] if bits == 32 else data.view(np.uint16)
    )
    return count(words, 0, np.zeros(1 << 16, np.int64))


def bound(counts: np.ndarray, dtype: str = "BF16") -> float:
    """Compressed size over size with only the exponents coded, of a joint histogram: (8 + H) / 16
    for bf16 whose exponents have H bits of entropy."""
    bits, e, m = FORMATS[dtype]
    exponents = counts[: 1 << (1 + e + m)].reshape(2, 1 << e, 1 << m).sum((0, 2))
    return (bits - e + entropy(exponents)) / bits
