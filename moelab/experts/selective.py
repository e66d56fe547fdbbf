"""Selective loading: only the experts that the batch needs (AWS Neuron MoE guide, "Selective loading algorithm").

Decode is bound by reading weights, so a step reads each expert that any of its tokens chose, once, and no other. It
pays while batch · K is well below E: the share of the weights that is not read is 1 − unique/E. The guide estimates
`unique` by its worst case min(batch · K, E); sequences that agree need fewer (`expected_unique`).

    x [T, H]    slots computed: one row a routed choice, no padding

Left out: the guide's static form, which gathers a copy of K experts' weights for every token; here weights that two
tokens share are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moelab.experts.executor import Executor, dispatch, zeros


@dataclass
class Loads:
    """Exact counts of what was loaded, and of what a way without skipping would have loaded on top of it."""

    loaded: int = 0
    skipped: int = 0
    bytes_loaded: int = 0
    bytes_skipped: int = 0

    @property
    def savings(self) -> float:
        """Share of the loads that was skipped; 0 before anything was loaded."""
        return self.skipped / max(self.loaded + self.skipped, 1)

    def add(self, loaded: int, skipped: int, size: int) -> None:
        """Count loads of `size` bytes each."""
        self.loaded, self.skipped = self.loaded + loaded, self.skipped + skipped
        self.bytes_loaded, self.bytes_skipped = self.bytes_loaded + loaded * size, self.bytes_skipped + skipped * size


class Selective(Executor):
    """The unique experts of the step, each one's weights fetched once; lossless.

    Attributes
    ----------
    loads : experts that were fetched; skipped are the others of the layer, so `loads.savings` is 1 − unique/E.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loads = Loads()

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        d = dispatch(ids, experts.num_experts)
        w = weights[d.tokens, d.choices]
        out, unique, size = zeros(x, weights, experts), d.hit(), 0
        for e, where in unique:
            expert_weights = experts.weights(e)
            size = nbytes(expert_weights)
            y = experts.weighted(x[d.tokens[where]], w[where], expert_weights)
            out.index_add_(0, d.tokens[where], y.to(out.dtype))
        if unique:
            self.loads.add(len(unique), experts.num_experts - len(unique), size)
        self.count(len(d), len(d), len(d))
        return out.to(x.dtype)


def nbytes(weights: dict[str, Tensor]) -> int:
    """Bytes of one expert's tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


def unique_experts(ids: Tensor, E: int) -> int:
    """How many experts the choices ids [T, K] name; E, "no expert", is none."""
    return int(torch.unique(ids[ids < E]).numel())


def provisioned_savings(batch: int, K: int, E: int) -> float:
    """What a static graph saves: it has room for min(batch · K, E) experts, the guide's "max unique experts"."""
    return 1 - min(batch * K, E) / E


def expected_unique(batch: int, inclusion: Sequence[float]) -> float:
    """Experts that a batch of independent tokens is expected to need: Σ_e 1 − (1 − p_e)^batch.

    inclusion : [E], the probability that a token chooses each expert; they sum to K. `[K / E] * E` if balanced.
    """
    return sum(1 - (1 - p) ** batch for p in inclusion)
