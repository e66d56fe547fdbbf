"""Dense weights as the kernels of products take them, as they lie."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moelab.kernels.linear import linear as multiplied
from moelab.kernels.products import KINDS, Matrices
from moelab.store.packed import Packed


def matrices_of(weight: Tensor, bias: Tensor | None = None) -> Matrices:
    """A weight [R, n] and its bias. Valid while they live."""
    if isinstance(weight, Packed):
        found = weight.matrices()
    else:
        row = np.array([[weight.data_ptr(), 0, 0, 0]])
        found = Matrices(KINDS[weight.dtype], row, len(weight))
    if bias is not None:
        found.rows[0, 2] = bias.data_ptr()
    return found


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` by our kernels of what `fits`; sums in fp32."""
    return multiplied(x, matrices_of(weight, bias))


def fits(w: Tensor, b: Tensor | None = None) -> bool:
    """Whether kernels read a weight, and a bias, as they lie."""
    if isinstance(w, Packed):  # their biases are bf16
        return w.matrices() is not None and (b is None or b.dtype == w.dtype == torch.bfloat16)
    return w.is_cpu and w.dtype in KINDS and w.is_contiguous() and (b is None or b.dtype == w.dtype)
