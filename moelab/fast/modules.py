"""RMSNorms, routers and linear layers with a forward of a kernel each.

In transformers norms and routers of a decode step are overhead-dominated. One is replaced only if a
probe on random tokens shows the same result within the dtype's tolerance; prompts, batches and
other devices take its own forward.

torch's bf16 products are slow where the processor has no bf16 instructions. `FastLinears` gives
each `nn.Linear` on the CPU (no subclass, contiguous weight) another forward:
`moelab.kernels.products` up to the number of rows at which torch is faster, measured once for each
type; torch beyond it. Weights are copied only packed. What is to be differentiated, or is traced by
torch.compile, takes the modules' own forwards.

    norm: x [..., H] → [..., H]    router: x [1, H] → logits [1, E], weights [1, K], ids [1, K]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moelab.fast.dense import Matrices, Pack, fits, linear
from moelab.kernels.layers import rms_norm, route
from moelab.kernels.products import KINDS, TEAM, crossover, entry
from moelab.models.unchanged import Replaced, Unchanged, watched

LARGEST_NORM = (
    1 << 16
)  # entries of a norm's x up to which one thread is faster than torch's many operations
LARGE = 1 << 16  # weights of a linear layer below which there is nothing to gain


def epsilon(norm: nn.Module) -> float | None:
    """What an RMSNorm adds to the mean square; None if it keeps that elsewhere."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _of_one(module: nn.Module, kind: str) -> bool:
    """Whether a module is of a class named so, and its forward takes one tensor and nothing
    else."""
    return (
        type(module).__name__.endswith(kind)
        and len(inspect.signature(type(module).forward).parameters) == 2
    )


class Norm(Replaced):
    """The forward of an RMSNorm: the kernel for few rows, the module's own for many."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.eps, self.dtype, self.parts = (
            epsilon(module),
            module.weight.dtype,
            Unchanged((), called=[module]),
        )
        self.kind, self.H = KINDS[self.dtype](0), len(module.weight)

    def __call__(self, x: Tensor) -> Tensor:
        n = x.numel()
        if (
            n > LARGEST_NORM
            or x.dtype != self.dtype
            or not x.is_cpu
            or not x.is_contiguous()
            or watched()
            or self.parts.listeners() is None
        ):
            return self.own(x)
        out, w = torch.empty_like(x), self.module.weight
        rms_norm(
            self.kind,
            x.data_ptr(),
            self.kind,
            w.data_ptr(),
            n // self.H,
            self.H,
            self.eps,
            out.data_ptr(),
        )
        return out


@torch.inference_mode()
def fast_norm(module: nn.Module) -> Norm | None:
    """The kernel for this module if it gives what the module gives, on random rows of very
    different sizes."""
    w = module._parameters.get("weight")
    if (
        not _of_one(module, "RMSNorm")
        or w is None
        or w.ndim != 1
        or epsilon(module) is None
        or not fits(w)
    ):
        return None
    x = torch.randn(3, len(w), generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-3], [1.0], [30.0]]
    )
    x, ours = x.to(w.dtype), Norm(module)
    wanted, got = module(x), ours(x)
    same = got.dtype == wanted.dtype and torch.allclose(
        got.float(), wanted.float(), rtol=2**-7, atol=1e-6
    )
    return ours if same else None


class Router(Replaced):
    """The forward of a top-K softmax router, its weights `normalised` or not; the module's own for
    several tokens, and where equal scores, which are frequent in bf16, leave it a choice."""

    def __init__(self, module: nn.Module, normalised: bool, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.normalised, self.dtype, self.kind = normalised, dtype, KINDS[dtype](0)
        self.parts = Unchanged((), called=[module])

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, w = hidden_states, self.parts.weights[0]
        E, H = w.shape
        if (
            x.numel() != H
            or x.dtype != w.dtype
            or not x.is_cpu
            or watched()
            or self.parts.listeners() is None
        ):
            return self.own(x)
        x, K = x.contiguous(), self.module.top_k
        logits, scores = x.new_empty(1, E), torch.empty(1, K, dtype=self.dtype)
        ids = torch.empty(1, K, dtype=torch.int64)
        decided = route(
            KINDS[w.dtype](0),
            self.kind,
            x.data_ptr(),
            w.data_ptr(),
            E,
            H,
            K,
            self.normalised,
            logits.data_ptr(),
            scores.data_ptr(),
            ids.numpy(),
            entry(KINDS[w.dtype], x=KINDS[x.dtype]),
            TEAM,
            torch.get_num_threads(),
        )
        return (logits, scores, ids) if decided else self.own(x)


@torch.inference_mode()
def fast_router(module: nn.Module) -> Router | None:
    """The kernel for this module if it chooses as the module does, on random tokens."""
    w, K = module._parameters.get("weight"), getattr(module, "top_k", None)
    if (
        not _of_one(module, "Router")
        or not isinstance(K, int)
        or w is None
        or w.ndim != 2
        or len(list(module.parameters())) > 1
        or len(list(module.buffers()))
        or not fits(w)
    ):
        return None
    tokens = torch.randn(8, 1, w.shape[1], generator=torch.Generator().manual_seed(0))
    tokens[::2] /= (
        w.float().norm(dim=1).mean()
    )  # logits of about 1: where a softmax is not saturated
    tokens = tokens.to(w.dtype)
    wanted = [module(x) for x in tokens]
    if any(
        len(found) != 3 or found[1].shape != (1, K) or found[1].dtype not in KINDS
        for found in wanted
    ):
        return None

    def agree(a: tuple, b: tuple) -> bool:
        pairs = (a[0], b[0]), (a[1], b[1]), tuple(a[0].gather(1, found[2]) for found in (a, b))
        return all(torch.allclose(x.float(), y.float(), rtol=2**-6, atol=1e-6) for x, y in pairs)

    for ours in (Router(module, normalised, wanted[0][1].dtype) for normalised in (False, True)):
        if all(agree(found, ours(x)) for found, x in zip(wanted, tokens)):
            return ours
    return None


class FastLinears:
    """Gives linear layers another forward, up to so many rows; None measures how many."""

    def __init__(self, rows: float | None = None) -> None:
        self._given, self.rows = rows, {}  # rows: dtype, or that and a kind → how many

    def __call__(
        self, module: nn.Module, pack: Pack | None = None
    ) -> Callable[[Tensor], Tensor] | None:
        """The forward for a module; None where the module's own is as good, or another.

        pack : packs the weight that is multiplied, kept beside the module's own, until anything of
            the module is changed. One that is rounded is so for any number of rows.
        """
        if (
            type(module) is not nn.Linear
            or not fits(module.weight, module.bias)
            or module.weight.numel() < LARGE
            and pack is None
        ):
            return None
        packed = None if pack is None else Matrices.of(module.weight, module.bias, pack=pack)
        rounded = packed and packed.rounded
        key = (module.weight.dtype, packed.kind) if rounded else module.weight.dtype
        if key not in self.rows:
            self.rows[key] = (
                _measured(module, packed, rounded) if self._given is None else self._given
            )
        rows, parts = self.rows[key], packed and Unchanged((), called=[module], copied=True)

        def forward(x: Tensor) -> Tensor:
            w, b = module.weight, module.bias  # asked each time: they may be replaced or moved
            trained = torch.is_grad_enabled() and w.requires_grad
            copy = packed if packed and not trained and parts.listeners() is not None else None
            if (
                x.is_cpu
                and x.dtype == w.dtype
                and x.shape[-1] == w.shape[1]
                and 0 < x.numel() <= rows * w.shape[1]
                and fits(w, b)
                and not watched()
            ):
                return linear(x, w, b, copy)
            return F.linear(x, rounded() if rounded and copy else w, b)

        forward.parts = parts
        return forward


@torch.inference_mode()
def _measured(module: nn.Linear, packed: Any, rounded: Callable[[], Tensor] | None) -> float:
    """Up to how many rows; torch, for its products, has to make the weight that was rounded."""
    w, b = module.weight, module.bias
    x, packed = torch.ones(128, w.shape[1], dtype=w.dtype), packed if rounded else None
    return max(
        crossover(
            lambda n: linear(x[:n], w, b, packed),
            lambda n: F.linear(x[:n], rounded() if rounded else w, b),
        ),
        1,
    )
