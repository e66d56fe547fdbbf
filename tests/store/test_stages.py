"""Decoding in two stages within the tensor's own memory equals the tensor."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.store import codecs
from moelab.store.codecs import CODECS, compress_tensor
from moelab.store.headers import NAMES
from moelab.store.layout import Chunk, TensorEntry
from moelab.store.reader import Chunks, decode_tensor, decompress, recover


def chunks_of(tensor, codec, K):
    """(E-chunks, SM-chunks) of a tensor as a reader would give them, by concatenation."""
    parts, planes = {"E": b"", "SM": b""}, []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(codecs, "SHARDS", K)
        packed = compress_tensor(tensor, codec)
    for i, plane in enumerate(packed):
        part, found = "SM" if i else "E", []
        for shard in plane.shards:
            found.append(Chunk(len(parts[part]), len(shard), ""))
            parts[part] += bytes(shard)
        planes.append((plane.codec, tuple(found)))
    entries = {"w": TensorEntry(NAMES[tensor.dtype], tuple(tensor.shape), "", tuple(planes))}
    return [
        Chunks(0, 0, part, entries, np.frombuffer(data, np.uint8), 0, len(data))
        for part, data in parts.items()
    ]


@given(
    st.integers(1, 70_000),
    st.sampled_from([name for name in CODECS if name not in ("raw", "bf12")]),
    st.integers(1, 3),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_two_stages_give_the_tensor(n, codec, K, dtype):
    tensor = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 0.02).to(dtype)
    e, sm = chunks_of(tensor, codec, K)
    if e.entries["w"].shards:  # large enough, and worth compressing
        decompress(e, "w", out := torch.full_like(tensor, float("nan")))
        recover(sm, "w", out)
        assert torch.equal(out.view(torch.int16), tensor.view(torch.int16))


@given(st.integers(0, 1 << 40).map(random.Random), st.integers(4000, 9000), st.integers(1, 5))
def test_shards_are_decoded_apart_in_any_order_in_one_stage_or_two(chance, n, K):
    tensor = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 0.02).bfloat16()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(codecs, "MIN_SHARD", 64)
        e, sm = chunks_of(tensor, "huffman", K)
    entry = e.entries["w"]
    out = torch.full_like(tensor, float("nan"))
    assert entry.shards == K
    left = [(shard, chance.choice(["decode", "decompress"])) for shard in range(entry.shards)]
    while left:
        shard, stage = left.pop(chance.randrange(len(left)))
        part = out[slice(*entry.bounds(shard))]
        if stage == "decode":
            decode_tensor(e, sm, "w", part, shard)
        elif stage == "recover":
            recover(sm, "w", part, shard)
        else:
            decompress(e, "w", part, shard)
            left.append((shard, "recover"))
    assert torch.equal(out.view(torch.int16), tensor.view(torch.int16))


@pytest.mark.parametrize("codec", [name for name in CODECS if name not in ("raw", "bf12")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 63, 5000, 9001])
def test_the_triton_kernel_joins_what_a_loop_joins(codec, dtype, n, triton_device):
    from moelab.store import unpack_triton

    tensor = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 0.02).to(dtype)
    e, sm = (
        torch.from_numpy(codecs.plane_bytes(plane, n).copy()).to(triton_device)
        for plane in compress_tensor(tensor, codec)
    )
    out = torch.full_like(tensor, float("nan"), device=triton_device)
    unpack_triton.join(e, sm, out)
    got = out.cpu().view(torch.int16)
    naive = [((a << 8 | b) >> 1) | (b & 1) << 15 for a, b in zip(e.tolist(), sm.tolist())]
    assert torch.equal(got, tensor.view(torch.int16))
    assert got.tolist() == np.array(naive, np.uint16).view(np.int16).tolist()
