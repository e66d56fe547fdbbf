"""Dense weights as the kernels of products take them, as they lie."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from moelab.kernels.products import KINDS, Matrices
from moelab.store.packed import Packed


def matrices_of(weight: Tensor, bias: Tensor | None = None) -> Matrices | None:
    """A weight [R, n] and its bias, valid while they live; None unless kernels read them as they lie."""
    if bias is not None and bias.dtype != weight.dtype:
        return None
    if isinstance(weight, Packed):
        return weight.matrices(bias)
    if not (weight.is_cpu and weight.dtype in KINDS and weight.is_contiguous()):
        return None
    row = [weight.data_ptr(), 0, 0 if bias is None else bias.data_ptr(), 0]
    return Matrices(KINDS[weight.dtype], np.array([row]), len(weight))
