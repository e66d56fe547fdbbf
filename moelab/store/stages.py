"""Decoding a tensor of 16-bit weights in two stages: the first can begin before its sign-mantissa
bytes are read.

Source: ZipMoE §3.2 and Fig. 6: decompression needs the E-chunks only, recovery needs its result and
the SM-chunks. The exponents of N weights, N bytes, are decompressed into the upper half of the
tensor's own 2N bytes, and recovery joins them from the front. So no other memory is needed. A shard is a tensor of its own, in its part of `out`.

Shapes: a tensor of N weights, its exponents uint8 [N], its sign-mantissa bytes uint8 [N].
"""

from __future__ import annotations

import numpy as np
import torch

from moelab.store import bits
from moelab.store.bits import as_bytes
from moelab.store.codecs import plane_bytes, unpack_plane
from moelab.store.reader import Chunks, named


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
        bits.recover(plane_bytes(sm.plane(name, 1, shard), len(words)), words)
