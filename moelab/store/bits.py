"""Splitting bf16 weights into exponent bytes and sign-mantissa bytes, and joining them again.

Source: ZipMoE §2.2 (only the exponents of trained weights are compressible) and §3.1 (the recovery
kernel). Every weight is rotated left by one bit, which puts the 8 exponent bits of bf16 into the
upper byte and `mantissa << 1 | sign` into the lower one. Joining is one OR and one rotation of
16-bit words, which vector units do faster than memcpy moves the same bytes; the paper's layout
(sign above the mantissa) needs two masks more. The same rotation serves every float type: fp16 gets
5 exponent and 3 mantissa bits into its upper byte, fp32 8 exponent bits.

Shapes: N weights as uint16 [N] ↔ exponents uint8 [N] and sign-mantissa uint8 [N].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moelab.kernels.compile import kernel

#: the name of the byte layout, recorded in every store
LAYOUT = "rotated"


def split(words: np.ndarray) -> list[np.ndarray]:
    """The byte planes, uint8 [N] each, of weights' bits [N], uint16 or wider: of the rotated weights
    the top byte first, which of bf16 is the exponent."""
    width = words.itemsize
    rotated = (words << 1) | (words >> (8 * width - 1))
    columns = rotated.view(np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(columns[:, i]) for i in reversed(range(width))]


def as_bytes(buffer: Any, writable: bool = False) -> np.ndarray:
    """A uint8 [n] view, without a copy, of a contiguous array, CPU tensor or any other bytes-like
    object.

    Raises TypeError if it is none of these, ValueError if it is not contiguous or, with `writable`,
    is read-only."""
    if isinstance(buffer, torch.Tensor):
        if not buffer.is_contiguous():
            raise ValueError("the tensor is not contiguous; call .contiguous() first")
        # torch cannot view nothing as bytes if its stride is 0
        flat = buffer.detach().reshape(-1) if buffer.numel() else torch.empty(0, dtype=torch.uint8)
        buffer = flat.view(torch.uint8).numpy()
    found = np.frombuffer(buffer, np.uint8)
    if writable and not found.flags.writeable:
        raise ValueError(
            "the output buffer is read-only; pass a bytearray, an array or a tensor that can be written"
        )
    return found


@kernel
def recover(sign_mantissa, words):
    """Join the exponents uint8 [N], which lie in the upper half of the words' own 2N bytes, with
    sign-mantissa bytes, in place: ZipMoE's recovery.

    By halves of what is left: the words of the first half end where its exponents begin, so that a
    loop of vectors may join them."""
    n = len(words)
    exponents = words.view(np.uint8)[n:]
    begin = 0
    while begin < n:
        end = begin + max(1, (n - begin) // 2)
        join(exponents[begin:end], sign_mantissa[begin:end], words[begin:end])
        begin = end


@kernel
def join(exponents, sign_mantissa, words):
    """Weights of exponents and sign-mantissa bytes, all arrays [N]."""
    for i in range(len(words)):
        high = np.uint16(np.uint16(exponents[i]) << np.uint16(8))
        x = high | np.uint16(sign_mantissa[i])
        sign = np.uint16(x << np.uint16(15))
        words[i] = np.uint16(x >> np.uint16(1)) | sign


@kernel
def count(words, shift, counts):
    """Add to `counts` how often each word occurs, shifted right; returns them.

    In eight tables, since adding to one counter twice in a row waits for the first store."""
    tables = np.zeros((8, len(counts)), np.int64)
    whole = len(words) >> 3
    for i in range(whole):
        for j in range(8):
            tables[j, words[8 * i + j] >> shift] += 1
    for word in words[8 * whole :]:
        counts[word >> shift] += 1
    for table in tables:
        counts += table
    return counts
