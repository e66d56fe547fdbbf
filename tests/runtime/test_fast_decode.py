"""The short way of a decode step against transformers' own, and its kernels against plain arithmetic."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moelab import open_model
from moelab.runtime import fast_decode as short
from moelab.runtime.fast_decode import fast_decode
from tests.models import tiny
from tests.runtime.test_offload import generate

pytest.importorskip("numba")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Norm(nn.Module):
    """RMSNorm as most models have it; `offset` as those that keep weight − 1."""

    def __init__(self, H, dtype, offset=0.0, mean=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H).to(dtype), requires_grad=False)
        self.variance_epsilon, self.offset, self.mean = 1e-5, offset, mean

    def forward(self, x):
        y = x.float() - self.mean * x.float().mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.offset) * y.to(x.dtype)




@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(1, 5), H=st.integers(1, 200), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_norms_equal_the_module(dtype, rows, H, seed):
    torch.manual_seed(seed)
    norm, x = Norm(H, dtype), (torch.randn(1, rows, H) * 10 ** torch.randn(1)).to(dtype)
    torch.testing.assert_close(short._Norm(norm)(x), norm(x), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_norms_that_the_kernel_equals_are_replaced(dtype):
    assert short._same(Norm(32, dtype))
    assert not short._same(Norm(32, dtype, offset=1.0)) and not short._same(Norm(32, dtype, mean=True))


@pytest.mark.parametrize("dtype", DTYPES)
@given(kv_heads=st.integers(1, 3), group=st.integers(1, 5), S=st.integers(1, 70), D=st.integers(1, 40),
       seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_attention_equals_softmax_by_hand(dtype, kv_heads, group, S, D, seed):
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(heads, n, D, generator=rng).to(dtype) for heads, n in (
        (kv_heads * group, 1), (kv_heads, S), (kv_heads, S)))
    out, scaling = torch.empty(kv_heads * group, D, dtype=dtype), 1 / math.sqrt(D)
    short._attend(q.data_ptr(), k.data_ptr(), v.data_ptr(), kv_heads, group, S, D, scaling, dtype != torch.float32,
                  out.data_ptr())
    for head in range(kv_heads * group):
        scores = (k[head // group].double() @ q[head, 0].double()) * scaling
        wanted = torch.softmax(scores, 0) @ v[head // group].double()
        torch.testing.assert_close(out[head].double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "llama4_text"])
def test_models_generate_the_same_but_for_rounding_and_are_given_back(name, tmp_path):
    if name not in tiny.ARCHITECTURES:
        pytest.skip(f"there is no tiny {name}")
    model = open_model(tiny.save(name, tmp_path / "model", torch.float32))
    for batch in (1, 2):
        wanted = generate(model, batch=batch, prompt=3)
        with fast_decode(model) as found:
            assert found.norms + found.linears > 0
            tokens, logits = generate(model, batch=batch, prompt=3)
        assert torch.equal(tokens, wanted[0])
        torch.testing.assert_close(logits, wanted[1], rtol=2e-4, atol=2e-4)
        assert all(torch.equal(*pair) for pair in zip(generate(model, batch=batch, prompt=3), wanted))
    assert not any("forward" in vars(module) for module in model.modules())


def test_without_numba_nothing_changes(monkeypatch, tmp_path):
    model = open_model(tiny.save("qwen3_moe", tmp_path / "model", torch.float32))
    monkeypatch.setattr(short, "numba", None)
    with fast_decode(model) as found:
        assert found.norms == 0 and model.config._attn_implementation == "sdpa"
