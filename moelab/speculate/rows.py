"""Training examples of an estimator from a trace, a buffer at a time.

Source: Speculating Experts §6.1. A row (R of them) is a token at a predicting layer that passed
both layers and was dropped in neither. A buffer is filled with short stretches of tokens from
random places of the trace, whose hidden states on disk are mapped, never loaded as a whole.

    residuals [T, L, H], ids and weights [T, L, K]  →  q [R, H]  →  start [R, E], the next routers' own logits on q
    router inputs [T, L, H]  →  logits [R, E]
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelab.speculate.predictors import Quasi, of_model
from moelab.speculate.routers import router_logits
from moelab.speculate.signals import DefaultVectors
from moelab.trace import RoutingTrace

STRETCH = 2**20  # bytes of hidden states that are read at one place of a trace
BUFFER = 32 * 2**20  # bytes of hidden states that are shuffled together


class Examples(NamedTuple):
    """Of R rows."""

    q: Tensor  # [R, H]
    layer: Tensor  # [R], the predicting one
    start: Tensor  # [R, E], float32: logits of the next router on q
    logits: Tensor  # [R, E], float32: its true ones


class Rows:
    """Training examples from a trace, read a buffer at a time."""

    def __init__(
        self, trace: RoutingTrace, model: Any, vectors: DefaultVectors, ahead: int
    ) -> None:
        if trace.router_inputs is None or trace.residuals is None:
            raise ValueError(
                "this trace has no hidden states to train on; moelab.record(model, prompts, "
                "hidden='train.safetensors') records them"
            )
        of_model(trace, model)
        self.trace = trace
        self.spec = trace.spec
        self.quasi = Quasi(model, vectors=vectors, ahead=ahead)
        if not self.quasi.targets:
            raise ValueError(f"ahead is {ahead}, and no MoE layer has another one so far ahead")
        token_bytes = 2 * trace.residuals[:1].nbytes
        self.stretch = max(1, STRETCH // token_bytes)  # tokens
        self.stretches = max(1, BUFFER // (self.stretch * token_bytes))  # a buffer

    def spans(self, buffer: int, seed: int, most: int) -> list[tuple[int, int]]:
        """The stretches (first token, end) of the buffer with this number, at most `most`
        tokens."""
        T = len(self.trace)
        n = math.ceil(T / self.stretch)
        epoch, place = divmod(buffer, math.ceil(n / self.stretches))
        order = torch.randperm(n, generator=generator_of(seed, "stretches", epoch))
        spans = []
        for i in order[place * self.stretches : (place + 1) * self.stretches].tolist():
            a = i * self.stretch
            b = min(a + self.stretch, T, a + most)
            most -= b - a
            if b > a:
                spans.append((a, b))
        return spans

    def buffers(self) -> Iterator[Examples]:
        """The whole trace in order."""
        T = len(self.trace)
        size = self.stretch * self.stretches
        return (self.read([(a, min(a + size, T))]) for a in range(0, T, size))

    @torch.no_grad()
    def read(self, spans: list[tuple[int, int]]) -> Examples:
        """The rows of stretches of tokens."""
        trace = self.trace
        device = self.quasi.device
        s, r, ids, weights = (
            torch.cat([column[a:b] for a, b in spans]).to(device)
            for column in (trace.router_inputs, trace.residuals, trace.ids, trace.weights)
        )
        ids = ids.long()
        passed = (ids != self.spec.E).any(-1)  # [T, L]
        parts = []
        for l, target in sorted(self.quasi.targets.items()):
            there = target.index
            t = (passed[:, l] & passed[:, there]).nonzero().flatten()
            q = self.quasi.quasi(l, r[t, l], ids[t, l], weights[t, l])
            start = router_logits(target, q)
            logits = router_logits(target, s[t, there])
            parts.append((q, torch.full_like(t, l), start, logits))
        return Examples(*(torch.cat(part) for part in zip(*parts)))


def generator_of(*parts: Any) -> torch.Generator:
    """Random numbers that these values decide."""
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "little")
    return torch.Generator().manual_seed(seed)
