"""RMSNorms, routers and linear layers with our kernels against the modules' own arithmetic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("numba")
from moelab.fast import modules

DTYPES = [torch.float32, torch.bfloat16]
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
    torch.testing.assert_close(
        modules.Norm(norm)(x), norm(x), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_norms_that_the_kernel_equals_are_replaced(dtype):
    assert modules.fast_norm(RMSNorm(32, dtype))
    assert not modules.fast_norm(RMSNorm(32, dtype, offset=1.0)) and not modules.fast_norm(
        RMSNorm(32, dtype, mean=True)
    )


class Router(nn.Module):
    """The K largest of a softmax of rounded logits; `normalised` to a sum of one; `sharp` is
    another router."""

    def __init__(self, E, H, K, dtype, normalised, sharp=1.0):
        super().__init__()
        self.weight, self.top_k = nn.Parameter(torch.randn(E, H).to(dtype), requires_grad=False), K
        self.normalised, self.sharp = normalised, sharp

    def forward(self, x):
        logits = nn.functional.linear(x.view(-1, x.shape[-1]), self.weight)
        values, ids = torch.softmax(logits.float() * self.sharp, -1).topk(self.top_k, -1)
        return logits, values / (values.sum(-1, keepdim=True) if self.normalised else 1), ids


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    E=st.integers(2, 70),
    H=st.integers(1, 200),
    K=st.integers(1, 8),
    normalised=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_routers_choose_as_the_module(dtype, E, H, K, normalised, seed):
    torch.manual_seed(seed)
    router, x = Router(E, H, min(E, K), dtype, normalised), torch.randn(1, 1, H).to(dtype)
    wanted, got = router(x), modules.Router(router, normalised, torch.float32)(x)
    torch.testing.assert_close(got[0], wanted[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    p = torch.softmax(got[0].double(), -1)[
        0
    ]  # of its own logits: a rounding may turn two of them round
    torch.testing.assert_close(p[got[2][0]], p.topk(min(E, K)).values, rtol=1e-12, atol=0)
    assert len(set(got[2][0].tolist())) == min(E, K)
    share = p[got[2][0]] / (p[got[2][0]].sum() if normalised else 1)
    torch.testing.assert_close(got[1][0].double(), share, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_routers_that_the_kernel_equals_are_replaced(dtype, seed):
    """Whether weights are normalised is not to be seen where the largest already sum to one, as
    with large logits."""
    torch.manual_seed(seed)
    for normalised in (False, True):
        router = Router(8, 32, 2, dtype, normalised)
        router.weight *= 10.0 ** (seed % 3)
        found = modules.fast_router(router)
        assert (
            found.normalised == normalised if found else seed % 3
        )  # logits of hundreds: it may be left alone
    assert not modules.fast_router(Router(8, 32, 2, dtype, True, sharp=2.0))


def test_linear_layers_get_another_forward_where_it_pays():
    model = nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.Linear(8, 8)
    ).requires_grad_(False)
    found = [modules.FastLinears(rows=4)(layer) for layer in model]
    assert [forward is not None for forward in found] == [
        True,
        False,
        True,
        False,
    ]  # the last one is too small
    x, many = torch.randn(3, 256), torch.randn(9, 256)
    assert torch.allclose(found[0](x), model[0](x), atol=1e-5)
    assert torch.equal(found[0](many), model[0](many))
    with pytest.raises(RuntimeError):
        found[0](torch.randn(3, 255))


def test_gradients_of_linear_layers_go_torchs_way():
    layer = nn.Linear(256, 256)
    modules.FastLinears(rows=100)(layer)(torch.randn(2, 256)).sum().backward()
    assert layer.weight.grad is not None


def test_rows_are_measured_once_for_each_type():
    find = modules.FastLinears()
    for layer in nn.Linear(256, 256), nn.Linear(256, 512), nn.Linear(256, 256).bfloat16():
        find(layer.requires_grad_(False))
    assert set(find.rows) == {torch.float32, torch.bfloat16} and all(
        rows >= 1 for rows in find.rows.values()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    E=st.integers(2, 70),
    K=st.integers(1, 8),
    values=st.integers(1, 12),
    seed=st.integers(0, 99),
    wrong=st.sampled_from([None, None, float("nan"), float("inf"), float("-inf")]),
)
@settings(max_examples=60, deadline=None)
def test_between_equal_scores_the_modules_code_decides(dtype, E, K, values, seed, wrong):
    """Logits of a few values, so that many are equal, or that are no numbers: the choice is torch's
    own."""
    torch.manual_seed(seed)
    router, x = Router(E, 4, min(E, K), dtype, True), torch.tensor([[[1.0, 0, 0, 0]]]).to(dtype)
    router.weight[:, 0] = torch.randint(values, (E,)).to(dtype) / 4
    if wrong is not None:
        router.weight[seed % E] = wrong
    (_, wanted, ids), (_, got, chosen) = router(x), modules.Router(router, True, torch.float32)(x)
    assert sorted(chosen[0].tolist()) == sorted(ids[0].tolist())
    torch.testing.assert_close(
        got.sort().values, wanted.sort().values, rtol=1e-5, atol=1e-7, equal_nan=True
    )
