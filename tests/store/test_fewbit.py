"""Few-bit formats against naive loops over single weights and against transformers' own
dequantisation."""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.checkpoint.experts import few_bits
from moelab.store.fewbit import E2M1, FORMATS, find_format, same_bits

EVERY = pytest.mark.parametrize("name", FORMATS)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
#: wide, with zeros of both signs, ties, subnormals and what overflows a narrower type
values = st.one_of(
    st.sampled_from(
        [0.0, -0.0, 0.5, -1.5, 2.5, 5.0, 6.0, 7.0, 127.0, 448.0, 1e-41, -3e-39, 3e38, 63.5]
    ),
    st.floats(-1e3, 1e3, width=32),
)


def matrix(R, n):
    """Weights of groups of all sizes."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(R, n, generator=generator) * 0.02
    sizes = torch.exp(2 * torch.randn(R, n // 32, generator=generator))
    return (w * sizes.repeat_interleave(32, 1)).bfloat16()


def pack(name, w):
    return find_format(name).compress(w)


def back(name, blob, shape, dtype=torch.float32):
    out = torch.full(shape, 77.0, dtype=dtype)
    find_format(name).decompress(blob, out)
    return out


@cache
def e4m3(code):
    """The value of a code by the definition of the format: sign, 4 bits of exponent, 3 of
    mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if code >> 7 else value


def bf16(bits):
    return np.array([bits << 16], np.uint32).view(np.float32)[0].item()


def naive(name, blob, R, n):
    """Weight by weight from the bytes of a blob, as the docstring of the module lays them out;
    Python's doubles."""
    blob, out = bytes(blob), torch.empty(R, n, dtype=torch.float64)
    half = name in ("mxfp4", "int4")
    at = R * n // 2 if half else R * n
    for r in range(R):
        for i in range(n):
            code = blob[(r * n + i) // 2] if half else blob[r * n + i]
            code = (code >> 4 if i % 2 else code & 15) if half else code
            group = r * (n // 32) + i // 32
            if name == "fp8":
                group = r // 128 * -(-n // 128) + i // 128
                scale = np.frombuffer(blob, np.float32, 1, at + 4 * group)[0].item()
                out[r, i] = e4m3(code) * scale
            elif name == "mxfp4":
                scale = 2.0 ** (blob[at + group] - 127) if blob[at + group] < 255 else math.inf
                out[r, i] = math.copysign(1, 7.5 - code) * E2M1[code & 7] * scale
            else:
                scale = bf16(int.from_bytes(blob[at + 2 * group : at + 2 * group + 2], "little"))
                out[r, i] = (code - 8 if half else code - 256 * (code > 127)) * scale
    return out


@EVERY
@given(R=st.integers(1, 4), groups=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_any_blob_unpacks_as_the_loop_says(name, R, groups, seed):
    """Every byte is possible in codes; scales are finite, of both signs where the format has
    one."""
    form, n, rng = find_format(name), 32 * groups, np.random.default_rng(seed)
    blob = rng.integers(0, 256, form.nbytes((R, n)), np.uint8)
    scales = form.split(blob, (R, n))["scales"]
    if scales.dtype == torch.uint8:
        scales.clamp_(max=254)
    else:
        scales.copy_(torch.from_numpy(rng.normal(size=scales.shape) * 10.0 ** rng.integers(-4, 4)))
    expected = naive(name, blob, R, n)
    for dtype in DTYPES:
        found = back(name, blob, (R, n), dtype)
        wanted = expected.float().to(dtype).double().numpy()
        assert np.array_equal(found.double().numpy(), wanted, equal_nan=True)
        turned = back(name + ".T", blob, (n, R), dtype)
        assert np.array_equal(turned.float().numpy(), found.T.float().numpy(), equal_nan=True)


@given(R=st.integers(1, 3), few=st.lists(values, min_size=3, max_size=99))
def test_no_other_code_of_fp8_is_nearer(R, few):
    """Every code, tried one by one; a widest weight beyond the last code takes that."""
    w = torch.tensor((few * 64)[: R * 64]).view(R, 64)
    blob = pack("fp8", w)
    found = back("fp8", blob, w.shape).double().flatten().tolist()
    scale = find_format("fp8").split(blob, w.shape)["scales"].double().item()
    grid = np.array([e4m3(c) for c in range(256) if c & 127 != 127]) * scale
    for value, exact in zip(found, w.double().flatten().tolist()):
        assert abs(value - exact) <= np.abs(grid - exact).min() + 1e-6 * abs(exact) + 1e-44


def in_torch(name, w):
    """The blob of fp32 weights [R, n] by whole-tensor operations of torch, step by step as the
    formats are defined."""
    groups = w.unflatten(-1, (-1, 32))
    if name == "mxfp4":
        mantissa, exponent = groups.abs().amax(-1, keepdim=True).frexp()
        shared = (exponent - 3).masked_fill(mantissa == 0, -127).clamp(-127, 127)
        middle = torch.tensor([(a + b) / 2 for a, b in zip(E2M1, E2M1[1:])])
        middle[1::2] = middle[1::2].nextafter(middle.new_zeros(()))  # ties to even codes
        scaled = torch.ldexp(groups, -shared)
        codes = torch.bucketize(scaled.abs(), middle) | scaled.signbit().long() << 3
        scales = (shared.squeeze(-1) + 127).to(torch.uint8)
    else:
        low, high, zero = (-8, 7, 8) if name == "int4" else (-127, 127, 0)
        widest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
        scales = (widest / -8 if name == "int4" else widest.abs() / 127).bfloat16()
        wide = scales.float()[..., None]
        codes = torch.where(wide == 0, 0, groups / wide).round().clamp(low, high).int() + zero
    codes = codes.to(torch.int8).view(torch.uint8).numpy().ravel()
    codes = codes if name == "int8" else codes[::2] | codes[1::2] << 4
    return np.concatenate([codes, scales.view(torch.uint8).numpy().ravel()])


@pytest.mark.parametrize("name", ["int8", "int4", "mxfp4"])
@given(
    R=st.integers(1, 5),
    groups=st.integers(1, 4),
    few=st.lists(values, max_size=40),
    scale=st.integers(-140, 120),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_blobs_are_those_of_torchs_operations_byte_for_byte(
    name, R, groups, few, scale, dtype, seed
):
    """Ties, subnormals, zeros of both signs, widest weights of both signs, any 32 bits that are
    finite."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(R, 32 * groups, generator=generator) * 2.0**scale
    if seed % 3 == 0:  # few values, so many ties
        w = (w / 2.0**scale).round() / 2
    if seed % 3 == 1:
        words = torch.randint(-(2**31), 2**31, w.shape, generator=generator).to(torch.int32)
        w = words.view(torch.float32)
    w.view(-1)[: len(few)] = torch.tensor(few)[: w.numel()]
    w = w.to(dtype).nan_to_num(0.0, 1.0, -1.0)
    assert np.array_equal(pack(name, w), in_torch(name, w.float()))


def test_every_format_costs_what_it_says():
    w = matrix(256, 512)
    size = {name: 8 * len(pack(name, w)) / w.numel() for name in FORMATS}
    assert size == {"int8": 8.5, "fp8": 8 + 32 / 128**2, "mxfp4": 4.25, "int4": 4.5}


@EVERY
def test_what_does_not_fit_stays_as_it_is(name):
    good = matrix(4, 64)
    for same in (good.T.contiguous(), good.T):
        assert np.array_equal(pack(name, good), pack(name + ".T", same))
    assert np.array_equal(pack(name, good), pack(name, good.view(2, 2, 64)))
    bad = [good[0], good[:, :40], good.int(), good[:0], good.T]
    for value in (math.nan, math.inf, -math.inf):
        bad.append(good.clone())
        bad[-1][1, -1] = value
    assert [pack(name, w) for w in bad] == [None] * len(bad)


@EVERY
def test_damage_and_other_shapes_are_refused(name):
    blob = pack(name, matrix(4, 64))
    for wrong, shape in (
        (blob[:-1], (4, 64)),
        (np.append(blob, blob[:1]), (4, 64)),
        (blob, (4, 96)),
    ):
        with pytest.raises(ValueError, match="were expected"):
            back(name, wrong, shape)
    with pytest.raises(ValueError, match="no multiple of 32"):
        back(name, blob, (4, 63))
    with pytest.raises(ValueError, match="'int3'.*int8, fp8, mxfp4, int4"):
        find_format("int3")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 2.0**-120, 2.0**121])
def test_fp8_of_every_scale_and_nan_is_what_torch_makes_of_it(scale, dtype):
    """By the kernel where it can, by torch where not."""
    generator, form = torch.Generator().manual_seed(0), find_format("fp8")
    for shape in ((130, 192), (4, 96), (2, 5, 128)):
        blob = torch.randint(0, 256, (form.nbytes(shape),), generator=generator).byte().numpy()
        codes, scales = form.split(blob, shape).values()
        scales.copy_(torch.randn(scales.shape, generator=generator) * scale)
        out = back("fp8", blob, shape, dtype)
        expected = form.dequantize(codes, scales).to(dtype).view(shape)
        assert torch.equal(out.isnan(), expected.isnan())
        assert same_bits(out.nan_to_num(0), expected.nan_to_num(0))


# ---------------------------------------------------------------------------------------------
# as checkpoints publish them


def published(tensors, made):
    plan = SimpleNamespace(quantizer=None)
    return few_bits(plan, [("", 0, tensor) for tensor in tensors], made)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_is_transformers(dtype):
    """Every code under every scale, and the transpose that GPT-OSS's model has."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).repeat(16).view(1, 256, 1, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0]  # [32, 256]
    form, blob = published([blocks, scales], theirs)
    assert form.name == "mxfp4.T"
    assert same_bits(back(form.name, blob, theirs.shape, dtype), theirs)
    assert published([scales, blocks], theirs)[0] is not None  # in any order
    theirs[0, 0] += 1
    assert published([blocks, scales], theirs) is None


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("R, n", [(256, 384), (64, 96), (128, 96)])
def test_fp8_is_transformers(R, n, scale):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (R, n), generator=generator).byte()  # NaN's two, too
    codes, grid = codes.view(torch.float8_e4m3fn), (-(-R // 128), -(-n // 128))
    scales = torch.exp2(torch.randint(-9, 3, grid, generator=generator).float())
    if scale != torch.float8_e8m0fnu:
        scales = scales * (1 + torch.rand(grid, generator=generator))
    scales = scales.to(scale)
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    form, blob = published([codes, scales], theirs)
    assert form.name == "fp8"
    assert same_bits(back("fp8", blob, (R, n), torch.bfloat16), theirs)
    if R == 256:  # gate and up, one below the other
        both = torch.cat([theirs, theirs])
        found = published([codes, scales, codes, scales], both)
        assert same_bits(back("fp8", found[1], both.shape, torch.bfloat16), both)


def test_what_is_no_blob_is_not_taken_for_one():
    w, codes = matrix(64, 64), torch.zeros(64, 64).to(torch.float8_e4m3fn)
    assert published([w], w) is None
    assert published([codes], codes.bfloat16()) is None  # no scales
    assert published([codes, torch.ones(2, 2)], codes.bfloat16()) is None  # blocks of 32 × 32
    assert published([torch.zeros(4, 64, dtype=torch.uint8)], w[:4]) is None
