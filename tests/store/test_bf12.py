"""bf12 gives every bit back, whatever it is given, and experts in it are computed like those of the
checkpoint."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.store import bf12
from moelab.store.codecs import compress_tensor, decompress_tensor


def naive(blob, n):
    """The weights of a blob, one after the other, by its description."""
    table, low, codes = blob[48:64], blob[64 : 64 + n], blob[64 + n : 64 + n + n // 2]
    words = []
    for i in range(n):
        code = int(codes[i // 64 * 32 + i % 32])
        words.append(int(low[i]) | int(table[code >> 4 if i % 64 >= 32 else code & 15]) << 8)
    rest = bytes(blob[64 + n + n // 2 :])
    m = len(rest) // 6
    indices, values = np.frombuffer(rest, np.uint32, m), np.frombuffer(rest, np.uint16, m, 4 * m)
    for index, value in zip(indices, values):
        words[index] = value
    return np.array(words, np.uint16)


@given(st.integers(1, 12), st.integers(1, 65536), st.integers(0, 10**6))
def test_any_weights_come_back(blocks, values, seed):
    words = np.random.default_rng(seed).integers(0, values, 64 * blocks).astype(np.uint16)
    blob, out = bf12.pack(words), np.empty_like(words)
    bf12.CODEC.decompress(blob, out)
    assert np.array_equal(out, words) and np.array_equal(naive(blob, len(words)), words)


def test_all_bit_patterns_and_heavy_tails():
    rng = np.random.default_rng(0)
    usual = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    tails = torch.from_numpy(rng.standard_cauchy(1 << 16)).bfloat16()
    every = torch.from_numpy(rng.permutation(1 << 16).astype(np.uint16)).view(torch.bfloat16)
    for w in (every, usual, tails, 0 * usual, torch.full((128,), torch.nan).bfloat16()):
        bf12.CODEC.decompress(bf12.pack(w), out := torch.empty_like(w))
        assert torch.equal(out.view(torch.int16), w.view(torch.int16))
    assert len(bf12.pack(usual)) < 0.76 * usual.nbytes


def test_what_does_not_fit_stays_raw():
    def stored(w):
        packed, out = compress_tensor(w, "bf12"), torch.empty_like(w)
        decompress_tensor(packed, out)
        assert torch.equal(out.view(torch.uint8), w.view(torch.uint8))
        return [plane.codec.name for plane in packed]

    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    b = w.bfloat16()
    assert stored(b) == stored(b[:, :96].contiguous()) == ["bf12"]
    assert bf12.CODEC.kernel("BF16", (64, 128)) == "bf12"
    assert bf12.CODEC.kernel("BF16", (64, 96)) == ""  # rows of no whole blocks: only stored so
    any_bits = torch.randint(-1 << 15, 1 << 15, (64, 128), dtype=torch.int16).view(torch.bfloat16)
    for other in (w, w.half(), b[0], b[:3, :96].contiguous(), any_bits):
        assert stored(other) == ["raw"]


@given(st.integers(0, 3000), st.integers(0, 40))
def test_a_blob_of_an_impossible_length_is_refused(length, blocks):
    least = 64 + 96 * blocks
    if length >= least and (length - least) % 6 == 0 and (length - least) // 6 <= 64 * blocks:
        assert bf12.escapes(length, 64 * blocks) == (length - least) // 6
    else:
        with pytest.raises(ValueError, match="bytes"):
            bf12.escapes(length, 64 * blocks)


def test_escapes_out_of_place_are_refused():
    words = np.random.default_rng(0).permutation(1 << 16).astype(np.uint16)
    blob, first = bf12.pack(words), 64 + 3 * len(words) // 2
    for value in (1 << 16, (1 << 32) - 1):
        blob[first : first + 4].view(np.uint32)[0] = value
        with pytest.raises(ValueError, match="order"):
            bf12.CODEC.decompress(blob, np.empty_like(words))
