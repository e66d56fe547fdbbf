"""The fused decode kernels on models, against transformers' own results."""

from collections import Counter

import pytest
import torch

pytest.importorskip("numba")
from moelab import open_model
from moelab.fast.attention import DecodeAttention
from moelab.fast.fast_decode import FastDecode
from moelab.fast.layers import DecodeLayer
from moelab.fast.modules import Linear, Norm
from moelab.fast.packing import DENSE
from moelab.store import fewbit
from moelab.store.packed import Packed
from tests.models import tiny
from tests.offloading.test_offload import generate

ATTENTION = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "phimoe")


def counts(fast):
    """How many forwards there are of each kind."""
    return Counter(type(fused) for fused in fast.fused)


@pytest.mark.parametrize("name", [*ATTENTION, "deepseek_v3", "gpt_oss", "llama4_text"])
def test_models_generate_the_same_but_for_rounding_and_are_given_back(name, tmp_path, monkeypatch):
    monkeypatch.setattr("moelab.fast.modules.LARGE", 1)
    model = open_model(tiny.save(name, tmp_path / "model", torch.float32))
    for batch in (1, 2):
        wanted = generate(model, batch=batch, prompt=3)
        with FastDecode(model) as fast:
            found = counts(fast)
            assert found[Norm] + found[DecodeAttention] > 0 and found[Linear] > 1
            assert (found[DecodeAttention] > 0) == (name in ATTENTION)
            # phimoe's norms are no RMSNorms
            assert found[DecodeLayer] == (found[DecodeAttention] if name != "phimoe" else 0)
            tokens, logits = generate(model, batch=batch, prompt=3)
            with FastDecode(model) as again:
                assert not again.fused  # not twice
        assert torch.equal(tokens, wanted[0])
        torch.testing.assert_close(logits, wanted[1], rtol=2e-4, atol=2e-4)
        back = generate(model, batch=batch, prompt=3)
        assert all(torch.equal(*pair) for pair in zip(back, wanted))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["bf12", "int8", "int4"])
def test_packed_layers_are_packed_for_prompts_and_tokens_alike(name, monkeypatch):
    """Against a model whose linear layers have the rounded weights themselves; all experts are
    chosen in both, as a sum in another order could else choose others."""
    model, twin, ids = open_model(), open_model(), torch.arange(3, 17)[None]
    for module in (*model.modules(), *twin.modules()):
        if hasattr(module, "top_k"):
            module.top_k = model.spec.E
    for module in twin.modules():
        if type(module) is torch.nn.Linear and name != "bf12":
            form, w = fewbit.find_format(name), module.weight.detach()
            form.decompress(form.compress(w), w := torch.empty_like(w))
            module.weight = torch.nn.Parameter(w, requires_grad=False)

    @torch.inference_mode()
    def logits(model):
        found, cache = [model(ids).logits], model(ids).past_key_values
        for token in (5, 9):
            found.append(model(torch.tensor([[token]]), past_key_values=cache).logits)
        return [one.float() for one in found]

    plain, wanted, exact = logits(model), logits(twin), logits(twin.float())
    for rows in (1e9, 1):  # prompts by our kernels, and by torch's
        monkeypatch.setattr("moelab.kernels.linear.few_rows", lambda *_, rows=rows: rows)
        with FastDecode(model, dense=name) as fast:
            found = counts(fast)
            assert found[DecodeAttention] == model.spec.num_layers
            linears = [one for one in model.modules() if type(one) is torch.nn.Linear]
            assert all(isinstance(one.weight, Packed) for one in linears)
            mine = logits(model)
        for ours, theirs, before, true in zip(mine, wanted, plain, exact):
            error, size, noise = (
                (one - theirs).norm() / theirs.norm() for one in (ours, before, true)
            )
            # bf16 rounds both: hardly further apart than twice as far as one is from fp32
            assert error < 3 * noise and (error < size / 2 or name != "int4")
    assert all(torch.equal(*pair) for pair in zip(logits(model), plain))


def test_routers_are_not_rounded_and_wrong_models_are_refused(tmp_path):
    model = open_model()
    model.model.layers[0].gate, model.router = (
        torch.nn.Linear(64, 64, bias=False).bfloat16() for _ in range(2)
    )
    x = torch.randn(1, 64).bfloat16()
    with torch.inference_mode(), FastDecode(model, dense="int4"):
        for module in (model.model.layers[0].gate, model.router):
            torch.testing.assert_close(module(x), x @ module.weight.T, rtol=2e-2, atol=1e-2)
    with pytest.raises(ValueError, match="int4.*bf16"):
        FastDecode(open_model(tiny.save("qwen3_moe", tmp_path / "m", torch.float32)), dense="int4")


@pytest.mark.parametrize("dense", DENSE)
def test_dense_is_an_option_of_fast(dense):
    with open_model(executor="fast", dense=dense) as lm:
        assert lm.generate(torch.arange(3, 9)[None], max_new_tokens=3, do_sample=False).shape == (
            1,
            9,
        )
    for wrong in ({"dense": dense}, {"dense": "int3", "executor": "fast"}):
        with pytest.raises(ValueError, match="bf12, int8, int4, mxfp4"):
            open_model(**wrong)
