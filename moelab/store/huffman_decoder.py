"""The decoder of `moelab.store.huffman`, whose docstring describes the blobs.

A window of at most 12 bits of a stream indexes a table whose entries hold up to six symbols. The
loop of `decompress` takes four windows of each of six streams a round; the number of rounds is
bounded beforehand so that none can leave the blob or the output, and the rest of each stream is
decoded with a check at every step. A stream is held as in zstd: a 64-bit window, shifted left as
bits are used; the position of a sentinel 1 below the last bit tells how many were used."""

from __future__ import annotations

import numpy as np

from moelab.kernels.compile import kernel
from moelab.store.memory import copy, load, load_byte, store, store_byte, trailing_zeros

MAGIC = 0x3146484D  # "MHF1"
RAW, CONSTANT, CODED = 0, 1, 2
STREAMS = 6  # the decoding loop below is written out for six
LEADS = 3
MAX_BITS = 12  # longest code: the table has 4096 entries, 32 KB
WORDS = 256 * (1 + LEADS)  # word s is byte s, word 256·j + s is the j-th lead and byte s
HEADER, CODED_HEADER = 16, 24 + 8 * STREAMS
ERRORS = (
    "",
    "is shorter than its own header",
    "does not start as a Huffman blob does",
    "is for another number of bytes",
    "has an impossible size",
    "has an impossible code table",
    "has a stream that ends too early or too late",
)
_U = np.uint64


@kernel
def segment(n, i):
    """Where the bytes of stream i begin."""
    return n * i // STREAMS


@kernel
def canonical(lengths, longest):
    """The words that have a code in the order of their codes, by length and then number, and how
    many they are."""
    order, n = np.empty(len(lengths), np.int64), 0
    for length in range(1, longest + 1):
        for s in range(len(lengths)):
            if lengths[s] == length:
                order[n] = s
                n += 1
    return order, n


@kernel
def _decoding_table(lengths, leads, order, n, longest):
    """Tables for windows of 0 … `longest` bits, that of w bits at [2^w : 2^(w+1)]: uint64
    [2^(longest+1)].

    An entry tells what the window starts with: bits used (byte 0), number of symbols, at most 6
    (byte 1), the symbols, the last in byte 7, the one before it in byte 6 … Each table is made of
    shorter ones: after a word of b bits comes the table of w − b bits. Where that is too full, the
    entry stops at its first word."""
    table = np.zeros(2 << longest, np.uint64)
    for width in range(1, longest + 1):
        at = 1 << width
        for j in range(n):
            if lengths[order[j]] > width:
                break
            alone = _entry(order[j], lengths, leads)
            size = alone >> _U(8) & _U(255)
            full, rest = (_U(7) - size) << _U(8), 1 << (width - lengths[order[j]])
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
    return entry if word < 256 else entry + (_U(leads[(word >> 8) - 1]) << _U(48)) + _U(0x100)


@kernel
def _look(bits, out, table, shift):
    """Decode what the top bits start with; later stores overwrite the bytes below the symbols."""
    entry = load(table + np.int64(bits >> shift) * 8)
    store(out - 8, entry)
    return bits << (entry & _U(63)), out - np.int64(entry >> _U(8) & _U(255))


@kernel
def _refill(bits, at):
    """Move down by the whole bytes that were used: the sentinel, put into bit 0, has risen by the
    bits used."""
    used = trailing_zeros(bits)
    at -= used >> 3
    return (load(at) | _U(1)) << _U(used & 7), at


@kernel
def decompress(source, size, target, n):
    """Decode the blob of `size` bytes at `source` into the `n` bytes at `target`; returns an index
    of `ERRORS`."""
    if size < HEADER:
        return 1
    word = load(source)
    last, first = np.int64(word >> _U(32) & _U(255)), np.int64(word >> _U(40) & _U(255))
    longest, mode = np.int64(word >> _U(48) & _U(255)), np.int64(word >> _U(56))
    if word & _U(0xFFFFFFFF) != _U(MAGIC) or mode > CODED + LEADS or first > last:
        return 2
    if load(source + 8) != _U(n):
        return 3
    if mode == RAW:
        if size != HEADER + n:
            return 4
        copy(source + HEADER, n, target)
        return 0
    if mode == CONSTANT:
        if size != HEADER:
            return 4
        for i in range(target, target + n):
            store_byte(i, _U(first))
        return 0

    span, k = last - first + 1, mode - CODED
    at = source + CODED_HEADER + ((span * (k + 1) + 1) >> 1)
    if size < at - source or longest < 1 or longest > MAX_BITS:
        return 4
    leads, lengths, room = np.zeros(LEADS, np.int64), np.zeros(256 * (k + 1), np.int64), 0
    for j in range(k):
        leads[j] = np.int64(load_byte(source + CODED_HEADER - 8 + j))
    for i in range(span * (k + 1)):
        length = np.int64(load_byte(source + CODED_HEADER + (i >> 1)) >> _U(4 * (i & 1)) & _U(15))
        if length > longest:
            return 5
        if length > 0:
            lengths[256 * (i // span) + first + i % span] = length
            room += 1 << (longest - length)
    if room != 1 << longest:  # Kraft: every window starts with exactly one code
        return 5
    order, n_words = canonical(lengths, longest)
    table = _decoding_table(lengths, leads, order, n_words, longest)
    entries, shift = table.ctypes.data + (8 << longest), _U(64 - longest)

    # ip: where a stream's 8-byte window lies, op: end of what is not decoded yet; both fall towards
    # start and base
    start, ip = np.empty(STREAMS, np.int64), np.empty(STREAMS, np.int64)
    base, op = np.empty(STREAMS, np.int64), np.empty(STREAMS, np.int64)
    window = np.empty(STREAMS, np.uint64)
    end = source + size
    for i in range(STREAMS):
        word = load(source + HEADER + 8 * i)
        length, lead = word & _U((1 << 56) - 1), np.int64(word >> _U(56))
        if length < _U(1) or length > _U(end - at) or lead > k:
            return 4
        start[i] = at
        at += np.int64(length)
        ip[i] = at - 8  # at or above `source`: the header is longer than a window
        base[i], op[i] = target + segment(n, i), target + segment(n, i + 1)
        if lead > 0:
            if op[i] == base[i]:
                return 6
            op[i] -= 1
            store_byte(op[i], _U(leads[lead - 1]))
        bits, closing = load(ip[i]), _U(1) << _U(63)
        if bits >> _U(56) == _U(0):
            return 6
        window[i] = bits | _U(1)
        while window[i] < closing:
            window[i] <<= _U(1)
        window[i] <<= _U(1)  # drops the closing 1 bit: up to 8 bits used
    if at != end:
        return 4

    i0, i1, i2, i3, i4, i5 = ip[0], ip[1], ip[2], ip[3], ip[4], ip[5]
    o0, o1, o2, o3, o4, o5 = op[0], op[1], op[2], op[3], op[4], op[5]
    b0, b1, b2, b3, b4, b5 = window[0], window[1], window[2], window[3], window[4], window[5]
    while True:
        # a round uses at most 8 + 48 bits (7 bytes) of a stream, and writes at most 24 bytes and 2
        # undefined ones below
        unread = min(
            i0 - start[0], i1 - start[1], i2 - start[2], i3 - start[3], i4 - start[4], i5 - start[5]
        )
        unset = min(
            o0 - base[0], o1 - base[1], o2 - base[2], o3 - base[3], o4 - base[4], o5 - base[5]
        )
        rounds = min(unread // 7, (unset - 2) // 24)
        if rounds <= 0:
            break
        for _ in range(rounds):
            for _ in range(4):
                b0, o0 = _look(b0, o0, entries, shift)
                b1, o1 = _look(b1, o1, entries, shift)
                b2, o2 = _look(b2, o2, entries, shift)
                b3, o3 = _look(b3, o3, entries, shift)
                b4, o4 = _look(b4, o4, entries, shift)
                b5, o5 = _look(b5, o5, entries, shift)
            b0, i0 = _refill(b0, i0)
            b1, i1 = _refill(b1, i1)
            b2, i2 = _refill(b2, i2)
            b3, i3 = _refill(b3, i3)
            b4, i4 = _refill(b4, i4)
            b5, i5 = _refill(b5, i5)
    ip[0], ip[1], ip[2], ip[3], ip[4], ip[5] = i0, i1, i2, i3, i4, i5
    op[0], op[1], op[2], op[3], op[4], op[5] = o0, o1, o2, o3, o4, o5
    window[0], window[1], window[2], window[3], window[4], window[5] = b0, b1, b2, b3, b4, b5
    for i in range(STREAMS):
        left = (ip[i] - start[i]) * 8 + 64 - trailing_zeros(window[i])
        if not _finish(lengths, leads, order, entries, shift, start[i], left, base[i], op[i]):
            return 6
    # numba frees an array after the last line that names it, and `entries` is only its address:
    # this line keeps it
    return 0 if len(table) else 6


@kernel
def _finish(lengths, leads, order, entries, shift, start, left, base, out):
    """Decode the last `left` bits of the stream at `start` to the bytes base … out; whether they
    end together.

    A window here may reach below `start`, never below the blob: what uses more bits than are left
    is refused."""
    while out > base:
        at = (left + 7) >> 3
        window = (load(start + at - 8) << _U(8 * at - left)) >> shift
        entry = load(entries + np.int64(window) * 8)
        if (
            np.int64(entry & _U(63)) > left
            or np.int64(entry >> _U(8) & _U(255)) > out - base
            or out - base < 8
        ):
            j, code = (
                0,
                _U(1) << (_U(64) - shift - _U(lengths[order[0]])),
            )  # only its first word, then
            while code <= window:
                j += 1
                code += _U(1) << (_U(64) - shift - _U(lengths[order[j]]))
            entry = _entry(order[j], lengths, leads)
        used, n = np.int64(entry & _U(63)), np.int64(entry >> _U(8) & _U(255))
        if used > left or n > out - base:
            return False
        left -= used
        for _ in range(n):
            out -= 1
            store_byte(out, entry >> _U(56))
            entry <<= _U(8)
    return left == 0
