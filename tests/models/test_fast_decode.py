"""The short way of a decode step against transformers' own, and its kernels against plain arithmetic."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moelab import open_model
from moelab.models import fast_decode as short
from moelab.models.fast_decode import fast_decode
from tests.models import tiny
from tests.offloading.test_offload import generate

pytest.importorskip("numba")
DTYPES = [torch.float32, torch.bfloat16]
ATTENTION = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "phimoe")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class RMSNorm(nn.Module):
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
    norm, x = RMSNorm(H, dtype), (torch.randn(1, rows, H) * 10 ** torch.randn(1)).to(dtype)
    torch.testing.assert_close(short._Norm(norm)(x), norm(x), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_norms_that_the_kernel_equals_are_replaced(dtype):
    assert short._norm(RMSNorm(32, dtype))
    assert not short._norm(RMSNorm(32, dtype, offset=1.0)) and not short._norm(RMSNorm(32, dtype, mean=True))


class Router(nn.Module):
    """The K largest of a softmax of rounded logits; `normalised` to a sum of one; `sharp` is another router."""

    def __init__(self, E, H, K, dtype, normalised, sharp=1.0):
        super().__init__()
        self.weight, self.top_k = nn.Parameter(torch.randn(E, H).to(dtype), requires_grad=False), K
        self.normalised, self.sharp = normalised, sharp

    def forward(self, x):
        logits = nn.functional.linear(x.view(-1, x.shape[-1]), self.weight)
        values, ids = torch.softmax(logits.float() * self.sharp, -1).topk(self.top_k, -1)
        return logits, values / (values.sum(-1, keepdim=True) if self.normalised else 1), ids


@pytest.mark.parametrize("dtype", DTYPES)
@given(E=st.integers(2, 70), H=st.integers(1, 200), K=st.integers(1, 8), normalised=st.booleans(),
       seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_routers_choose_as_the_module(dtype, E, H, K, normalised, seed):
    torch.manual_seed(seed)
    router, x = Router(E, H, min(E, K), dtype, normalised), torch.randn(1, 1, H).to(dtype)
    wanted, got = router(x), short._Router(router, normalised, torch.float32)(x)
    torch.testing.assert_close(got[0], wanted[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    p = torch.softmax(got[0].double(), -1)[0]               # of its own logits: a rounding may turn two of them round
    torch.testing.assert_close(p[got[2][0]], p.topk(min(E, K)).values, rtol=1e-12, atol=0)
    assert len(set(got[2][0].tolist())) == min(E, K)
    share = p[got[2][0]] / (p[got[2][0]].sum() if normalised else 1)
    torch.testing.assert_close(got[1][0].double(), share, rtol=1e-5, atol=1e-7)


def test_only_routers_that_the_kernel_equals_are_replaced():
    for normalised in (False, True):
        assert short._router(Router(8, 32, 2, torch.float32, normalised)).normalised == normalised
    assert not short._router(Router(8, 32, 2, torch.float32, True, sharp=2.0))


@pytest.mark.parametrize("name", [*ATTENTION, "deepseek_v3", "gpt_oss", "llama4_text"])
def test_models_generate_the_same_but_for_rounding_and_are_given_back(name, tmp_path):
    if name not in tiny.ARCHITECTURES:
        pytest.skip(f"there is no tiny {name}")
    model = open_model(tiny.save(name, tmp_path / "model", torch.float32))
    for batch in (1, 2):
        wanted = generate(model, batch=batch, prompt=3)
        with fast_decode(model) as found:
            assert found.norms + found.attentions > 0 and (found.attentions > 0) == (name in ATTENTION)
            tokens, logits = generate(model, batch=batch, prompt=3)
        assert torch.equal(tokens, wanted[0])
        torch.testing.assert_close(logits, wanted[1], rtol=2e-4, atol=2e-4)
        assert all(torch.equal(*pair) for pair in zip(generate(model, batch=batch, prompt=3), wanted))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_linear_layers_give_the_same_logits(name, tmp_path, monkeypatch):
    monkeypatch.setattr("moelab.kernels.linear.LARGE", 1)
    model = open_model(tiny.save(name, tmp_path / "m"))
    ids = torch.arange(3, 17)[None]
    with torch.inference_mode():
        logits = model(ids).logits
        with fast_decode(model, rows=1e9) as fast:
            assert fast.linears > 10 and set(fast.rows) == {torch.float32}
            assert torch.allclose(model(ids).logits, logits, atol=1e-4, rtol=1e-4)
            assert torch.allclose(copy.deepcopy(model)(ids).logits, logits, atol=1e-4, rtol=1e-4)
            with fast_decode(model) as again:
                assert again.linears == again.norms == again.routers == again.attentions == 0   # not twice
        assert torch.equal(model(ids).logits, logits)


def test_without_numba_nothing_changes(monkeypatch, tmp_path):
    model = open_model(tiny.save("qwen3_moe", tmp_path / "model", torch.float32))
    monkeypatch.setattr(short, "numba", None)
    with fast_decode(model) as found:
        assert found.norms == found.routers == found.attentions == found.linears == 0
