"""A GPU's grouped products against naive loops and transformers' eager: with a GPU, and everywhere
with the CPU taken for one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.experts import gemv, grouped_gemm
from moelab.experts.executor import Sorted
from moelab.experts.fast import Fast
from moelab.experts.grouped_gemm import feed_forward
from tests.experts.test_executors import close
from tests.experts.toy import LAYOUTS, make_experts, make_routing, naive

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
TYPES = {"cpu": [torch.float32, torch.bfloat16, torch.float16], "cuda": [torch.bfloat16]}


@st.composite
def cases(draw, device):
    """(x, ids, weights, experts): any number of tokens an expert, many of none."""
    E, T = draw(st.sampled_from([1, 3, 8, 33])), draw(st.sampled_from([2, 3, 17, 90]))
    K = draw(st.integers(1, min(6, E)))
    dtype, seed = draw(st.sampled_from(TYPES[device])), draw(st.integers(0, 1000))
    experts = make_experts(E, 32, 24, draw(st.sampled_from(sorted(LAYOUTS))), dtype, seed)
    ids, weights = make_routing(T, E, K, draw(st.sampled_from([0.0, 4.0])), seed, dtype)
    weights = weights.double() if draw(st.booleans()) else weights
    how = draw(st.sampled_from(["as it is", "some of nobody", "all alike", "twice"]))
    random = torch.Generator().manual_seed(seed)
    if how == "some of nobody":
        ids = torch.where(torch.rand(ids.shape, generator=random) < 0.4, E, ids)
    elif how == "all alike":
        ids = torch.full_like(ids, draw(st.integers(0, E)))
    elif how == "twice":
        ids[:, K - 1] = ids[:, 0]
    return torch.randn(T, 32, generator=random).to(dtype), ids, weights, experts


@pytest.mark.parametrize("device", ["cpu", GPU])
@given(data=st.data())
def test_grouped_products_equal_a_naive_loop(device, data):
    x, ids, weights, experts = data.draw(cases(device))
    wanted = naive(x, ids, weights, experts)
    experts.module.to(device)
    y = feed_forward(x.to(device), ids.to(device), weights.to(device), experts)
    if device == "cpu" or torch.cuda.get_device_capability()[0] in (9, 10):
        close(y.cpu(), wanted, x.dtype)
        again = feed_forward(x.to(device), ids.to(device), weights.to(device), experts)
        assert torch.equal(again, y)


def case(**options):
    x, (ids, weights) = torch.randn(9, 32), make_routing(9, 6, 3, seed=1)
    return x, ids, weights, make_experts(6, 32, options.pop("I", 24), **options)


@pytest.mark.parametrize("wrong", [-1, 7, 10**12])
def test_a_token_of_an_expert_that_is_not_there_is_nan(wrong):
    x, ids, weights, experts = case()
    y = feed_forward(x, ids, weights, experts)
    ids[2, 1] = wrong
    got = feed_forward(x, ids, weights, experts)
    assert got[2].isnan().all()
    others = torch.arange(9) != 2
    assert torch.allclose(got[others], y[others], atol=1e-6)


def test_what_is_not_grouped_goes_its_old_way(monkeypatch, triton_device):
    """Sizes that torch's kernel refuses, experts that are not plain, weights of one's own."""
    monkeypatch.setattr(gemv, "GPUS", (triton_device,))
    for options in ({"I": 25}, {"layout": "gated"}):
        x, ids, weights, experts = case(**options)
        if "layout" in options:
            experts.has_post_expert_norm = True
            experts.module.post_expert_norm = torch.nn.LayerNorm(32)
        x, ids, weights = (of.to(triton_device) for of in (x, ids, weights))
        experts.module.to(triton_device)
        if "I" in options:
            assert feed_forward(x, ids, weights, experts) is None
        fast, plain = Fast(), Sorted()
        y, wanted = (run(x, ids, weights, experts) for run in (fast, plain))
        assert torch.allclose(y, wanted, atol=1e-5)
        assert fast.tally == plain.tally


@pytest.mark.parametrize("dropped", [0, 2])
def test_choices_are_counted(dropped, monkeypatch):
    monkeypatch.setattr(gemv, "GPUS", ("cpu",))
    monkeypatch.setattr(grouped_gemm, "TOKENS", 4)  # in three parts
    x, ids, weights, experts = case()
    ids[3 : 3 + dropped, 1] = 6
    if dropped:  # which only a block of its own does
        experts.__class__ = type("OfABlock", (type(experts),), {})
    fast = Fast()
    for _ in range(2):
        close(fast(x, ids, weights, experts), naive(x, ids, weights, experts), x.dtype)
    assert fast.tally.routed == fast.tally.executed == fast.tally.slots == 2 * (27 - dropped)
