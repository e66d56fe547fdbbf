"""Dense weights as the kernels of products take them, as they lie."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from moelab.kernels.linear import linear as multiplied
from moelab.kernels.products import KINDS, Matrices
from moelab.store.packed import Packed


def matrices_of(weight: Tensor, bias: Tensor | None = None) -> Matrices:
    """A weight [R, n] and its bias. Valid while they live."""
    if isinstance(weight, Packed):
        return weight.matrices(bias)
    row = [weight.data_ptr(), 0, 0 if bias is None else bias.data_ptr(), 0]
    return Matrices(KINDS[weight.dtype], np.array([row]), len(weight))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` by our kernels of what `fits`; sums in fp32."""
    return multiplied(x, matrices_of(weight, bias))


def fits(w: Tensor, b: Tensor | None = None) -> bool:
    """Whether kernels read a weight, and a bias, as they lie."""
    plain = (
        w.is_cpu and w.dtype in KINDS and w.is_contiguous() and (b is None or b.dtype == w.dtype)
    )
    return plain and (not isinstance(w, Packed) or w.matrices() is not None)
