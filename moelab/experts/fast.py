"""The fast executor: GEMV for few tokens an expert, for many a GEMM of weights that are widened once;
where that takes over is measured on this machine. On a GPU it is `GEMV`.

The first time in a process that a kind of weights has several tokens an expert, both multiply a matrix
with 8, 32 and 128 tokens, a few milliseconds each; GEMV is used up to about where it starts to lose.
Both are lossless, so the choice changes no result beyond rounding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.experts.gemv import GEMV
from moelab.kernels.linear import few_rows, product, wide
from moelab.kernels.products import Matrices

PAIR = 2  # tokens that GEMV multiplies as fast as one


class Fast(GEMV):
    """`GEMV` up to so many tokens an expert that is hit, on average, then `gemm`."""

    def compute(
        self,
        up: Matrices,
        down: Matrices,
        bounds: np.ndarray,
        x: Tensor,
        tokens: np.ndarray,
        of: Any,
    ) -> Tensor:
        each = len(tokens) / (len(bounds) - 1)
        one, n = up._replace(rows=up.rows[:1]), x.shape[1]
        if len(x) == 1 or each <= PAIR or each <= few_rows(x.dtype, one, n):
            return super().compute(up, down, bounds, x, tokens, of)
        self.count(len(tokens), len(tokens), len(tokens))
        rows = x.to(wide(x.dtype))[torch.from_numpy(tokens)].split(np.diff(bounds).tolist())
        return gemm(up, down, rows, of)


def gemm(up: Matrices, down: Matrices, x: Iterable[Tensor], experts: Any) -> Tensor:
    """`GEMV.compute`, by `moelab.kernels.linear`, of each expert's rows: its matrices are widened once."""
    parts = (product(down, m, experts.activate(product(up, m, rows))) for m, rows in enumerate(x))
    return torch.cat([*parts]).float()
