"""Triton's GEMV against a naive loop in fp64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from moelab.kernels.products import Matrices
from moelab.store import bf12
from moelab.store.reader import aligned_buffer


@pytest.mark.parametrize("codec", ["raw", "bf12"])
@pytest.mark.parametrize("K, H, width", [(3, 192, 64), (1, 64, 128), (2, 576, 320)])
def test_a_tokens_experts_equal_a_naive_loop(codec, K, H, width, triton_device):
    from moelab.experts import gemv_triton

    random, alive = torch.Generator().manual_seed(K), []

    def drawn(*shape):
        w = (0.05 * torch.randn(shape, generator=random)).bfloat16()
        w.view(-1)[torch.randperm(w.numel(), generator=random)[:40]] *= 1e4  # escapes
        return w

    def row(w):
        if codec == "raw":
            alive.append(w.to(triton_device))
            return [alive[-1].data_ptr(), 0, 0, 0]
        blob = bf12.CODEC.compress(w)
        memory = aligned_buffer(len(blob), 64)
        memory[:] = np.frombuffer(blob, np.uint8)
        alive.append(torch.from_numpy(memory).to(triton_device))
        return bf12.CODEC.row(alive[-1].data_ptr(), len(blob), w.shape)

    ups, downs = (
        [drawn(2 * width, H) for _ in range(K + 1)],
        [drawn(H, width) for _ in range(K + 1)],
    )
    x, w = torch.randn(1, H, generator=random).bfloat16(), torch.rand(K, generator=random)
    kind = gemv_triton.BF12 if codec == "bf12" else gemv_triton.BFLOAT16

    def bank(weights):
        of = Matrices(kind, np.array([row(w) for w in weights]), len(weights[0]))
        return gemv_triton.bank(of, torch.from_numpy(of.rows).to(triton_device))

    ids = torch.randperm(K + 1, generator=random)[:K]
    given = (of.to(triton_device) for of in (x, ids, w))
    got = gemv_triton.feed_forward(bank(ups), bank(downs), *given).cpu()
    wanted = torch.zeros(1, H, dtype=torch.float64)
    for i, of in zip(ids, w):
        up, down = ups[i], downs[i]
        gate, value = (x.double() @ up.double().T).chunk(2, -1)
        wanted += of * (F.silu(gate) * value) @ down.double().T
    assert got.shape == x.shape and got.dtype == x.dtype
    assert (got - wanted).norm() < 4e-3 * wanted.norm()
