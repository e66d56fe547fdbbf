"""The mailbox between a GPU and the CPU: the GPU's kernels (in Triton's interpreter where there is
no GPU) and the thread that answers, against a naive loop."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
from moelab.kernels.gates import SILU
from moelab.kernels.products import KINDS, Matrices
from moelab.offloading.host import Lying, Worker
from moelab.offloading.mailbox import Mailbox

L, E, K, H, I = 3, 5, 2, 64, 32


def experts(dtype=torch.float32, seed=0, missing=()):
    random = torch.Generator().manual_seed(seed)
    memory = torch.randn(L, E, 3 * I * H, generator=random).to(dtype) / 8
    rows = np.zeros((2, L, E, 4), np.int64)
    rows[1, ..., 0] = 2 * I * H * dtype.itemsize
    begins = memory.data_ptr() + np.arange(L * E) * 3 * I * H * dtype.itemsize
    home = begins.reshape(L, E).copy()
    for key in missing:
        home[key] = 0
    kind = KINDS[dtype]
    moves = np.array([[1, 0, 0, 0]] * 2)
    return memory, Lying(
        Matrices(kind, rows[0], 2 * I), Matrices(kind, rows[1], H), SILU, rows, moves, home
    )


def naive(memory, layer, x, away, w):
    out = torch.zeros(H, dtype=torch.float64)
    for e, scale in zip(away.tolist(), w.tolist()):
        if e >= 0:
            up, down = memory[layer, e].double().split([2 * I * H, H * I])
            g, u = (up.view(2 * I, H) @ x[0].double()).chunk(2)
            out += scale * (down.view(H, I) @ (torch.nn.functional.silu(g) * u))
    return out


@pytest.fixture
def worker():
    worker = Worker(1)
    yield worker
    worker.close()


def test_smoke(triton_device, worker):
    from moelab.offloading.mailbox_triton import post, take

    memory, lying = experts()
    box = Mailbox(L, K, H, torch.float32, triton_device)
    for number in range(1, 6):
        count = torch.tensor([number], device=triton_device)
        with worker.token(box, lying, number) as events:
            for layer in range(L):
                x = torch.randn(1, H, device=triton_device)
                away = torch.tensor(
                    [(number + layer) % E, -1 if number % 2 else 0], device=triton_device
                )
                w = torch.rand(K, device=triton_device)
                out = torch.randn(1, H, device=triton_device)
                before = out.double().cpu()
                post(box, count, layer, x, away, w)
                take(box, count, layer, away, out)
                wanted = before + naive(memory, layer, x.cpu(), away.cpu(), w.cpu())
                torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-4, atol=1e-4)
        print(len(events), events[:2])
