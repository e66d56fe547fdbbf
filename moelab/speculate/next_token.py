"""Which experts the next tokens will choose at a layer: a ridge regression from its router input,
for caches (ours).

The router input s_t of a layer says what this token is about, and so, in part, what the next one
will be; what the layer chose lately, u_t, says which experts this text uses at all.
`moelab.cache.next_token` evicts by the expectation

    ŷ_t = W_l [s_t, u_t, 1]  of  y_t = (1 − γ) Σ_i γ^i [chosen by token t + 1 + i]
    u_t = [chosen by t] + 2^(−1/h) u_{t−1}

W is fitted to a recorded calibration text. Left out: tokens of a batch apart from each other; their expectations are averaged.

Shapes: s [T, H], u [E], W [L, H + E + 1, E].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moelab.base.progress import progress
from moelab.trace import RoutingTrace

#: strength of the ridge in tokens: what predicts unseen text best, of the shipped model
PRIOR = 300


@dataclass(frozen=True, eq=False)
class NextToken:
    """W of every layer, float32 [L, H + E + 1, E]; half_life, in tokens, is that of u."""

    W: Tensor
    half_life: float

    def expected(self, layer: int, s: np.ndarray, u: np.ndarray) -> np.ndarray:
        """ŷ [E] of a layer, from the router inputs s [T, H] of the tokens that go on and recent
        uses u [E]."""
        H = s.shape[-1]
        W = self.W[layer].numpy()
        return s.mean(0) @ W[:H] + u @ W[H:-1] + W[-1]

    @property
    def shape(self) -> tuple[int, int]:
        """L, E."""
        return len(self.W), self.W.shape[-1]


def fit(trace: RoutingTrace, half_life: float = 16.0, discount: float = 0.5) -> NextToken:
    """Fit W to a trace that was recorded with `hidden=True`.

    discount : γ; 0 asks for the next token's experts alone, more for those of the tokens after it,
        too.

    Raises ValueError: a trace without router inputs.
    """
    if trace.router_inputs is None:
        raise ValueError(
            "this trace has no router inputs; moelab.record(model, prompts, hidden=True) records them"
        )
    spec = trace.spec
    layers = []
    order = torch.argsort(trace.sequence.long(), stable=True)
    sequence = trace.sequence[order].long()
    for layer in progress(range(spec.L), "fitting", unit="layer"):
        passed = trace.ids[order, layer, 0] != spec.E
        rows = order[passed]
        of = sequence[passed]
        chosen = chosen_of(trace.ids[rows, layer], spec.E)
        s = trace.router_inputs[rows, layer].float()
        x = torch.cat([s, lately(chosen, half_life), torch.ones(len(s), 1)], 1)
        y, last = coming(chosen, of, discount)
        layers.append(ridge(x[~last], y[~last]))
    return NextToken(torch.stack(layers), half_life)


def chosen_of(ids: Tensor, E: int) -> Tensor:
    """0 or 1, float32 [T, E]: which experts each token [T, K] chose; the id E is none."""
    return torch.zeros(len(ids), E + 1).scatter(1, ids.long(), 1.0)[:, :E]


def lately(chosen: Tensor, half_life: float) -> Tensor:
    """u of every token, [T, E]: uses up to its own, each counting half after `half_life` tokens."""
    u = torch.zeros(chosen.shape[1])
    rows = []
    decay = 0.5 ** (1 / half_life)
    for row in chosen:
        rows.append(u := u * decay + row)
    return torch.stack(rows)


def coming(chosen: Tensor, sequence: Tensor, discount: float) -> tuple[Tensor, Tensor]:
    """(y of every token [T, E], whether it is the last of its sequence [T], after which nothing is
    known)."""
    last = torch.ones(len(chosen), dtype=torch.bool)
    last[:-1] = sequence[1:] != sequence[:-1]
    y = chosen.clone()  # after its end a sequence is taken to go on like its last token
    for t in reversed(range(len(chosen) - 1)):
        if not last[t]:
            y[t] = (1 - discount) * chosen[t + 1] + discount * y[t + 1]
    return y, last


def ridge(x: Tensor, y: Tensor) -> Tensor:
    """W [F, E] of y ≈ x W, held near 0 as by `PRIOR` further rows."""
    x = x.double()
    y = y.double()
    level = PRIOR * x.square().mean() * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(x.T @ x + level, x.T @ y).float()
