"""Dense weights as the kernels of products take them: as they lie, or packed in memory, whole or
cut into parts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from moelab.kernels.products import KINDS, Matrices, multiply

#: (weight, number of parts) → the weight packed; None where that is not possible or does not pay
Pack = Callable[[Tensor, int], Matrices | None]


def matrices_of(
    weight: Tensor, bias: Tensor | None, parts: int = 1, pack: Pack | None = None
) -> Matrices:
    """One weight [parts · R, n] and its bias, cut into parts: as they lie or, if the weight is bf16
    and `pack` does that, packed. Valid while this, the weight and the bias live."""
    found = pack(weight, parts) if pack and weight.dtype == torch.bfloat16 else None
    if found is None:
        rows = np.zeros((parts, 4), np.int64)
        rows[:, 0] = _addresses(weight, parts)
        found = Matrices(KINDS[weight.dtype], rows, len(weight) // parts)
    if bias is not None:
        found.rows[:, 2] = _addresses(bias, parts)
    return found


def _addresses(tensor: Tensor, parts: int) -> np.ndarray:
    return tensor.data_ptr() + np.arange(parts) * (tensor.nbytes // parts)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, matrices: Matrices | None = None
) -> Tensor:
    """`F.linear` by our kernels: CPU tensors of one type in `KINDS`, a contiguous weight; sums in
    fp32.

    matrices : `matrices_of` the same weight and bias.
    """
    matrices, rows = matrices or matrices_of(weight, bias), x.reshape(-1, weight.shape[1])
    y = multiply(matrices, np.array([0, len(rows)]), rows, None, x.dtype)
    return y.view(*x.shape[:-1], len(weight))


def fits(w: Tensor, b: Tensor | None = None) -> bool:
    """Whether kernels read a weight, and a bias, as they lie."""
    return w.is_cpu and w.dtype in KINDS and w.is_contiguous() and (b is None or b.dtype == w.dtype)
