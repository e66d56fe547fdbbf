"""All experts on all tokens, masked when they are combined (AWS Neuron MoE guide, "All-Experts algorithm").

When a batch needs nearly every expert anyway, gathering the few it needs costs more than it saves: load every
expert once, compute every token with it, and zero what was not routed. Shapes are static and nothing is indirect, so
loads are long and even; the price is E/K times the arithmetic.

    x [T, H]    slots computed: T·E, of which the routed ones count as executed; on a rank, T times the experts it has

A token that chose an expert twice contributes once, with the sum of the two weights; for experts whose *input* is
weighed (Llama 4) that is another number, but their routers choose no expert twice. Left out: one batched product over
stacked banks, which would need [E, T, I] of memory and is no faster on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelab.experts.executor import Executor, here, zeros


class AllExperts(Executor):
    """Every expert on every token; lossless."""

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        T, E, held = len(x), experts.num_experts, here(experts)
        affinity = weights.new_zeros(T, E + 1).scatter_add_(1, ids, weights)            # the last column: "no expert"
        mask = torch.zeros(T, E + 1, dtype=torch.bool, device=x.device).scatter_(1, ids, True)
        out = zeros(x, weights, experts)
        if T:
            for e in held:
                y = experts.weighted(x, affinity[:, e], experts.weights(e))
                out += torch.where(mask[:, e, None], y.to(out.dtype), 0)                # 0 · ∞ would not be 0
        routed = int((ids < E).sum())
        self.count(routed, routed, T * len(held))
        return out.to(x.dtype)
