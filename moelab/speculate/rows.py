"""Training examples of an estimator from a trace, a buffer at a time.

Source: Speculating Experts §6.1. A row (R of them) is a token at a predicting layer that passed
both layers and was dropped in neither. Hidden states on disk are mapped, never loaded as a whole.

    residuals [T, L, H], ids and weights [T, L, K]  →  q [R, H]  →  start [R, E], the next routers' own logits on q
    router inputs [T, L, H]  →  logits [R, E]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelab.models import MoELayer
from moelab.speculate.predictors import Quasi, of_model
from moelab.speculate.routers import router_logits
from moelab.speculate.signals import DefaultVectors
from moelab.trace import RoutingTrace

BUFFER = 32 * 2**20  # bytes of hidden states that are shuffled together


class Examples(NamedTuple):
    """Of R rows."""

    q: Tensor  # [R, H]
    layer: Tensor  # [R], the predicting one
    start: Tensor  # [R, E], float32: logits of the next router on q
    logits: Tensor  # [R, E], float32: its true ones


class Rows:
    """Training examples from a trace, read a buffer at a time."""

    def __init__(self, trace: RoutingTrace, model: Any, vectors: DefaultVectors) -> None:
        if trace.router_inputs is None or trace.residuals is None:
            raise ValueError(
                "this trace has no hidden states to train on; moelab.record(model, prompts, "
                "hidden='train.safetensors') records them"
            )
        of_model(trace, model)
        self.trace = trace
        self.spec = trace.spec
        self.quasi = Quasi(model, vectors=vectors)
        if not self.quasi.targets:
            raise ValueError("no MoE layer of this model has another one ahead of it")
        #: tokens that are read together
        self.size = max(1, BUFFER // (2 * trace.residuals[:1].nbytes))

    def all(self) -> tuple[Tensor, ...]:
        """Tokens [n] of the whole trace, a buffer at a time."""
        return torch.arange(len(self.trace)).split(self.size)

    def layers(self, tokens: Tensor) -> Iterator[tuple[int, MoELayer, Tensor, Tensor, Tensor]]:
        """(predicting layer, predicted one, q [R, H], s there [R, H], ids there [R, K]) of tokens
        [n]."""
        trace = self.trace
        columns = trace.router_inputs, trace.residuals, trace.ids, trace.weights
        s, r, ids, weights = (column[tokens].to(self.quasi.device) for column in columns)
        ids = ids.long()
        passed = (ids != self.spec.E).any(-1)  # [T, L]
        for l, target in sorted(self.quasi.targets.items()):
            there = target.index
            t = (passed[:, l] & passed[:, there]).nonzero().flatten()
            q = self.quasi.quasi(l, r[t, l], ids[t, l], weights[t, l])
            yield l, target, q, s[t, there], ids[t, there]

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Examples:
        """The rows of tokens [n] of the trace."""
        parts = [
            (q, torch.full((len(q),), l), router_logits(target, q), router_logits(target, s))
            for l, target, q, s, _ in self.layers(tokens)
        ]
        return Examples(*(torch.cat(part) for part in zip(*parts)))
