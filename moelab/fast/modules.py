"""RMSNorms, routers and linear layers with a forward of a kernel each.

In transformers norms and routers of a decode step are overhead-dominated. One is replaced only if a
probe on random tokens shows the same result within the dtype's tolerance; prompts, batches and
other devices take its own forward.

torch's bf16 products are slow where the processor has no bf16 instructions. `Linear` gives each
`nn.Linear` on the CPU (no subclass, contiguous weight) another forward: `moelab.kernels.linear`. What
is to be differentiated, or is traced by torch.compile, takes the modules' own forwards.

    norm: x [..., H] → [..., H]    router: x [1, H] → logits [1, E], weights [1, K], ids [1, K]
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from moelab.fast.dense import matrices_of
from moelab.kernels.layers import route
from moelab.kernels.linear import linear
from moelab.kernels.norm import rms_norm
from moelab.kernels.products import KINDS, plan_of
from moelab.kernels.threads import team
from moelab.models import compat
from moelab.models.unchanged import FusedModule, Unchanged, watched
from moelab.store.packed import untouched

#: entries of a norm's x up to which one thread is faster than torch's many operations
LARGEST_NORM = 1 << 16
LARGE = 1 << 16  # weights of a linear layer below which there is nothing to gain


def epsilon(norm: nn.Module) -> float | None:
    """What an RMSNorm adds to the mean square; None if it keeps that elsewhere."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _weight_of(module: nn.Module, kind: str) -> Tensor | None:
    """The weight of a module of a class named so, whose forward takes one tensor and nothing else;
    None if there is none that kernels read."""
    weight = compat.parameters_of(module).get("weight")
    if (
        not type(module).__name__.endswith(kind)
        or len(inspect.signature(type(module).forward).parameters) != 2
        or weight is None
        or matrices_of(weight) is None
    ):
        return None
    return weight


def drawn(*shape: int) -> Tensor:
    """Random numbers to try a module on, fp32."""
    return torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(0))


class Norm(FusedModule):
    """The forward of an RMSNorm: the kernel for few rows, the module's own for many."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, Unchanged(called=[module]))
        self.eps = epsilon(module)
        self.dtype = module.weight.dtype
        self.H = len(module.weight)

    @classmethod
    @torch.inference_mode()
    def of(cls, module: nn.Module) -> Norm | None:
        """For this module if the kernel gives what it gives, on random rows of very different
        sizes."""
        w = _weight_of(module, "RMSNorm")
        if w is None or epsilon(module) is None:
            return None
        x = drawn(3, len(w))
        x = (x * x.new_tensor([[1e-3], [1.0], [30.0]])).to(w.dtype)
        ours = cls(module)
        wanted = module(x)
        got = ours(x)
        close = torch.allclose(got.float(), wanted.float(), rtol=2**-7, atol=1e-6)
        return ours if got.dtype == wanted.dtype and close else None

    def fused(self, x: Tensor) -> Tensor | None:
        n = x.numel()
        fitting = x.dtype == self.dtype and x.is_cpu and x.is_contiguous()
        if n > LARGEST_NORM or not fitting or not self.free():
            return None
        out = torch.empty_like(x)
        w = self.module.weight
        kind = KINDS[self.dtype].tag
        rows = n // self.H
        rms_norm(kind, x.data_ptr(), kind, w.data_ptr(), rows, self.H, self.eps, out.data_ptr())
        return out


class Router(FusedModule):
    """The forward of a top-K softmax router, its weights `normalised` or not; the module's own for
    several tokens, and where equal scores, which are frequent in bf16, leave it a choice."""

    def __init__(self, module: nn.Module, normalised: bool, dtype: torch.dtype) -> None:
        super().__init__(module, Unchanged(called=[module]))
        self.normalised = normalised
        self.dtype = dtype

    @classmethod
    @torch.inference_mode()
    def of(cls, module: nn.Module) -> Router | None:
        """For this module if the kernel chooses as it does, on random tokens."""
        w = _weight_of(module, "Router")
        K = getattr(module, "top_k", None)
        others = [*module.parameters(), *module.buffers()][1:]
        if w is None or not isinstance(K, int) or others:
            return None
        tokens = drawn(8, 1, w.shape[1])
        tokens[::2] /= w.float().norm(dim=1).mean()  # logits of about 1: no saturated softmax
        tokens = tokens.to(w.dtype)
        wanted = [module(x) for x in tokens]
        if len(wanted[0]) != 3 or wanted[0][1].shape != (1, K) or wanted[0][1].dtype not in KINDS:
            return None
        for normalised in (False, True):
            ours = cls(module, normalised, wanted[0][1].dtype)
            if all(_same_choice(found, ours(x)) for found, x in zip(wanted, tokens)):
                return ours
        return None

    def plan(self) -> tuple:
        """Of `moelab.kernels.layers.route`."""
        kind = KINDS[self.module.weight.dtype]
        return kind.tag, KINDS[self.dtype].tag, plan_of(kind, x=kind), self.normalised

    def fused(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        x = hidden_states
        w = self.parts.weights[0]
        E, H = w.shape
        if x.numel() != H or x.dtype != w.dtype or not x.is_cpu or not self.free():
            return None
        x = x.contiguous()
        K = self.module.top_k
        logits = x.new_empty(1, E)
        scores = torch.empty(1, K, dtype=self.dtype)
        ids = torch.full((1, K), -1)
        out = (logits.data_ptr(), scores.data_ptr())
        if route(self.plan(), x.data_ptr(), w.data_ptr(), E, H, *out, ids.numpy(), team()):
            return logits, scores, ids
        return None


def _same_choice(wanted: tuple, got: tuple) -> bool:
    """Whether two routers' logits, weights and the logits of their choices are close."""
    pairs = [*zip(wanted[:2], got[:2]), tuple(out[0].gather(1, out[2]) for out in (wanted, got))]
    return all(torch.allclose(a.float(), b.float(), rtol=2**-6, atol=1e-6) for a, b in pairs)


class Linear(FusedModule):
    """The forward of a linear layer: `moelab.kernels.linear` with its weight as it lies."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__(module, Unchanged())

    @classmethod
    def of(cls, module: nn.Module) -> Linear | None:
        """None where the module's own forward is as good, or another."""
        if type(module) is not nn.Linear or matrices_of(module.weight, module.bias) is None:
            return None
        return cls(module) if module.weight.numel() >= LARGE else None

    def fused(self, x: Tensor) -> Tensor | None:
        parameters = compat.parameters_of(self.module)  # which may be replaced
        w, b = parameters["weight"], parameters["bias"]
        with untouched():  # packed weights would answer slowly
            same = x.is_cpu and x.dtype == w.dtype and x.shape[-1] == w.shape[1] and x.numel()
            found = matrices_of(w, b) if same and not watched() else None
            return found and linear(x, found)
