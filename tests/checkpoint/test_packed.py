"""Checkpoints of compressed-tensors, GPTQ and AWQ: opened, kept byte for byte, and as exact as the
bf16 model of the weights that they mean."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moelab import open_model
from moelab.checkpoint.convert import convert
from moelab.checkpoint.restore import restore
from moelab.offloading.slots import Sizes
from moelab.store.layout import SOURCE_LAYOUT
from moelab.store.verify import verify
from tests.checkpoint import packed
from tests.checkpoint.stores import identity_of
from tests.depth import depth

IDS = torch.arange(3, 20)[None]
CASES = {
    "int4 in groups of 32": ("pack", dict(group=32)),
    "int4 in groups of 64, asymmetric": ("pack", dict(group=64, symmetric=False)),
    "int4 a channel": ("pack", dict(group=None)),
    "int4, fp16 scales": ("pack", dict(group=32, scales=torch.float16)),
    "int8 packed, asymmetric": ("pack", dict(group=32, bits=8, symmetric=False)),
    "int8 a channel, asymmetric": ("int", dict(group=None, bits=8, symmetric=False)),
    "int8 a channel": ("int", dict(group=None, bits=8)),
    "fp8 a channel": ("float", dict(group=None)),
    "fp8 in blocks": ("float", dict(group=-128, H=256, I=128)),
    "fp8 a tensor, fp32 scales": ("float", dict(group=0, scales=torch.float32)),
    "GPTQ asymmetric, attention in bf16": (
        "gptq",
        dict(group=16, symmetric=False, skip="self_attn"),
    ),
    "GPTQ": ("gptq", dict(group=32, scales=torch.float16)),
    "GPTQ in act-order": ("act-order", dict(group=16, symmetric=False, scales=torch.float16)),
    "GPTQ v2, 8 bits": ("gptq_v2", dict(group=None, bits=8, symmetric=False, scales=torch.float16)),
    "AWQ": ("awq", dict(group=32, symmetric=False, scales=torch.float16)),
}
#: the sample of `make test`
FEW = (
    "int4 in groups of 32",
    "int8 a channel, asymmetric",
    "fp8 a tensor, fp32 scales",
    "GPTQ in act-order",
    "AWQ",
)
#: those that kernels multiply as they lie, as what
MULTIPLIED = {
    "int4 in groups of 32": "int4",
    "int4 a channel": "int4",
    "int8 a channel": "int8",
    "fp8 in blocks": "fp8",
}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def truth(folder):
    return logits(
        transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, experts_implementation="eager"
        ).eval()
    )


def relative(found, expected):
    return (found - expected).float().norm() / expected.float().norm()


def codecs(store):
    return {codec for entry in store.entries(0, 0).values() for codec, _ in entry.planes}


def is_kept(store, source, folder):
    assert all(codec.few_bits for codec in codecs(store)) and SOURCE_LAYOUT in store.files
    assert verify(store)[
        "experts"
    ] == store.spec.L * store.spec.E and store.identity == identity_of(source)
    back = restore(store, folder)
    assert {p.name: p.read_bytes() for p in back.iterdir()} == {
        p.name: p.read_bytes() for p in source.iterdir()
    }


@pytest.mark.parametrize("case", depth(FEW, CASES))
def test_it_is_the_model_of_the_weights_that_it_means(case, tmp_path):
    """However it is opened; and restored byte for byte."""
    kind, options = CASES[case]
    source, plain = packed.save(tmp_path / "m", kind, **options)
    expected = truth(plain)
    assert torch.isfinite(expected).all() and expected.std() > 0
    store = convert(source, tmp_path / "s")
    is_kept(store, source, tmp_path / "r")
    for place, more in [
        (source, {"memory": "40%"}),
        (store.folder, {}),
        (store.folder, {"memory": "40%", "compact": True}),
    ]:
        with open_model(place, **more) as model:
            assert torch.equal(logits(model), expected), (place, more)
    for place in depth(
        (source,), (store.folder, source)
    ):  # converted or not, slots hold the same bytes
        with open_model(place, memory="60%", executor="fast") as model:
            slots = model.moelab.engine.loader.slots
            assert (
                slots.sizes.in_place == (case in MULTIPLIED)
                and relative(logits(model), expected) < 0.03
            )
            assert slots.matrices([0], 0, [0], model.dtype)["gate_up_proj"][0] == MULTIPLIED.get(
                case, "raw"
            )
            assert slots.sizes == Sizes.of(store, slots.sizes.in_place)


def test_a_store_of_a_store_and_other_ways_to_open_it(tmp_path):
    source, plain = packed.save(tmp_path / "m", "gptq", 8, "glm4_moe", symmetric=False)
    store = convert(convert(source, tmp_path / "s").folder, tmp_path / "t", "raw")
    is_kept(store, source, tmp_path / "r")
    expected = truth(plain)
    for place, more in [
        (source, {"experts": "external"}),
        (store.folder, {"memory": "40%", "prefetch": "router"}),
    ]:
        with open_model(place, **more) as model:
            assert torch.equal(logits(model), expected), (place, more)


@pytest.mark.parametrize("kind, group", [("pack", 32), ("float", None)])
def test_it_is_the_model_that_transformers_dequantises(kind, group, tmp_path):
    """Those that transformers reads; its own quantiser refuses experts of int8 and asymmetric
    ones."""
    pytest.importorskip("compressed_tensors")
    source, plain = packed.save(tmp_path / "m", kind, group)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
        dtype=torch.bfloat16,
        experts_implementation="eager",
    ).eval()
    assert torch.equal(logits(theirs), truth(plain)) and torch.equal(
        logits(open_model(source)), truth(plain)
    )


KEY = "model.layers.2.mlp.experts.5.up_proj."


@pytest.mark.parametrize(
    "change, message",
    [
        ({KEY + "scales": None}, "experts.5.up_proj.scales is missing"),
        (
            {KEY + "qzeros": torch.zeros(3, 8, dtype=torch.int32)},
            r"made of \S+5.up_proj.qzeros is I32 \[3, 8\]",
        ),
        ({"model.layers.0.self_attn.q_proj.g_idx": None}, "q_proj.weight cannot be made of"),
        (
            {"model.layers.0.self_attn.q_proj.qweight": torch.zeros(4, 64, dtype=torch.int32)},
            "cannot be made of",
        ),
        (
            {"model.layers.0.self_attn.q_proj.g_idx": torch.full((64,), 9, dtype=torch.int32)},
            "made of its files",
        ),
        ({"model.norm.scales": torch.ones(4)}, "scales"),
    ],
)
def test_a_layer_that_is_not_whole_is_refused(change, message, tmp_path):
    source, _ = packed.save(tmp_path / "m", "gptq", 32)
    tensors = load_file(source / "model.safetensors") | change
    save_file(
        {k: t for k, t in tensors.items() if t is not None},
        source / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ValueError, match=message):
        open_model(source)


def test_what_is_not_read_is_refused_when_it_is_opened(tmp_path):
    source, _ = packed.save(tmp_path / "m", "awq", 32)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["version"] = "gemv"
    (source / "config.json").write_text(json.dumps(config))
    for opened in (open_model, lambda folder: convert(folder, tmp_path / "s")):
        with pytest.raises(
            ValueError,
            match=f"{source} is quantised with awq, and version 'gemv' is not read.*Take one of these",
        ):
            opened(source)
