"""Decoding a tensor of 16-bit weights in two stages: the first can begin before its sign-mantissa
bytes are read.

Source: ZipMoE §3.2 and Fig. 6: decompression needs the E-chunks only, recovery needs its result and
the SM-chunks. The exponents of N weights, N bytes, are decompressed into the upper half of the
tensor's own 2N bytes, and recovery joins them from the front: the weight i at bytes 2i, 2i+1 never
reaches an exponent at byte N+j that is still needed, since 2i+1 < N+i+1 for every i < N. So no
other memory is needed. A shard is a tensor of its own, in its part of `out`.

Shapes: a tensor of N weights, its exponents uint8 [N], its sign-mantissa bytes uint8 [N].
"""

from __future__ import annotations

import numpy as np
import torch

from moelab.kernels.compile import kernel
from moelab.store.bits import as_bytes, join_words
from moelab.store.codecs import plane_bytes, unpack_plane
from moelab.store.reader import Chunks, named

#: weights joined at a time: a copy of their exponents stays in the first-level cache
_BLOCK = 1 << 14


def decompress(e: Chunks, name: str, out: torch.Tensor, shard: int | None = None) -> None:
    """Stage 1: the exponents of a tensor that has `shards`, or of one of them, into the upper half of
    `out`. Raises StoreError if damaged."""
    with named(e, name):
        unpack_plane(e.plane(name, 0, shard), as_bytes(out, writable=True)[out.numel() :])


def recover(sm: Chunks, name: str, out: torch.Tensor, shard: int | None = None) -> None:
    """Stage 2: join the exponents in the upper half of `out` with the sign-mantissa bytes, in
    place."""
    words = as_bytes(out, writable=True).view(np.uint16)
    with named(sm, name):
        _recover(plane_bytes(sm.plane(name, 1, shard), len(words)), words)


@kernel
def _recover(sign_mantissa, words):
    n = len(words)
    exponents = words.view(np.uint8)[n:]
    block = np.empty(_BLOCK, np.uint8)
    for begin in range(0, n, _BLOCK):
        end = min(begin + _BLOCK, n)
        block[: end - begin] = exponents[begin:end]
        join_words(block[: end - begin], sign_mantissa[begin:end], words[begin:end])
