"""Decoding in two stages within the tensor's own memory equals the tensor."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.store import bits, stages
from moelab.store.codecs import CODECS, compress_tensor
from moelab.store.layout import Chunk, StoreError, TensorEntry
from moelab.store.reader import Chunks


def chunks_of(tensor, codec, K):
    """(E-chunks, SM-chunks) of a tensor as a reader would give them, by concatenation."""
    packed, parts, planes = compress_tensor(tensor, codec, K), {"E": b"", "SM": b""}, []
    for i, plane in enumerate(packed.planes):
        part, found = "SM" if i else "E", []
        for shard in plane.shards:
            data = bytes(shard)
            found.append(Chunk(len(parts[part]), len(data), ""))
            parts[part] += data
        planes.append((plane.codec, tuple(found)))
    entries = {
        "w": TensorEntry(
            "BF16" if tensor.dtype == torch.bfloat16 else "F16",
            tuple(tensor.shape),
            "",
            tuple(planes),
        )
    }
    return [
        Chunks(0, 0, part, entries, np.frombuffer(data, np.uint8), 0, len(data))
        for part, data in parts.items()
    ]


@settings(max_examples=60)
@given(
    st.integers(1, 70_000),
    st.sampled_from([name for name in CODECS if name != "raw"]),
    st.integers(1, 3),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.integers(0, 9),
)
def test_two_stages_give_the_tensor(n, codec, K, dtype, seed):
    tensor = (torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)
    e, sm = chunks_of(tensor, codec, K)
    if not e.entries["w"].separable:  # too small, or not worth compressing
        return
    out = torch.full_like(tensor, float("nan"))
    stages.decompress(e, "w", out)
    stages.recover(sm, "w", out)
    assert torch.equal(out.view(torch.int16), tensor.view(torch.int16))


@given(st.integers(0, 40_000), st.integers(0, 9))
def test_joining_in_place_is_joining(n, seed):
    rng = np.random.default_rng(seed)
    exponents, rest = (rng.integers(0, 256, n, np.uint8) for _ in range(2))
    words = np.empty(n, np.uint16)
    words.view(np.uint8)[n:] = exponents
    stages._recover(rest, words)
    assert np.array_equal(words, bits.join(exponents, rest, np.empty_like(words)))


def test_a_damaged_chunk_is_named():
    tensor = (torch.randn(60_000) * 0.02).bfloat16()
    e, _ = chunks_of(tensor, "zstd", 1)
    broken = Chunks(4, 17, "E", e.entries, e.data[::-1].copy(), 0, len(e.data))
    with pytest.raises(StoreError, match="w of expert 17 of MoE layer 4"):
        stages.decompress(broken, "w", torch.empty_like(tensor))
