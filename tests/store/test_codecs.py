import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.store.codecs import (
    CODECS,
    MIN_SHARD,
    compress_tensor,
    decompress_tensor,
    find_codec,
    shard_bounds,
    shard_count,
)

BYTES = pytest.mark.parametrize("name", [name for name in CODECS if name != "bf12"])


def gaussian(n, dtype=torch.bfloat16):
    return (torch.randn(n, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)


def exponents(weights):
    return (weights.view(torch.int16).to(torch.int32) >> 7) & 0xFF


def same(a, b):
    return torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))


@BYTES
@given(data=st.binary(max_size=2000) | st.lists(st.integers(100, 104), max_size=3000).map(bytes))
def test_every_codec_round_trips_arbitrary_bytes(name, data):
    codec, out = find_codec(name), bytearray(len(data))
    blob = codec.compress(data)
    for view in (blob, memoryview(blob)):
        codec.decompress(view, out)
        assert out == data


@BYTES
def test_other_sizes_and_damage_are_refused_or_fill_the_buffer(name):
    rng, codec = np.random.default_rng(0), find_codec(name)
    data = (rng.integers(0, 9, 3000) ** 2).astype(np.uint8).tobytes()
    blob = codec.compress(data)
    for size in (0, 1, 2999, 3001, 9000):
        with pytest.raises(ValueError, match=str(size)):
            codec.decompress(blob, bytearray(size))
    for _ in range(200):
        damaged = bytearray(blob)
        damaged[rng.integers(len(blob))] ^= 1 << rng.integers(8)
        del damaged[len(blob) - rng.integers(2) * rng.integers(len(blob)) :]
        with contextlib.suppress(ValueError):
            codec.decompress(damaged, bytearray(len(data)))


@pytest.mark.parametrize("name", CODECS)
def test_tensors_of_every_type_come_back_bit_for_bit(name):
    rng = np.random.default_rng(0)
    for dtype in (
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32),
    ):
        for shape, high in (((0,), 9), ((1,), 256), ((3, 5), 256), ((64, 129), 256), ((64, 64), 4)):
            raw = rng.integers(0, high, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
            weights = torch.empty(shape, dtype=dtype)
            weights.view(torch.uint8).copy_(torch.from_numpy(raw))
            packed, out = compress_tensor(weights, name), torch.empty_like(weights)
            decompress_tensor(packed, out)
            assert same(out, weights) and packed.nbytes <= weights.nbytes


@pytest.mark.parametrize(
    "name, points", [("huffman", 0.30), ("zstd-huffman", 0.40), ("zstd", 4), ("lz4hc", 10)]
)
def test_how_close_a_codec_comes_to_the_bound(name, points):
    """(8 + H) / 16, H from counts made without the package."""
    weights = gaussian(1 << 19)  # 1 MB
    _, counts = torch.unique(exponents(weights), return_counts=True)
    p = counts.double() / counts.sum()
    bound = (8 - float((p * p.log2()).sum())) / 16
    packed = compress_tensor(weights, name)
    assert bound < packed.nbytes / weights.nbytes <= bound + points / 100
    assert [plane.codec.name for plane in packed] == [name, "raw"]


def test_splitting_pays_or_is_left():
    def fraction(weights):
        packed = compress_tensor(weights, "huffman")
        planes = ["coded" if plane.codec.name == "huffman" else "" for plane in packed]
        return packed.nbytes / weights.nbytes, planes

    noise = torch.randint(0, 256, (40000,), dtype=torch.uint8)
    assert fraction(noise) == (1.0, [""])
    assert fraction(noise.view(torch.bfloat16)) == (1.0, ["", ""])
    half, planes = fraction(gaussian(100_000, torch.float16))
    assert half < 0.87 and planes == ["coded", ""]
    single, planes = fraction(gaussian(100_000, torch.float32))
    assert single < 0.85 and planes == ["coded", "", "", ""]
    widened, planes = fraction(gaussian(100_000).float())  # two of four bytes are zero
    assert widened < 0.34 and planes[2:] == ["coded"] * 2


@given(st.integers(0, 10**8), st.integers(1, 64))
def test_shards_are_few_enough_not_to_become_small(n, k):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("moelab.store.codecs.SHARDS", k)
        count = shard_count(n)
    assert 1 <= count <= k
    assert count == 1 or n / count >= MIN_SHARD
    assert count == k or n < (count + 1) * MIN_SHARD
    bounds = shard_bounds(n, count)
    assert bounds[0][0] == 0 and bounds[-1][1] == n and len(bounds) == count
    assert all(a[1] == b[0] and b[0] % 64 == 0 for a, b in zip(bounds, bounds[1:]))


@pytest.mark.parametrize("name", ["huffman", "zstd-huffman"])
def test_several_shards(name):
    weights = gaussian(3 * MIN_SHARD + 1001)
    packed = compress_tensor(weights, name)
    assert len(packed[0].shards) == 3
    out = torch.zeros_like(weights)
    decompress_tensor(packed, out)
    assert same(out, weights)
    begin, end = shard_bounds(len(weights), 3)[-1]
    find_codec(name).decompress(packed[0].shards[-1], last := bytearray(end - begin))
    assert list(last) == exponents(weights)[begin:].tolist()
