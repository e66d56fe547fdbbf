"""Layouts of compressed-tensors, GPTQ and AWQ: against the formulas in loops, and the library's own
decompression."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.store import fewbit, packings
from moelab.store.headers import DTYPES, NAMES
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
    R, groups, group = (
        8 * draw(st.integers(1, 5)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([8, 16, 32, 64])),
    )
    if kind in ("int", "float") and draw(st.booleans()):
        R, n, group = (
            draw(st.integers(2, 300)),
            draw(st.integers(1, 300)),
            draw(st.sampled_from([0, -128])),
        )
    else:
        n = groups * group
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    symmetric, scales = group <= 0 or draw(st.booleans()), draw(st.sampled_from(SCALES))
    count = draw(st.integers(1, 2)) if group > 0 else 1
    dtype = draw(st.sampled_from(SCALES))
    made = [
        packed.layer(kind, R, n, group, generator, bits, symmetric, scales, dtype)
        for _ in range(count)
    ]
    return (
        KIND.get(kind, kind),
        bits,
        [tensors for tensors, _ in made],
        torch.cat([truth for _, truth in made]),
    )


@given(layers())
@settings(deadline=None, max_examples=60)
def test_weights_are_those_of_the_formula_and_bytes_are_kept(layer):
    kind, bits, tensors, truth = layer
    one = packings.dequantize(kind, bits, tensors[0])
    assert torch.equal(one.to(truth.dtype), truth[: len(one)])
    sources = [(f"{i}.{name}", 0, t) for i, one in enumerate(tensors) for name, t in one.items()]
    name, blob = packings.keep(kind, bits, sources, truth)
    assert fewbit.is_format(name) and fewbit.nbytes(name, truth.shape) == len(blob)
    found = fewbit.split(name, blob, truth.shape)
    assert {key: (t.dtype, tuple(t.shape)) for key, t in found.items()} == fewbit.parts(
        name, tuple(truth.shape)
    )
    for i, one in enumerate(tensors):
        for key, t in one.items():
            assert fewbit.same_bits(found[f"{key}.{i}"], t)
    out = torch.empty_like(truth)
    fewbit.unpack(name, blob, out)
    assert torch.equal(out, truth)
    assert packings.keep(kind, bits, sources, truth + 1) is None
    if form := fewbit.kernel(
        name, tuple(truth.shape), NAMES[truth.dtype]
    ):  # its first bytes are a blob of it
        fewbit.unpack(form, blob[: fewbit.nbytes(form, truth.shape)], out)
        assert torch.equal(out, truth)
    with pytest.raises(ValueError, match="expected"):
        fewbit.split(name, blob[:-1], truth.shape)
    for shape in ((truth.shape[0] + 1, truth.shape[1]), truth.shape[:1], ()):
        with pytest.raises(ValueError):
            fewbit.nbytes(name, shape)


def test_symmetric_bf16_groups_are_multiplied_as_they_lie():
    generator = torch.Generator().manual_seed(0)
    for kind, bits, form in (("pack", 4, "int4"), ("int", 8, "int8")):
        for group in (32, 64, 128, 384):
            tensors, truth = packed.layer(kind, 8, 384, group, generator, bits)
            name, _ = packings.keep(
                "compressed-tensors", bits, [(f"x.{k}", 0, t) for k, t in tensors.items()], truth
            )
            assert fewbit.kernel(name, (8, 384), "BF16") == form
            assert not any(
                fewbit.kernel(name, (8, 384), dtype) for dtype in ("F16", "F32")
            )  # rounded to bf16
        for options in ({"symmetric": False}, {"scales": torch.float16}):
            tensors, truth = packed.layer(kind, 8, 384, 128, generator, bits, **options)
            name, _ = packings.keep(
                "compressed-tensors", bits, [(f"x.{k}", 0, t) for k, t in tensors.items()], truth
            )
            assert fewbit.kernel(name, (8, 384), "BF16") == ""


@pytest.mark.parametrize(
    "kind, group, symmetric",
    [
        ("pack", 32, True),
        ("pack", 32, False),
        ("pack", 96, True),
        ("int", 96, True),
        ("int", 96, False),
        ("float", 96, True),
        ("float", 0, True),
    ],
)
def test_it_is_what_the_library_decompresses(kind, group, symmetric):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    for bits in (4, 8) if kind == "pack" else (8,):
        for scales in SCALES:
            tensors, _ = packed.layer(
                kind, 32, 96, group, torch.Generator().manual_seed(1), bits, symmetric, scales
            )
            config = packed.config(kind, None if group == 96 else group, bits, symmetric)
            scheme = QuantizationScheme(**config["config_groups"]["group_0"])
            library = BaseCompressor.get_value_from_registry(config["format"])
            theirs = library.decompress(dict(tensors), scheme)["weight"]
            ours = packings.dequantize("compressed-tensors", bits, tensors)
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


NAME = "gptq:4*2 qweight:I32[4,16] scales:F16[2,16] qzeros:I32[2,2] g_idx:I32[32]"


@pytest.mark.parametrize(
    "bad",
    [
        "gptq:4*2",
        "gptq:4*0 " + NAME[9:],
        "gptq:3*2 " + NAME[9:],
        NAME.replace("I32[32]", "I32[33]"),
        NAME.replace("F16", "F17"),
        NAME.replace("[4,16]", "[04,16]"),
        NAME.replace("[2,16]", "[0,16]"),
        NAME + " ",
        NAME.replace("[4,16]", "[999999999999,999999999999,9]"),
        NAME.replace("[4,16]", "[]"),
        NAME + " x:I8[1]x9",
        NAME.replace("g_idx", "qweight"),
        NAME.replace(" qzeros:I32[2,2]", ""),
        NAME.replace("F16[2,16]", "F16[2,16]x4"),
        "awq:4*2 " + NAME[9:],
        "compressed-tensors:4*2 " + NAME[9:],
        NAME.replace("gptq", "gptq\n"),
    ],
)
def test_an_impossible_packing_is_refused(bad):
    assert fewbit.nbytes(NAME, (32, 32)) == 2 * 4 * (64 + 16 + 4 + 32)
    with pytest.raises(ValueError):
        fewbit.nbytes(bad, (32, 32))


@given(st.text("gptqaw:4*2 I32[],8x_", max_size=60))
def test_any_other_name_is_refused(name):
    with pytest.raises(ValueError):
        fewbit.nbytes("gptq:" + name, (32, 32))


def test_groups_that_are_not_there_are_refused():
    tensors, truth = packed.layer("gptq", 8, 32, 16, torch.Generator().manual_seed(0))
    for wrong in (-1, 2):
        groups = tensors["g_idx"].clone()
        groups[3] = wrong
        with pytest.raises(ValueError, match="one of 2 groups for each of 32 inputs"):
            packings.dequantize("gptq", 4, tensors | {"g_idx": groups})
    tensors, _ = packed.layer("pack", 8, 32, 16, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"weight_shape is \[8, 31\]"):
        packings.dequantize(
            "compressed-tensors", 4, tensors | {"weight_shape": torch.tensor([8, 31])}
        )


def compressed(**change):
    config = json.loads(json.dumps(packed.config("pack", 32)))
    group = config["config_groups"]["group_0"]
    for key, value in change.items():
        (
            config
            if key
            in ("format", "kv_cache_scheme", "sparsity_config", "transform_config", "config_groups")
            else group
            if key.endswith("activations")
            else group["weights"]
        )[key] = value
    return config


@pytest.mark.parametrize(
    "config, message",
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq, in 3 bits.*4 and 8 bits"),
        ({"quant_method": "gptq"}, "gptq, in None bits"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "layout 'marlin'.*gptq_v2",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:lm_head": {"bits": 8}}},
            "another way for .:lm_head",
        ),
        ({"quant_method": "awq", "bits": 8}, "awq, in 8 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout 'gemv'.*gemm"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "without zero points"),
        (compressed(num_bits=2), "in int2.*int4, int8 and fp8"),
        (compressed(type="float"), "in float4"),
        (compressed(format="marlin-24"), "layout 'marlin-24'"),
        (compressed(format="nvfp4-pack-quantized"), "nvfp4"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "KV cache"),
        (compressed(transform_config={"a": 1}), "transforms"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse .sparse-24-bitmask"),
        (
            compressed(input_activations={"num_bits": 8, "dynamic": False}),
            "input_activations by stored scales.*weights al",
        ),
        (compressed(actorder="group"), "act-order"),
        (compressed(strategy="tensor_group"), "by tensor_group"),
        (compressed(strategy="block", block_structure=[64, 64]), r"blocks of \[64, 64\]"),
        (
            compressed(
                config_groups={
                    name: compressed(num_bits=bits)["config_groups"]["group_0"]
                    for name, bits in (("a", 4), ("b", 8))
                }
            ),
            "several widths",
        ),
        (compressed(config_groups=3), "makes no sense"),
        (compressed(config_groups={"a": 3}), "makes no sense"),
        ({"quant_method": "compressed-tensors"}, "makes no sense"),
    ],
)
def test_what_is_not_read_is_refused_by_name_with_a_remedy(config, message):
    with pytest.raises(ValueError, match=message) as error:
        packings.scheme(config)
    assert "unquantised checkpoint" in str(error.value) or "correct it" in str(error.value)


def test_activations_that_are_quantised_as_they_come_do_not_matter():
    given = compressed(input_activations={"num_bits": 8, "dynamic": True})
    assert packings.scheme(given) == packings.scheme(compressed()) == ("compressed-tensors", 4)


def test_blobs_of_every_alignment_are_read():
    """A tensor of 8-byte entries behind an odd number of 2-byte ones."""
    tensors, truth = packed.layer("pack", 3, 64, 64, torch.Generator().manual_seed(0))
    name, blob = packings.keep(
        "compressed-tensors", 4, [(f"x.{k}", 0, t) for k, t in tensors.items()], truth
    )
    room = np.zeros(len(blob) + 4096, np.uint8)
    for offset in (0, 8):
        room[offset : offset + len(blob)] = blob
        found = fewbit.split(name, room[offset : offset + len(blob)], truth.shape)
        assert (
            found["weight_shape.0"].tolist() == [3, 64]
            and found["weight_shape.0"].dtype == DTYPES["I64"]
        )
