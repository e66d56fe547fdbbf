"""Dense linear layers with the kernels of the experts: attention's projections, shared experts, the head.

Once the experts of a decode step take only as long as reading them, the dense layers' bf16 GEMVs are next: torch's run
at a fraction of the memory's rate, and its bf16 GEMMs at a fraction of the arithmetic's, where the processor has no
bf16 instructions. `FastLinears(model)` gives each `nn.Linear` on the CPU a forward of its own that multiplies by
`moelab.experts.products`, up to the number of rows at which torch's product is faster, found by timing both once for
each type; beyond it, and while gradients are wanted, the module's own forward runs. No module is replaced, no weight
copied; `close` undoes it. Sums are in fp32 and rounded once, so results equal torch's within the type's tolerance.

Left out: subclasses of nn.Linear, which may mean something else; weights that are not contiguous; other devices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moelab.experts.choice import crossover

try:
    from moelab.experts import products
except ModuleNotFoundError as error:
    if error.name != "numba":
        raise
    products = None             # nothing is replaced

LARGE = 1 << 16                 # weights of a layer below which there is nothing to gain


class FastLinears:
    """A model whose linear layers multiply by our kernels; undone by `close`, or at the end of a `with` block.

    Parameters
    ----------
    rows : the largest number of rows that they get; None measures it.

    Attributes
    ----------
    linears : the layers that were given another forward.
    rows : dtype → up to how many rows it is taken.
    """

    def __init__(self, model: nn.Module, rows: float | None = None) -> None:
        self.linears: list[nn.Linear] = []
        self.rows: dict[torch.dtype, float] = {}
        for module in model.modules() if products is not None else ():
            if type(module) is nn.Linear and "forward" not in vars(module) and _fits(module.weight, module.bias):
                dtype = module.weight.dtype
                if dtype not in self.rows:
                    self.rows[dtype] = _measured(module) if rows is None else rows
                module.forward = _Forward(module, self.rows[dtype])
                self.linears.append(module)

    def close(self) -> None:
        """Give the layers their own forward back."""
        for module in self.linears:
            del module.forward
        self.linears = []

    def __enter__(self) -> FastLinears:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fast_linears(model: nn.Module, rows: float | None = None) -> FastLinears:
    """Let a model's linear layers multiply by our kernels; see `FastLinears`."""
    return FastLinears(model, rows)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ + b as `F.linear`, x [..., n], W [R, n], by our kernels: CPU tensors of one type, in `products.KINDS`.

    Needs numba and a contiguous W; sums in fp32.
    """
    kind, rows = products.KINDS[weight.dtype], x.reshape(-1, weight.shape[1])
    matrix = np.array([[weight.data_ptr(), 0, 0 if bias is None else bias.data_ptr(), 0]])
    y = products.multiply(kind, matrix, np.array([0, len(rows)]), rows, None, weight.shape[0], False, x.dtype)
    return y.view(*x.shape[:-1], weight.shape[0])


class _Forward:
    """The forward of one linear layer, called as `module(x)`."""

    def __init__(self, module: nn.Linear, rows: float) -> None:
        self.module, self.rows = module, rows

    def __call__(self, x: Tensor) -> Tensor:
        w, b = self.module.weight, self.module.bias                 # asked each time: they may be replaced or moved
        ours = x.is_cpu and x.dtype == w.dtype and x.shape[-1] == w.shape[1] \
            and 0 < x.numel() <= self.rows * w.shape[1] and _fits(w, b) \
            and not (torch.is_grad_enabled() and (x.requires_grad or w.requires_grad))
        return linear(x, w, b) if ours else F.linear(x, w, b)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        import copy
        return _Forward(copy.deepcopy(self.module, memo), self.rows)


def _fits(w: Tensor, b: Tensor | None) -> bool:
    return w.is_cpu and w.dtype in products.KINDS and w.is_contiguous() and w.numel() >= LARGE \
        and (b is None or b.dtype == w.dtype)


@torch.inference_mode()
def _measured(module: nn.Linear) -> float:
    """Up to how many rows our kernels are faster for a layer like this one."""
    w = module.weight
    x = torch.ones(128, w.shape[1], dtype=w.dtype)
    return max(crossover(lambda n: linear(x[:n], w), lambda n: F.linear(x[:n], w)), 1)
