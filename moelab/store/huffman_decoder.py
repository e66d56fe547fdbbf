"""The decoder of `moelab.store.huffman`, whose docstring describes the blobs.

A window of at most 12 bits of a stream indexes a table whose entries hold up to six symbols. The
main loop, `_rounds`, takes four windows of each of six streams a round; the number of rounds is
bounded beforehand so that none can leave the blob or the output, and the rest of each stream is
decoded with a check at every step. A stream is held as in zstd: a 64-bit window, shifted left as
bits are used; the position of a sentinel 1 below the last bit tells how many were used."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from moelab.kernels.compile import kernel
from moelab.kernels.emit import I8, I64, Value, address, emitted, kept

STREAMS = 6
LEADS = 3
MAX_BITS = 12  # longest code: the table has 4096 entries, 32 KB
WORDS = 256 * (1 + LEADS)  # word s is byte s, word 256·j + s is the j-th lead and byte s
HEADER = 16
CODED_HEADER = 24 + 8 * STREAMS
_WINDOW, _AT, _OUT = 0, 1, 2  # what is held of a stream, see `_opened`
_U = np.uint64


# Loads and stores at addresses: words are little-endian, of any alignment; bounds are unchecked.


@emitted(types.uint64)
def load(address):
    return address.load(I64)


@emitted(types.uint64)
def load_byte(address):
    return address.load(I8).to(I64, "zext")


@emitted()
def store(address, value):
    address.store(value)


@emitted()
def store_byte(address, value):
    address.store(value.to(I8, "trunc"))


@emitted(types.int64)
def trailing_zeros(value):
    """Zeros below the lowest 1 of a u64 that has one."""
    return value.made("cttz", value.of(1, ir.IntType(1)))


@kernel
def segment(n, i):
    """Where the bytes of stream i begin."""
    return n * i // STREAMS


@kernel
def _decoding_table(lengths, leads, longest):
    """Tables for windows of 0 … `longest` bits, that of w bits at [2^w : 2^(w+1)]: uint64
    [2^(longest+1)].

    An entry tells what the window starts with: bits used (byte 0), number of symbols, at most 6
    (byte 1), the symbols, the last in byte 7, the one before it in byte 6 … Each table is made of
    shorter ones: after a word of b bits comes the table of w − b bits. Where that is too full, the
    entry stops at its first word."""
    table = np.zeros(2 << longest, np.uint64)
    coded = np.flatnonzero(lengths)
    order = coded[np.argsort(lengths[coded], kind="mergesort")]
    for width in range(1, longest + 1):
        at = 1 << width
        for word in order:
            if lengths[word] > width:
                break
            alone = _entry(word, lengths, leads)
            size = alone >> _U(8) & _U(255)
            full = (_U(7) - size) << _U(8)
            rest = 1 << (width - lengths[word])
            shorter, entries = (
                table[rest : 2 * rest],
                table[at : at + rest],
            )  # two slices: LLVM vectorises the loop
            for i in range(len(entries)):
                more = shorter[i]
                joined = (
                    (more >> (_U(8) * size) & _U(0xFFFFFFFFFFFF0000)) + (more & _U(0xFFFF)) + alone
                )
                entries[i] = joined if (more & _U(0xFF00)) < full else alone
            at += rest
    return table


@kernel
def _entry(word, lengths, leads):
    """The table's entry of one word."""
    entry = _U(word & 255) << _U(56) | _U(0x100) | _U(lengths[word])
    if word < 256:
        return entry
    lead = _U(leads[(word >> 8) - 1])
    return entry + (lead << _U(48)) + _U(0x100)


@emitted()
def _rounds(rounds, state, table, shift):
    """In each round decode four windows of each stream, then move each stream's window down by the
    whole bytes that were used. `state` is the address of what `_opened` returns.

    An entry's eight bytes are stored at once: later stores overwrite what is below its symbols. The
    sentinel, put into bit 0 of a window, has risen by the bits used."""
    b = rounds.builder
    streams = [[cgutils.alloca_once(b, I64) for _ in range(3)] for _ in range(STREAMS)]
    places = [(cell, state + 8 * i) for i, cell in enumerate(sum(streams, []))]

    def get(cell):
        return Value(b, b.load(cell))

    for cell, place in places:
        b.store(place.load(I64).llvm, cell)
    with rounds.steps(1):
        for window, _, out in streams * 4:
            entry = (table + (get(window) >> shift) * 8).load(I64)
            (get(out) - 8).store(entry)
            b.store((get(window) << (entry & 63)).llvm, window)
            b.store((get(out) - (entry >> 8 & 255)).llvm, out)
        for window, at, _ in streams:
            used = get(window).made("cttz", Value(b, cgutils.true_bit))
            b.store((get(at) - (used >> 3)).llvm, at)
            b.store(((get(at).load(I64) | 1) << (used & 7)).llvm, window)
    for cell, place in places:
        place.store(get(cell))


@kernel
def _code_lengths(at, first, last, k, longest):
    """The words' lengths from their 4 bits each at an address, and whether they are a code: every
    window starts with exactly one word (Kraft)."""
    span = last - first + 1
    room = 0
    lengths = np.zeros(256 * (k + 1), np.int64)
    for i in range(span * (k + 1)):
        two = load_byte(at + (i >> 1))
        length = np.int64(two >> _U(4 * (i & 1)) & _U(15))
        if length > longest:
            return lengths, False
        if length > 0:
            lengths[256 * (i // span) + first + i % span] = length
            room += 1 << (longest - length)
    return lengths, room == 1 << longest


@kernel
def decode(source, size, target, n, first, last, longest, k):
    """Decode a coded blob of `size` bytes, with k leads, at `source` into the `n` bytes at
    `target`; whether it is undamaged."""
    if k > LEADS or first > last or longest < 1 or longest > MAX_BITS:
        return False
    at = source + CODED_HEADER + (((last - first + 1) * (k + 1) + 1) >> 1)
    if at > source + size:
        return False
    leads = np.zeros(LEADS, np.int64)
    for j in range(k):
        leads[j] = np.int64(load_byte(source + CODED_HEADER - 8 + j))
    lengths, whole = _code_lengths(source + CODED_HEADER, first, last, k, longest)
    if not whole:
        return False
    table = _decoding_table(lengths, leads, longest)
    return _decode_streams(source, at, size, target, n, k, longest, leads, table)


@kernel
def _decode_streams(source, at, size, target, n, k, longest, leads, table):
    """Decode the streams from `at` on; whether they are undamaged."""
    state = np.empty((STREAMS, 3), np.int64)
    start = np.empty(STREAMS, np.int64)
    for i in range(STREAMS):
        word = load(source + HEADER + 8 * i)
        length = word & _U((1 << 56) - 1)
        lead = np.int64(word >> _U(56))
        if length < _U(1) or length > _U(source + size - at) or lead > k:
            return False
        start[i] = at
        at += np.int64(length)
        out = target + segment(n, i + 1)
        if lead > 0:
            if out == target + segment(n, i):
                return False
            out -= 1
            store_byte(out, _U(leads[lead - 1]))
        window = _first_window(at - 8)  # at or above `source`: the header is longer
        if window == _U(0):
            return False
        state[i, _WINDOW] = np.int64(window)
        state[i, _AT], state[i, _OUT] = at - 8, out
    if at != source + size:
        return False
    entries = address(table) + (8 << longest)
    shift = 64 - longest
    while True:
        # a round uses at most 8 + 48 bits (7 bytes) of a stream, and writes at most 24 bytes and 2
        # undefined ones below
        rounds = size
        for i in range(STREAMS):
            unset = state[i, _OUT] - target - segment(n, i)
            rounds = min(rounds, (state[i, _AT] - start[i]) // 7, (unset - 2) // 24)
        if rounds <= 0:
            break
        _rounds(rounds, address(state), entries, shift)
    for i in range(STREAMS):
        left = (state[i, _AT] - start[i]) * 8 + 64 - trailing_zeros(state[i, _WINDOW])
        base = target + segment(n, i)
        if not _finish(address(table), longest, start[i], left, base, state[i, _OUT]):
            return False
    kept(table)
    kept(state)
    return True


@kernel
def _first_window(at):
    """A stream's last 8 bytes at an address without the closing 1 bit and what is above it; a
    sentinel in bit 0. 0 if the last byte has no closing bit."""
    window = load(at)
    if window >> _U(56) == _U(0):
        return _U(0)
    window |= _U(1)
    while window >> _U(63) == _U(0):
        window <<= _U(1)
    return window << _U(1)


@kernel
def _finish(tables, longest, start, left, base, out):
    """Decode the last `left` bits of the stream at `start` to the bytes base … out; whether they
    end together.

    A window has no more bits than are left, so only words that end within them are looked up. The
    load may begin below `start`, never below the blob."""
    while out > base and left > 0:
        at = (left + 7) >> 3
        width = min(longest, left)
        window = (load(start + at - 8) << _U(8 * at - left)) >> _U(64 - width)
        entry = load(tables + (8 << width) + np.int64(window) * 8)
        n = np.int64(entry >> _U(8) & _U(255))
        if n == 0 or n > out - base:
            return False
        left -= np.int64(entry & _U(63))
        for _ in range(n):
            out -= 1
            store_byte(out, entry >> _U(56))
            entry <<= _U(8)
    return out == base and left == 0
