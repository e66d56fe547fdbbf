"""Table Huffman coding of bytes, decoded several symbols a look-up from six interleaved streams.

Source: length-limited codes by package-merge (Larmore & Hirschberg, JACM 1990); words of variable
length (Tunstall, 1967); decoding after zstd's huf (backward bit streams, a sentinel instead of a
bit counter). Exponents (ZipMoE §2.2) have about 2.6 bits of entropy, so 12 bits of a stream hold
four of them: a table of 4096 words gives all four in one look-up, one 8-byte store writes them, and
six streams hide its latency. Up to three frequent bytes are *leads*: a lead and the byte after it
share one code, which halves the loss to whole bits.

A blob is little-endian 64-bit words and bytes:

    word 0       magic (32 bits), last symbol, first symbol, longest code, mode (8 bits each)
    word 1       n, the number of bytes coded
    RAW          n bytes                             (coding would not have made it smaller)
    CONSTANT     nothing; every byte is `first`
    CODED + k    6 words: a stream's size (56 bits), 1 + the lead that its bytes end on, if one is left (8 bits);
                 a word: the k leads, a byte each; the code lengths, 4 bits each: of first … last
                 alone, then of first … last after each lead; the streams

Stream i codes bytes n·i/6 … n·(i+1)/6 in their order, low bits first, closed by a 1 bit; it is
decoded from its end, so output is written downwards. Whatever the bytes are, decompressing it
ends, and neither reads outside the blob nor writes outside the output. It finds most damage, not
all; the store has checksums."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from moelab.kernels.compile import kernel
from moelab.store.bits import as_bytes, count
from moelab.store.codec import Codec
from moelab.store.huffman_decoder import (
    CODED_HEADER,
    HEADER,
    LEADS,
    MAX_BITS,
    STREAMS,
    WORDS,
    decode,
    load_byte,
    store,
)

RAW = 0
CONSTANT = 1
CODED = 2
#: the words 0 and 1
_HEAD = struct.Struct("<4sBBBBQ")
_MAGIC = b"MHF1"
_U = np.uint64
#: bits a byte above the entropy (0.25 points of a bf16 weight) that are not worth leads, which
#: halve the speed
CLOSE = 0.04


class Huffman(Codec):
    """Bytes as the blobs above."""

    def compress(self, data: Any) -> bytes:
        source = as_bytes(data)
        counts = count(source, 0, np.zeros(256, np.int64))
        used = np.flatnonzero(counts)
        if len(used) == 1:
            return _HEAD.pack(_MAGIC, used[0], used[0], 0, CONSTANT, len(source))
        coded = _coded(source, counts) if len(used) else None
        raw = _HEAD.pack(_MAGIC, 255, 0, 0, RAW, len(source))
        return raw + source.tobytes() if coded is None else coded

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
    return decode(*ends, first, last, longest, mode - CODED)


# ---------------------------------------------------------------------------------------------------
# compression


def code_lengths(counts: np.ndarray, limit: int) -> np.ndarray:
    """Lengths of an optimal prefix code of at most `limit` bits for int64 counts [N]: int64 [N], 0
    where unused.

    List j merges the counts and the pairs of list j − 1; each time that a count is among the
    cheapest 2n − 2 items, unpacked through the lists, its code is one bit longer."""
    words = np.flatnonzero(counts)
    words = words[np.argsort(counts[words], kind="stable")]
    n = len(words)
    items = np.zeros(0, np.int64)
    lists = []  # how many of the first items are counts, which come before pairs of the same size
    for _ in range(limit):
        items = np.concatenate([counts[words], items[: len(items) & ~1].reshape(-1, 2).sum(1)])
        order = np.argsort(items, kind="stable")
        items = items[order]
        lists.append(np.cumsum(order < n))
    lengths = np.zeros(len(counts), np.int64)
    take = 2 * n - 2
    for of_list in reversed(lists):
        whole = of_list[take - 1] if take else 0
        lengths[words[:whole]] += 1
        take = 2 * (take - whole)
    return lengths


def _coded(source: np.ndarray, counts: np.ndarray) -> bytes | None:
    """A coded blob, with leads where that pays; None if it is larger than the bytes."""
    n = len(source)
    most = HEADER + n
    alone = np.zeros(WORDS, np.int64)
    alone[:256] = counts
    lengths = code_lengths(alone, MAX_BITS)
    used = np.flatnonzero(counts)
    first = int(used[0])
    last = int(used[-1])
    bits = int(alone @ lengths)
    ideal = counts[used] @ np.log2(n / counts[used])
    if bits - ideal > CLOSE * n:
        words, leads = _expected_words(counts)
        without = CODED_HEADER + ((last - first + 2) >> 1) + (bits >> 3)
        blob = _write(source, first, last, leads, code_lengths(words, MAX_BITS))
        if len(blob) <= min(most, without):
            return blob
    blob = _write(source, first, last, [], lengths)
    return blob if len(blob) <= most else None


def _expected_words(counts: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """How often each word occurs if bytes are independent, int64 [WORDS]; the most frequent bytes,
    which are leads."""
    words = np.zeros((1 + LEADS, 256), np.int64)
    leads = []
    n = counts.sum()
    words[0] = counts
    for follow in words[1:]:
        lead = int(words[0].argmax())
        if not words[0, lead]:
            break
        words[0, lead] = 0
        leads.append(lead)
        expected = (counts[lead] * (counts / n)).astype(np.int64)
        follow[:] = np.maximum(expected, 1) * (counts > 0)  # what can occur needs a code
    return words.ravel(), leads


def _write(
    source: np.ndarray, first: int, last: int, leads: list[int], lengths: np.ndarray
) -> bytes:
    """A coded blob, of codes whose lengths are those of the words."""
    n = len(source)
    k = len(leads)
    longest = int(lengths.max())
    is_lead = np.zeros(256, np.uint64)
    row_of = np.zeros(256, np.uint64)
    is_lead[leads], row_of[leads] = ~_U(0), 256 * np.arange(1, k + 1)
    codes = _codes(lengths, longest)
    nibbles = lengths.reshape(-1, 256)[: k + 1, first : last + 1].astype(np.uint8).ravel()
    nibbles = np.append(nibbles, np.zeros(len(nibbles) % 2, np.uint8))
    table = nibbles[::2] | nibbles[1::2] << 4
    blob = np.empty(2 * n + 1024, np.uint8)
    at = CODED_HEADER + len(table)
    streams = []
    for i in range(STREAMS):
        begin = n * i // STREAMS
        end = n * (i + 1) // STREAMS
        place = source.ctypes.data + begin
        to = blob.ctypes.data + at
        size, row = _encode(codes, is_lead, row_of, place, end - begin, to)
        streams.append(size | row >> 8 << 56)
        at += size
    head = _HEAD.pack(_MAGIC, last, first, longest, CODED + k, n)
    head += struct.pack(f"<{STREAMS}Q8s", *streams, bytes(leads)) + table.tobytes()
    blob[: len(head)] = np.frombuffer(head, np.uint8)
    return blob[:at].tobytes()


def _codes(lengths: np.ndarray, longest: int) -> np.ndarray:
    """For each word its canonical code in the top bits and the code's length in the low byte,
    uint64; 0 for one that has none, as a lead that waits for its second byte."""
    used = np.flatnonzero(lengths)
    used = used[np.argsort(lengths[used], kind="stable")]
    sizes = 1 << (longest - lengths[used])
    codes = np.zeros(len(lengths), np.uint64)
    found = (np.cumsum(sizes) - sizes).astype(np.uint64) << _U(64 - longest)
    codes[used] = found | lengths[used].astype(np.uint64)
    return codes


@kernel
def _encode(codes, is_lead, row_of, source, n, target):
    """Write one stream of `n` bytes; returns its size and the row of a lead left over.

    `row` is the row of words of a lead that waits for its second byte (`waiting` is all ones then),
    else 0: two variables, so that a byte depends on the one before it by a single AND. Stores up to
    8 bytes past the end."""
    bits, used, at = _U(0), _U(0), target  # `used` low bits of `bits` wait to be written: 0 … 7
    row = _U(0)
    waiting = _U(0)
    low = _U(255)
    for i in range(source, source + (n & ~3), 4):
        four = _U(0)
        length = _U(0)
        for j in range(4):  # a lead adds no bits, but the byte after it does: length > 0
            s = load_byte(i + j)
            code = codes[row + s]
            row = row_of[s] & ~waiting
            waiting = is_lead[s] & ~waiting
            # the lengths in the low byte stay below the codes
            four = four >> (code & _U(63)) | code
            length += code
        length &= low
        bits |= (four >> (_U(64) - length)) << used
        used += length
        store(at, bits)
        at += np.int64(used >> _U(3))
        bits >>= used & _U(56)
        used &= _U(7)
    for i in range(source + (n & ~3), source + n):
        s = load_byte(i)
        code = codes[row + s]
        row = row_of[s] & ~waiting
        waiting = is_lead[s] & ~waiting
        bits |= (code >> _U(1) >> (_U(63) - (code & low))) << used
        used += code & low
    store(at, bits | _U(1) << used)  # closed by a 1 bit
    return at + np.int64((used + _U(8)) >> _U(3)) - target, row
