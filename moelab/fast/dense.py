"""Dense weights as the kernels of products take them: as they lie, or packed in memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from moelab.kernels.products import KINDS, Matrices, multiply

#: a weight → that packed; None where that is not possible or does not pay
Pack = Callable[[Tensor], Matrices | None]


def matrices_of(weight: Tensor, bias: Tensor | None, pack: Pack | None = None) -> Matrices:
    """A weight [R, n] and its bias: as they lie or, if the weight is bf16 and `pack` does that,
    packed. Valid while this, the weight and the bias live."""
    found = pack(weight) if pack and weight.dtype == torch.bfloat16 else None
    if found is None:
        row = np.array([[weight.data_ptr(), 0, 0, 0]])
        found = Matrices(KINDS[weight.dtype], row, len(weight))
    if bias is not None:
        found.rows[0, 2] = bias.data_ptr()
    return found


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, matrices: Matrices | None = None
) -> Tensor:
    """`F.linear` by our kernels: CPU tensors of one type in `KINDS`, a contiguous weight; sums in
    fp32.

    matrices : `matrices_of` the same weight and bias.
    """
    matrices = matrices or matrices_of(weight, bias)
    rows = x.reshape(-1, weight.shape[1])
    y = multiply(matrices, np.array([0, len(rows)]), rows, None, x.dtype)
    return y.view(*x.shape[:-1], len(weight))


def fits(w: Tensor, b: Tensor | None = None) -> bool:
    """Whether kernels read a weight, and a bias, as they lie."""
    return w.is_cpu and w.dtype in KINDS and w.is_contiguous() and (b is None or b.dtype == w.dtype)
