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
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
        return scatter(x, weights, order.tokens, torch.cat(parts) if parts else x[:0], experts)


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


def scatter(x: Tensor, weights: Tensor, tokens: Tensor, y: Tensor, experts: Any) -> Tensor:
    """Add each contribution y [n, H], weighted already, to its token: [T, H] like x."""
    out = zeros(x, weights, experts)
    return out.index_add_(0, tokens, y.to(out.dtype)).to(x.dtype)


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


class Glu(NamedTuple):
    """gate · σ(alpha · gate) · (up + shift), of gates of at most `limit` and ups within ± limit; gate
    and up in turn, or all gates first."""

    alpha: float = 1.0
    limit: float = inf
    shift: float = 0.0
    interleaved: bool = False

    def __call__(self, h: Tensor) -> Tensor:
        """[n, 2I] → [n, I]."""
        gate, up = h.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else h.chunk(2, -1)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.shift)


SILU = Glu()


def silu_gated(experts: Any) -> bool:
    """Whether the activation is silu(gate) · up."""
    return gate_of(experts) == SILU


def gate_of(experts: Any) -> Glu | None:
    """The activation, where it is SiLU's gate, one that clamps, or GPT-OSS's (its model's code, with
    `alpha` and `limit` of its config); probed at all sizes and signs, and again once anything of the
    module is changed."""
    known = getattr(experts, "glu", None)  # there, as a table of ours would keep the model
    if known is None or known[0].listeners() is None:
        parts = Unchanged([*experts.module.modules()][1:], called=[experts.module])
        known = experts.glu = parts, _probed(experts) if experts.has_gate else None
    return known[1] if known[0].listeners() is not None else None


def _probed(experts: Any) -> Glu | None:
    far = torch.logspace(-2, 6, 25)
    values = torch.cat([-far, torch.linspace(-9, 9, 19), far])
    both = torch.meshgrid(values, values, indexing="ij")
    h = torch.cat([torch.cat(both, -1), torch.stack(both, -1).flatten(-2)])
    found = experts.activate(h)
    limits = {getattr(experts.module, name, inf) for name in ("limit", "swiglu_limit")} - {None}
    alpha = getattr(experts.module, "alpha", 1.702)
    wanted = [SILU, *(Glu(limit=limit) for limit in limits)]
    wanted += [Glu(alpha, limit, 1.0, True) for limit in limits]
    fit = (one for one in wanted if torch.allclose(found, one(h), atol=1e-6))
    return next(fit, None)
