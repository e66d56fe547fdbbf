"""Static capacities: experts with a fixed number of rows, and what happens to tokens beyond it.

A static graph has room for C tokens of an expert. If more come, either it is launched again until
all are served (*pad*), or the least important are dropped (*prune*): a dropped choice contributes
nothing. Importance is an entry of `ORDERS`; NPUMoE's (§3.2) is saliency, the L2 norm of the token's
attention output.

    CapacityFactor  one capacity for all experts, set by the step's size      AWS Neuron MoE guide, "Dropping MoE"
    Tiered          a capacity an expert, set by calibration                  NPUMoE §4.1, see `moelab.static.tiers`
    Grouped         experts of one tier share one launch                      NPUMoE §4.2, Fig. 11

    capacity [E]    a launch: experts of equal capacity, C rows of each, zero-padded; the valid ones are scattered

Rows are counted as a static graph would have them; here an expert computes those of all its
launches of a step at once.

All tokens of a step, of all texts of a batch and padding included, compete for the same places. A step of one token is never dropped
by an expert that has any capacity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moelab.base.registry import require
from moelab.experts.executor import Dispatch, Executor, add_padded, dispatch, local_experts, zeros
from moelab.experts.located import weighted
from moelab.static.tiers import Group

#: importance of each choice [n] of a dispatch, from the routing weights [T, K], the tokens'
#: saliency [T], and chance
Order = Callable[[Dispatch, Tensor, Tensor, torch.Generator], Tensor]
#: name → importance: the least important are dropped first, and of equals the later token
ORDERS: dict[str, Order] = {
    "saliency": lambda d, weights, saliency, rng: saliency[d.tokens],
    "router": lambda d, weights, saliency, rng: weights[d.tokens, d.choices],
    "random": lambda d, weights, saliency, rng: torch.rand(
        len(d), dtype=torch.float32, generator=rng
    ).to(d.tokens.device),
    "token": lambda d, weights, saliency, rng: -d.tokens,
    # the opposite of saliency, for control: the strongest are dropped first
    "strongest": lambda d, weights, saliency, rng: -saliency[d.tokens],
}
OVERFLOW = ("prune", "pad")
NEED_SALIENCY = ("saliency", "strongest")
#: names under which architectures keep a decoder layer's attention
ATTENTION = ("self_attn", "attention", "attn", "self_attention", "linear_attn")


class Saliency(ExitStack):
    """Context manager: while it is open, `saliency[layer]` are the norms [T] of that layer's latest
    pass (NPUMoE §3.2).

    The L2 norm of each token's attention output [batch, S, H], before the residual is added, T =
    batch·S. ValueError for a layer without an attention module beside its MoE block (Switch).

    layers : the model's MoE layers (`moelab.models.discover`, `plug`).
    """

    def __init__(self, model: nn.Module, layers: Iterable[Any]) -> None:
        super().__init__()
        self._attention = {layer.index: _attention_beside(model, layer.name) for layer in layers}
        self._norms: dict[int, Tensor] = {}

    def __enter__(self) -> Saliency:
        for index, attention in self._attention.items():
            self.callback(attention.register_forward_hook(partial(self._keep, index)).remove)
        self.callback(self._norms.clear)
        return self

    def __getitem__(self, layer: int) -> Tensor:
        if layer not in self._norms:
            raise KeyError(
                f"no saliency was recorded for layer {layer}: run the model inside `with saliency:`"
            )
        return self._norms[layer]

    def _keep(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        output = output if isinstance(output, Tensor) else output[0]
        self._norms[index] = torch.linalg.vector_norm(output.detach().float(), dim=-1).flatten()


def _attention_beside(model: nn.Module, name: str) -> nn.Module:
    beside = dict(model.get_submodule(name.rpartition(".")[0]).named_children())
    if found := [beside[n] for n in ATTENTION if n in beside]:
        return found[0]
    raise ValueError(
        f"beside the MoE block {name} there is no attention module named {', '.join(ATTENTION)} (there "
        f"are: {', '.join(beside)}), so this model has no saliency; choose another order, such as 'router'"
    )


def within_capacity(d: Dispatch, capacity: Tensor, importance: Tensor) -> Dispatch:
    """The choices that stay: each expert keeps its capacity [E] of its most important, by [n]; of
    equals the earlier."""
    expert = torch.arange(len(d.counts), device=d.counts.device).repeat_interleave(d.counts)
    by_importance = torch.argsort(importance, descending=True, stable=True)
    order = by_importance[
        torch.argsort(expert[by_importance], stable=True)
    ]  # by expert, then by importance
    rank = torch.empty_like(order)
    rank[order] = (
        torch.arange(len(d), device=order.device) - d.offsets[expert]
    )  # sorted by expert, as `order` is
    keep, counts = rank < capacity[expert], torch.minimum(d.counts, capacity)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Dispatch(d.tokens[keep], d.choices[keep], counts, offsets)


def rows_for(count: int, capacity: int) -> int:
    """Rows of the launches that hold `count` tokens: multiples of the capacity, at least one;
    unpadded without any."""
    return max(-(-count // capacity), 1) * capacity if capacity else count


class StaticExecutor(Executor):
    """Base of executors whose experts have static capacities: subclasses have `capacities`, and
    perhaps `rows`, or a `run` of their own.

    overflow : "prune" or "pad"; with "pad" the executor is lossless.
    order : which tokens "prune" drops first, a name in `ORDERS`; `saliency` and `seed` are what
        some need."""

    lossless = False

    def __init__(
        self,
        overflow: str = "prune",
        order: str = "saliency",
        saliency: Saliency | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require("overflow", overflow, OVERFLOW)
        require("order", order, ORDERS)
        if overflow == "prune" and order in NEED_SALIENCY and saliency is None:
            raise ValueError(
                f"order={order!r} needs the tokens' saliency: pass saliency=Saliency(model, layers) and "
                f"run the model inside `with saliency:`, or choose order='router', 'token' or 'random'"
            )
        self.overflow = overflow
        self.order = order
        self.saliency = saliency
        self.lossless = overflow == "pad"
        self._rng = torch.Generator().manual_seed(seed)

    def capacities(self, layer: int, T: int, K: int, E: int) -> Sequence[int]:
        """Capacity of each expert of a layer for a step of T tokens: [E]."""

    def rows(self, layer: int, counts: list[int], capacity: Sequence[int]) -> list[int]:
        """Rows that each expert computes, [E], padding included, for `counts` [E] admitted
        tokens."""
        return [rows_for(n, C) if n else 0 for n, C in zip(counts, capacity)]

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        out = zeros(x, weights, experts)
        (T, K), E, layer = ids.shape, experts.num_experts, experts.layer
        capacity = self.capacities(layer, T, K, E)
        # one token alone is dropped only by experts without any capacity
        room = torch.tensor([K * (C > 0) if T == 1 else C for C in capacity])
        routed = dispatch(ids, E)
        kept = self.admitted(routed, room.to(x.device), weights, layer)
        counts, begins = kept.counts.tolist(), kept.offsets.tolist()
        local = set(local_experts(experts))
        rows = [n * (e in local) for e, n in enumerate(self.rows(layer, counts, capacity))]
        for e, n in enumerate(rows):
            if n:
                mine = slice(begins[e], begins[e] + counts[e])
                tokens = kept.tokens[mine]
                w = weights[tokens, kept.choices[mine]]
                add_padded(out, x, tokens, w, n, partial(weighted, experts, e))
        self.count(len(routed), len(kept), sum(rows))
        return out.to(x.dtype)

    def admitted(self, routed: Dispatch, room: Tensor, weights: Tensor, layer: int) -> Dispatch:
        """The choices of a step's tokens that are computed: all of them if what overflows is
        launched again, else at most `room` [E] of each expert, the most important ones."""
        if self.overflow == "pad":
            return routed
        needed = self.order in NEED_SALIENCY
        saliency = self.saliency[layer] if needed else room
        if needed and len(saliency) != len(weights):
            raise ValueError(
                f"layer {layer} runs {len(weights)} tokens, but the saliency kept for them is of "
                f"{len(saliency)}: it must be recorded in the same forward pass, from all tokens of "
                "the batch"
            )
        importance = ORDERS[self.order](routed, weights, saliency, self._rng)
        return within_capacity(routed, room, importance)


def capacity_of(T: int, K: int, E: int, factor: float) -> int:
    """C = min(⌈T·K·cf/E⌉, T); T, the full capacity, from cf = E/K on."""
    return T if factor >= E / K else min(math.ceil(T * K * factor / E), T)


class CapacityFactor(StaticExecutor):
    """One capacity for all experts (`capacity_of`); experts without tokens are computed, too.

    order : who is dropped first, "token" (the later tokens, as the guide does), "router" or
    "random" by `seed`."""

    def __init__(self, factor: float = 1.25, order: str = "token", seed: int = 0) -> None:
        super().__init__(order=order, seed=seed)
        if not factor > 0:
            raise ValueError(
                f"the capacity factor is {factor}; it must be above 0, or use a lossless executor"
            )
        self.factor = factor

    def capacities(self, layer: int, T: int, K: int, E: int) -> Sequence[int]:
        return [capacity_of(T, K, E, self.factor)] * E

    def rows(self, layer: int, counts: list[int], capacity: Sequence[int]) -> list[int]:
        return list(map(rows_for, counts, capacity))


class Tiered(StaticExecutor):
    """Experts with static capacities of their own; one without tokens is not launched.

    capacities : [L][E], e.g. `[tiers.capacity for tiers in capacity_tiers(…)]`; 0 is an expert that
        never runs ("pad": that runs unpadded). The other parameters are those of `StaticExecutor`.
    """

    def __init__(
        self, capacities: Sequence[Sequence[int]], overflow: str = "prune", **options: Any
    ) -> None:
        super().__init__(overflow, **options)
        self._capacities = [[int(c) for c in of] for of in capacities]
        if not self._capacities or any(c < 0 for of in self._capacities for c in of):
            raise ValueError(
                "capacities must be a list for each MoE layer, and none of them negative"
            )

    def capacities(self, layer: int, T: int, K: int, E: int) -> Sequence[int]:
        if not 0 <= layer < len(self._capacities) or len(self._capacities[layer]) != E:
            have = ", ".join(str(len(of)) for of in self._capacities)
            raise ValueError(
                f"layer {layer} has {E} experts, but these capacities are for {len(self._capacities)} "
                f"layers with {have} experts: calibrate this model"
            )
        return self._capacities[layer]


class Grouped(Tiered):
    """Groups of experts of equal capacity, each launched as one, with all its G·C rows, if any
    expert has a token.

    groups : [L][…], e.g. from `moelab.static.tiers.form_groups`; each layer's hold every expert
    once."""

    def __init__(
        self, groups: Sequence[Sequence[Group]], overflow: str = "prune", **options: Any
    ) -> None:
        capacities = []
        for layer, of in enumerate(groups):
            capacity = sorted((e, group.capacity) for group in of for e in group.experts)
            if [e for e, _ in capacity] != list(range(len(capacity))):
                raise ValueError(
                    f"the groups of layer {layer} must hold every expert from 0 up exactly once, "
                    f"not {[e for e, _ in capacity]}"
                )
            capacities.append([C for _, C in capacity])
        super().__init__(capacities, overflow, **options)
        self.groups = groups

    def rows(self, layer: int, counts: list[int], capacity: Sequence[int]) -> list[int]:
        rows = [0] * len(counts)
        for group in self.groups[layer]:
            most = max(counts[e] for e in group.experts)
            for e in group.experts:
                rows[e] = rows_for(most, group.capacity) if most else 0
        return rows
