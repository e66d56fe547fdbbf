"""Few-bit formats against naive loops over single weights and against transformers' own
dequantisation."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.store import fewbit
from moelab.store.codecs import PackedTensor, Plane, decompress_tensor, find_codec
from moelab.store.fewbit import E2M1, FORMATS, pack, parts, published, same_bits, split, unpack

NAMES = list(FORMATS)
QUICK = settings(max_examples=30, deadline=None)
#: wide, with zeros of both signs, ties, subnormals and what overflows a narrower type
values = st.one_of(
    st.sampled_from(
        [0.0, -0.0, 0.5, -1.5, 2.5, 5.0, 6.0, 7.0, 127.0, 448.0, 1e-41, -3e-39, 3e38, 63.5]
    ),
    st.floats(-1e3, 1e3, width=32),
    st.floats(-(2**-10), 2**-10, width=32),
)


def matrix(R, n, seed=0, dtype=torch.bfloat16, spread=2.0):
    """Weights of groups of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(R, n, generator=generator) * 0.02
    return (
        w
        * torch.exp(spread * torch.randn(R, n // 32, generator=generator)).repeat_interleave(32, 1)
    ).to(dtype)


def back(name, blob, shape, dtype=torch.float32):
    out = torch.full(shape, 77.0, dtype=dtype)
    unpack(name, blob, out)
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
            byte = blob[(r * n + i) // 2] if half else blob[r * n + i]
            code, group = (
                (byte >> 4 if i % 2 else byte & 15) if half else byte,
                r * (n // 32) + i // 32,
            )
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


@pytest.mark.parametrize("name", NAMES)
@QUICK
@given(R=st.integers(1, 4), groups=st.integers(1, 5), data=st.data())
def test_any_blob_unpacks_as_the_loop_says(name, R, groups, data):
    """Every byte is possible in codes; scales are finite, of both signs where the format has
    one."""
    n, kinds = 32 * groups, parts(name, (R, 32 * groups))
    codes = np.frombuffer(
        data.draw(st.binary(min_size=R * n // 32, max_size=R * n // 32)) * 32, np.uint8
    )
    codes = codes[: math.prod(kinds["codes"][1]) * kinds["codes"][0].itemsize]
    dtype, shape = kinds["scales"]
    scales = torch.tensor(
        data.draw(
            st.lists(
                st.integers(0, 254) if dtype == torch.uint8 else st.floats(-1e4, 1e4, width=16),
                min_size=math.prod(shape),
                max_size=math.prod(shape),
            )
        )
    ).to(dtype)
    blob = np.concatenate([codes, scales.view(torch.uint8).numpy().reshape(-1)])
    expected = naive(name, blob, R, n)
    for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = back(name, blob, (R, n), out_dtype)
        assert np.array_equal(
            found.double().numpy(), expected.float().to(out_dtype).double().numpy(), equal_nan=True
        )
        turned = torch.empty(n, R, dtype=out_dtype)
        unpack(name + ".T", blob, turned)
        assert np.array_equal(turned.float().numpy(), found.T.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
@QUICK
@given(data=st.data())
def test_no_other_code_is_nearer(name, data):
    """Every code of a group's or block's scale, tried one by one; a widest weight beyond the last
    code takes that."""
    R, n = data.draw(st.integers(1, 3)), 32 * data.draw(st.integers(1, 2))
    few = data.draw(st.lists(values, min_size=R, max_size=R * n))
    w = torch.tensor((few * n)[: R * n]).view(R, n)
    blob = pack(name, w)
    found, scales = back(name, blob, (R, n)).double(), split(name, blob, (R, n))["scales"]
    codes = {
        "int8": range(-127, 128),
        "int4": range(-8, 8),
        "fp8": [e4m3(c) for c in range(256) if e4m3(c) == e4m3(c)],
        "mxfp4": [*E2M1, *(-v for v in E2M1)],
    }[name]
    grid, wide = np.array(codes, dtype=np.float64), w.double()
    for r in range(R):
        for i in range(n):
            scale = scales[r // 128, i // 128] if name == "fp8" else scales[r, i // 32]
            scale = 2.0 ** (int(scale) - 127) if name == "mxfp4" else scale.double().item()
            nearest = np.abs(grid * scale - wide[r, i].item()).min()
            error = abs(found[r, i].item() - wide[r, i].item())
            assert error <= nearest + 1e-6 * abs(wide[r, i].item()) + 1e-44


def in_torch(name, w):
    """The blob of fp32 weights [R, n] by whole-tensor operations of torch, step by step as the
    formats are defined."""
    groups = w.unflatten(-1, (-1, 32))
    if name.startswith("mxfp4"):
        mantissa, exponent = groups.abs().amax(-1, keepdim=True).frexp()
        shared = exponent - 3 + (mantissa > 0.75).int() * (name == "mxfp4-up")
        shared = shared.masked_fill(mantissa == 0, -127).clamp(-127, 127)
        middle = torch.tensor([(a + b) / 2 for a, b in zip(E2M1, E2M1[1:])])
        middle[1::2] = middle[1::2].nextafter(middle.new_zeros(()))  # ties to even codes
        scaled = torch.ldexp(groups, -shared)
        codes = torch.bucketize(scaled.abs(), middle) | scaled.signbit().long() << 3
        scales = (shared.squeeze(-1) + 127).to(torch.uint8)
    else:
        low, high = (-8, 7) if name == "int4" else (-127, 127)
        widest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
        scales = (widest / -8 if name == "int4" else widest.abs() / 127).bfloat16()
        wide = scales.float()[..., None]
        codes = torch.where(wide == 0, 0, groups / wide).round().clamp(low, high).int() + 8 * (
            name == "int4"
        )
    codes = codes.to(torch.int8).view(torch.uint8).numpy().ravel()
    return np.concatenate(
        [
            codes if name == "int8" else codes[::2] | codes[1::2] << 4,
            scales.view(torch.uint8).numpy().ravel(),
        ]
    )


@pytest.mark.parametrize("name", ["int8", "int4", "mxfp4", "mxfp4-up"])
@settings(max_examples=200, deadline=None)
@given(
    R=st.integers(1, 5),
    groups=st.integers(1, 4),
    few=st.lists(values, max_size=40),
    scale=st.integers(-140, 120),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
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
        w = (
            torch.randint(-(2**31), 2**31, w.shape, generator=generator)
            .to(torch.int32)
            .view(torch.float32)
        )
    w.view(-1)[: len(few)] = torch.tensor(few)[: w.numel()]
    w = w.to(dtype).nan_to_num(0.0, 1.0, -1.0)
    if name == "mxfp4-up":
        found = fewbit.joined(*fewbit.quantize_mxfp4(w.float(), saturate=False))
    else:
        found = pack(name, w)
    assert np.array_equal(found, in_torch(name, w.float()))


@pytest.mark.parametrize("name", NAMES)
def test_scales_are_those_of_the_widest_weight(name):
    w = matrix(256, 192, dtype=torch.float32)
    scales = split(name, pack(name, w), w.shape)["scales"]
    for r in range(0, 256, 5):
        for g in range(6):
            group = w[r, 32 * g : 32 * g + 32].tolist()
            widest = max(group, key=abs)
            if name == "mxfp4":
                assert scales[r, g] == math.floor(math.log2(abs(widest))) - 2 + 127
            elif name != "fp8":
                exact = abs(widest) / 127 if name == "int8" else widest / -8
                assert scales[r, g].item() == torch.tensor(exact).bfloat16().item()
    if name == "fp8":
        assert scales.shape == (2, 2)
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            block = w[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            assert scales[i, j].item() == pytest.approx(block.abs().max().item() / 448, rel=1e-6)


def test_every_format_costs_what_it_says_and_errs_in_order():
    w = matrix(256, 512, spread=0.3)
    size, error = {}, {}
    for name in NAMES:
        blob = pack(name, w)
        size[name] = 8 * len(blob) / w.numel()
        error[name] = ((back(name, blob, w.shape) - w.float()).norm() / w.float().norm()).item()
        assert len(blob) == fewbit.nbytes(name, w.shape)
    assert size == {"int8": 8.5, "fp8": 8 + 32 / 128**2, "mxfp4": 4.25, "int4": 4.5}
    assert (
        0.003
        < error["int8"]
        < 0.008
        < error["fp8"]
        < 0.03
        < error["int4"]
        < 0.1
        < error["mxfp4"]
        < 0.15
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_was_rounded_once_is_not_rounded_again(name, dtype):
    """Within the dtype's own rounding; zeros stay zeros, and the smallest and the largest weights
    finite."""
    w = matrix(160, 96, dtype=dtype)
    w[0] = 0
    w[1, ::2], w[2] = torch.finfo(dtype).tiny / 4, torch.finfo(dtype).max / 4
    once = back(name, pack(name, w), w.shape, dtype)
    assert once.isfinite().all() and not once[0].any()
    if name == "mxfp4":  # powers of two scale exactly
        assert same_bits(back(name, pack(name, once), w.shape, dtype).abs(), once.abs())
    again = back(name, pack(name, once), w.shape, dtype)
    assert ((again.float() - once.float()).abs() <= (w.float() - once.float()).abs().max()).all()


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_stays_as_it_is(name):
    good = matrix(4, 64)
    assert pack(name, good) is not None and pack(name + ".T", good.T) is not None
    assert np.array_equal(pack(name, good), pack(name + ".T", good.T.contiguous()))
    assert np.array_equal(pack(name, good), pack(name, good.view(2, 2, 64)))
    bad = [good[0], good[:, :40], good.int(), good[:0], good.T, torch.full((4, 64), math.inf)]
    for i in range(3):
        bad.append(good.clone())
        bad[-1][i, -1] = (math.nan, math.inf, -math.inf)[i]
    assert [pack(name, w) for w in bad] == [None] * len(bad)


@pytest.mark.parametrize("name", NAMES)
def test_damage_and_other_shapes_are_refused(name):
    w = matrix(4, 64)
    blob = pack(name, w)
    for wrong, shape in (
        (blob[:-1], (4, 64)),
        (np.append(blob, 0).astype(np.uint8), (4, 64)),
        (blob, (4, 96)),
    ):
        with pytest.raises(ValueError, match="were expected"):
            unpack(name, wrong, torch.empty(shape))
    with pytest.raises(ValueError, match="no multiple of 32"):
        unpack(name, blob, torch.empty(4, 63))
    packed = PackedTensor(w.nbytes, (Plane(name, (bytes(blob),)),))
    out = torch.empty_like(w)
    decompress_tensor(packed, out)
    assert same_bits(out, back(name, blob, w.shape, w.dtype))
    with pytest.raises(ValueError, match=f"quantize='{name}'"):
        find_codec(name)
    with pytest.raises(ValueError, match="'int3'.*int8, fp8, mxfp4, int4"):
        fewbit.find_format("int3")


# ------------------------------------------------------------------------------------- as
# checkpoints publish them


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mxfp4_is_transformers(dtype):
    """Every code under every scale, and the transpose that GPT-OSS's model has."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).repeat(16).view(1, 256, 1, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0]  # [32, 256]
    name, blob, read = published([blocks, scales], theirs)
    assert name == "mxfp4.T" and read[0] is blocks and read[1] is scales
    assert same_bits(back(name, blob, theirs.shape, dtype), theirs)
    assert published([scales, blocks], theirs)[0] == name  # in any order
    theirs[0, 0] += 1
    assert published([blocks, scales], theirs) is None


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("R, n", [(256, 384), (64, 96), (128, 96)])
def test_fp8_is_transformers(R, n, scale):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (R, n), dtype=torch.uint8, generator=generator)
    assert R * n < 16384 or len(codes.unique()) == 256  # NaN's two, too
    codes, grid = codes.view(torch.float8_e4m3fn), (-(-R // 128), -(-n // 128))
    scales = torch.exp2(torch.randint(-9, 3, grid, generator=generator)) * (
        1 if scale == torch.float8_e8m0fnu else 1 + torch.rand(grid, generator=generator)
    )
    scales = scales.to(scale)
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    name, blob, (first, second) = published([codes, scales], theirs)
    assert name == "fp8" and first is codes and second.dtype == torch.float32
    assert same_bits(second.to(scale), scales)
    assert same_bits(back(name, blob, (R, n), torch.bfloat16), theirs)
    if R == 256:  # gate and up, one below the other
        both = torch.cat([theirs, theirs])
        found = published([codes, scales, codes, scales], both)
        assert same_bits(back("fp8", found[1], both.shape, torch.bfloat16), both)


def test_what_is_no_blob_is_not_taken_for_one():
    w = matrix(64, 64)
    assert published([w], w) is None
    codes = torch.zeros(64, 64).to(torch.float8_e4m3fn)
    assert published([codes], codes.bfloat16()) is None  # no scales
    odd = torch.ones(2, 2)  # blocks of 32 × 32
    assert published([codes, odd], codes.bfloat16()) is None
    assert published([torch.zeros(4, 64, dtype=torch.uint8)], w[:4]) is None


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_unpacks_every_blob_as_torch_does(name, dtype):
    generator = torch.Generator().manual_seed(0)
    for shape in ((130, 192), (3, 64), (256, 320), (4, 96), (2, 5, 128)):  # whole blocks, and not
        blob = torch.randint(
            0, 256, (fewbit.nbytes(name, shape),), generator=generator, dtype=torch.uint8
        ).numpy()
        codes, scales = split(name, blob, shape).values()
        for scale in (None, 2.0**-120, 2.0**121) if name == "fp8" else (None,):
            if scale:
                scales.copy_(torch.randn(scales.shape, generator=generator) * scale)
            unpack(name, blob, out := torch.empty(shape, dtype=dtype))
            expected = FORMATS[name].home.dequantize(codes, scales).to(dtype).view(shape)
            assert torch.equal(out.isnan(), expected.isnan())
            assert same_bits(out.nan_to_num(0), expected.nan_to_num(0))
