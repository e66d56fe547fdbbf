"""Linear layers with our kernels: the same results as torch's, and exactly undone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from moelab.experts.dense import FastLinears, fast_linears, linear
from moelab.models import open_model

from ..models import tiny

pytest.importorskip("moelab.experts.products")


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype, tolerance, bias):
    layer = nn.Linear(96, 75, bias=bias).to(dtype).requires_grad_(False)
    for shape in ((96,), (1, 1, 96), (2, 7, 96), (40, 96), (0, 96)):
        x = torch.randn(shape).to(dtype)
        y = linear(x, layer.weight, layer.bias)
        assert y.shape == (*shape[:-1], 75) and y.dtype == dtype
        assert torch.allclose(y.float(), layer.to(dtype)(x).float(), atol=tolerance * 3, rtol=tolerance)


def test_layers_are_given_another_forward_and_get_theirs_back():
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.Linear(8, 8)).requires_grad_(False)
    x = torch.randn(3, 256)
    y = model[:3](x)
    with fast_linears(model, rows=4) as fast:
        assert fast.linears == [model[0], model[2]] and "forward" in vars(model[0])     # the last one is too small
        assert torch.allclose(model[:3](x), y, atol=1e-5)
        assert torch.allclose(copy.deepcopy(model)[:3](x), y, atol=1e-5)
        many = torch.randn(9, 256)
        assert torch.equal(model[0](many), nn.functional.linear(many, model[0].weight, model[0].bias))
        with pytest.raises(RuntimeError):
            model[0](torch.randn(3, 255))
        assert FastLinears(model).linears == []                                         # not twice
    assert not any("forward" in vars(module) for module in model)
    assert torch.equal(model[:3](x), y)


def test_gradients_go_torchs_way():
    model = nn.Sequential(nn.Linear(256, 256))
    with fast_linears(model, rows=100):
        model(torch.randn(2, 256)).sum().backward()
    assert model[0].weight.grad is not None


def test_rows_are_measured_once_for_each_type():
    model = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 512), nn.Linear(256, 256).bfloat16()])
    with fast_linears(model.requires_grad_(False)) as fast:
        assert set(fast.rows) == {torch.float32, torch.bfloat16} and all(rows >= 1 for rows in fast.rows.values())


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_a_model_gives_the_same_logits(name, tmp_path, monkeypatch):
    monkeypatch.setattr("moelab.experts.dense.LARGE", 1)
    model = open_model(tiny.save(name, tmp_path / "m"))
    ids = torch.arange(3, 17)[None]
    with torch.inference_mode():
        logits = model(ids).logits
        with fast_linears(model, rows=1e9) as fast:
            assert len(fast.linears) > 10
            assert torch.allclose(model(ids).logits, logits, atol=1e-4, rtol=1e-4)
        assert torch.equal(model(ids).logits, logits)
