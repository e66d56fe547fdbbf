"""The lossless codecs, and how a tensor is split into byte planes and shards for them.

Source: ZipMoE §2.2 (LZ4HC and ZSTD on the exponents), §3.1 (exponents in shards, "E-chunks", the
rest in one "SM-chunk"). A float of w bytes is rotated left by one bit (`moelab.store.bits`) and
split into w planes, one for each byte, the top one first: exponents and sign-mantissa for bf16. A
plane is compressed, in shards that different threads can decode, if that saves at least 2 %, and
raw otherwise; so the zero bytes of weights that were widened from a narrower type are found, too.
Under a codec that is `in_place`, and where such a codec does not fit, a tensor is one plane.

Shapes: a tensor of n entries of w bytes ↔ w planes of n bytes, each in one or more shards.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from moelab.base.registry import Entry, find
from moelab.store import bf12, bits, fewbit, huffman, packings
from moelab.store.bits import as_bytes
from moelab.store.codec import RAW, WORTH, Codec
from moelab.store.ggml import GGML

#: exponent bytes that a shard has at least; a third of it, 180 KB, is stored. Below, fixed costs
#: show.
MIN_SHARD = 3 * (180 << 10)
#: bytes of a plane that are sampled, and the length of a run of them
_SAMPLE = 1 << 15
_BLOCK = 1 << 11


#: name → a `Codec`, an object and no class, in an entry of `moelab.base.registry`
CODECS = {
    "raw": Entry(RAW, "uncompressed, read in place"),
    "lz4hc": Entry("moelab.zipmoe.codecs:LZ4HC", "ZipMoE's LZ4HC, level 9"),
    "zstd": Entry("moelab.zipmoe.codecs:ZSTD", "ZipMoE's ZSTD, level 1"),
    "zstd-huffman": Entry(
        "moelab.zipmoe.codecs:ZSTD_HUFFMAN", "Huffman coding in standard zstd frames"
    ),
    "bf12": Entry(bf12.CODEC, "bf16 in twelve bits, read in place and multiplied as it lies"),
    "huffman": Entry(huffman.CODEC, "table Huffman of our own, the smallest"),
}
DEFAULT = "bf12"
#: of a tensor's exponents, if they are large enough
SHARDS = 4


@cache
def find_codec(name: str) -> Codec:
    """The codec of a name. Raises ValueError, listing those there are."""
    return find("codec", name)


def read_codec(record: Any) -> Codec:
    """The codec of a `Codec.record`, few-bit formats, packings and GGML's types included. Raises
    ValueError."""
    if isinstance(record, dict):
        return packings.from_record(record)
    kind = record.removesuffix(".T")
    if kind in GGML:
        return GGML[kind] if kind == record else GGML[kind].T
    if kind in fewbit.FORMATS:
        return fewbit.find_format(record)
    return find_codec(record)


# ---------------------------------------------------------------------------------------------
# planes and shards


class Plane(NamedTuple):
    """One byte of every weight in shards, bytes-like objects, or a tensor as one blob."""

    codec: Codec
    shards: tuple[Any, ...]


class PackedTensor(tuple[Plane, ...]):
    """A compressed tensor: its planes, the exponents' first."""

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return sum(len(shard) for plane in self for shard in plane.shards)


def shard_count(n_bytes: int) -> int:
    """How many shards a plane of `n_bytes` is split into: at most `SHARDS`, and none smaller than
    `MIN_SHARD`."""
    return max(1, min(SHARDS, n_bytes // MIN_SHARD))


def shard_bounds(n_bytes: int, shards: int) -> list[tuple[int, int]]:
    """(begin, end) of each shard of a plane; all but the last begin and end on a multiple of 64
    bytes."""
    step = -(-n_bytes // (64 * shards)) * 64
    cuts = [min(i * step, n_bytes) for i in range(shards + 1)]
    return list(zip(cuts, cuts[1:]))


def compress_tensor(weights: torch.Tensor, codec: str = DEFAULT) -> PackedTensor:
    """Compress a tensor of any dtype and shape; lossless for every bit pattern.

    weights : contiguous, on the CPU. Floats are split into byte planes unless the codec is
        `in_place`; anything else is one plane of bytes.
    codec : a key of `CODECS`.
    """
    found = find_codec(codec)
    if not found.in_place:
        data = as_bytes(weights)
        width = weights.itemsize if weights.is_floating_point() else 1
        planes = [data] if width == 1 else bits.split(data.view(f"u{width}"))
        return PackedTensor(_pack(plane, found, not i) for i, plane in enumerate(planes))
    if (blob := found.compress(weights)) is None:
        found = RAW
        blob = RAW.compress(weights)
    return PackedTensor([Plane(found, (blob,))])


def decompress_tensor(packed: PackedTensor, out: Any) -> None:
    """Write the weights of `packed` into `out`, a contiguous buffer of exactly their size; of few
    bits a tensor.

    Raises ValueError if a blob is damaged or the sizes do not fit.
    """
    first = packed[0]
    width = len(packed)
    if first.codec.in_place and width == 1:
        return first.codec.decompress(first.shards[0], out)
    target = as_bytes(out, writable=True)
    n = len(target) // width
    if width == 1:
        unpack_plane(first, target)
    elif width == 2:  # shard by shard, while its exponents are in the processor's cache
        words = target.view(np.uint16)
        sign_mantissa = plane_bytes(packed[1], n)
        for (begin, end), blob in zip(shard_bounds(n, len(first.shards)), first.shards):
            part = words[begin:end]
            first.codec.decompress(blob, part.view(np.uint8)[len(part) :])
            bits.recover(sign_mantissa[begin:end], part)
    else:
        columns = target.reshape(n, width)
        for i, plane in enumerate(reversed(packed)):
            columns[:, i] = plane_bytes(plane, n)
        words = target.view(f"u{width}")
        words[:] = (words >> 1) | (words << (8 * width - 1))


def _pack(plane: np.ndarray, codec: Codec, exponents: bool) -> Plane:
    """The plane compressed, or raw where that does not pay; a sample is looked at first unless it
    is the exponents."""
    if len(plane) and (exponents or _sampled_entropy(plane) < 8 * WORTH):
        bounds = shard_bounds(len(plane), shard_count(len(plane)))
        blobs = tuple(codec.compress(plane[begin:end]) for begin, end in bounds)
        if sum(map(len, blobs)) <= WORTH * len(plane):
            return Plane(codec, blobs)
    return Plane(RAW, (RAW.compress(plane),))


def entropy(counts: np.ndarray) -> float:
    """Shannon entropy, in bits a symbol, of a histogram; 0 for an empty one."""
    p = counts[counts > 0] / max(counts.sum(), 1)
    return float(abs((p * np.log2(p)).sum()))  # abs: −0.0 for a single symbol


def _sampled_entropy(plane: np.ndarray) -> float:
    """Entropy in bits of the bytes in runs that are spread over the plane."""
    if len(plane) > _SAMPLE:
        begins = np.linspace(0, len(plane) - _BLOCK, _SAMPLE // _BLOCK).astype(np.int64)
        plane = np.concatenate([plane[begin : begin + _BLOCK] for begin in begins])
    return entropy(np.bincount(plane, minlength=256))


def plane_bytes(plane: Plane, n: int) -> np.ndarray:
    """The `n` bytes of a plane; those of a raw one without a copy."""
    if plane.codec is RAW and len(plane.shards[0]) == n:
        return as_bytes(plane.shards[0])
    out = np.empty(n, np.uint8)
    unpack_plane(plane, out)
    return out


def unpack_plane(plane: Plane, out: np.ndarray) -> None:
    """Write the bytes of a plane into an array uint8."""
    bounds = shard_bounds(len(out), len(plane.shards))
    for (begin, end), blob in zip(bounds, plane.shards):
        plane.codec.decompress(blob, out[begin:end])
