"""The Neuron SDK's choice of how to run the experts, by sizes alone (AWS Neuron MoE guide, `ExpertMLPsV2`).

Few tokens need few experts, so their weights are loaded selectively; a batch that needs about all of them runs all;
a prompt runs blockwise, or with a capacity factor if the model has one. The SDK knows whether it decodes; an executor
sees T tokens, and takes up to `batch` of them for a step of token generation.

    token generation:  T·K ≥ α·E → all experts, else selective
    prompt:            a capacity factor → capacity; T·K < α·E → selective; T·K < B → all experts; else blockwise

α is 1.0 in the code and "typically between 0.8-1" in the guide. Left out: expert parallelism, which has no selective
loading in the SDK.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from moelab.experts.all_experts import AllExperts
from moelab.experts.blockwise import Blockwise
from moelab.experts.capacity import CapacityFactor
from moelab.experts.executor import Executor
from moelab.experts.selective import Selective


def neuron_choice(T: int, K: int, E: int, *, decode: bool, block_size: int = 512, capacity_factor: float | None = None,
                  alpha: float = 1.0) -> str:
    """"selective", "all_experts", "capacity" or "blockwise", by the SDK's rule."""
    if decode:
        return "all_experts" if T * K >= alpha * E else "selective"
    if capacity_factor is not None and capacity_factor < E / K:         # from E/K on it is taken for None
        return "capacity"
    if T * K < alpha * E:
        return "selective"
    return "all_experts" if T * K < block_size else "blockwise"


class NeuronRule(Executor):
    """Runs each step by `neuron_choice`; lossless without a capacity factor.

    Parameters
    ----------
    capacity_factor, block_size, alpha : the SDK's settings and their defaults.
    batch : sequences that decode together: a step of at most so many tokens is one of token generation.

    Attributes
    ----------
    chosen : how often each way was chosen.
    executors : name → the executor of that way; they share this one's tally.
    """

    def __init__(self, capacity_factor: float | None = None, block_size: int = 512, alpha: float = 1.0,
                 batch: int = 1) -> None:
        super().__init__()
        self.settings = {"capacity_factor": capacity_factor, "block_size": block_size, "alpha": alpha}
        self.lossless, self.batch = capacity_factor is None, batch
        self.chosen: Counter[str] = Counter()
        self.executors: dict[str, Executor] = {"selective": Selective(), "all_experts": AllExperts(),
                                               "blockwise": Blockwise(block_size)}
        if capacity_factor is not None:
            self.executors["capacity"] = CapacityFactor(capacity_factor)
        for executor in self.executors.values():
            executor.tally = self.tally

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        T, K = ids.shape
        name = neuron_choice(T, K, experts.num_experts, decode=T <= self.batch, **self.settings)
        self.chosen[name] += 1
        return self.executors[name](x, ids, weights, experts)
