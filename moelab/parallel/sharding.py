"""Which experts each rank holds, and a source that holds those, or a part of each (tensor
parallelism), and no more.

Source: AWS Neuron's MoE guide, "Parallelism Strategies for Routed Experts".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moelab.experts.sharding import Weights, on_intermediate, share
from moelab.progress import progress


@dataclass(frozen=True)
class Placement:
    """Which experts each rank holds; an expert may be on several ranks, or twice on one."""

    devices: tuple[tuple[int, ...], ...]  # the experts of each rank
    E: int

    def __post_init__(self) -> None:
        placed = {e for experts in self.devices for e in experts}
        if wrong := placed ^ set(range(self.E)):
            raise ValueError(
                f"every one of the experts 0 to {self.E - 1}, and no other, must be on a device; these "
                f"are not: {sorted(wrong)[:5]}"
            )

    @classmethod
    def consecutive(cls, E: int, W: int) -> Placement:
        """Experts 0 … E−1 in order over W ranks, as equally as can be, none twice."""
        parts = torch.arange(E).split(share(E, W))
        return cls(tuple(tuple(part.tolist()) for part in parts), E)

    @cached_property
    def replicas(self) -> Tensor:
        """int64 [E]: on how many places each expert is."""
        return torch.bincount(torch.tensor([e for experts in self.devices for e in experts]))

    @cached_property
    def table(self) -> Tensor:
        """int64 [E + 1, R]: the ranks of each expert's replicas, at most R; W ("nowhere") behind
        them and for the id E."""
        where: list[list[int]] = [[] for _ in range(self.E + 1)]
        for rank, experts in enumerate(self.devices):
            for e in experts:
                where[e].append(rank)
        rows = [torch.tensor(ranks, dtype=torch.long) for ranks in where]
        return torch.nn.utils.rnn.pad_sequence(rows, True, len(self.devices))

    def assign(self, ids: Tensor, start: int = 0) -> Tensor:
        """The rank of each choice [T, K], W for the id E; an expert's replicas take turns,
        beginning with `start`."""
        table = self.table.to(ids.device)
        if table.shape[1] == 1:
            return table[ids, 0]
        replicas = torch.cat([self.replicas, self.replicas.new_ones(1)]).to(ids.device)
        return table[ids, (turns(ids, self.E) + start) % replicas[ids]]


def turns(ids: Tensor, E: int) -> Tensor:
    """How many choices of the same expert (0 … E) come before each choice [T, K], by token and then
    choice."""
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=E + 1)
    first = (counts.cumsum(0) - counts)[flat[order]]  # where each expert's choices begin
    turn = torch.empty_like(flat)
    turn[order] = torch.arange(len(flat), device=ids.device) - first
    return turn.view_as(ids)


class ShardedExperts:
    """A source for the seam that holds this rank's experts, or its part of each, loaded one at a
    time.

    layers : the experts module of each layer, for the layout. source : (layer, expert) → that
        expert's whole tensors.
    placements : one a layer; of it, `device`'s experts are held, cut along I into `parts`.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        source: Callable[[int, int], Weights],
        placements: Sequence[Placement],
        device: int = 0,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        self._held: dict[tuple[int, int], Weights] = {}
        for layer, experts in progress(list(enumerate(layers)), "loading experts", unit="layer"):
            for e in sorted(set(placements[layer].devices[device])):
                weights = source(layer, e)
                if parts > 1:
                    weights = on_intermediate(weights, part, parts, experts)
                self._held[layer, e] = {
                    name: tensor.detach().clone() for name, tensor in weights.items()
                }

    def held(self, layer: int) -> list[int]:
        """The experts of a layer that are here, in order."""
        return [e for of, e in self._held if of == layer]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for weights in self._held.values() for t in weights.values())

    def __call__(self, layer: int, expert: int) -> Weights:
        if (layer, expert) not in self._held:
            raise KeyError(f"expert {expert} of layer {layer} is on another rank")
        return self._held[layer, expert]
