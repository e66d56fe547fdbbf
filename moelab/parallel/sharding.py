"""Which experts each rank holds, and a source that holds those, or a part of each (tensor
parallelism), and no more.

Source: AWS Neuron's MoE guide, "Parallelism Strategies for Routed Experts".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moelab.base.progress import progress
from moelab.experts.sharding import Weights, part_of, share


def owners(E: int, W: int) -> Tensor:
    """int64 [E + 1]: the rank of each expert, consecutive ones on each as equally as can be; W
    ("nowhere") for the id E."""
    return torch.arange(W + 1).repeat_interleave(torch.tensor([*share(E, W), 1]))


class ShardedExperts:
    """A source for the seam that holds the experts of one of W ranks, cut along I into `parts`,
    loaded one at a time.

    layers : the experts of each layer, for the layout.
    source : (layer, expert) → that expert's whole tensors.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        source: Callable[[int, int], Weights],
        rank: int = 0,
        W: int = 1,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        self._held: dict[tuple[int, int], Weights] = {}
        for layer, experts in progress(list(enumerate(layers)), "loading experts", unit="layer"):
            for e in (owners(experts.num_experts, W) == rank).nonzero().flatten().tolist():
                weights = source(layer, e)
                if parts > 1:
                    weights = part_of(weights, part, parts, experts)
                self._held[layer, e] = {
                    name: tensor.detach().clone() for name, tensor in weights.items()
                }

    def held(self, layer: int) -> list[int]:
        """The experts of a layer that are here, in order; executors ask for it."""
        return [e for held_layer, e in self._held if held_layer == layer]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for weights in self._held.values() for t in weights.values())

    def __call__(self, layer: int, expert: int) -> Weights:
        if (layer, expert) not in self._held:
            raise KeyError(f"expert {expert} of layer {layer} is on another rank")
        return self._held[layer, expert]
