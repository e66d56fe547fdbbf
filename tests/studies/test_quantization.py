"""Quantised experts against the formats of a store; models on them against replaced parameters."""

from __future__ import annotations

import pytest
import torch

from moelab import open_model
from moelab.experts.executor import dispatch
from moelab.models import discover, eager, plug, plugged
from moelab.store.fewbit import find_format
from notebooks.studies import quantization
from notebooks.studies.quantization import FORMATS, Quantized, layer_error
from tests.experts.toy import LAYOUTS, make_experts, make_routing
from tests.models import tiny


class ToyLayer:
    """An experts module as a layer of a model."""

    def __init__(self, experts):
        self.seam, self.index, self.name, self.plugged = experts, 0, "toy", True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_matrices_are_rounded_along_their_inputs_and_biases_stay(layout, format):
    experts = make_experts(3, 32, 64, layout, torch.bfloat16)
    source = Quantized([ToyLayer(experts)], format)
    for e in range(3):
        expected_bytes = 0
        for name, w in experts.own(e).items():
            expected, size = w.clone(), w.nbytes
            if w.dim() > 1 and format != "bf16":
                form = find_format(format + ".T" * LAYOUTS[layout][2])
                blob = form.compress(w)
                form.decompress(blob, expected)
                size = len(blob)
            found = source(0, e)[name]
            assert found.dtype == w.dtype and torch.equal(found, expected)
            expected_bytes += size
        assert source.bytes[0, e] == expected_bytes


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "switch_transformers"])
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
    with pytest.raises(ValueError, match="fp3.*mxfp4"):
        Quantized([], "fp3")


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


def test_fewer_bits_err_and_lose_more():
    found = quantization.run(tasks=("loss", "lookup"), prompts=8, tokens=64, calibration=4)
    errors, rows = found.values()
    assert len(errors) == 4 * 7
    for layer in [*(f"layer {i}" for i in range(6)), "all"]:
        int8, mxfp4 = (errors[f"{name}, {layer}"] for name in ("int8", "mxfp4"))
        for key in ("weights", "experts", "layer"):
            assert 0 < 4 * int8[key] < mxfp4[key] < 20
    assert list(rows) == ["raw", "bf12", "huffman", "int8", "fp8", "mxfp4", "int4"]
    bits = {name: row["bits a weight"] for name, row in rows.items()}
    assert (bits["raw"], bits["int8"], bits["mxfp4"], bits["int4"]) == (16, 8.5, 4.25, 4.5)
    assert 12 < bits["bf12"] < 12.2 and 8 < bits["fp8"] < 8.01 and 10 < bits["huffman"] < 12
    assert rows["raw"]["bytes"] == 6 * 32 * 6 * 128 * 64
    scores = {name: row["loss: score"] for name, row in rows.items()}
    assert scores["raw"] == scores["huffman"] == scores["bf12"]
    off = {name: rows[name]["loss: difference error"] for name in ("int8", "int4", "mxfp4")}
    assert 0 < off["int8"] < min(off["int4"], off["mxfp4"])
