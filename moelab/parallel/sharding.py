"""Which experts a rank holds, and which part of each: expert parallelism, and tensor parallelism along I or H.

Source: AWS Neuron's MoE guide, "Parallelism Strategies for Routed Experts", "Sharding strategies". Along I, gate and up
are cut by columns and down by rows, so that every rank computes a part of each sum over I and one reduction ends the
layer; the bias of down is added on one rank only. Along H, gate and up are cut by rows and down by columns: their sums
must be complete before the activation. Dimensions that the ranks do not divide are cut into unequal parts.

    gate_up_proj [2I, H] (transposed [H, 2I]; gate and up one after the other, or interleaved)    down_proj [H, I]

Left out: experts whose output passes a norm (`has_post_expert_norm`), which no part of a sum can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moelab.parallel.exchange import share
from moelab.progress import progress

#: parameters that lead from H to I, and back
UP, DOWN = ("gate_up_proj", "up_proj", "wi.weight"), ("down_proj", "wo.weight")
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Placement:
    """Which experts each rank holds; an expert may be on several ranks, or twice on one.

    devices : the experts of each rank.
    E : number of experts.

    Raises
    ------
    ValueError : an expert is nowhere, or there is no such expert.
    """

    devices: tuple[tuple[int, ...], ...]
    E: int

    def __post_init__(self) -> None:
        placed = {e for experts in self.devices for e in experts}
        if missing := set(range(self.E)) - placed:
            raise ValueError(f"experts {sorted(missing)[:5]} of {self.E} are on no device")
        if extra := placed - set(range(self.E)):
            raise ValueError(f"experts {sorted(extra)[:5]} are placed, but there are only {self.E}")

    @classmethod
    def consecutive(cls, E: int, W: int) -> Placement:
        """Experts 0 … E−1 in order over W ranks, as equally as can be, none twice."""
        ends = torch.tensor(share(E, W)).cumsum(0).tolist()
        return cls(tuple(tuple(range(a, b)) for a, b in zip([0, *ends], ends)), E)

    @cached_property
    def replicas(self) -> Tensor:
        """int64 [E]: on how many places each expert is."""
        return torch.bincount(torch.tensor([e for experts in self.devices for e in experts]), minlength=self.E)

    @cached_property
    def table(self) -> Tensor:
        """int64 [E + 1, R]: the ranks of each expert's replicas, repeated up to R; W ("nowhere") for the id E."""
        where: list[list[int]] = [[] for _ in range(self.E)]
        for rank, experts in enumerate(self.devices):
            for e in experts:
                where[e].append(rank)
        R = max(map(len, where))
        return torch.tensor([[ranks[i % len(ranks)] for i in range(R)] for ranks in where] + [[len(self.devices)] * R])

    def assign(self, ids: Tensor, start: int = 0) -> Tensor:
        """The rank of each choice [T, K], W for the id E; an expert's replicas take turns, beginning with `start`."""
        table = self.table.to(ids.device)
        if table.shape[1] == 1:
            return table[ids, 0]
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=self.E + 1)
        turn = torch.empty_like(flat)
        turn[order] = torch.arange(len(flat), device=ids.device) - (counts.cumsum(0) - counts)[flat[order]]
        replicas = torch.cat([self.replicas, self.replicas.new_ones(1)]).to(ids.device)
        return table[flat, (turn + start) % replicas[flat]].view_as(ids)


class ShardedExperts:
    """A source for the seam that holds this rank's experts, or its part of each, and nothing else.

    They are taken one at a time, so that no more than one whole expert is in memory beside them.

    Parameters
    ----------
    layers : the experts module of each layer (`moelab.models.MoELayer.experts`), for the layout.
    source : (layer, expert) → that expert's whole tensors.
    placements : one for all layers, or one a layer.
    device : which of a placement's devices this rank is.
    part, parts : which part of every expert.
    cut : how an expert is cut: `on_intermediate` or `on_hidden`.
    """

    def __init__(self, layers: Sequence[Any], source: Callable[[int, int], Weights],
                 placements: Placement | Sequence[Placement], device: int = 0, part: int = 0, parts: int = 1,
                 cut: Callable[..., Weights] | None = None) -> None:
        cut = cut or on_intermediate
        self._held: dict[tuple[int, int], Weights] = {}
        for layer, experts in progress(list(enumerate(layers)), "loading experts", unit="layer"):
            placement = placements if isinstance(placements, Placement) else placements[layer]
            for e in sorted(set(placement.devices[device])):
                weights = source(layer, e)
                weights = weights if parts == 1 else cut(weights, part, parts, experts)
                self._held[layer, e] = {name: tensor.detach().clone() for name, tensor in weights.items()}

    def held(self, layer: int) -> list[int]:
        """The experts of a layer that are here, in order."""
        return [e for of, e in self._held if of == layer]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are held."""
        return sum(t.numel() * t.element_size() for weights in self._held.values() for t in weights.values())

    def __call__(self, layer: int, expert: int) -> Weights:
        if (layer, expert) not in self._held:
            raise KeyError(f"expert {expert} of layer {layer} is on another rank")
        return self._held[layer, expert]


def on_intermediate(weights: Weights, part: int, parts: int, experts: Any) -> Weights:
    """One of `parts` parts of an expert along I: gate and up by columns, down by rows, its bias with part 0.

    Raises
    ------
    ValueError : a tensor of unknown meaning, or a norm behind the experts.
    """
    _refuse_norm(experts)
    transposed, interleaved = getattr(experts, "is_transposed", False), not getattr(experts, "is_concatenated", True)
    gated = getattr(experts, "has_gate", False)
    made = {}
    for name, tensor in weights.items():
        base = name.removesuffix("_bias")
        if base in UP:
            dim = tensor.dim() - 1 if transposed and name == base else 0
            made[name] = _cut_columns(tensor, dim, part, parts, 2 if gated else 1, interleaved)
        elif name in DOWN:
            made[name] = _cut(tensor, 0 if transposed else 1, part, parts)
        elif base in DOWN:
            made[name] = tensor if part == 0 else torch.zeros_like(tensor)
        else:
            raise ValueError(f"no rule how to cut the experts' tensor {name!r}; known are {', '.join(UP + DOWN)} and "
                             f"their biases. Expert parallelism needs none")
    return made


def on_hidden(weights: Weights, part: int, parts: int, experts: Any) -> Weights:
    """One of `parts` parts of an expert along H: gate and up by rows (their bias with part 0), down by columns.

    Raises
    ------
    ValueError : experts outside transformers' experts interface, or a norm behind them.
    """
    _refuse_norm(experts)
    if not hasattr(experts, "is_concatenated"):
        raise ValueError(f"{type(experts).__name__} has a forward of its own, which cannot be stopped between its "
                         f"matrices: shard its experts on I")
    made = {}
    for name, tensor in weights.items():
        if name in UP:
            made[name] = _cut(tensor, 0 if experts.is_transposed else 1, part, parts)
        elif name in DOWN:
            made[name] = _cut(tensor, 1 if experts.is_transposed else 0, part, parts)
        elif name.removesuffix("_bias") in UP:
            made[name] = tensor if part == 0 else torch.zeros_like(tensor)
        else:
            made[name] = _cut(tensor, 0, part, parts)
    return made


def _cut_columns(tensor: Tensor, dim: int, part: int, parts: int, matrices: int, interleaved: bool) -> Tensor:
    """A part of I of one or two matrices that lie along `dim`, one after the other or interleaved."""
    I = tensor.shape[dim] // matrices
    shape = (I, matrices) if interleaved else (matrices, I)
    apart = tensor.unflatten(dim, shape)
    return _cut(apart, dim if interleaved else dim + 1, part, parts).flatten(dim, dim + 1)


def _cut(tensor: Tensor, dim: int, part: int, parts: int) -> Tensor:
    sizes = share(tensor.shape[dim], parts)
    return tensor.narrow(dim, sum(sizes[:part]), sizes[part])


def _refuse_norm(experts: Any) -> None:
    if getattr(experts, "has_post_expert_norm", False):
        raise ValueError(f"{type(experts).__name__} normalises each expert's output, which needs the whole of it: "
                         f"spread its experts (ep) instead of cutting them (tp)")
