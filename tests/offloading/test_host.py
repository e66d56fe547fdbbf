"""Experts computed where they lie against a loop in double precision, as they are stored."""

import pytest
import torch

from moelab import convert, open_model
from moelab.models.experts import seam_of
from moelab.models.seam import discover
from moelab.offloading.host import Host
from moelab.offloading.prompts import OneToken
from tests.experts.toy import naive
from tests.models import tiny

pytest.importorskip("numba")

WAYS = [
    ("qwen3_moe", torch.float32, "raw", None),
    ("qwen3_moe", torch.float16, "raw", None),
    ("qwen3_moe", torch.bfloat16, "raw", None),
    ("qwen3_moe", torch.bfloat16, "bf12", None),
    *(("qwen3_moe", torch.bfloat16, "bf12", few) for few in ("int8", "int4", "fp8")),
    ("gpt_oss", torch.bfloat16, "bf12", None),
    ("gpt_oss", torch.bfloat16, "bf12", "mxfp4"),
    ("deepseek_v4", torch.bfloat16, "bf12", "mxfp4"),
]


@pytest.mark.parametrize("name, dtype, codec, quantize", WAYS)
def test_a_tokens_experts_are_those_of_a_loop(name, dtype, codec, quantize, tmp_path):
    folder = tiny.save(
        name,
        tmp_path / "model",
        dtype,
        hidden_size=128,
        intermediate_size=64,
        moe_intermediate_size=64,
    )
    store = convert(folder, tmp_path / "store", codec, quantize=quantize)
    host = Host(store, 1, torch.device("cpu"), 99, False)
    random = torch.Generator().manual_seed(0)
    with open_model(store.folder) as model:
        for layer in discover(model):
            seam, events = seam_of(layer.experts, layer.index), []
            x = torch.randn(1, 128, generator=random).to(dtype)
            ids = torch.randperm(seam.num_experts, generator=random)[None, :4]
            weights = torch.rand(1, 4, generator=random)
            chosen = ids[0, 1:].tolist()
            given = OneToken(x, ids, weights)
            got = host.compute(seam, chosen, given, events.append)
            here = weights.clone()
            here[0, 0] = 0
            wanted = naive(x, ids, here, seam)
            assert got.dtype == dtype and got.shape == x.shape
            assert (got - wanted).norm() < {torch.float32: 1e-5}.get(dtype, 1e-2) * wanted.norm()
            assert [(e.layer, e.expert) for e in events] == [(layer.index, e) for e in chosen]
            assert host.matrices(layer.index, chosen, dtype)
            host.home[layer.index, chosen[0]] = 0
            assert host.matrices(layer.index, chosen, dtype) is None
    host.close()
