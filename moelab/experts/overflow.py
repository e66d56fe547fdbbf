"""Who is dropped when an expert overflows, and what executors of static capacities share (NPUMoE §3.2, §4.1).

A static graph has room for C tokens of an expert. If more come, either it is run again until all are served (*pad*:
nothing is lost, more rows are computed), or the least important are left out (*prune*): a pruned choice contributes
nothing, the token lives on by its other experts and by the residual. Importance is an entry of `ORDERS`; NPUMoE's is
saliency, the L2 norm of the token's attention output, lowest dropped first.

    capacity [E]    a launch: some experts of equal capacity, a zero-padded buffer [G, C, H], its valid rows scattered
    chunk: capacities hold for that many consecutive tokens; batch and sequence are flattened, in order

Padding counts: an executor is not told which tokens of a batch are padding. They are routed and counted like others,
and all texts of a batch compete for the same places, with left padding the padding first. So what dropping costs is
asked one text at a time (`python -m moelab evaluate` does so by itself).

A step of one token (decode) is never dropped by an expert that has any capacity. Left out: spilling what overflows to
another processor, which static placement forbids (NPUMoE §4.1).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moelab.experts.executor import Dispatch, Executor, Tally, dispatch, here, zeros

if TYPE_CHECKING:
    from moelab.experts.saliency import Saliency

#: importance of each choice [n] of a dispatch, from the routing weights [T, K], the tokens' saliency [T], and chance
Order = Callable[[Dispatch, Tensor, Tensor, torch.Generator], Tensor]
#: name → importance: the least important are dropped first, and of equals the later token
ORDERS: dict[str, Order] = {
    "saliency": lambda d, weights, saliency, rng: saliency[d.tokens],
    "router": lambda d, weights, saliency, rng: weights[d.tokens, d.choices],
    "random": lambda d, weights, saliency, rng: torch.rand(len(d), generator=rng).to(d.tokens.device),
    "token": lambda d, weights, saliency, rng: -d.tokens,
    # the opposite of saliency, for control: the strongest are dropped first
    "strongest": lambda d, weights, saliency, rng: -saliency[d.tokens],
}
NEED_SALIENCY = ("saliency", "strongest")


def experts_of(d: Dispatch) -> Tensor:
    """The expert of each choice: int64 [n]."""
    return torch.arange(len(d.counts), device=d.counts.device).repeat_interleave(d.counts)


def within_capacity(d: Dispatch, capacity: Tensor, importance: Tensor) -> Tensor:
    """Which choices stay: bool [n]. Each expert keeps its capacity [E] of its most important; of equals the earlier."""
    expert = experts_of(d)
    by_importance = torch.argsort(importance, descending=True, stable=True)
    order = by_importance[torch.argsort(expert[by_importance], stable=True)]        # by expert, then by importance
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(d), device=order.device) - d.offsets[expert]     # sorted by expert, as `order` is
    return rank < capacity[expert]


def select(d: Dispatch, keep: Tensor) -> Dispatch:
    """The dispatch of those choices for which `keep` [n] is true."""
    counts = torch.bincount(experts_of(d)[keep], minlength=len(d.counts))
    return Dispatch(d.tokens[keep], d.choices[keep], counts, torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


class StaticExecutor(Executor):
    """Base of executors whose experts have static capacities. Subclasses say which, and what is launched together.

    Parameters
    ----------
    overflow : "prune" or "pad"; with "pad" the executor is lossless.
    order : whom "prune" drops first, a name in `ORDERS`.
    saliency : where the orders "saliency" and "strongest" find the tokens' norms: [layer] → [T].
    chunk : tokens that the capacities are for; None takes each call as one chunk.
    seed : of the order "random".

    Attributes
    ----------
    by_layer : {layer: Tally}, as `tally`, layer by layer.

    Raises
    ------
    ValueError : an unknown overflow or order, an order without its saliency, or a chunk below 1.
    """

    lossless = False

    def __init__(self, overflow: str, order: str, saliency: Saliency | None, chunk: int | None, seed: int) -> None:
        super().__init__()
        if overflow not in ("prune", "pad"):
            raise ValueError(f"overflow is {overflow!r}; it must be 'prune' or 'pad'")
        if order not in ORDERS:
            raise ValueError(f"there is no order {order!r}; there are: {', '.join(ORDERS)}")
        if overflow == "prune" and order in NEED_SALIENCY and saliency is None:
            raise ValueError(f"order={order!r} needs the tokens' saliency: pass saliency=Saliency(model, layers) and "
                             f"run the model inside `with saliency:`, or choose order='router', 'token' or 'random'")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk is {chunk}; it must be at least 1, or None")
        self.overflow, self.order, self.saliency, self.chunk = overflow, order, saliency, chunk
        self.lossless = overflow == "pad"
        self.by_layer: dict[int, Tally] = {}
        self._rng = torch.Generator().manual_seed(seed)

    @abstractmethod
    def capacities(self, layer: int, T: int, K: int, E: int) -> Sequence[int]:
        """Capacity of each expert of a layer for a chunk of T tokens: [E]."""

    @abstractmethod
    def launches(self, layer: int, counts: list[int], capacity: Sequence[int]) -> Iterable[tuple[Sequence[int], int]]:
        """(experts, rows of each) of what is launched for `counts` [E] admitted tokens."""

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        saliency = self._saliency(experts.layer, len(x))
        out = zeros(x, weights, experts)
        for start in range(0, len(x), self.chunk or max(len(x), 1)):
            part = slice(start, start + (self.chunk or len(x)))
            self._run_chunk(out[part], x[part], ids[part], weights[part], saliency[part], experts)
        return out.to(x.dtype)

    def _run_chunk(self, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, saliency: Tensor, experts: Any) -> None:
        (T, K), E, layer = ids.shape, experts.num_experts, experts.layer
        capacity = self.capacities(layer, T, K, E)
        routed = kept = dispatch(ids, E)
        if self.overflow == "prune":
            room = torch.as_tensor(capacity, device=x.device)
            importance = ORDERS[self.order](routed, weights, saliency, self._rng)
            keep = room[experts_of(routed)] > 0 if T == 1 else within_capacity(routed, room, importance)
            kept = select(routed, keep)
        w, offsets, slots = weights[kept.tokens, kept.choices], kept.offsets.tolist(), 0
        held = set(here(experts))
        for members, rows in self.launches(layer, kept.counts.tolist(), capacity):
            members = [e for e in members if e in held]
            if not members:
                continue
            where = [slice(offsets[e], offsets[e + 1]) for e in members]
            buffer, scale = x.new_zeros(len(members), rows, x.shape[1]), w.new_zeros(len(members), rows)
            for g, of in enumerate(where):                                          # gather
                buffer[g, :of.stop - of.start] = x[kept.tokens[of]]
                scale[g, :of.stop - of.start] = w[of]
            y = torch.cat([experts.weighted(buffer[g], scale[g], experts.weights(e))[:of.stop - of.start]
                           for g, (e, of) in enumerate(zip(members, where))])       # all rows computed, valid ones kept
            out.index_add_(0, torch.cat([kept.tokens[of] for of in where]), y.to(out.dtype))
            slots += len(members) * rows
        self.count(len(routed), len(kept), slots)
        tally = self.by_layer.setdefault(layer, Tally())
        tally.routed, tally.executed = tally.routed + len(routed), tally.executed + len(kept)
        tally.slots += slots

    def _saliency(self, layer: int, T: int) -> Tensor:
        if self.overflow == "pad" or self.order not in NEED_SALIENCY:
            return torch.zeros(T)
        saliency = self.saliency[layer]
        if len(saliency) != T:
            raise ValueError(f"layer {layer} runs {T} tokens, but the saliency kept for it is of {len(saliency)}: it "
                             f"must be recorded in the same forward pass, from all tokens of the batch")
        return saliency


def rows_for(count: int, capacity: int) -> int:
    """Rows of the launches that hold `count` tokens: whole multiples of the capacity, at least one.

    An expert without capacity has no static graph; what it must do all the same (*pad*) it does unpadded.
    """
    return max(-(-count // capacity), 1) * capacity if capacity else count
