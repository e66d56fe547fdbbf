"""GGML's types against gguf-py."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

quants = pytest.importorskip("gguf.quants")
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from moelab.store.ggml import GGML

EVERY = pytest.mark.parametrize("name", GGML)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: of fp16: zeros, the smallest and the largest subnormal, the largest number, infinities, NaNs
BITS = [0, 0x8000, 1, 0x8001, 0x3FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF]
#: where in a block numbers of fp16 lie
HALVES = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
HALVES |= {"Q3_K": [108], "Q2_K": [80, 82], "MXFP4": []}


def theirs(name, blob, shape):
    rows = blob.reshape(-1, GGML[name].nbytes(shape[-1:]))
    with np.errstate(all="ignore"):
        return torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[name])).view(shape)


def same(found, wanted):
    """Bit by bit, but for which NaN it is."""
    nan = wanted.isnan()
    bits = {2: torch.int16, 4: torch.int32}[wanted.itemsize]
    equal = found.view(bits) == wanted.view(bits)
    return torch.equal(found.isnan(), nan) and bool((equal | nan).all())


def blob_of(name, blocks, seed):
    """Random blocks, the first of them with each of `BITS` where numbers of fp16 are."""
    form, rng = GGML[name], np.random.default_rng(seed)
    found = rng.integers(0, 256, (blocks, form.size), dtype=np.uint8)
    for number, at in enumerate(HALVES.get(name, [0])):
        values = np.array(BITS * len(BITS), np.uint16)
        values = values.reshape(len(BITS), -1).T if number else values.reshape(len(BITS), -1)
        some = values.ravel()[:blocks].view(np.uint8).reshape(-1, 2)
        found[: len(some), at : at + 2] = some
    if name == "MXFP4":
        found[:256, 0] = np.arange(256)[:blocks]
    return found.ravel()


@EVERY
def test_ten_thousand_blocks_are_decoded_as_gguf_py_does(name):
    form = GGML[name]
    shape = 10_240 * form.block // 512, 512
    blob = blob_of(name, 10_240, 0)
    wanted = theirs(name, blob, shape)
    assert same(form.dequantize(blob, shape), wanted)
    for dtype in DTYPES:
        form.decompress(blob, out := torch.empty(shape, dtype=dtype))
        assert same(out, wanted.to(dtype))


@EVERY
@given(
    rows=st.integers(1, 5), count=st.integers(1, 5), odd=st.integers(0, 3), seed=st.integers(0, 99)
)
def test_any_shape_at_any_address(name, rows, count, odd, seed):
    form = GGML[name]
    shape = rows, count * form.block
    blob = blob_of(name, rows * count, seed)
    buffer = np.empty(len(blob) + odd, np.uint8)
    buffer[odd:] = blob
    wanted = theirs(name, blob, shape)
    assert same(form.dequantize(buffer[odd:], shape), wanted)
    form.decompress(buffer[odd:], turned := torch.empty(shape[::-1]).T)
    assert same(turned.contiguous(), wanted)
    halves = [form.dequantize(part, (1, *shape[1:])) for part in np.split(blob, rows)]
    assert same(torch.cat(halves), wanted)


@EVERY
def test_sizes_are_gguf_pys(name):
    form = GGML[name]
    assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == (form.block, form.size)
    assert form.nbytes((3, 512)) == len(blob_of(name, 3 * 512 // form.block, 0))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
def test_what_gguf_py_writes(name):
    form, w = GGML[name], torch.randn(5, 2, 96, dtype=torch.bfloat16)
    blob = form.compress(w)
    rows = quants.quantize(w.float().numpy(), GGMLQuantizationType[name])
    assert np.array_equal(blob, rows.ravel())
    form.decompress(blob, out := torch.empty(w.shape))
    assert np.array_equal(out, quants.dequantize(rows, GGMLQuantizationType[name]))


@EVERY
def test_what_does_not_fit_stays_as_it_is(name):
    form, w = GGML[name], torch.randn(4, 512)
    bad = [w[0], w[:, :40], w.int(), w[:0], w.where(w < 0, torch.nan)]
    assert [form.compress(one) for one in bad] == [None] * len(bad)
    blob = blob_of(name, 4 * 512 // form.block, 0)
    with pytest.raises(ValueError, match="were expected"):
        form.dequantize(blob[:-1], (4, 512))
    with pytest.raises(ValueError, match="no multiple of"):
        form.dequantize(blob, (4, 500))
