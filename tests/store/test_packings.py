"""Layouts of compressed-tensors, GPTQ and AWQ: against the formulas in loops, and the library's own
decompression."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.store import fewbit, packings
from moelab.store.codecs import read_codec
from moelab.store.headers import NAMES
from tests.checkpoint import packed

SCALES = [torch.bfloat16, torch.float16, torch.float32]
KIND = {
    "pack": "compressed-tensors",
    "int": "compressed-tensors",
    "float": "compressed-tensors",
    "act-order": "gptq",
}


@st.composite
def layers(draw):
    """(kind, bits, tensors of one layer or of two, one below the other, their weights)."""
    kind = draw(st.sampled_from(["pack", "int", "float", "gptq", "gptq_v2", "act-order", "awq"]))
    bits = 4 if kind == "awq" else 8 if kind in ("int", "float") else draw(st.sampled_from([4, 8]))
    R, group = 8 * draw(st.integers(1, 5)), draw(st.sampled_from([8, 16, 32, 64]))
    n = group * draw(st.integers(1, 4))
    if kind in ("int", "float") and draw(st.booleans()):
        R, n = draw(st.integers(2, 300)), draw(st.integers(1, 300))
        group = draw(st.sampled_from([0, -128]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    symmetric = group <= 0 or draw(st.booleans())
    options = bits, symmetric, draw(st.sampled_from(SCALES)), draw(st.sampled_from(SCALES))
    count = draw(st.integers(1, 2)) if group > 0 else 1
    made = [packed.layer(kind, R, n, group, generator, *options) for _ in range(count)]
    truth = torch.cat([truth for _, truth in made])
    return KIND.get(kind, kind), bits, [tensors for tensors, _ in made], truth


@given(layers())
def test_weights_are_those_of_the_formula_and_bytes_are_kept(layer):
    kind, bits, tensors, truth = layer
    shape = tuple(truth.shape)
    one = packings.dequantize(kind, bits, tensors[0])
    assert torch.equal(one.to(truth.dtype), truth[: len(one)])
    sources = [(f"{i}.{name}", 0, t) for i, one in enumerate(tensors) for name, t in one.items()]
    packing, blob = packings.gathered(kind, bits, sources)
    dtype = NAMES[truth.dtype]
    assert packing.few_bits and packing.admits(dtype, shape, 1, [len(blob)])
    assert read_codec(json.loads(json.dumps(packing.record))) == packing
    found = packing.split(blob, shape)
    assert len(found) == sum(map(len, tensors))
    for i, one in enumerate(tensors):
        for key, t in one.items():
            assert fewbit.same_bits(found[f"{key}.{i}"], t)
    packing.decompress(blob, out := torch.empty_like(truth))
    assert torch.equal(out, truth)
    if name := packing.kernel(dtype, shape):  # its first bytes are a blob of that format
        form = fewbit.find_format(name)
        form.decompress(blob[: form.nbytes(shape)], out)
        assert torch.equal(out, truth) and packing.row(0, len(blob), shape) == form.row(0, 0, shape)
    with pytest.raises(ValueError, match="expected"):
        packing.split(blob[:-1], shape)
    for other in ((shape[0] + 1, shape[1]), shape[:1], ()):
        with pytest.raises(ValueError, match="cannot be"):
            packing.nbytes(other)


def kept(kind, *args, **options):
    """The packing and the blob of a layer of compressed-tensors, and its weights."""
    tensors, truth = packed.layer(kind, *args, torch.Generator().manual_seed(0), **options)
    sources = [(f"x.{name}", 0, t) for name, t in tensors.items()]
    bits = options.get("bits", 4)
    return *packings.gathered("compressed-tensors", bits, sources), truth


@pytest.mark.parametrize("kind, bits, form", [("pack", 4, "int4"), ("int", 8, "int8")])
def test_symmetric_bf16_groups_are_multiplied_as_they_lie(kind, bits, form):
    for group in (32, 64, 128, 384):
        packing, *_ = kept(kind, 8, 384, group, bits=bits)
        assert packing.kernel("BF16", (8, 384)) == form
        assert packing.kernel("F16", (8, 384)) == ""  # scales are rounded to bf16
    for options in ({"symmetric": False}, {"scales": torch.float16}):
        packing, *_ = kept(kind, 8, 384, 128, bits=bits, **options)
        assert packing.kernel("BF16", (8, 384)) == ""


@pytest.mark.parametrize("kind, group", [("pack", 32), ("int", 96), ("float", 96), ("float", 0)])
def test_it_is_what_the_library_decompresses(kind, group):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    for bits in (4, 8) if kind == "pack" else (8,):
        for scales, symmetric in ((torch.bfloat16, True), (torch.float32, kind == "float")):
            generator = torch.Generator().manual_seed(1)
            tensors, _ = packed.layer(kind, 32, 96, group, generator, bits, symmetric, scales)
            config = packed.config(kind, None if group == 96 else group, bits, symmetric)
            scheme = QuantizationScheme(**config["config_groups"]["group_0"])
            library = BaseCompressor.get_value_from_registry(config["format"])
            theirs = library.decompress(dict(tensors), scheme)["weight"]
            ours = packings.dequantize("compressed-tensors", bits, tensors)
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


RECORD = {
    "kind": "gptq",
    "bits": 4,
    "matrices": 2,
    "tensors": [
        ["qweight", "I32", [4, 16]],
        ["scales", "F16", [2, 16]],
        ["qzeros", "I32", [2, 2]],
        ["g_idx", "I32", [32]],
    ],
}


def other(i, *fields):
    """The record with another i-th tensor, or without it."""
    tensors = RECORD["tensors"]
    return {"tensors": [*tensors[:i], *([list(fields)] if fields else []), *tensors[i + 1 :]]}


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": []},
        {"matrices": 2.5},
        {"bits": 3},
        {"kind": "gguf"},
        {"kind": "compressed-tensors"},
        other(0, "qweight", "I32", [10**12, 10**12, 9]),
        other(0, "qweight", "I32", [-4, 16]),
        other(1, "scales", "F17", [2, 16]),
        other(1, "scales", "F16", [0, 16]),
        other(2),
        other(3, "g_idx", "I32", [33]),
    ],
)
def test_an_impossible_packing_is_refused(change):
    size = 2 * 4 * (64 + 16 + 4 + 32)
    assert read_codec(RECORD).admits("BF16", (32, 32), 1, [size])
    with pytest.raises((ValueError, TypeError)):
        read_codec(RECORD | change).nbytes((32, 32))


def test_groups_that_are_not_there_are_refused():
    tensors, _ = packed.layer("gptq", 8, 32, 16, torch.Generator().manual_seed(0))
    for wrong in (-1, 2):
        groups = tensors["g_idx"].clone()
        groups[3] = wrong
        with pytest.raises(ValueError, match="g_idx"):
            packings.dequantize("gptq", 4, tensors | {"g_idx": groups})


def compressed(where="weights", **change):
    """A quantization_config of compressed-tensors with other fields: of it, its group or that's
    weights."""
    config = json.loads(json.dumps(packed.config("pack", 32)))
    group = config["config_groups"]["group_0"]
    {"config": config, "group": group, "weights": group["weights"]}[where].update(change)
    return config


TWO_WIDTHS = {str(b): packed.config("pack", 32, b)["config_groups"]["group_0"] for b in (4, 8)}
STATIC = {"num_bits": 8, "dynamic": False}


@pytest.mark.parametrize(
    "config, message",
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq, and bits '3'.*4, 8 are"),
        ({"quant_method": "gptq"}, "bits 'none'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'.*gptq_v2"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"x": {"bits": 8}}}, "dynamic.*bits"),
        ({"quant_method": "awq", "bits": 8}, "awq, and bits '8'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'.*gemm"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point 'false'"),
        (compressed(num_bits=2), "num_bits '2'.*4, 8 are"),
        (compressed(actorder="group"), "actorder 'group'"),
        (compressed(strategy="block", block_structure=[64, 64]), r"\[64, 64\]"),
        (compressed("group", input_activations=STATIC), "input_activations.dynamic 'false'"),
        (compressed("config", format="nvfp4-pack-quantized"), "nvfp4"),
        (compressed("config", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed("config", sparsity_config={"format": "sparse-24"}), "sparse-24"),
        (compressed("config", config_groups=TWO_WIDTHS), "packed widths"),
        (compressed("config", config_groups={"a": 3}), "makes no sense"),
        ({"quant_method": "compressed-tensors"}, "num_bits 'none'"),
    ],
)
def test_what_is_not_read_is_refused_by_name_with_a_remedy(config, message):
    with pytest.raises(ValueError, match=message) as error:
        packings.scheme(config)
    assert "unquantised checkpoint" in str(error.value) or "correct it" in str(error.value)


def test_what_is_read():
    dynamic = compressed("group", input_activations={"num_bits": 8, "dynamic": True})
    assert packings.scheme(dynamic) == packings.scheme(compressed()) == ("compressed-tensors", 4)
    left_out = {"quant_method": "gptq", "bits": 8, "dynamic": {"-:lm_head": {}}}
    assert packings.scheme(left_out) == ("gptq", 8)
