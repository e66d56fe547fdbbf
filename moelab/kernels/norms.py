"""RMSNorms and routers of a decode step, in a kernel each.

In transformers both are overhead-dominated. A module is replaced only if a probe on random tokens shows the same result
within the dtype's tolerance. Prompts, batches and other devices take the module's own forward.

    norm: x [..., H] → [..., H]    router: x [1, H] → logits [1, E], weights [1, K], ids [1, K]
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from moelab.kernels.compile import kernel
from moelab.kernels.products import KINDS, PIECE, TEAM, entry, job_of, widen
from moelab.kernels.tiles import address, span, together, write

#: entries of a norm's x up to which one thread of ours is faster than torch's many operations
LARGEST_NORM = 1 << 16


def epsilon(norm: nn.Module) -> float | None:
    """What an RMSNorm adds to the mean square; None if it keeps that elsewhere."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


class Norm:
    """The forward of an RMSNorm: the kernel for few rows, the module's own for many."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own, self.eps = module, type(module).forward, epsilon(module)
        self.dtype = module.weight.dtype
        self.kind, self.H = KINDS[self.dtype](0), len(module.weight)

    def __call__(self, x: Tensor) -> Tensor:
        w, n = self.module._parameters["weight"], x.numel()             # asked each time: it may be replaced or moved
        if n > LARGEST_NORM or not x.dtype == w.dtype == self.dtype or not x.is_cpu or not x.is_contiguous():
            return self.own(self.module, x)
        out = torch.empty_like(x)
        rms_norm(self.kind, x.data_ptr(), self.kind, w.data_ptr(), n // self.H, self.H, self.eps, out.data_ptr())
        return out


@torch.inference_mode()
def fast_norm(module: nn.Module) -> Norm | None:
    """The kernel for this module if it gives what the module gives, on random rows of very different sizes."""
    w = module._parameters.get("weight")
    if not type(module).__name__.endswith("RMSNorm") or w is None or w.ndim != 1 or epsilon(module) is None \
            or not w.is_cpu or w.dtype not in KINDS:
        return None
    x = torch.randn(3, len(w), generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-3], [1.0], [30.0]])
    x, ours = x.to(w.dtype), Norm(module)
    wanted, got = module(x), ours(x)
    same = got.dtype == wanted.dtype and torch.allclose(got.float(), wanted.float(), rtol=2 ** -7, atol=1e-6)
    return ours if same else None


class Router:
    """The forward of a top-K softmax router, its weights `normalised` or not; the module's own for several tokens."""

    def __init__(self, module: nn.Module, normalised: bool, dtype: torch.dtype) -> None:
        self.module, self.own, self.normalised, self.dtype = module, type(module).forward, normalised, dtype
        self.kind = KINDS[dtype](0)

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, w = hidden_states, self.module._parameters["weight"]
        E, H = w.shape
        if x.numel() != H or x.dtype != w.dtype or not (x.is_cpu and w.is_cpu and w.is_contiguous()) \
                or torch.is_grad_enabled():
            return self.own(self.module, x)
        x, K = x.contiguous(), self.module.top_k
        logits, scores = x.new_empty(1, E), torch.empty(1, K, dtype=self.dtype)
        ids = torch.empty(1, K, dtype=torch.int64)
        route(KINDS[w.dtype](0), self.kind, x.data_ptr(), w.data_ptr(), E, H, K, self.normalised, logits.data_ptr(),
               scores.data_ptr(), ids.numpy(), entry(KINDS[w.dtype]), TEAM, torch.get_num_threads())
        return logits, scores, ids


@torch.inference_mode()
def fast_router(module: nn.Module) -> Router | None:
    """The kernel for this module if it chooses as the module does (of equal scores any), on random tokens."""
    w, K = module._parameters.get("weight"), getattr(module, "top_k", None)
    if not type(module).__name__.endswith("Router") or not isinstance(K, int) or w is None or w.ndim != 2 \
            or len(list(module.parameters())) > 1 or len(list(module.buffers())) or w.dtype not in KINDS \
            or not (w.is_cpu and w.is_contiguous()):
        return None
    tokens = torch.randn(8, 1, w.shape[1], generator=torch.Generator().manual_seed(0))
    tokens[::2] /= w.float().norm(dim=1).mean()             # logits of about 1: where a softmax is not saturated
    tokens = tokens.to(w.dtype)
    wanted = [module(x) for x in tokens]
    if any(len(found) != 3 or found[1].shape != (1, K) or found[1].dtype not in KINDS for found in wanted):
        return None

    def agree(a: tuple, b: tuple) -> bool:
        pairs = (a[0], b[0]), (a[1], b[1]), tuple(a[0].gather(1, found[2]) for found in (a, b))
        return all(torch.allclose(x.float(), y.float(), rtol=2 ** -6, atol=1e-6) for x, y in pairs)
    for ours in (Router(module, normalised, wanted[0][1].dtype) for normalised in (False, True)):
        if all(agree(found, ours(x)) for found, x in zip(wanted, tokens)):
            return ours
    return None


@kernel(fastmath={"reassoc", "contract"})               # sums may be taken in any order, so that they are vectors
def rms_norm(kind, x, w_kind, w, rows, H, eps, out):
    """Norms of rows [H] at x, times the weight at w; `out` may be x."""
    row, scale = np.empty(H, np.float32), np.empty(H, np.float32)
    widen(w_kind, np.float32(0), w, H, address(scale))
    for r in range(rows):
        at, to = x + span(kind, r * H), out + span(kind, r * H)
        widen(kind, np.float32(0), at, H, address(row))
        total = np.float32(0)
        for i in range(H):
            total += row[i] * row[i]
        inverse = np.float32(1 / np.sqrt(total / H + eps))
        for i in range(H):
            write(kind, to, i, row[i] * inverse)                # rounded before the weight, as transformers does it
        widen(kind, np.float32(0), to, H, address(row))
        for i in range(H):
            write(kind, to, i, row[i] * scale[i])


@kernel
def route(kind, score_kind, x, w, E, H, K, normalised, logits, scores, ids, work, team, threads):
    p, chosen = np.empty(E, np.float32), np.empty(K, np.float32)
    matrix, bounds = np.zeros((1, 4), np.int64), np.arange(2)
    matrix[0, 0] = w
    job = job_of(kind, kind, matrix, bounds, x, np.int64(1), H, bounds[:0], E, address(p), np.int64(PIECE))
    together(team, work, min(threads, (E + PIECE - 1) // PIECE), job)
    for e in range(E):
        write(kind, logits, e, p[e])                            # rounded before the softmax, as transformers does it
    widen(kind, np.float32(0), logits, E, address(p))
    p = np.exp(p - p.max())
    total = p.sum()
    for k in range(K):
        ids[0, k] = np.argmax(p)
        chosen[k] = p[ids[0, k]]
        p[ids[0, k]] = -1
    total = chosen.sum() if normalised else total
    for k in range(K):
        write(score_kind, scores, k, chosen[k] / total)
