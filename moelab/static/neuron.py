"""All experts, selective loading, and the Neuron SDK's choice among its algorithms (AWS Neuron MoE
guide).

`AllExperts` ("All-Experts algorithm") computes T·E rows, E/K times the arithmetic, with static
shapes. "selective" ("Selective loading algorithm") is `Sorted`: it reads each expert that any token of the step
chose, once, and no other: 1 − unique/E of the weights are not read, which pays while batch · K is
well below E. `NeuronRule` (`ExpertMLPsV2`) chooses by sizes alone; α is 1.0 in the code and
"typically between 0.8-1" in the guide:

    token generation:  T·K ≥ α·E → all experts, else selective
    prompt:            a capacity factor → capacity; T·K < α·E → selective; T·K < B → all experts; else blockwise
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from moelab.experts.executor import Executor, Sorted, local_experts, zeros
from moelab.experts.located import weighted
from moelab.static.blockwise import Blockwise
from moelab.static.parallelism import neuron_choice
from moelab.static.static import CapacityFactor


class AllExperts(Executor):
    """Every expert on every token, what was not routed masked; an expert chosen twice runs once,
    with both weights."""

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        T = len(x)
        E = experts.num_experts
        local = local_experts(experts)
        affinity = weights.new_zeros(T, E + 1).scatter_add_(
            1, ids, weights
        )  # the last column: "no expert"
        mask = torch.zeros(T, E + 1, dtype=torch.bool, device=x.device).scatter_(1, ids, True)
        out = zeros(x, weights, experts)
        for e in local if T else ():
            y = weighted(experts, e, x, affinity[:, e])
            out += torch.where(mask[:, e, None], y.to(out.dtype), 0)  # 0 · ∞ would not be 0
        routed = int((ids < E).sum())
        self.count(routed, routed, T * len(local))
        return out.to(x.dtype)


class NeuronRule(Executor):
    """Runs each step by `neuron_choice`; lossless without a capacity factor. `chosen` counts the
    algorithms.

    batch : sequences that decode together. An executor sees T tokens only: up to `batch` are taken
    for a decode step."""

    def __init__(
        self,
        capacity_factor: float | None = None,
        block_size: int = 512,
        alpha: float = 1.0,
        batch: int = 1,
    ) -> None:
        super().__init__()
        self.settings = {
            "capacity_factor": capacity_factor,
            "block_size": block_size,
            "alpha": alpha,
        }
        self.lossless = capacity_factor is None
        self.batch = batch
        self.chosen: Counter[str] = Counter()
        self.executors: dict[str, Executor] = {
            "selective": Sorted(),
            "all_experts": AllExperts(),
            "blockwise": Blockwise(block_size),
        }
        if capacity_factor is not None:
            self.executors["capacity"] = CapacityFactor(capacity_factor)
        for executor in self.executors.values():
            executor.tally = self.tally

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        T, K = ids.shape
        name = neuron_choice(T, K, experts.num_experts, decode=self.batch >= T, **self.settings)
        self.chosen[name] += 1
        return self.executors[name](x, ids, weights, experts)
