"""Dense weights as the kernels of products take them: as they lie, or packed in memory, whole or
cut into parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.kernels.products import KINDS, Matrices, multiply
from moelab.kernels.vectors import Kind


@dataclass(frozen=True)
class Dense:
    """One weight [parts · R, n] and its bias, cut into parts, as `moelab.kernels.products.Matrices`
    has them.

    rows : int64 [parts, 4]; they point into the weight or, packed, into `memory`.
    rounded : makes the weight that this stands for; None where that is the very same.
    """

    kind: Kind
    rows: np.ndarray
    memory: Any = None
    rounded: Callable[[], Tensor] | None = None

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None, parts: int = 1, pack: Pack | None = None
    ) -> Dense:
        """Packed by `pack` if the weight is bf16 and that does; valid while this and the weight
        live."""
        found = pack(weight, parts) if pack and weight.dtype == torch.bfloat16 else None
        if found is None:
            found = cls(KINDS[weight.dtype], np.zeros((parts, 4), np.int64))
            found.rows[:, 0] = _parts(weight, parts)
        if bias is not None:
            found.rows[:, 2] = _parts(bias, parts)
        return found


#: (weight, number of parts) → the weight packed; None where that is not possible or does not pay
Pack = Callable[[Tensor, int], Dense | None]


def _parts(tensor: Tensor, parts: int) -> np.ndarray:
    return tensor.data_ptr() + np.arange(parts) * (tensor.nbytes // parts)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dense: Dense | None = None
) -> Tensor:
    """`F.linear` by our kernels: CPU tensors of one type in `KINDS`, a contiguous weight; sums in
    fp32.

    dense : of the same weight and bias.
    """
    dense, rows = dense or Dense.of(weight, bias), x.reshape(-1, weight.shape[1])
    matrices = Matrices(dense.kind, dense.rows, len(weight))
    y = multiply(matrices, np.array([0, len(rows)]), rows, None, x.dtype)
    return y.view(*x.shape[:-1], len(weight))


def fits(w: Tensor, b: Tensor | None = None) -> bool:
    """Whether kernels read a weight, and a bias, as they lie."""
    return w.is_cpu and w.dtype in KINDS and w.is_contiguous() and (b is None or b.dtype == w.dtype)
