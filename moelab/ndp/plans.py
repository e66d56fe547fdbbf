"""What a schedule sees of one MoE layer, and what it decides. Closed form and event simulation run
the same plan.

A `Plan` gives each expert of a `LayerStep` as shares of its columns: 1 in one place is a whole
expert, 1/N on each of N units is tensor parallelism; every row adds up to 1.

    units [A, N]   computed on unit u from its own memory        host [A]
    computed on the CPU from its own memory
    resident [A]   computed on the GPU from its own memory       moved [A]
    sent over the link, computed on the GPU
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

#: what a step says of each of its experts
COLUMNS = ("experts", "tokens", "home", "resident")


@dataclass(frozen=True, eq=False)
class LayerStep:
    """The A experts that one layer must compute in one forward of S tokens, hottest first.

    experts, tokens : int [A], ids and the tokens each gets. resident : bool [A], in GPU memory.
    home : int [A], the unit that holds an expert where units hold whole experts.
    decode : whether the answer is decoded, S being 1 or a batch's sequences. now : seconds since
        the run began, if steps are planned one by one (see `System.situations`).
    """

    experts: np.ndarray
    tokens: np.ndarray
    home: np.ndarray
    resident: np.ndarray
    S: int
    decode: bool
    layer: int = 0
    now: float = 0.0

    def __len__(self) -> int:
        return len(self.experts)

    def take(self, order: np.ndarray) -> LayerStep:
        """The experts at those places, in that order, int [A]."""
        return replace(self, **{name: getattr(self, name)[order] for name in COLUMNS})


@dataclass(frozen=True, eq=False)
class Plan:
    """Where each expert of a step is computed, as shares of its columns.

    step : its experts in the order in which they are sent and computed; a system may reorder them.
    broadcast : one transfer of a token's hidden state serves all units; otherwise each that needs
        it is sent its own.
    pieces : parts in which an expert comes over the link, each computed while the next arrives.
    """

    step: LayerStep
    units: np.ndarray
    resident: np.ndarray
    moved: np.ndarray
    host: np.ndarray
    broadcast: bool
    pieces: int

    @property
    def receivers(self) -> np.ndarray:
        """Tokens that each unit, and last the host, must be sent: int [N + 1].

        Exact for one token and if every unit has a share of all experts; otherwise an upper bound,
        since two experts of one unit may share tokens."""
        busy = np.column_stack([self.units, self.host]) > 0
        return np.minimum(self.step.tokens @ busy, self.step.S)

    @property
    def sent(self) -> np.ndarray:
        """Experts that leave each unit's memory over the link, a number: [N]; what is in parts
        leaves all alike."""
        N = self.units.shape[1]
        return (
            np.full(N, self.moved.sum() / N)
            if self.broadcast
            else np.bincount(self.step.home, self.moved, N)
        )

    @property
    def tokens_in(self) -> int:
        """Hidden states that go over the link before the units and the host can compute."""
        receivers = self.receivers
        return int(receivers.max() if self.broadcast else receivers.sum())

    @property
    def tokens_out(self) -> int:
        """Hidden states (outputs or partial sums) that come back: each unit's tokens."""
        return int(self.receivers.sum())


def make_plan(
    step: LayerStep,
    N: int,
    *,
    resident: np.ndarray | float = 0.0,
    moved: np.ndarray | float = 0.0,
    host: np.ndarray | float = 0.0,
    split: bool = False,
    pieces: int = 1,
) -> Plan:
    """A plan whose units compute what nothing else does: a 1/N share each if `split`, otherwise at
    home."""
    resident, moved, host = (
        np.broadcast_to(np.asarray(share, float), len(step)) for share in (resident, moved, host)
    )
    rest = 1 - resident - moved - host
    where = (
        np.full((len(step), N), 1 / N)
        if split
        else (step.home[:, None] == np.arange(N)).astype(float)
    )
    return Plan(step, rest[:, None] * where, resident, moved, host, split, pieces)


def problem(
    plan: Plan,
    asked: LayerStep,
    N: int,
    held: Callable[[LayerStep, int], tuple[np.ndarray | float, float]],
) -> str:
    """What is wrong with a plan, in words; "" if every expert is computed exactly once, from where
    it is.

    asked : the step that was to be planned, in any order of its experts. N : units.
    held : (step, N) → the share of each of its experts that each unit ([A, N] or one for all) and
    the host has."""

    def told(
        step: LayerStep,
    ) -> tuple[Any, ...]:  # steps differ at most in the order of their experts
        experts = zip(*(getattr(step, name).tolist() for name in COLUMNS))
        return step.S, step.decode, step.layer, sorted(experts)

    if not isinstance(plan, Plan) or told(asked) != told(plan.step):
        return f"it is {plan!r}, and asked was for one of {asked}"
    step, A = plan.step, len(asked)
    columns = (plan.resident, plan.moved, plan.host)
    shapes = [np.shape(plan.units), *map(np.shape, columns)]
    if shapes != [(A, N), (A,), (A,), (A,)] or plan.pieces != max(int(plan.pieces), 1):
        return (
            f"its shapes are {shapes} for {A} experts on {N} units, which come in {plan.pieces} pieces, a "
            "whole number of at least 1"
        )
    on_units, on_host = held(step, N)
    shares = np.column_stack([plan.units, *columns])
    most = np.column_stack(
        [
            np.broadcast_to(on_units, (A, N)),
            step.resident,
            np.ones(A),
            np.full(A, on_host),
        ]
    )
    places = [*(f"unit {u}" for u in range(N)), "the GPU, from its memory,", "the GPU", "the host"]
    for a, p in np.argwhere(~((shares >= -1e-12) & (shares <= most + 1e-9))):
        return (
            f"{places[p]} computes {shares[a, p]:.6g} of expert {step.experts[a]}, and it can "
            f"compute 0 to {most[a, p]:.6g}"
        )
    once = shares.sum(1)
    return "; ".join(
        f"expert {step.experts[a]} is computed {once[a]:.6g} times"
        for a in np.flatnonzero(abs(once - 1) > 1e-9)[:3]
    )
