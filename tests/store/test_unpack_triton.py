"""What Triton makes of a blob on a GPU against what its codec makes of it, bit for bit."""

import numpy as np
import pytest
import torch

from moelab.store import bf12
from moelab.store.fewbit import FORMATS, find_format, joined
from moelab.store.packings import gathered

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same(codec, blob, shape, dtype, device):
    """Whether both ways give the same bits, whatever was in memory. Triton's interpreter truncates
    what a GPU rounds to bf16, so there the last one may differ."""
    from moelab.store.unpack_triton import unpack

    wanted = torch.full(shape, torch.nan, dtype=dtype)
    codec.decompress(blob, wanted)
    out = torch.full(shape, torch.nan, dtype=dtype, device=device)
    got = unpack(codec, torch.from_numpy(np.array(blob)).to(device), out).cpu()
    for one in (got, wanted):
        one[one.isnan()] = torch.nan
    ints = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    off = (got.view(ints).long() - wanted.view(ints).long()).abs().max()
    truncated = codec.few_bits and dtype == torch.bfloat16 and device == "cpu"
    return off <= truncated


@pytest.mark.parametrize("turned", ["", ".T"])
@pytest.mark.parametrize("name", FORMATS)
def test_few_bits(name, turned, triton_device):
    form = find_format(name + turned)
    for (R, n), dtype in zip(((3, 128), (130, 192), (2, 96)), DTYPES):  # the last one by torch
        w = torch.randn(R, n, generator=torch.Generator().manual_seed(R))
        w[0, :32] = 0
        w[1] *= torch.logspace(-30, 3, n)
        w = w.T.contiguous() if form.transposed else w
        assert same(form, form.compress(w), tuple(w.shape), dtype, triton_device)


def test_any_codes_and_scales(triton_device):
    codes = torch.arange(256, dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8)  # 2⁻¹²⁷ … 2¹²⁸
    blob = joined(codes.repeat(16), scales)
    assert same(find_format("mxfp4"), blob, (128, 64), torch.float32, triton_device)
    blob = joined(codes.view(torch.float8_e4m3fn).repeat(64), torch.tensor([1e-40]))
    assert same(find_format("fp8"), blob, (128, 128), torch.float32, triton_device)


def test_bf12(triton_device):
    from moelab.store.unpack_triton import unpack

    words = np.random.default_rng(0).permutation(1 << 16).astype(np.uint16)[:8192]
    patterns = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).view(64, 128)
    usual = torch.randn(64, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    odd = usual[:, :97].contiguous()  # stored in whole blocks, with rows of others
    for w in (patterns, usual, 0 * usual, odd):
        blob = bf12.pack(w)
        assert same(bf12.CODEC, blob, tuple(w.shape), torch.bfloat16, triton_device)
    with pytest.raises(ValueError, match="bf12 blob"):
        unpack(bf12.CODEC, torch.from_numpy(blob[:-3]).to(triton_device), odd)


@pytest.mark.parametrize("packed", [True, False])
def test_what_a_checkpoint_publishes(packed, triton_device):
    rng = torch.Generator().manual_seed(0)
    scales = torch.rand(64, 4, generator=rng).bfloat16()
    codes = torch.randint(-(2**31), 2**31, (64, 16), generator=rng).int()
    layer = {"weight_packed": codes, "weight_scale": scales}
    if not packed:  # which no kernel reads
        layer["weight_zero_point"] = torch.randint(0, 2**31, (8, 4), generator=rng).int()
    sources = [(f"layer.{name}", 0, tensor) for name, tensor in layer.items()]
    packing, blob = gathered("compressed-tensors", 4, sources)
    assert bool(packing.kernel("BF16", (64, 128))) is packed
    assert same(packing, blob, (64, 128), torch.bfloat16, triton_device)
