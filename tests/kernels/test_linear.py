"""Linear layers with our kernels: the same results as torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moelab.kernels.linear import FastLinears, linear

pytest.importorskip("moelab.kernels.products")


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype, tolerance, bias):
    layer = nn.Linear(96, 75, bias=bias).to(dtype).requires_grad_(False)
    for shape in ((96,), (1, 1, 96), (2, 7, 96), (40, 96), (0, 96)):
        x = torch.randn(shape).to(dtype)
        y = linear(x, layer.weight, layer.bias)
        assert y.shape == (*shape[:-1], 75) and y.dtype == dtype
        assert torch.allclose(y.float(), layer.to(dtype)(x).float(), atol=tolerance * 3, rtol=tolerance)


def test_layers_get_another_forward_where_it_pays():
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.Linear(8, 8)).requires_grad_(False)
    found = [FastLinears(rows=4)(layer) for layer in model]
    assert [forward is not None for forward in found] == [True, False, True, False]         # the last one is too small
    x, many = torch.randn(3, 256), torch.randn(9, 256)
    assert torch.allclose(found[0](x), model[0](x), atol=1e-5)
    assert torch.equal(found[0](many), model[0](many))
    with pytest.raises(RuntimeError):
        found[0](torch.randn(3, 255))


def test_gradients_go_torchs_way():
    layer = nn.Linear(256, 256)
    FastLinears(rows=100)(layer)(torch.randn(2, 256)).sum().backward()
    assert layer.weight.grad is not None


def test_rows_are_measured_once_for_each_type():
    find = FastLinears()
    for layer in nn.Linear(256, 256), nn.Linear(256, 512), nn.Linear(256, 256).bfloat16():
        find(layer.requires_grad_(False))
    assert set(find.rows) == {torch.float32, torch.bfloat16} and all(rows >= 1 for rows in find.rows.values())
