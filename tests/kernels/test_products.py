"""`linear` against torch's; the products under it are tested with the experts,
`tests.experts.test_kernels`."""

import pytest
import torch
from torch import nn

pytest.importorskip("numba")
from moelab.fast.dense import linear


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype, tolerance, bias):
    layer = nn.Linear(96, 75, bias=bias).to(dtype).requires_grad_(False)
    for shape in ((96,), (1, 1, 96), (2, 7, 96), (40, 96), (0, 96)):
        x = torch.randn(shape).to(dtype)
        y = linear(x, layer.weight, layer.bias)
        assert y.shape == (*shape[:-1], 75) and y.dtype == dtype
        assert torch.allclose(
            y.float(), layer.to(dtype)(x).float(), atol=tolerance * 3, rtol=tolerance
        )
