"""What all executors share: the call, who goes where, the sum, and the count of what was done.

    x [T, H]    ids [T, K], E means "no expert"    weights [T, K]    experts    →  [T, H]

`experts` is the layer's experts module behind the seam (`moelab.models.seam.SeamExperts`): `weights(e)` are one
expert's tensors, `weighted(rows, w, weights)` is what it contributes to rows with routing weights w, computed as the
architecture does it, whatever its layout, gate and biases (Llama 4 weighs the expert's input). An executor is exact
about tokens: routed = executed + dropped, and its `tally` says so, with the slots it computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Tally:
    """What an executor has done since it was made or `reset`: exact counts.

    routed : choices of an expert by a token that came in; executed and dropped add up to it.
    slots : rows that were computed, padding included; never fewer than executed.
    """

    routed: int = 0
    executed: int = 0
    slots: int = 0

    @property
    def dropped(self) -> int:
        return self.routed - self.executed

    @property
    def drop_rate(self) -> float:
        """Dropped choices over routed ones; 0 before anything was routed."""
        return self.dropped / self.routed if self.routed else 0.0

    @property
    def padded_fraction(self) -> float:
        """Share of the computed rows that were padding or masked out."""
        return 1 - self.executed / self.slots if self.slots else 0.0

    def reset(self) -> None:
        self.routed = self.executed = self.slots = 0


class Executor(ABC):
    """Runs the routed experts of one layer; `tally` counts. Subclasses write `run`.

    Attributes
    ----------
    lossless : whether every routed choice is executed, with the weights as they are.
    """

    lossless = True

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


def here(experts: Any) -> Sequence[int]:
    """The experts whose weights this process has: all of them, except on a rank that holds some (`ShardedExperts`)."""
    held = getattr(experts.source, "held", None)
    return range(experts.num_experts) if held is None else held(experts.layer)


@dataclass(frozen=True, eq=False)
class Dispatch:
    """All choices of one step, sorted by expert, and within an expert by token.

    tokens, choices : int64 [n], whose choice it is, and which of its K.
    counts : int64 [E], choices of each expert; offsets : int64 [E + 1], where each expert's begin.
    """

    tokens: Tensor
    choices: Tensor
    counts: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def hit(self) -> list[tuple[int, slice]]:
        """(expert, where its choices are) for each expert that has any."""
        bounds = self.offsets.tolist()
        return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(bounds, bounds[1:])) if b > a]


def dispatch(ids: Tensor, E: int) -> Dispatch:
    """Sort a step's choices by expert, then token, then choice; the id E ("no expert") is left out.

    Raises
    ------
    ValueError : an id below 0 or above E.
    """
    T, K = ids.shape
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)                # token-major, so ties stay in token order
    counts = torch.bincount(flat.clamp(-1, E + 1) + 1, minlength=E + 3)     # of −1 and less, 0 … E, E + 1 and more
    if counts[0] or counts[-1]:
        raise ValueError(f"there are experts' ids from {int(flat.min())} to {int(flat.max())}; with {E} experts they "
                         f"must be 0 to {E - 1}, or {E} for no expert")
    counts = counts[1:E + 1]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    order = order[:int(offsets[-1])]
    return Dispatch(order // K, order % K, counts, offsets)


def zeros(x: Tensor, weights: Tensor, experts: Any) -> Tensor:
    """[T, H] to add contributions to, as wide as the architecture sums them; `.to(x.dtype)` when all are in."""
    return torch.zeros_like(x, dtype=experts.sum_dtype(x.dtype, torch.promote_types(x.dtype, weights.dtype)))


def scatter(x: Tensor, weights: Tensor, tokens: Tensor, y: Tensor, experts: Any) -> Tensor:
    """Add each contribution y [n, H] to its token: [T, H] like x. The weights are in y already (`weighted`)."""
    out = zeros(x, weights, experts)
    return out.index_add_(0, tokens, y.to(out.dtype)).to(x.dtype)
