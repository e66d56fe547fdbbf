"""Dense linear layers with the kernels of the experts: attention's projections, shared experts, the head.

torch's bf16 products are slow where the processor has no bf16 instructions. `FastLinears` gives each `nn.Linear` on the
CPU (no subclass, contiguous weight) another forward: `moelab.kernels.products` up to the number of rows at which torch
is faster, measured once for each type; torch beyond it and where gradients are wanted. No weight is copied, unless it
is to be multiplied in fewer bits. Sums are in fp32 and rounded once, so results equal torch's within the type's
tolerance.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moelab.kernels import products

SIZES = (8, 32, 128)            # tokens of one expert that are tried
REPEATS = 3                     # the best of so many counts: the others were disturbed
LARGE = 1 << 16                 # weights of a layer below which there is nothing to gain


class FastLinears:
    """Gives linear layers another forward, up to so many rows; None measures how many."""

    def __init__(self, rows: float | None = None) -> None:
        self._given, self.rows = rows, {}                   # rows: dtype, or that and a kind → how many

    def __call__(self, module: nn.Module, pack: Callable | None = None) -> Callable[[Tensor], Tensor] | None:
        """The forward for a module; None where the module's own is as good, or another.

        pack : a `products.Pack`: the weight is multiplied as that packs it, kept beside the module's own. One that is
            rounded is so for any number of rows; only where it is trained is it the module's own.
        """
        if type(module) is not nn.Linear or not fits(module.weight, module.bias) \
                or module.weight.numel() < LARGE and pack is None:
            return None
        packed = None if pack is None else products.Matrices.of(module.weight, module.bias, pack=pack)
        rounded, key = packed and packed.rounded, module.weight.dtype
        if rounded:
            key = key, packed.kind
        if key not in self.rows:
            self.rows[key] = _measured(module, packed, rounded) if self._given is None else self._given
        rows, packed_from = self.rows[key], module.weight.data_ptr()

        def forward(x: Tensor) -> Tensor:
            w, b = module.weight, module.bias                       # asked each time: they may be replaced or moved
            same = w.data_ptr() == packed_from
            graph = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
            if x.is_cpu and x.dtype == w.dtype and x.shape[-1] == w.shape[1] \
                    and 0 < x.numel() <= rows * w.shape[1] and fits(w, b) and not graph:
                return linear(x, w, b, packed if same else None)
            return F.linear(x, rounded() if rounded and same and not (graph and w.requires_grad) else w, b)
        return forward


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, matrices: Any = None) -> Tensor:
    """`F.linear` by our kernels: CPU tensors of one type in `products.KINDS`, a contiguous weight; sums in fp32.

    matrices : `products.Matrices` of the same weight and bias.
    """
    matrices, rows = matrices or products.Matrices.of(weight, bias), x.reshape(-1, weight.shape[1])
    y = products.multiply(matrices.kind, matrices.rows, np.array([0, len(rows)]), rows, None, weight.shape[0], False,
                          x.dtype)
    return y.view(*x.shape[:-1], weight.shape[0])


def fits(w: Tensor, b: Tensor | None) -> bool:
    """Whether these are a weight and a bias for `linear`."""
    return w.is_cpu and w.dtype in products.KINDS and w.is_contiguous() and (b is None or b.dtype == w.dtype)


@torch.inference_mode()
def _measured(module: nn.Linear, packed: Any, rounded: Callable[[], Tensor] | None) -> float:
    """Up to how many rows; torch, for its products, has to make the weight that was rounded."""
    w, b = module.weight, module.bias
    x, packed = torch.ones(128, w.shape[1], dtype=w.dtype), packed if rounded else None
    return max(crossover(lambda n: linear(x[:n], w, b, packed),
                         lambda n: F.linear(x[:n], rounded() if rounded else w, b)), 1)


def crossover(first: Callable[[int], Any], second: Callable[[int], Any]) -> float:
    """Up to how many tokens `first` is no slower than `second`: 1, the middle of two of the `SIZES`, or infinity."""
    last = 0
    for size in SIZES:
        seconds: list[list[float]] = [[], []]
        for _ in range(1 + REPEATS):                        # the first ones compile, pack, fill caches
            for function, runs in zip((first, second), seconds):        # in turn: what disturbs one disturbs the other
                start = time.perf_counter()
                function(size)
                runs.append(time.perf_counter() - start)
        if min(seconds[0][1:]) > min(seconds[1][1:]):
            return (last + size) // 2 if last else 1
        last = size
    return inf
