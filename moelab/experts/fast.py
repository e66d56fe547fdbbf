"""The fast executor: GEMV for few tokens an expert, for many a GEMM of weights that are widened once;
where that takes over is measured on this machine. On a GPU it is `GEMV`.

The first time in a process that a kind of weights has several tokens an expert, both multiply a matrix
with 8, 32 and 128 tokens, a few milliseconds each; GEMV is used up to about where it starts to lose.
Both are lossless, so the choice changes no result beyond rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.experts.gemv import GEMV, Choices
from moelab.kernels.feed_forward import combine
from moelab.kernels.linear import few_rows, product, wide
from moelab.kernels.products import Matrices

PAIR = 2  # tokens that GEMV multiplies as fast as one


class Fast(GEMV):
    """`GEMV` up to so many tokens an expert that is hit, on average, then `gemm`."""

    def compute(self, up: Matrices, down: Matrices, of: Choices, experts: Any) -> Tensor:
        each = len(of.tokens) / (len(of.bounds) - 1)
        one, n = up._replace(rows=up.rows[:1]), of.x.shape[1]
        few = len(of.x) == 1 or each <= PAIR or each <= few_rows(of.x.dtype, one, n)
        return (super().compute if few else gemm)(up, down, of, experts)


def gemm(up: Matrices, down: Matrices, of: Choices, experts: Any) -> Tensor:
    """`GEMV.compute`, by `moelab.kernels.linear`: each matrix is widened for all tokens of an expert."""
    x = of.x.to(wide(of.x.dtype))[torch.from_numpy(of.tokens)]
    parts = []
    for m, rows in enumerate(x.split(np.diff(of.bounds).tolist())):
        parts.append(product(down, m, experts.activate(product(up, m, rows))))
    return combine(torch.cat(parts).float(), of.rows, of.weights, of.x.dtype)
