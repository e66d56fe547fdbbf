"""Attention of a single token against softmax by hand, in double precision, and against
transformers' own modules."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from moelab import open_model
from tests.models import tiny

pytest.importorskip("numba")
from moelab.fast import attention as fused
from moelab.fast.attention import DecodeAttention
from moelab.fast.fast_decode import FastDecode

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def past_of(tensors, window=None):
    """A cache of keys and values, perhaps one that forgets."""
    cache = DynamicCache()
    cache.update(*tensors, 0)
    if window:
        cache.layers[0] = DynamicSlidingWindowLayer(window)
        cache.layers[0].update(*tensors)
    return cache


class Config:
    _attn_implementation = "sdpa"


class MixtralAttention(nn.Module):
    """Grouped attention with any sizes, norm ("head", "full", None) and biases; computed in double
    precision."""

    def __init__(self, H, heads, kv_heads, D, norm, bias, dtype):
        super().__init__()
        self.head_dim, self.scaling, self.layer_idx, self.config = D, D**-0.5, 0, Config

        def put(name, module, mean, deviation):
            module.requires_grad_(False).weight.normal_(mean, deviation)
            setattr(self, name, module.to(dtype))

        for name, n in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            put(name, nn.Linear(H, n * D, bias), 0, H**-0.5)
        put("o_proj", nn.Linear(heads * D, H, bias), 0, (heads * D) ** -0.5)
        for name, n in (("q_norm", heads), ("k_norm", kv_heads)) if norm else ():
            put(name, nn.RMSNorm(D if norm == "head" else n * D, eps=1e-3), 1, 0.3)

    def forward(self, x, position_embeddings, attention_mask, past_key_values):
        D, (cos, sin) = self.head_dim, (t.double() for t in position_embeddings)

        def heads(name, norm):
            linear, module = getattr(self, name), getattr(self, norm, None)
            y = x.double() @ linear.weight.double().T
            y = y if linear.bias is None else y + linear.bias.double()
            if module is not None:
                y = y.view(-1, len(module.weight))
                size = torch.rsqrt(y.square().mean(-1, keepdim=True) + module.eps)
                y = y * size * module.weight.double()
            return y.view(-1, D)

        def turned(y):
            return y * cos[0] + torch.cat([-y[:, D // 2 :], y[:, : D // 2]], 1) * sin[0]

        q, k = turned(heads("q_proj", "q_norm")), turned(heads("k_proj", "k_norm"))
        keys, values = past_key_values.update(
            k[None, :, None], heads("v_proj", "")[None, :, None], 0
        )
        shared = len(q) // keys.shape[1]
        keys, values = (t[0].double().repeat_interleave(shared, 0) for t in (keys, values))
        shares = torch.softmax(torch.einsum("hd,hsd->hs", q, keys) * self.scaling, -1)
        y = torch.einsum("hs,hsd->hd", shares, values).flatten()
        bias = 0 if self.o_proj.bias is None else self.o_proj.bias.double()
        weight = self.o_proj.weight.double().T
        # what rounding is relative to
        type(self).summed = float((y.abs() @ weight.abs() + abs(bias)).max())
        return (y @ weight + bias)[None, None], None


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    st.integers(1, 90),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(0, 70),
    st.sampled_from([None, "head", "full"]),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.integers(0, 99),
)
def test_one_token_equals_softmax_by_hand(
    dtype, H, kv_heads, group, half, S, norm, bias, threads, seed
):
    torch.manual_seed(seed)
    D = 2 * half
    module = MixtralAttention(H, kv_heads * group, kv_heads, D, norm, bias, dtype)
    past, angle = (
        [torch.randn(1, kv_heads, S, D).to(dtype) for _ in range(2)],
        torch.randn(1, 1, half).repeat(1, 1, 2),
    )
    given = {
        "position_embeddings": (angle.cos().to(dtype), angle.sin().to(dtype)),
        "attention_mask": None,
    }
    x, kept, before = torch.randn(1, 1, H).to(dtype), past_of(past), torch.get_num_threads()
    with torch.inference_mode():
        wanted, _ = module(x, **given, past_key_values=past_of(past))
        torch.set_num_threads(threads)
        try:
            got, _ = DecodeAttention(module)(x, **given, past_key_values=kept)
        finally:
            torch.set_num_threads(before)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance * module.summed)


def test_windows_slide_as_transformers_would_have_it():
    """Until a window is full the kernel continues it, then the module does; what is kept stays the
    same."""
    torch.manual_seed(0)
    module = MixtralAttention(64, 4, 2, 32, None, False, torch.float32)
    past, angle = torch.randn(2, 1, 2, 3, 32).unbind(), torch.randn(1, 1, 16).repeat(1, 1, 2)
    given = {"position_embeddings": (angle.cos(), angle.sin()), "attention_mask": None}
    mine, theirs, ours = past_of(past, 8), past_of(past, 8), DecodeAttention(module)
    for _ in range(9):
        x = torch.randn(1, 1, 64)
        with torch.inference_mode():
            wanted, _ = module(x, **given, past_key_values=theirs)
            got, _ = ours(x, **given, past_key_values=mine)
        a, b = mine.layers[0], theirs.layers[0]
        assert a.cumulative_length == b.cumulative_length
        for one, other in ((got, wanted), (a.keys, b.keys), (a.values, b.values)):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)


def test_what_is_no_such_attention_is_left_alone():
    module = MixtralAttention(32, 4, 2, 16, None, False, torch.float32)
    assert DecodeAttention.of(module) is not None
    module.scaling *= 2  # read when it is called, so still the same
    assert DecodeAttention.of(module) is not None
    assert DecodeAttention.of(nn.Linear(3, 3)) is None
    module.q_proj = nn.utils.parametrizations.weight_norm(module.q_proj)
    assert DecodeAttention.of(module) is None


def test_masks_are_heard(tmp_path):
    model = open_model(tiny.save("qwen2_moe", tmp_path / "model", torch.float32))
    ids, mask = torch.arange(3, 9)[None], torch.tensor([[0, 1, 1, 1, 1, 1]])

    @torch.inference_mode()
    def step():
        cache = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True).past_key_values
        return model(ids[:, 5:], attention_mask=mask, past_key_values=cache).logits

    wanted = step()
    with FastDecode(model):
        torch.testing.assert_close(step(), wanted, rtol=1e-4, atol=1e-5)


def test_a_cache_grows_as_transformers_would_have_it(tmp_path, monkeypatch):
    """Beyond its memory, cropped, copied and continued both ways, and given away in between."""
    monkeypatch.setattr(fused, "GROWTH", 3)
    monkeypatch.setattr("moelab.fast.fast_decode.KERNELS", [DecodeAttention])
    model = open_model(tiny.save("qwen3_moe", tmp_path / "model", torch.float32))
    tokens = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def walk():
        def feed(cache, first, last):
            parts = tokens[:, first:last].split(1, 1)
            return [model(part, past_key_values=cache).logits for part in parts]

        cache = model(tokens[:, :5], use_cache=True).past_key_values
        found = feed(cache, 5, 13)
        given = cache.layers[0].keys
        seen, other = given.clone(), copy.deepcopy(cache)
        found += feed(cache, 13, 20) + feed(other, 20, 27) + feed(cache, 27, 30)
        cache.crop(-4)
        found += feed(cache, 30, 36)
        assert torch.equal(given, seen)
        return [*found, cache.layers[1].keys, cache.layers[1].values, other.layers[1].keys]

    wanted = walk()
    with FastDecode(model):
        for got, plain in zip(walk(), wanted, strict=True):
            torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-5)
