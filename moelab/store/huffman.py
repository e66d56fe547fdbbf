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

from typing import Any

import numpy as np

from moelab.kernels.compile import kernel
from moelab.store.bits import as_bytes
from moelab.store.codec import Codec, room
from moelab.store.huffman_decoder import (
    CODED,
    CODED_HEADER,
    CONSTANT,
    ERRORS,
    HEADER,
    LEADS,
    MAGIC,
    MAX_BITS,
    RAW,
    STREAMS,
    WORDS,
    canonical,
    decompress,
    segment,
)
from moelab.store.memory import copy, load, load_byte, store, store_byte

_U = np.uint64
#: bits a byte above the entropy (0.25 points of a bf16 weight) that are not worth leads, which
#: halve the speed
CLOSE = 0.04


class Huffman(Codec):
    """Bytes as the blobs above."""

    def compress(self, data: Any) -> bytes:
        source = as_bytes(data)
        target = room("blob", len(source) + 1024)
        return target[: _compress(source.ctypes.data, len(source), target.ctypes.data)].tobytes()

    def decompress(self, blob: Any, out: Any) -> None:
        """`out` is undefined if this raises."""
        source, target = as_bytes(blob), as_bytes(out, writable=True)
        error = decompress(source.ctypes.data, len(source), target.ctypes.data, len(target))
        if error:
            raise ValueError(
                f"the Huffman blob of {len(source)} bytes {ERRORS[error]} (decoding into {len(target)} bytes)"
            )


CODEC = Huffman("huffman")


# ---------------------------------------------------------------------------------------------------
# compression


@kernel
def histogram(source, n):
    """Counts of the 256 byte values among `n` bytes at address `source`: int64 [256].

    There is a table for each byte of a word, since adding to one counter twice in a row waits for
    the first store."""
    counts = np.zeros((8, 256), np.int64)
    for i in range(n >> 3):
        word = load(source + 8 * i)
        for lane in range(8):
            counts[lane, (word >> _U(8 * lane)) & _U(255)] += 1
    for i in range(n & ~7, n):
        counts[0, load_byte(source + i)] += 1
    for lane in range(1, 8):  # `sum(axis=0)` would take seconds to compile
        for s in range(256):
            counts[0, s] += counts[lane, s]
    return counts[0]


@kernel
def code_lengths(counts, limit):
    """Lengths of an optimal prefix code of at most `limit` bits for int64 counts [N]: int64 [N], 0
    where unused.

    Package-merge: list j holds the counts and the pairs of list j − 1, sorted; each time that a
    count is among the cheapest 2n − 2 items, unpacked through the lists, its code is one bit
    longer."""
    words, n = np.empty(len(counts), np.int64), 0
    for s in range(len(counts)):  # insertion sort: few words occur
        if counts[s] > 0:
            j = n
            while j > 0 and counts[words[j - 1]] > counts[s]:
                words[j] = words[j - 1]
                j -= 1
            words[j] = s
            n += 1
    is_count = np.zeros((limit, 2 * n + 1), np.bool_)
    old, new, size = np.zeros(2 * n + 1, np.int64), np.zeros(2 * n + 1, np.int64), 0
    for level in range(limit):
        a, b, pairs = 0, 0, size // 2
        size = n + pairs
        for j in range(size):
            if b == pairs or (a < n and counts[words[a]] <= old[2 * b] + old[2 * b + 1]):
                new[j] = counts[words[a]]
                is_count[level, j] = True
                a += 1
            else:
                new[j] = old[2 * b] + old[2 * b + 1]
                b += 1
        old, new = new, old
    lengths, take = np.zeros(len(counts), np.int64), 2 * n - 2
    for level in range(limit - 1, -1, -1):
        a = 0
        for j in range(take):
            if is_count[level, j]:
                lengths[words[a]] += 1
                a += 1
        take = 2 * (take - a)
    return lengths


@kernel
def _compress(source, n, target):
    """Write the blob of `n` bytes at `source` to `target`; returns its size."""
    counts, first, last = histogram(source, n), 0, 255
    while first < 255 and counts[first] == 0:
        first += 1
    while last > first and counts[last] == 0:
        last -= 1
    if n > 0 and first == last:
        _write_header(target, last, first, 0, CONSTANT, n)
        return HEADER
    size = _compress_words(source, n, target, counts, first, last) if n > 0 else 0
    if size == 0:
        _write_header(target, 255, 0, 0, RAW, n)
        copy(source, n, target + HEADER)
        size = HEADER + n
    return size


@kernel
def _compress_words(source, n, target, counts, first, last):
    """Write a coded blob, with leads where that pays; returns its size, or 0 if it is no smaller
    than the bytes."""
    alone, bits, ideal = np.zeros(WORDS, np.int64), 0, 0.0
    alone[:256] = counts
    lengths = code_lengths(alone, MAX_BITS)
    for s in range(256):
        bits += alone[s] * lengths[s]
        if counts[s] > 0:
            ideal += counts[s] * np.log2(n / counts[s])
    smallest, size = HEADER + n, 0
    if bits - ideal > CLOSE * n:
        words, leads, k = _expected_words(counts, n)
        without = CODED_HEADER + ((last - first + 2) >> 1) + (bits >> 3)
        lead_lengths = code_lengths(words, MAX_BITS)
        limit = min(smallest, without)
        size = _write(source, n, target, first, last, leads, k, lead_lengths, limit)
    if size == 0:
        leads = np.zeros(LEADS, np.int64)
        size = _write(source, n, target, first, last, leads, 0, lengths, smallest)
    return size


@kernel
def _write_header(target, last, first, longest, mode, n):
    store(
        target,
        _U(MAGIC)
        | _U(last) << _U(32)
        | _U(first) << _U(40)
        | _U(longest) << _U(48)
        | _U(mode) << _U(56),
    )
    store(target + 8, _U(n))


@kernel
def _expected_words(counts, n):
    """How often each word occurs if bytes are independent, int64 [WORDS]; the most frequent bytes
    and their number."""
    words, leads, k = np.zeros(WORDS, np.int64), np.zeros(LEADS, np.int64), 0
    for s in range(256):
        words[s] = counts[s]
    while k < LEADS:
        lead = 0
        for s in range(256):
            lead = s if words[s] > words[lead] else lead
        if words[lead] == 0:
            break
        words[lead], leads[k] = 0, lead
        k += 1
        for s in range(256):
            if counts[s] > 0:  # what can occur needs a code
                words[256 * k + s] = max(1, np.int64(counts[lead] * (counts[s] / n)))
    return words, leads, k


@kernel
def _write(source, n, target, first, last, leads, k, lengths, limit):
    """Write a coded blob with `k` leads; returns its size, or 0 as soon as it becomes larger than
    `limit`."""
    longest, span = 0, last - first + 1
    for word in range(WORDS):
        longest = max(longest, lengths[word])
    at = target + CODED_HEADER + ((span * (k + 1) + 1) >> 1)
    _write_header(target, last, first, longest, CODED + k, n)
    for i in range(target + CODED_HEADER - 8, at):
        store_byte(i, _U(0))
    is_lead, row_of = np.zeros(256, np.uint64), np.zeros(256, np.uint64)
    for j in range(k):
        store_byte(target + CODED_HEADER - 8 + j, _U(leads[j]))
        is_lead[leads[j]], row_of[leads[j]] = ~_U(0), _U(256 * (j + 1))
    for i in range(span * (k + 1)):
        place, word = target + CODED_HEADER + (i >> 1), 256 * (i // span) + first + i % span
        store_byte(place, load_byte(place) | _U(lengths[word]) << _U(4 * (i & 1)))
    # an entry a word: its code in the top bits, the code's length in the low byte; none for a lead
    # that waits
    codes, code = np.zeros(WORDS, np.uint64), 0
    order, n_words = canonical(lengths, longest)
    for j in range(n_words):
        codes[order[j]] = _U(code) << _U(64 - longest) | _U(lengths[order[j]])
        code += 1 << (longest - lengths[order[j]])
    for i in range(STREAMS):
        begin, end = segment(n, i), segment(n, i + 1)
        size, row = _encode(codes, is_lead, row_of, source + begin, end - begin, at, target + limit)
        if size == 0:
            return 0
        store(target + HEADER + 8 * i, _U(size) | row >> _U(8) << _U(56))
        at += size
    return at - target


@kernel
def _flushed(bits, used, at):
    """Store the whole bytes of `bits`; returns what is left of them, its length, and where it
    goes."""
    store(at, bits)
    return bits >> (used & _U(56)), used & _U(7), at + np.int64(used >> _U(3))


@kernel
def _closed(bits, used, at, target, limit):
    """Write the last bits and the closing 1 bit; returns the stream's size, 0 if that is past
    `limit`."""
    store(at, bits | _U(1) << used)
    at += np.int64((used + _U(8)) >> _U(3))
    return at - target if at <= limit else 0


@kernel
def _encode(codes, is_lead, row_of, source, n, target, limit):
    """Write one stream of `n` bytes; returns its size, 0 if it goes past `limit`, and the row of a
    lead left over.

    `row` is the row of words of a lead that waits for its second byte (`waiting` is all ones then),
    else 0: two variables, so that a byte depends on the one before it by a single AND. Stores up to
    8 bytes past the end."""
    bits, used, at = _U(0), _U(0), target  # `used` low bits of `bits` wait to be written: 0 … 7
    row, waiting, low = _U(0), _U(0), _U(255)
    for i in range(source, source + (n & ~3), 4):
        four, length = _U(0), _U(0)
        for j in range(4):  # a lead adds no bits, but the byte after it does: length > 0
            s = load_byte(i + j)
            code = codes[row + s]
            row = row_of[s] & ~waiting
            waiting = is_lead[s] & ~waiting
            four = (
                four >> (code & _U(63)) | code
            )  # the lengths in the low byte stay below the codes
            length += code
        length &= low
        bits, used, at = _flushed(bits | (four >> (_U(64) - length)) << used, used + length, at)
        if at > limit:
            return 0, row
    for i in range(source + (n & ~3), source + n):
        s = load_byte(i)
        code = codes[row + s]
        row = row_of[s] & ~waiting
        waiting = is_lead[s] & ~waiting
        bits |= (code >> _U(1) >> (_U(63) - (code & low))) << used
        used += code & low
    return _closed(bits, used, at, target, limit), row
