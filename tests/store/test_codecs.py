import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
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

NAMES = list(CODECS)
BYTES = [name for name in NAMES if name != "bf12"]  # of any length


def gaussian(n: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(n, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)


def bound(weights: torch.Tensor) -> float:
    """(8 + H_exp) / 16, from counts made without the package."""
    _, counts = torch.unique(
        (weights.view(torch.int16).to(torch.int32) >> 7) & 0xFF, return_counts=True
    )
    p = counts.double() / counts.sum()
    return (8 - float((p * p.log2()).sum())) / 16


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))


@pytest.mark.parametrize("name", BYTES)
@settings(max_examples=40, deadline=None)
@given(
    data=st.one_of(
        st.binary(max_size=2000), st.lists(st.integers(100, 104), max_size=3000).map(bytes)
    )
)
def test_every_codec_round_trips_arbitrary_bytes(name, data):
    blob = find_codec(name).compress(data)
    out = bytearray(len(data))
    find_codec(name).decompress(blob, out)
    assert out == data
    find_codec(name).decompress(memoryview(blob), out)
    assert out == data


@pytest.mark.parametrize("name", BYTES)
def test_a_buffer_of_another_size_is_refused(name):
    blob = find_codec(name).compress(bytes(range(100)) * 50)
    for size in (0, 1, 4999, 5001, 9000):
        with pytest.raises(ValueError, match=str(size)):
            find_codec(name).decompress(blob, bytearray(size))


@pytest.mark.parametrize("name", BYTES)
def test_damaged_blobs_raise_or_fill_the_buffer(name):
    rng = np.random.default_rng(0)
    data = (rng.integers(0, 9, 3000) ** 2).astype(np.uint8).tobytes()
    blob = find_codec(name).compress(data)
    for _ in range(300):
        damaged = bytearray(blob)
        damaged[rng.integers(len(blob))] ^= 1 << rng.integers(8)
        del damaged[len(blob) - rng.integers(2) * rng.integers(len(blob)) :]
        with contextlib.suppress(ValueError):
            find_codec(name).decompress(damaged, bytearray(len(data)))


DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int32,
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_come_back_bit_for_bit(name, dtype):
    rng = np.random.default_rng(0)
    for shape in ((0,), (1,), (3, 5), (64, 129)):
        n = int(np.prod(shape)) * dtype.itemsize
        for raw in (
            rng.integers(0, 256, n, dtype=np.uint8),
            rng.integers(60, 64, n, dtype=np.uint8),
        ):
            weights = (
                torch.from_numpy(raw).view(dtype).view(shape)
                if n
                else torch.empty(shape, dtype=dtype)
            )
            packed = compress_tensor(weights, name)
            out = torch.empty_like(weights)
            decompress_tensor(packed, out)
            assert same(out, weights)
            assert packed.nbytes <= weights.nbytes


def test_all_patterns_of_bf16_as_bits():
    x = np.arange(65536, dtype=np.uint16)
    out = np.empty_like(x)
    decompress_tensor(compress_tensor(x, "huffman"), out, scratch=bytearray(65536))
    assert (out == x).all()


@pytest.mark.parametrize(
    "name, points", [("huffman", 0.30), ("zstd-huffman", 0.40), ("zstd", 4), ("lz4hc", 10)]
)
def test_how_close_a_codec_comes_to_the_bound(name, points):
    weights = gaussian(1 << 19)  # 1 MB
    packed = compress_tensor(weights, name)
    assert bound(weights) < packed.nbytes / weights.nbytes <= bound(weights) + points / 100
    assert [plane.codec.name for plane in packed.planes] == [name, "raw"]


def test_splitting_pays_or_is_left():
    def fraction(weights):
        packed = compress_tensor(weights, "huffman")
        return packed.nbytes / weights.nbytes, [plane.codec.name for plane in packed.planes]

    noise = torch.randint(0, 256, (40000,), dtype=torch.uint8)
    assert fraction(noise) == (1.0, ["raw"])
    assert fraction(noise.view(torch.bfloat16)) == (1.0, ["raw", "raw"])
    half, planes = fraction(gaussian(100_000, torch.float16))
    assert half < 0.87 and planes == ["huffman", "raw"]
    single, planes = fraction(gaussian(100_000, torch.float32))
    assert single < 0.85 and planes == ["huffman", "raw", "raw", "raw"]
    widened, planes = fraction(gaussian(100_000).float())  # two of four bytes are zero
    assert widened < 0.34 and planes[2:] == ["huffman"] * 2
    assert fraction(gaussian(100_000).to(torch.float8_e4m3fn).bfloat16())[1] == ["huffman"] * 2


@given(st.integers(0, 10**8), st.integers(1, 64))
def test_shards_are_few_enough_not_to_become_small(n, k):
    count = shard_count(n, k)
    assert 1 <= count <= k
    assert count == 1 or n / count >= MIN_SHARD
    assert count == k or n < (count + 1) * MIN_SHARD
    bounds = shard_bounds(n, count)
    assert bounds[0][0] == 0 and bounds[-1][1] == n and len(bounds) == count
    assert all(a[1] == b[0] and b[0] % 64 == 0 for a, b in zip(bounds, bounds[1:]))


@pytest.mark.parametrize("name", ["huffman", "zstd-huffman"])
def test_several_shards(name):
    weights = gaussian(3 * MIN_SHARD + 1001)
    packed = compress_tensor(weights, name, shards=4)
    assert len(packed.planes[0].shards) == 3
    out = torch.empty_like(weights)
    decompress_tensor(packed, out, torch.empty(len(weights), dtype=torch.uint8))
    assert same(out, weights)
    (begin, end), shard = (
        shard_bounds(len(weights), len(packed.planes[0].shards))[-1],
        packed.planes[0].shards[-1],
    )
    last = bytearray(end - begin)  # a shard is decoded without the others
    find_codec(name).decompress(shard, last)
    assert (
        list(last) == ((weights[begin:end].view(torch.int16).to(torch.int32) >> 7) & 0xFF).tolist()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_a_raw_tensor_is_its_own_bytes(dtype):
    weights = gaussian(1001).to(dtype)
    packed = compress_tensor(weights, "raw", shards=4)
    (plane,) = packed.planes
    assert (
        plane.codec.name == "raw"
        and bytes(plane.shards[0]) == weights.view(torch.uint8).numpy().tobytes()
    )


def test_compressed_tensors_do_not_share_memory_with_the_weights():
    weights = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    copy, packed = weights.clone(), compress_tensor(weights, "raw")
    weights.zero_()
    out = torch.empty_like(weights)
    decompress_tensor(packed, out)
    assert same(out, copy)


def test_errors():
    with pytest.raises(ValueError, match="unknown codec 'gzip'.*huffman"):
        compress_tensor(gaussian(10), "gzip")
    with pytest.raises(ValueError, match="at least one"):
        shard_count(1000, 0)
    with pytest.raises(ValueError, match="9 were expected"):
        decompress_tensor(compress_tensor(gaussian(10), "zstd"), bytearray(18))
