"""What executors share: the call, dispatch by expert, the sum, and counts; and the two simplest
executors.

    x [T, H]    ids [T, K], E means "no expert"    weights [T, K]    experts    →  [T, H]

`experts` is a layer's experts behind the seam (`moelab.models.experts.SeamExperts`): `weights(e)`
are one expert's tensors, `weighted(rows, w, weights)` is what it contributes to rows with routing
weights w, computed as the architecture does it (layout, gate, biases; Llama 4 weighs
the expert's input). Executors that go past `weighted` need an expert that is `plain`: up
(`gate_up_proj` or `up_proj`), gate or activation, down, each with a bias or without.

    rows layout        up [2I, H], down [H, I]          (`is_transposed` False: an output's weights are contiguous)
    transposed layout  up [H, 2I], down [I, H]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from moelab.kernels.gates import Gate
from moelab.models.experts import SeamExperts, eager
from moelab.models.unchanged import Unchanged


@dataclass
class Tally:
    """Exact counts of what an executor has done."""

    routed: int = 0  # choices of an expert by a token; executed and dropped add up to it
    executed: int = 0
    slots: int = 0  # rows that were computed, padding included

    @property
    def dropped(self) -> int:
        return self.routed - self.executed

    @property
    def drop_rate(self) -> float:
        return self.dropped / self.routed if self.routed else 0.0

    @property
    def padded_fraction(self) -> float:
        return 1 - self.executed / self.slots if self.slots else 0.0


class Executor(ABC):
    """Runs the routed experts of one layer; `tally` counts. Subclasses write `run`."""

    lossless = True  # whether every routed choice is executed, with the weights as they are

    def __init__(self) -> None:
        self.tally = Tally()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        return self.run(x, ids, weights, experts)

    @abstractmethod
    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """[T, H]; must `count` what it did."""

    def count(self, routed: int, executed: int, slots: int) -> None:
        self.tally.routed += routed
        self.tally.executed += executed
        self.tally.slots += slots


class Exact(Executor):
    """transformers' eager arithmetic, bit for bit (`moelab.models.eager`)."""

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        n = int((ids < experts.num_experts).sum())
        self.count(n, n, n)
        return eager(x, ids, weights, experts)


class Sorted(Executor):
    """One stable sort of all choices, one product an expert on its contiguous rows, one scatter at
    the end.

    Source: MegaBlocks (Gale et al. 2023). Runs every architecture; what faster executors fall back
    on."""

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        order = dispatch(ids, experts.num_experts)
        self.count(len(order), len(order), len(order))
        rows = x[order.tokens]
        w = weights[order.tokens, order.choices]
        parts = [experts.weighted(rows[of], w[of], experts.weights(e)) for e, of in order.hit()]
        out = zeros(x, weights, experts)
        y = torch.cat(parts) if parts else out[:0]
        return out.index_add_(0, order.tokens, y.to(out.dtype)).to(x.dtype)


@dataclass(frozen=True, eq=False)
class Dispatch:
    """All n choices of one step, sorted by expert, and within an expert by token; int64."""

    tokens: Tensor  # [n], whose choice it is
    choices: Tensor  # [n], which of its K
    counts: Tensor  # [E], choices of each expert
    offsets: Tensor  # [E + 1], where each expert's begin

    def __len__(self) -> int:
        return len(self.tokens)

    def hit(self) -> list[tuple[int, slice]]:
        """(expert, where its choices are) for each expert that has any."""
        bounds = self.offsets.tolist()
        return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(bounds, bounds[1:])) if b > a]


def dispatch(ids: Tensor, E: int) -> Dispatch:
    """Sort a step's choices by expert, then token, then choice, without the id E; ValueError for an
    id beyond it."""
    T, K = ids.shape
    flat = ids.reshape(-1)
    if len(flat) and (flat.min() < 0 or flat.max() > E):
        raise ValueError(f"experts' ids are {flat.aminmax()}; they must be 0 to {E}, {E} for none")
    order = torch.argsort(flat, stable=True)  # token-major, so ties stay in token order
    counts = torch.bincount(flat, minlength=E + 1)[:E]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    order = order[: int(offsets[-1])]
    return Dispatch(order // K, order % K, counts, offsets)


def zeros(x: Tensor, weights: Tensor, experts: Any) -> Tensor:
    """[T, H] to add contributions to, as wide as the architecture sums them; `.to(x.dtype)` when
    all are in."""
    return torch.zeros_like(
        x, dtype=experts.sum_dtype(x.dtype, torch.promote_types(x.dtype, weights.dtype))
    )


def add_padded(
    out: Tensor, x: Tensor, tokens: Tensor, w: Tensor, slots: int, weighted: Callable[..., Tensor]
) -> None:
    """Add to out [T, H] what an expert makes of tokens [n] with weights [n], padded to so many slots.

    weighted : its contribution to rows [slots, H] with weights [slots]."""
    n = len(tokens)
    rows, scale = x.new_zeros(slots, x.shape[1]), w.new_zeros(slots)
    rows[:n], scale[:n] = x[tokens], w
    out.index_add_(0, tokens, weighted(rows, scale)[:n].to(out.dtype))


def local_experts(experts: Any) -> Sequence[int]:
    """The experts whose weights this process has: all, except on a rank that holds some
    (`ShardedExperts`)."""
    held = getattr(experts.source, "held", None)
    return range(experts.num_experts) if held is None else held(experts.layer)


def plain(experts: Any) -> bool:
    """Whether an expert is up, gate, down, and its output is weighted; not Llama 4's, Switch's, or
    one with a norm."""
    weighs_output = type(experts).weighted is SeamExperts.weighted
    return usual(experts) and weighs_output and not experts.has_post_expert_norm


def usual(experts: Any) -> bool:
    """Whether an expert is computed as up, gate, down, whatever its routing weight scales."""
    return type(experts).ffn is SeamExperts.ffn


def names(experts: Any) -> tuple[str, str]:
    """The parameters of up and down; their biases' names end in `_bias`."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def gate_of(experts: Any) -> Gate | None:
    """The activation as kernels have it, probed at all sizes and signs; None for another. Probed
    again once anything of the module is changed."""
    known = getattr(experts, "gate", None)  # there, as a table of ours would keep the model
    if known is None or known[0].listeners() is None:
        parts = Unchanged([*experts.module.modules()][1:], called=[experts.module])
        known = experts.gate = parts, _probed(experts) if experts.has_gate else None
    return known[1] if known[0].listeners() is not None else None


def _probed(experts: Any) -> Gate | None:
    """The gate that gives of g = 1 and the smallest u, −1, 1 and the largest u what an activation
    gives, if it gives the same of all numbers."""
    far = torch.logspace(-2, 6, 25, dtype=torch.float64)
    values = torch.cat([-far, torch.linspace(-9, 9, 19, dtype=torch.float64), far]).sort()[0]
    one = values.tolist().index(1)
    g, u = torch.meshgrid(values, values, indexing="ij")
    for interleaved in (False, True):
        both = torch.stack([g, u], -1 if interleaved else -2).flatten(-2)
        found = experts.activate(both)
        least, low, high, most = found[one, [0, -1 - one, one, -1]]
        step = (high - low) / 2  # sigmoid(alpha)
        limit = (most - least) / 2 / step
        limit = limit if limit < values[-1] else inf * limit
        numbers = step.logit(), limit, high / step - 1
        gate = Gate(interleaved, *(round(number.item(), 4) for number in numbers))
        if torch.allclose(found, gate(g, u), atol=1e-6):
            return gate
    return None
