"""GPU-NDP's tensor parallelism executed in torch (§III-B, Fig. 4): columns, columns, rows over N
units, partial sums.

Gate and up are cut by columns, down by the matching rows, so each unit ends with a partial sum of
the whole output.

    x [T, H] ids [T, K] weights [T, K]  →  partial sums [N, T, H]  →  [T, H]

Experts whose output passes a norm raise ValueError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelab.experts.executor import Executor, dispatch
from moelab.experts.sharding import part_of


class NDPTensorParallel(Executor):
    """Every expert on all `units`, each a share of its columns; outputs differ from one device's by
    rounding alone."""

    def __init__(self, units: int = 6) -> None:
        super().__init__()
        if units < 1:
            raise ValueError(f"{units} units; tensor parallelism needs at least one")
        self.units = units

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        return self.partial_sums(x, ids, weights, experts).sum(0).to(x.dtype)

    def partial_sums(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """What each unit sends back: float32 or wider, [N, T, H]."""
        order = dispatch(ids, experts.num_experts)
        self.count(len(order), len(order), len(order))
        out = x.new_zeros(self.units, *x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        for expert, of in order.hit():
            tokens = order.tokens[of]
            w = weights[order.tokens[of], order.choices[of]]
            whole = experts.weights(expert)
            for unit in range(self.units):
                y = experts.weighted(x[tokens], w, part_of(whole, unit, self.units, experts))
                out[unit].index_add_(0, tokens, y.to(out.dtype))
        return out
