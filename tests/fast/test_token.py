"""A token through a decoder model's own forward and through ours."""

import copy
import io

import pytest
import torch
from transformers.cache_utils import DynamicCache

from moelab import open_model
from tests.models import tiny

pytest.importorskip("numba")
from moelab.fast import layers
from moelab.fast.fast_decode import FastDecode
from moelab.fast.paths import fast_paths

PROMPT = torch.arange(3, 9)[None]
FAMILIES = "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def opened(name):
        if name not in made:
            folder = tiny.save(name, tmp_path_factory.mktemp(name) / "model", torch.float32)
            made[name] = open_model(folder)
        return made[name]

    return opened


@torch.inference_mode()
def stepped(model, steps=4, **more):
    """Logits of tokens after a prompt, the last output, and the cache."""
    cache = model(PROMPT, use_cache=True, past_key_values=DynamicCache()).past_key_values
    found = []
    for token in range(20, 20 + steps):
        out = model(torch.tensor([[token]]), past_key_values=cache, **more)
        found.append(out.logits)
    return torch.cat(found), out, cache


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_transformers(name, models):
    model = models(name)
    wanted, _, plain = stepped(model)
    with FastDecode(model):
        assert fast_paths(model)["models"] == 1
        got, out, cache = stepped(model)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert out.past_key_values is cache and cache.get_seq_length() == plain.get_seq_length()
    for ours, theirs in zip(cache.layers, plain.layers):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "more",
    [
        {"output_hidden_states": True},
        {"output_router_logits": True},
        {"use_cache": False},
        {"attention_mask": torch.ones(1, 10, dtype=torch.long)},
        {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1]])},
        {"position_ids": torch.tensor([[11]])},
        {"return_dict": False},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_is_asked_for_is_heard(more, models):
    """Whatever else a call has, all is as transformers would have it."""
    model = models("qwen3_moe")
    with torch.inference_mode():
        cache = model(PROMPT, use_cache=True).past_key_values
        other = copy.deepcopy(cache)
        wanted = model(torch.tensor([[20]]), past_key_values=cache, **more)
        with FastDecode(model):
            got = model(torch.tensor([[20]]), past_key_values=other, **more)
    assert type(got) is type(wanted) and len(got) == len(wanted)
    pairs = zip(
        *([*out.items()] if hasattr(out, "items") else [*enumerate(out)] for out in (got, wanted))
    )
    for (name, ours), (same, theirs) in pairs:
        assert name == same
        for a, b in zip(*((of if isinstance(of, tuple) else (of,)) for of in (ours, theirs))):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_embeddings_given_in_place_of_ids(models):
    model = models("olmoe")
    with torch.inference_mode():
        embeds = model.get_input_embeddings()(torch.tensor([[20]]))
        wanted, _, _ = stepped(model, 1)
        with FastDecode(model):
            cache = model(PROMPT, use_cache=True).past_key_values
            got = model(inputs_embeds=embeds, past_key_values=cache).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "part", ["embed_tokens", "norm", "rotary_emb", "layers.1", "layers.0.self_attn.q_proj"]
)
def test_hooks_on_parts_are_called(part, models):
    model = models("mixtral")
    heard = []
    with FastDecode(model):
        stepped(model, 1)
        handle = model.model.get_submodule(part).register_forward_hook(lambda *_: heard.append(1))
        try:
            stepped(model, 2)
            with_hook = len(heard)
        finally:
            handle.remove()
        stepped(model, 2)
    assert with_hook == 3 and len(heard) == 3  # the prompt, two tokens


def test_a_hook_that_goes_gives_the_kernel_back(models, monkeypatch):
    model = models("mixtral")
    calls, run = [], layers.to_experts
    monkeypatch.setattr(layers, "to_experts", lambda *of: calls.append(1) or run(*of))
    with FastDecode(model):
        for hooked in (False, True, False):
            calls.clear()
            q = model.model.layers[0].self_attn.q_proj
            handle = q.register_forward_hook(lambda *_: None) if hooked else None
            stepped(model, 2)
            if handle:
                handle.remove()
            assert len(calls) == 2 * (len(model.model.layers) - hooked)


@pytest.mark.parametrize(
    "change",
    [
        lambda q: setattr(q, "forward", lambda x: torch.zeros(*x.shape[:-1], q.out_features)),
        lambda q: setattr(q, "weight", torch.nn.Parameter(2 * q.weight, False)),
        lambda q: setattr(q.weight, "data", 2 * q.weight.data),
        lambda q: q.weight.mul_(2),
    ],
    ids=["forward", "parameter", "data", "in place"],
)
def test_a_changed_module_is_noticed(change, models):
    model = models("qwen3_moe")
    q = model.model.layers[0].self_attn.q_proj
    before, held = q.weight, q.weight.data.clone()
    try:
        with FastDecode(model):
            was, _, _ = stepped(model, 1)
            with torch.inference_mode(False), torch.no_grad():
                change(q)
            got, _, _ = stepped(model, 1)
        wanted, _, _ = stepped(model, 1)
    finally:
        vars(q).pop("forward", None)
        q.weight = before
        before.data = held
    assert not torch.allclose(was, wanted)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_copies_of_a_cache_are_transformers_own(models):
    """Copied, saved and read again, while its keys and values are in memory of ours."""
    model = models("qwen3_moe")
    with FastDecode(model):
        _, _, cache = stepped(model, 3)
        file = io.BytesIO()
        torch.save(copy.deepcopy(cache), file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        assert type(read.layers[0]).__module__ == "transformers.cache_utils"
        with torch.inference_mode():
            wanted = model(torch.tensor([[7]]), past_key_values=cache).logits
            got = model(torch.tensor([[7]]), past_key_values=read).logits
        assert torch.equal(got, wanted)
        for layer in (cache.layers[0], read.layers[0]):
            layer.reset()
            assert layer.get_seq_length() == 0
            with pytest.raises(AttributeError, match="nothing"):
                layer.nothing  # noqa: B018
