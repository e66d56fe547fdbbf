"""Sorted by expert: one sort of all choices, contiguous rows for each expert, one scatter at the end.

Source: the permutation that every MoE kernel starts with (MegaBlocks, Gale et al. 2023; transformers'
`grouped_mm_experts_forward`). Where eager searches the whole routing for each expert and adds to the output expert by
expert, here one stable sort finds all and one `index_add_` sums all. It runs on every architecture and every source of
weights, and is what faster executors fall back on. Left out: nothing is packed, nothing runs side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelab.experts.executor import Executor, dispatch, scatter


class Sorted(Executor):
    """One gather, one product after the other on contiguous rows, one scatter."""

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        order = dispatch(ids, experts.num_experts)
        n = len(order)
        self.count(n, n, n)
        rows, w = x[order.tokens], weights[order.tokens, order.choices]
        parts = [experts.weighted(rows[of], w[of], experts.weights(e)) for e, of in order.hit()]
        return scatter(x, weights, order.tokens, torch.cat(parts) if parts else x[:0], experts)
