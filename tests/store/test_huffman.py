"""Huffman blobs against a naive decoder and optimal codes; damage against memory that cannot be
touched."""

import ctypes
import itertools
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.store import huffman
from moelab.store.huffman import CODED, CONSTANT, MAX_BITS, RAW, STREAMS

ROOT = Path(__file__).parents[2]


def compress(data):
    return huffman.CODEC.compress(data)


def decompress(blob, n):
    out = np.full(n + 64, 0xA5, np.uint8)  # 32 guard bytes on either side
    huffman.CODEC.decompress(blob, out[32 : 32 + n])
    assert (out[:32] == 0xA5).all() and (out[32 + n :] == 0xA5).all()
    return out[32 : 32 + n]


def mode(blob):
    return blob[7]


def skewed(n, symbols, seed, first=0):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(symbols, 0.3))
    return ((first + rng.choice(symbols, n, p=p)) % 256).astype(np.uint8)


def exponents(n, scale=0.02):
    w = np.random.default_rng(0).standard_normal(n).astype(np.float32) * np.float32(scale)
    return (w.view(np.uint32) >> 23 & 0xFF).astype(np.uint8)


def naive_decode(blob):
    """A decoder written from the docstring alone: one bit at a time, through a dictionary of
    codes."""
    last, first, longest, n = blob[4], blob[5], blob[6], int.from_bytes(blob[8:16], "little")
    if mode(blob) in (RAW, CONSTANT):
        return blob[16:] if mode(blob) == RAW else bytes([first]) * n
    k, span = mode(blob) - CODED, last - first + 1
    sizes = [int(w) for w in np.frombuffer(blob[16 : 16 + 8 * STREAMS], np.uint64)]
    at = 16 + 8 * STREAMS
    leads, at = blob[at : at + k], at + 8
    nibbles = [x for byte in blob[at:] for x in (byte & 15, byte >> 4)]
    words = []
    for j, s in itertools.product(range(k + 1), range(first, last + 1)):
        if length := nibbles[j * span + s - first]:
            words.append((length, j * 256 + s, bytes([*leads[j - 1 : j], s]) if j else bytes([s])))
    codes, code = {}, 0
    for length, _, word in sorted(words):
        codes[format(code >> (longest - length), f"0{length}b")] = word
        code += 1 << (longest - length)
    at += (span * (k + 1) + 1) // 2
    out = b""
    for i, size in enumerate(sizes):
        size, left = size & (1 << 56) - 1, size >> 56
        bits = format(int.from_bytes(blob[at : at + size], "little"), "b")[1:]  # no closing 1 bit
        at += size
        pieces, word = [bytes([leads[left - 1]])] if left else [], ""
        for bit in bits:
            word += bit
            if word in codes:
                pieces.append(codes[word])
                word = ""
        out += b"".join(reversed(pieces))
        assert word == "" and len(out) == n * (i + 1) // STREAMS
    return out


@given(st.integers(0, 4000), st.integers(1, 256), st.integers(0, 10**6), st.integers(0, 255))
def test_round_trip(n, symbols, seed, first):
    data = skewed(n, symbols, seed, first)
    blob = compress(data)
    assert (decompress(blob, n) == data).all() and len(blob) <= n + 16
    if n < 700:
        assert naive_decode(blob) == data.tobytes()


def test_modes():
    for data, is_mode, size in (
        (np.zeros(0, np.uint8), RAW, 16),
        (np.full(10**6, 200, np.uint8), CONSTANT, 16),
        (np.tile(np.arange(256, dtype=np.uint8), 100), RAW, 25_616),
    ):
        assert (mode(compress(data)), len(compress(data))) == (is_mode, size)
    blob = compress(exponents(10000))
    assert mode(blob) > CODED and naive_decode(blob) == exponents(10000).tobytes()  # with leads
    # of bytes that are not independent leads would take more
    data = np.tile(np.repeat(np.uint8([1, 2, 3, 4, 5, 6]), [900, 500, 300, 200, 60, 40]), 20)
    lengths = huffman.code_lengths(np.bincount(data, minlength=256).astype(np.int64), MAX_BITS)
    assert len(compress(data)) * 8 <= lengths[data].sum() + 8 * 250


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=5), st.integers(3, 4))
def test_code_lengths_are_optimal_under_the_limit(counts, limit):
    padded = np.zeros(256, np.int64)
    padded[10 : 10 + len(counts)] = counts
    lengths = huffman.code_lengths(padded, limit)[10 : 10 + len(counts)]
    assert sum(2.0 ** -int(k) for k in lengths) == 1 and lengths.max() <= limit
    every = itertools.product(range(1, limit + 1), repeat=len(counts))
    possible = (tried for tried in every if sum(2.0**-k for k in tried) <= 1)
    assert np.dot(counts, lengths) == min(np.dot(counts, tried) for tried in possible)


def test_bad_arguments():
    blob = compress(exponents(5000))
    with pytest.raises(ValueError, match="read-only"):
        huffman.CODEC.decompress(blob, bytes(5000))
    for wrong in (blob[:15], b"x" + blob[1:], blob[:-1], compress(exponents(4999))):
        with pytest.raises(ValueError, match="is damaged, or not one of 5000 bytes"):
            huffman.CODEC.decompress(wrong, bytearray(5000))


# ---------------------------------------------------------------------------------------------
# damage


class Fenced:
    """A buffer of whole pages between two that cannot be touched: reading outside it ends the
    process."""

    def __init__(self, size):
        page = mmap.PAGESIZE
        self.size = -(-size // page) * page
        whole = np.frombuffer(mmap.mmap(-1, self.size + 2 * page), np.uint8)
        self.inside = whole[page : page + self.size]
        libc = ctypes.CDLL(None)
        for address in (whole.ctypes.data, self.inside.ctypes.data + self.size):
            assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), 0) == 0

    def put(self, data, at_the_end):
        view = self.inside[self.size - len(data) :] if at_the_end else self.inside[: len(data)]
        view[:] = np.frombuffer(data, np.uint8)
        return view


def mutate(blob, rng):
    data, kind = bytearray(blob), rng.integers(6)
    if kind == 0:  # bits anywhere
        for _ in range(rng.integers(1, 9)):
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    elif kind == 1:  # bytes of the header
        for _ in range(rng.integers(1, 5)):
            data[rng.integers(min(len(data), 120))] = rng.integers(256)
    elif kind == 2:
        del data[rng.integers(len(data)) :]
    elif kind == 3:
        data += rng.bytes(rng.integers(1, 40))
    elif kind == 4:  # noise in the place of the streams
        start = rng.integers(16, max(17, min(len(data), 400)))
        data[start:] = rng.bytes(len(data) - start)
    else:  # a size of a stream, moved to its neighbour
        i, step = rng.integers(STREAMS - 1), int(rng.integers(-60, 60))
        for j, change in ((i, step), (i + 1, -step)):
            at = 16 + 8 * j
            size = int.from_bytes(data[at : at + 7], "little") + change
            data[at : at + 7] = (size % (1 << 56)).to_bytes(7, "little")
    return bytes(data)


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
def test_damaged_blobs_never_crash_and_never_write_outside():
    rng = np.random.default_rng(0)
    originals = [exponents(20000), exponents(331), skewed(9000, 3, 5), skewed(7777, 200, 6)]
    originals += [skewed(40, 4, 7), np.zeros(500, np.uint8), np.zeros(0, np.uint8)]
    fence_in, fence_out = Fenced(40000), Fenced(30000)
    blobs, refused = [compress(data) for data in originals], 0
    for turn in range(4000):
        data, blob = originals[turn % 7], mutate(blobs[turn % 7], rng)
        n = len(data) if rng.random() < 0.9 else int(rng.integers(0, 20000))
        end = bool(rng.integers(2))
        out = fence_out.put(bytes(n), end)
        try:
            huffman.CODEC.decompress(fence_in.put(blob, end), out)
        except ValueError:
            refused += 1
    assert refused > 2000  # some damage only changes symbols


def test_no_kernel_reads_memory_that_it_has_freed():
    """The C library overwrites what is freed; a table that numba frees too early would decode to
    rubbish."""
    code = (
        "import numpy as np\nfrom moelab.store import huffman\n"
        "data = np.random.default_rng(0).geometric(0.4, 100_000).astype(np.uint8)\n"
        "blob, out = huffman.CODEC.compress(data), np.empty_like(data)\n"
        "for _ in range(20):\n    huffman.CODEC.decompress(blob, out)\n    assert np.array_equal(out, data)\n"
    )
    env = {**os.environ, "MALLOC_PERTURB_": "90"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
