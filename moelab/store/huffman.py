"""Table Huffman coding of bytes, decoded several symbols a look-up from six interleaved streams.

Source: decoding after zstd's huf (backward bit streams, a sentinel instead of a bit counter).
Exponents (ZipMoE §2.2) have about 2.6 bits of entropy, so 12 bits of a stream hold four of them: a
table of 4096 words gives all four in one look-up, one 8-byte store writes them, and six streams
hide its latency.

A blob is little-endian 64-bit words and bytes:

    word 0       magic (32 bits), last symbol, first symbol, longest code, mode (8 bits each)
    word 1       n, the number of bytes coded
    RAW          n bytes                             (coding would not have made it smaller)
    CONSTANT     nothing; every byte is `first`
    CODED        6 words: a stream's size; the code lengths of first … last, 4 bits each; the streams

Stream i codes bytes n·i/6 … n·(i+1)/6 in their order, low bits first, closed by a 1 bit; it is
decoded from its end, so output is written downwards. Whatever the bytes are, decompressing it
ends, and neither reads outside the blob nor writes outside the output. It finds most damage, not
all; the store has checksums."""

from __future__ import annotations

import struct
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from moelab.kernels.compile import kernel
from moelab.store.bits import as_bytes, count
from moelab.store.codec import Codec, room
from moelab.store.huffman_decoder import CODED_HEADER, HEADER, MAX_BITS, STREAMS, decode
from moelab.store.memory import load_byte, store

RAW = 0
CONSTANT = 1
CODED = 2
#: the words 0 and 1
_HEAD = struct.Struct("<4sBBBBQ")
_MAGIC = b"MHF2"
_U = np.uint64


class Huffman(Codec):
    """Bytes as the blobs above."""

    def compress(self, data: Any) -> bytes:
        source = as_bytes(data)
        counts = count(source, 0, np.zeros(256, np.int64))
        used = np.flatnonzero(counts)
        if len(used) == 1:
            return _HEAD.pack(_MAGIC, used[0], used[0], 0, CONSTANT, len(source))
        if len(used):
            blob = _coded(source, code_lengths(counts), int(used[0]), int(used[-1]))
            if len(blob) <= HEADER + len(source):
                return blob
        return _HEAD.pack(_MAGIC, 255, 0, 0, RAW, len(source)) + source.tobytes()

    def decompress(self, blob: Any, out: Any) -> None:
        """`out` is undefined if this raises."""
        source = as_bytes(blob)
        target = as_bytes(out, writable=True)
        if not _decompress(source, target):
            raise ValueError(
                f"the Huffman blob of {len(source)} bytes is damaged, or not one of {len(target)} bytes"
            )


CODEC = Huffman("huffman")


def _decompress(source: np.ndarray, target: np.ndarray) -> bool:
    """Decode a blob; whether it is one of so many bytes."""
    if len(source) < HEADER:
        return False
    magic, last, first, longest, mode, n = _HEAD.unpack_from(source)
    if magic != _MAGIC or n != len(target):
        return False
    if mode == RAW and len(source) == HEADER + n:
        target[:] = source[HEADER:]
        return True
    if mode == CONSTANT and len(source) == HEADER:
        target[:] = first
        return True
    ends = source.ctypes.data, len(source), target.ctypes.data, n
    return mode == CODED and decode(*ends, first, last, longest)


# ---------------------------------------------------------------------------------------------------
# compression


def code_lengths(counts: np.ndarray) -> np.ndarray:
    """Lengths of a Huffman code of at most `MAX_BITS` bits: int64 [256], 0 where unused. Rare bytes
    count as if they were more frequent, until none is longer."""
    least = int(counts.sum()) >> MAX_BITS + 1
    while True:
        lengths = np.zeros(256, np.int64)
        heap = [(max(n, least), [s]) for s, n in enumerate(counts.tolist()) if n]
        heapify(heap)
        while len(heap) > 1:
            (n, first), (m, second) = heappop(heap), heappop(heap)
            lengths[first + second] += 1
            heappush(heap, (n + m, first + second))
        if lengths.max() <= MAX_BITS:
            return lengths
        least = 2 * least + 1


def _coded(source: np.ndarray, lengths: np.ndarray, first: int, last: int) -> bytes:
    """A coded blob, of codes of these lengths."""
    n = len(source)
    longest = int(lengths.max())
    codes = _codes(lengths, longest)
    nibbles = np.append(lengths[first : last + 1], 0).astype(np.uint8)
    table = nibbles[:-1:2] | nibbles[1::2] << 4
    blob = room("blob", 2 * n + 1024)
    at = CODED_HEADER + len(table)
    sizes = []
    for i in range(STREAMS):
        begin = n * i // STREAMS
        end = n * (i + 1) // STREAMS
        to = blob.ctypes.data + at
        sizes.append(_encode(codes, source.ctypes.data + begin, end - begin, to))
        at += sizes[-1]
    head = _HEAD.pack(_MAGIC, last, first, longest, CODED, n)
    head += struct.pack(f"<{STREAMS}Q", *sizes) + table.tobytes()
    blob[: len(head)] = np.frombuffer(head, np.uint8)
    return blob[:at].tobytes()


def _codes(lengths: np.ndarray, longest: int) -> np.ndarray:
    """For each byte its canonical code in the top bits and the code's length in the low byte,
    uint64; 0 for one that has none."""
    used = np.flatnonzero(lengths)
    used = used[np.argsort(lengths[used], kind="stable")]
    sizes = 1 << (longest - lengths[used])
    codes = np.zeros(256, np.uint64)
    found = (np.cumsum(sizes) - sizes).astype(np.uint64) << _U(64 - longest)
    codes[used] = found | lengths[used].astype(np.uint64)
    return codes


@kernel
def _encode(codes, source, n, target):
    """Write one stream of `n` bytes; returns its size. Stores up to 8 bytes past the end."""
    bits, used, at = _U(0), _U(0), target  # `used` low bits of `bits` wait to be written: 0 … 7
    for i in range(source, source + n):
        code = codes[load_byte(i)]
        length = code & _U(63)
        bits |= (code >> (_U(64) - length)) << used
        used += length
        store(at, bits)
        at += np.int64(used >> _U(3))
        bits >>= used & _U(56)
        used &= _U(7)
    store(at, bits | _U(1) << used)  # closed by a 1 bit
    return at + 1 - target
