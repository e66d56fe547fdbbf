"""Checkpoints of compressed-tensors, GPTQ and AWQ: opened, kept byte for byte, and as exact as the bf16 model of the
weights that they mean."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from moelab import open_model
from moelab.models.convert import convert
from moelab.models.restore import restore
from moelab.store import fewbit
from moelab.store.layout import SOURCE_LAYOUT
from moelab.store.verify import verify
from tests.models import packed
from tests.models.stores import identity_of

IDS = torch.arange(3, 20)[None]
CASES = {
    "int4 in groups of 32": ("pack", dict(group=32)),
    "int4 in groups of 64, asymmetric": ("pack", dict(group=64, symmetric=False)),
    "int4 a channel": ("pack", dict(group=None)),
    "int4, fp16 scales": ("pack", dict(group=32, scales=torch.float16)),
    "int8 packed, asymmetric": ("pack", dict(group=32, bits=8, symmetric=False)),
    "int8 a channel": ("int", dict(group=None, bits=8)),
    "int8 a channel, asymmetric": ("int", dict(group=None, bits=8, symmetric=False)),
    "fp8 a channel": ("float", dict(group=None)),
    "fp8 a tensor, fp32 scales": ("float", dict(group=0, scales=torch.float32)),
    "GPTQ": ("gptq", dict(group=32, scales=torch.float16)),
    "GPTQ asymmetric, attention in bf16": ("gptq", dict(group=16, symmetric=False, skip="self_attn")),
    "GPTQ v2, 8 bits": ("gptq_v2", dict(group=None, bits=8, symmetric=False, scales=torch.float16)),
    "GPTQ in act-order": ("act-order", dict(group=16, symmetric=False, scales=torch.float16)),
    "AWQ": ("awq", dict(group=32, symmetric=False, scales=torch.float16)),
}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def truth(folder):
    return logits(transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation="eager").eval())


def codecs(store):
    return {codec for entry in store.entries(0, 0).values() for codec, _ in entry.planes}


def is_kept_and_exact(source, plain, tmp_path, kept=fewbit.is_format):
    expected = truth(plain)
    assert torch.isfinite(expected).all() and expected.std() > 0
    first = convert(source, tmp_path / "s")
    second = convert(first.folder, tmp_path / "t", "raw")
    for store in (first, second):
        assert all(map(kept, codecs(store))) and SOURCE_LAYOUT in store.files
        assert verify(store)["experts"] == store.spec.L * store.spec.E and store.identity == identity_of(source)
        back = restore(store, tmp_path / f"{store.folder.name}-back")
        assert {p.name: p.read_bytes() for p in back.iterdir()} == {p.name: p.read_bytes() for p in source.iterdir()}
    for place, options in [(source, {}), (source, {"experts": "external"}), (source, {"memory": "40%"}),
                           (first.folder, {}), (first.folder, {"memory": "40%"}), (second.folder, {"memory": "40%"}),
                           (first.folder, {"memory": "40%", "compact": True})]:
        with open_model(place, **options) as model:
            assert torch.equal(logits(model), expected), (place, options)
    with open_model(first.folder, memory="60%", executor="fast") as model:
        assert (logits(model) - expected).float().norm() < 0.03 * expected.float().norm()
    return first


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_model_of_the_weights_that_it_means(case, tmp_path):
    """However it is opened, and from a store of a store; restored byte for byte."""
    kind, options = CASES[case]
    is_kept_and_exact(*packed.save(tmp_path / "m", kind, **options), tmp_path)
