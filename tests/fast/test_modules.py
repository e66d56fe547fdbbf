"""RMSNorms, routers and linear layers with our kernels against the modules' own arithmetic."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("numba")
from moelab.fast.modules import Linear, Norm, Router

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
any_dtype = pytest.mark.parametrize("dtype", DTYPES)


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


@any_dtype
@given(rows=st.integers(1, 5), H=st.integers(1, 200), seed=st.integers(0, 99))
def test_norms_equal_the_module(dtype, rows, H, seed):
    torch.manual_seed(seed)
    norm, x = RMSNorm(H, dtype), (torch.randn(1, rows, H) * 10 ** torch.randn(1)).to(dtype)
    within = TOLERANCE[dtype]
    torch.testing.assert_close(Norm(norm)(x), norm(x), rtol=within, atol=within)


@any_dtype
def test_only_norms_that_the_kernel_equals_are_replaced(dtype):
    assert Norm.of(RMSNorm(32, dtype))
    assert not Norm.of(RMSNorm(32, dtype, offset=1.0)) and not Norm.of(
        RMSNorm(32, dtype, mean=True)
    )


class TopKRouter(nn.Module):
    """The K largest of a softmax of rounded logits; `normalised` to a sum of one; `sharp` is
    another router."""

    def __init__(self, E, H, K, dtype, normalised, sharp=1.0):
        super().__init__()
        self.weight, self.top_k = nn.Parameter(torch.randn(E, H).to(dtype), requires_grad=False), K
        self.normalised, self.sharp = normalised, sharp

    def forward(self, x):
        logits = F.linear(x.view(-1, x.shape[-1]), self.weight)
        values, ids = torch.softmax(logits.float() * self.sharp, -1).topk(self.top_k, -1)
        return logits, values / (values.sum(-1, keepdim=True) if self.normalised else 1), ids


@any_dtype
@given(
    E=st.integers(2, 70),
    H=st.integers(1, 200),
    K=st.integers(1, 8),
    normalised=st.booleans(),
    seed=st.integers(0, 99),
)
def test_routers_choose_as_the_module(dtype, E, H, K, normalised, seed):
    torch.manual_seed(seed)
    router, x = TopKRouter(E, H, min(E, K), dtype, normalised), torch.randn(1, 1, H).to(dtype)
    wanted, got = router(x), Router(router, normalised, torch.float32)(x)
    torch.testing.assert_close(got[0], wanted[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    # Of its own logits: a rounding may turn two of them round.
    p = torch.softmax(got[0].double(), -1)[0]
    torch.testing.assert_close(p[got[2][0]], p.topk(min(E, K)).values, rtol=1e-12, atol=0)
    assert len(set(got[2][0].tolist())) == min(E, K)
    share = p[got[2][0]] / (p[got[2][0]].sum() if normalised else 1)
    torch.testing.assert_close(got[1][0].double(), share, rtol=1e-5, atol=1e-7)


@any_dtype
@given(
    E=st.integers(2, 70),
    K=st.integers(1, 8),
    values=st.integers(1, 12),
    seed=st.integers(0, 99),
    wrong=st.sampled_from([None, None, float("nan"), float("inf"), float("-inf")]),
)
def test_between_equal_scores_the_modules_code_decides(dtype, E, K, values, seed, wrong):
    """Logits of a few values, so that many are equal, or that are no numbers: the choice is torch's
    own."""
    torch.manual_seed(seed)
    router, x = TopKRouter(E, 4, min(E, K), dtype, True), torch.tensor([[[1.0, 0, 0, 0]]]).to(dtype)
    router.weight[:, 0] = torch.randint(values, (E,)).to(dtype) / 4
    if wrong is not None:
        router.weight[seed % E] = wrong
    (_, wanted, ids), (_, got, chosen) = router(x), Router(router, True, torch.float32)(x)
    assert sorted(chosen[0].tolist()) == sorted(ids[0].tolist())
    both = got.sort().values, wanted.sort().values
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-7, equal_nan=True)


@any_dtype
def test_only_routers_that_the_kernel_equals_are_replaced(dtype):
    """Whether weights are normalised is not to be seen where the largest already sum to one, as
    with logits of hundreds: such a router may be left alone."""
    for seed in range(9):
        torch.manual_seed(seed)
        for normalised in (False, True):
            router = TopKRouter(8, 32, 2, dtype, normalised)
            router.weight *= 10.0 ** (seed % 3)
            found = Router.of(router)
            assert found.normalised == normalised if found else seed % 3
    assert not Router.of(TopKRouter(8, 32, 2, dtype, True, sharp=2.0))


def test_linear_layers_use_the_kernel_without_a_gradient():
    layer = nn.Linear(256, 512)
    ours = Linear.of(layer)
    x = torch.randn(3, 256)
    with torch.inference_mode():
        for rows in (x, torch.randn(300, 256)):
            assert torch.allclose(ours(rows), layer(rows), atol=1e-5)
    ours(x).sum().backward()
    assert layer.weight.grad is not None
    with pytest.raises(RuntimeError):
        ours(torch.randn(3, 255))
    assert not Linear.of(nn.Linear(8, 8)) and not Linear.of(nn.ReLU())
