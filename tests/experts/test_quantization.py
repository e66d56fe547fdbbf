"""Weight formats against brute force and transformers' own MXFP4; quantised models against replaced
parameters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from moelab import open_model
from moelab.experts.executor import dispatch
from moelab.experts.quantization import FORMATS, MXFP4, Quantized, layer_error, quantize
from moelab.models import discover, eager, plug, plugged
from moelab.store.fewbit import E2M1
from tests.experts.toy import LAYOUTS, make_experts, make_routing
from tests.models import tiny

QUICK = settings(max_examples=40, deadline=None)
#: wide, with ties on every grid, zeros and subnormals
values = st.one_of(
    st.sampled_from(
        [0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 1e-41, -3e-39, 3e38]
    ),
    st.floats(-1e3, 1e3, width=32),
    st.floats(-(2**-10), 2**-10, width=32),
)


def nearest(value: float, grid: list[float]) -> int:
    """Index of the nearest of an ascending grid; of two equally near ones the even index."""
    return min(range(len(grid)), key=lambda i: (abs(grid[i] - value), i % 2))


# ------------------------------------------------------------------------------------------------------------
# formats


@QUICK
@given(st.lists(values, min_size=1, max_size=70), st.booleans())
def test_mxfp4_takes_the_nearest_neighbour(row, saturate):
    w = torch.tensor(row)
    kept = quantize(w, "mxfp4" if saturate else "mxfp4-up")
    codes = torch.stack([kept.blocks & 15, kept.blocks >> 4], -1).flatten(1).tolist()
    assert len(codes) == math.ceil(len(row) / 32) and kept.nbytes == 17 * len(codes)
    for g, (block, scale) in enumerate(zip(codes, kept.scales.tolist())):
        inside = w[32 * g : 32 * g + 32].double().tolist()
        largest = max(map(abs, inside))
        X = -127
        if largest and saturate:
            X = max(
                math.floor(math.log2(largest)) - 2, -127
            )  # OCP MX v1.0 §6.3; doubles are exact here
        elif largest:
            X = max(next(x for x in range(-160, 128) if largest <= 6 * 2.0**x), -127)
        assert scale == X + 127
        for value, code in zip(inside, block):
            assert code & 7 == nearest(abs(value) / 2.0**X, list(E2M1))
            assert bool(code & 8) == (math.copysign(1, value) < 0)
        assert not any(block[len(inside) :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_unpacks_as_transformers_does(dtype):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    scales = torch.arange(256, dtype=torch.uint8).reshape(4, 8, 8)
    blocks = torch.randint(0, 256, (4, 8, 8, 16), dtype=torch.uint8, generator=generator)
    assert blocks.unique().numel() == 256
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)  # [E, in, out]
    for e in range(4):
        mine = MXFP4(blocks[e], scales[e], axis=0, length=256).dequantize(dtype)
        assert mine.dtype == dtype and mine.shape == theirs[e].shape
        assert np.array_equal(mine.float().numpy(), theirs[e].float().numpy(), equal_nan=True)
        assert torch.equal(mine.signbit(), theirs[e].signbit())


def test_mxfp4_reads_a_gpt_oss_checkpoint(tmp_path):
    folder = tiny.save_mxfp4(tmp_path)
    stored = load_file(next(folder.glob("*.safetensors")))
    for layer in discover(open_model(folder)):
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = (
                stored[f"{layer.name}.experts.{name}_{part}"] for part in ("blocks", "scales")
            )
            for e, w in enumerate(getattr(layer.experts, name)):
                kept = MXFP4(blocks[e], scales[e], axis=0, length=w.shape[0])
                assert torch.equal(kept.dequantize(w.dtype), w)


@QUICK
@given(
    st.lists(
        st.lists(st.floats(-1e3, 1e3, width=32), min_size=9, max_size=9), min_size=1, max_size=4
    ),
    st.sampled_from(["fp8", "int8"]),
)
def test_channels_take_the_nearest_neighbour(rows, format):
    w = torch.tensor(rows)
    kept = quantize(w, format)
    assert kept.nbytes == w.numel() + 4 * len(rows)
    if format == "int8":
        grid = [float(v) for v in range(-127, 128)]
    else:
        finite = (
            torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
        )  # 0 … 448
        assert finite[-1] == 448
        grid = finite
    for row, codes, scale in zip(w, kept.codes, kept.scale):
        largest = max(map(abs, row.tolist()))
        assert scale.item() == pytest.approx(
            max(largest / grid[-1], torch.finfo(torch.float32).tiny), rel=1e-6
        )
        for quotient, code in zip((row / scale).double().tolist(), codes.double().tolist()):
            if format == "int8":
                assert code == grid[nearest_even_integer(quotient)]
            else:
                assert code == math.copysign(grid[nearest(abs(quotient), grid)], quotient)


def nearest_even_integer(quotient: float) -> int:
    """Index of round(quotient), ties to even, in −127 … 127."""
    return max(-127, min(127, round(quotient))) + 127


@QUICK
@given(
    shape=st.lists(st.integers(1, 40), min_size=2, max_size=3),
    seed=st.integers(0, 1000),
    data=st.data(),
    format=st.sampled_from(list(FORMATS)),
)
def test_any_axis_is_the_last_axis_transposed(shape, seed, data, format):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    kept = quantize(w, format, axis).dequantize(torch.float32)
    assert kept.shape == w.shape
    moved = quantize(w.movedim(axis, -1).contiguous(), format).dequantize(torch.float32)
    assert torch.equal(kept, moved.movedim(-1, axis))
    if not format.startswith("mxfp4"):  # FP8's half step is 2⁻⁴, INT8's ½ of 1/127
        channel = w.abs().amax(axis, keepdim=True)
        bound = {
            "bf16": w.abs() * 2**-8,
            "fp8": w.abs() / 16 + channel / 448 / 512,
            "int8": channel / 254,
        }[format]
        assert ((kept - w).abs() <= bound * (1 + 1e-5)).all()
    again = quantize(kept, format, axis).dequantize(torch.float32)
    assert torch.allclose(again, kept, rtol=1e-6, atol=0)
    if format == "mxfp4":  # powers of two scale exactly, and OCP's exponent stays
        assert torch.equal(again, kept)


@pytest.mark.parametrize("format", FORMATS)
def test_bad_tensors_are_refused(format):
    for bad in (torch.tensor([1.0, math.inf]), torch.tensor([math.nan]), torch.tensor([1, 2])):
        with pytest.raises(ValueError, match="finite floating-point"):
            quantize(bad, format)
    zeros = quantize(torch.zeros(3, 32), format)
    assert torch.equal(zeros.dequantize(torch.bfloat16), torch.zeros(3, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="'fp3'.*mxfp4"):
        quantize(torch.zeros(1), "fp3")


# -------------------------------------------------------------------------------------------------------------
# models


class ToyLayer:
    """An experts module as a layer of a model."""

    def __init__(self, experts):
        self.experts, self.index, self.name = experts, 0, "toy"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_scales_are_shared_along_the_inputs_of_every_layout(layout, format):
    experts = make_experts(3, 32, 64, layout, torch.bfloat16)
    source = Quantized([ToyLayer(experts)], format)
    transposed = LAYOUTS[layout][2]
    for e in range(3):
        expected_bytes = 0
        for name, w in experts.own(e).items():
            found = source(0, e)[name]
            assert found.dtype == w.dtype and found.shape == w.shape
            if w.dim() == 1:
                assert torch.equal(found, w)
                expected_bytes += w.nbytes
                continue
            outs_last = w.T.contiguous() if transposed else w  # [out, in]
            expected = quantize(outs_last, format).dequantize(w.dtype)
            assert torch.equal(found, expected.T if transposed else expected)
            outs, n = outs_last.shape
            expected_bytes += {
                "bf16": 2 * outs * n,
                "fp8": outs * (n + 4),
                "int8": outs * (n + 4),
            }.get(format, outs * n // 32 * 17)
        assert source.nbytes(0, e) == expected_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_store_holds_has_a_scale_for_32_inputs(layout):
    experts = make_experts(3, 32, 64, layout, torch.bfloat16)
    source = Quantized([ToyLayer(experts)], "stored int4")
    for e in range(3):
        expected_bytes = 0
        for name, w in experts.own(e).items():
            found = source(0, e)[name]
            expected_bytes += w.nbytes if w.dim() == 1 else w.numel() * 9 // 16
            if w.dim() == 1:
                assert torch.equal(found, w)
                continue

            def inputs_last(t):
                return t.T if LAYOUTS[layout][2] else t

            for row, back in zip(
                inputs_last(w).float().unflatten(1, (-1, 32)).flatten(0, 1),
                inputs_last(found).float().unflatten(1, (-1, 32)).flatten(0, 1),
            ):
                scale = max(row.tolist(), key=abs) / -8
                assert (back - row).abs().max() <= abs(
                    scale
                ) * 1.05  # of −8 … 7: the other 8 is cut
                assert (
                    len(set((back / scale).round().tolist())) <= 16 and back.unique().numel() <= 16
                )
        assert source.nbytes(0, e) == expected_bytes
    with pytest.raises(ValueError, match="fp3"):
        Quantized([ToyLayer(experts)], "stored fp3")


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_model_runs_on_the_quantised_weights(name, tmp_path):
    model = open_model(tiny.save(name, tmp_path, torch.bfloat16))
    layers = plug(model)
    inputs = {"input_ids": torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]

    def logits():
        with torch.no_grad():
            return model(**inputs).logits

    before = logits()
    with plugged(model, source=Quantized(layers, "bf16")):
        assert torch.equal(logits(), before)
    source = Quantized(layers, "mxfp4")
    with plugged(model, source=source):
        quantised = logits()
    assert all(layer.seam.source is None for layer in layers)
    assert torch.equal(logits(), before)
    with torch.no_grad():  # the same weights, put where the model keeps its own
        for layer in layers:
            for e in range(layer.experts.num_experts):
                for parameter, w in source(layer.index, e).items():
                    layer.seam.own(e)[parameter].copy_(w)
    replaced = logits()
    assert torch.equal(quantised, replaced) and not torch.equal(quantised, before)


def test_experts_must_be_behind_the_seam(tmp_path):
    model = open_model(tiny.save("mixtral", tmp_path))
    with pytest.raises(ValueError, match="plug"):
        Quantized(discover(model), "int8")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_error_is_that_of_the_outputs(layout):
    experts = make_experts(4, 32, 32, layout)
    source = Quantized([ToyLayer(experts)], "fp8")
    ids, weights = make_routing(50, 4, 2, seed=1)
    ids[0, 0] = 4  # dropped
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(2))
    found = layer_error(experts, source, x, ids, weights)
    single, exact = [], eager(x, ids, weights, experts)
    experts.source = source
    other = eager(x, ids, weights, experts)
    assert found.layer == pytest.approx(((other - exact).norm() / exact.norm()).item(), rel=1e-4)
    for t, e in ((t, e) for t, row in enumerate(ids.tolist()) for e in row if e < 4):
        single.append([experts.ffn(x[t : t + 1], of) for of in (experts.own(e), source(0, e))])
    a, b = (torch.cat(side) for side in zip(*single))
    assert found.experts == pytest.approx(((b - a).norm() / a.norm()).item(), rel=1e-4)
    assert 0.01 < found.weights < 0.04  # uniform rounding of 4 significant bits: about 2.6 %
    assert len(dispatch(ids, 4)) == 99
    experts.source = None
    assert (
        layer_error(experts, Quantized([ToyLayer(experts)], "int8"), x, ids, weights).layer
        < found.layer
    )
    assert layer_error(experts, lambda _, e: experts.own(e), x, ids, weights) == (0, 0, 0)
