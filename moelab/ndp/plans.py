"""Step and Plan: what a schedule sees of one MoE layer, and what it decides. Both engines run a plan.

A `Step` is the experts that one layer must compute in one forward, with their tokens, hottest first. A `Plan` says for
each of them which share of its columns is computed where, and by which way its weights get there. A whole expert is
share 1 in one place; tensor parallelism over N units is share 1/N on each; every row of a plan adds up to 1.

    units [A, N]   computed on unit u from its own memory        host [A]    computed on the CPU from its own memory
    resident [A]   computed on the GPU from its own memory       moved [A]   sent over the link, computed on the GPU
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Step:
    """The A experts that one layer must compute in one forward of S tokens, hottest first.

    Attributes
    ----------
    experts, tokens : int [A], ids and the tokens each gets.
    home : int [A], the unit that holds an expert where units hold whole experts.
    resident : bool [A], whether an expert was prefetched into GPU memory.
    S : tokens of the forward; 1 when decoding.
    """

    experts: np.ndarray
    tokens: np.ndarray
    home: np.ndarray
    resident: np.ndarray
    S: int

    def __len__(self) -> int:
        return len(self.experts)

    def take(self, order: np.ndarray) -> Step:
        """The same experts in another order, int [A]."""
        return Step(self.experts[order], self.tokens[order], self.home[order], self.resident[order], self.S)


@dataclass(frozen=True, eq=False)
class Plan:
    """Where each expert of a step is computed, as shares of its columns, and in which order.

    step : what was planned, its experts in the order in which they are sent and computed; a system may reorder them.
    broadcast : one transfer of a token's hidden state serves all units (tensor parallelism); otherwise each unit that
        needs it is sent its own.
    pieces : parts in which an expert comes over the link, each computed while the next arrives: N where N units hold
        its columns.
    """

    step: Step
    units: np.ndarray
    resident: np.ndarray
    moved: np.ndarray
    host: np.ndarray
    broadcast: bool
    pieces: int

    @property
    def receivers(self) -> np.ndarray:
        """Tokens that each unit, and last the host, must be sent: int [N + 1]; never a token twice.

        Exact when decoding, and for a prompt if every unit has a share of all experts; otherwise an upper bound,
        because two experts of one unit may share tokens that a count per expert does not tell.
        """
        busy = np.column_stack([self.units, self.host]) > 0
        return np.minimum(self.step.tokens @ busy, self.step.S)

    @property
    def tokens_in(self) -> int:
        """Hidden states that go over the link before the units and the host can compute."""
        receivers = self.receivers
        return int(receivers.max() if self.broadcast else receivers.sum())

    @property
    def tokens_out(self) -> int:
        """Hidden states (outputs or partial sums) that come back: each unit's tokens."""
        return int(self.receivers.sum())


def make_plan(step: Step, N: int, *, resident: np.ndarray | float = 0.0, moved: np.ndarray | float = 0.0,
              host: np.ndarray | float = 0.0, split: bool = False, pieces: int = 1) -> Plan:
    """A plan whose units compute what nothing else does: a 1/N share each if `split`, otherwise at home."""
    resident, moved, host = (np.broadcast_to(np.asarray(share, float), len(step)) for share in (resident, moved, host))
    rest = 1 - resident - moved - host
    where = np.full((len(step), N), 1 / N) if split else (step.home[:, None] == np.arange(N)).astype(float)
    return Plan(step, rest[:, None] * where, resident, moved, host, split, pieces)


def problems(plan: Plan) -> list[str]:
    """What is wrong with a plan, in words: an expert that is not computed exactly once, or a prefetch that was none."""
    found = []
    shares = np.column_stack([plan.units, plan.resident, plan.moved, plan.host])
    if (shares < -1e-12).any():
        found.append("a share is negative")
    once = shares.sum(1)
    found += [f"expert {e} is computed {s:.6g} times" for e, s in zip(plan.step.experts, once) if abs(s - 1) > 1e-9]
    found += [f"expert {e} runs from GPU memory without being there"
              for e, share, held in zip(plan.step.experts, plan.resident, plan.step.resident) if share > 0 and not held]
    return found
