"""The fused decode kernels on models, against transformers' own results."""

import pytest
import torch

from moelab import open_model
from moelab.fast.fast_decode import FastDecode
from moelab.fast.packing import DENSE
from moelab.models import discover
from moelab.models.patches import Patches
from moelab.speculate.routers import route
from moelab.store import fewbit
from tests.models import tiny
from tests.offloading.test_offload import generate

pytest.importorskip("numba")
from moelab.fast import layers as decode_layers
from moelab.fast import modules

ATTENTION = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "phimoe")


def counts(fast):
    return {what: len(found) for what, found in fast.fused.items()}


@pytest.mark.parametrize("name", [*ATTENTION, "deepseek_v3", "gpt_oss", "llama4_text"])
def test_models_generate_the_same_but_for_rounding_and_are_given_back(name, tmp_path, monkeypatch):
    monkeypatch.setattr("moelab.fast.modules.LARGE", 1)
    model = open_model(tiny.save(name, tmp_path / "model", torch.float32))
    for batch in (1, 2):
        wanted = generate(model, batch=batch, prompt=3)
        with FastDecode(model, rows=1e9) as fast:
            found = counts(fast)
            assert found["norms"] + found["attentions"] > 0
            assert (found["attentions"] > 0) == (name in ATTENTION)
            # phimoe's norms are no RMSNorms
            assert found["layers"] == (found["attentions"] if name != "phimoe" else 0)
            assert found["linears"] > 1
            tokens, logits = generate(model, batch=batch, prompt=3)
            with FastDecode(model) as again:
                assert not any(counts(again).values())  # not twice
        assert torch.equal(tokens, wanted[0])
        torch.testing.assert_close(logits, wanted[1], rtol=2e-4, atol=2e-4)
        back = generate(model, batch=batch, prompt=3)
        assert all(torch.equal(*pair) for pair in zip(back, wanted))
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_router_that_is_asked_is_the_kernel_in_its_place(tmp_path, monkeypatch):
    model = open_model(tiny.save("qwen3_moe", tmp_path / "model", torch.float32))
    calls, run, layers = [], modules.route, discover(model)
    monkeypatch.setattr(modules, "route", lambda *args: calls.append(args) or run(*args))
    x = torch.randn(1, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = [route(each, x) for each in layers]
        with FastDecode(model):
            calls.clear()
            for each, (ids, weights) in zip(layers, wanted):
                found = route(each, x)
                assert torch.equal(found[0], ids)
                torch.testing.assert_close(found[1], weights, rtol=1e-4, atol=1e-5)
    assert len(calls) == len(layers)


def test_a_layer_is_one_call_unless_something_lies_on_its_parts(tmp_path, monkeypatch):
    model = open_model(tiny.save("qwen3_moe", tmp_path / "model", torch.float32))
    calls, run, ids = [], decode_layers.to_experts, torch.arange(3, 9)[None]
    monkeypatch.setattr(decode_layers, "to_experts", lambda *args: calls.append(args) or run(*args))

    @torch.inference_mode()
    def step(wanted, fused):
        calls.clear()
        cache = model(ids[:, :5], use_cache=True).past_key_values
        found = model(ids[:, 5:], past_key_values=cache).logits
        assert len(calls) == fused
        if wanted is not None:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        return found

    wanted, first, seen = step(None, 0), model.model.layers[0], []
    with FastDecode(model) as fast:
        step(wanted, L := len(fast.fused["layers"]))
        for part in (first.input_layernorm, first.self_attn, first.post_attention_layernorm):
            for register in (part.register_forward_hook, part.register_forward_pre_hook):
                hook = register(lambda *_: seen.append(1))
                step(wanted, L - 1)
                hook.remove()
            with Patches() as patches:
                patches.wrap(part, "forward", lambda below: lambda *a, **k: below(*a, **k))
                step(wanted, L - 1)
        assert len(seen) == 12  # prompts are heard, too
        hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        step(wanted, 0)
        hook.remove()
        step(wanted, L)
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm = getattr(first, name)
            norm.weight = torch.nn.Parameter(norm.weight.detach() * 3)
            before, wanted = wanted, step(None, L - 1)
            assert not torch.allclose(before, wanted, rtol=1e-3, atol=1e-4)
    step(wanted, 0)


def test_linear_layers_and_attention_multiply_by_bf12(monkeypatch):
    monkeypatch.setattr("moelab.fast.modules.LARGE", 1)
    model, ids = open_model(), torch.arange(3, 17)[None]

    def logits(dense):
        with FastDecode(model, rows=1e9, dense=dense) as fast, torch.inference_mode():
            cache = model(ids).past_key_values
            out = [model(ids).logits, model(torch.tensor([[5]]), past_key_values=cache).logits]
        return counts(fast), torch.cat([one.flatten() for one in out]).float()

    (found, plain), (packed, bf12) = logits(None), logits("bf12")
    assert found == packed and found["attentions"] == model.spec.num_layers
    assert (plain - bf12).abs().mean() < 0.02 * plain.abs().mean()


@pytest.mark.parametrize("name", ["int8", "int4", "mxfp4"])
def test_rounded_layers_are_rounded_for_prompts_and_tokens_alike(name):
    """Against a model whose linear layers have the rounded weights themselves; all experts are
    chosen in both, as a sum in another order could else choose others."""
    model, ids = open_model(), torch.arange(3, 17)[None]
    twin = open_model()
    for module in (*model.modules(), *twin.modules()):
        if hasattr(module, "top_k"):
            module.top_k = model.spec.E
    for _at, module in twin.named_modules():
        if type(module) is torch.nn.Linear:
            form, w = fewbit.find_format(name), module.weight.detach()
            form.decompress(form.compress(w), w := torch.empty_like(w))
            module.weight = torch.nn.Parameter(w, requires_grad=False)

    def logits(model):
        with torch.inference_mode():
            cache = model(ids).past_key_values
            steps = [
                model(torch.tensor([[token]]), past_key_values=cache).logits for token in (5, 9)
            ]
            return [one.float() for one in (model(ids).logits, *steps)]

    plain, wanted, exact = logits(model), logits(twin), logits(twin.float())
    for rows in (1e9, 1):  # prompts by our kernels, and by torch's
        with FastDecode(model, rows=rows, dense=name) as fast:
            found = counts(fast)
            assert found["attentions"] == model.spec.num_layers
            assert found["linears"] >= 4 * found["attentions"]
            mine = logits(model)
        for ours, theirs, before, true in zip(mine, wanted, plain, exact):
            error, size, noise = (
                (one - theirs).norm() / theirs.norm() for one in (ours, before, true)
            )
            # bf16 rounds both: hardly further apart than twice as far as one is from fp32
            assert error < 3 * noise and (error < size / 2 or name == "int8")
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
