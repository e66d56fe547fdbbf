"""Prompts: several tokens of a layer on a GPU, those of many experts in one call, while other experts land.

Source: ZipMoE §3.3 (work-conserving); Speculating Experts §5.1 (double buffering). A layer's choices
are sorted by expert once, on the GPU. Each call computes the rows of its experts, and no others; what
they contribute is put where the choice was, and summed over K at the end: so no result depends on the
order in which experts arrive.

A prompt that comes in chunks runs all layers for each, so what does not fit into memory is read once
a chunk: that is said, with what it costs (`PromptChunks`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, count

import numpy as np
import torch
from torch import Tensor

from moelab.base.specs import Event, MoESpec
from moelab.cache.residency import Step
from moelab.experts.gemv import GEMV
from moelab.kernels.feed_forward import combine
from moelab.models.experts import SeamExperts, execute
from moelab.models.forward import ForwardInfo

#: choices an expert from which on a layer's tokens want all experts, so that the next layer's need
#: no guessing (Speculating Experts §5.2)
PREFILL = 2


class Choices:
    """The choices of T tokens: x [T, H], ids and weights [T, K].

    tokens : expert → its tokens."""

    def __init__(self, x: Tensor, ids: Tensor, weights: Tensor, tokens: Mapping[int, int]) -> None:
        self.x, self.shape = x, ids.shape
        hit = sorted(tokens)
        ends = accumulate(tokens[expert] for expert in hit)
        self._at = {expert: slice(end - tokens[expert], end) for expert, end in zip(hit, ends)}
        self._order = torch.argsort(ids.flatten(), stable=True)
        sorts = (of.flatten()[self._order, None] for of in (ids, weights))
        self._sorted = self._order // ids.shape[1], *sorts
        self._parts = x.new_zeros(ids.numel(), x.shape[1])

    def compute(self, experts: SeamExperts, chosen: Sequence[int]) -> None:
        """What these experts contribute, by the layer's executor."""

        def rows(of: Tensor) -> Tensor:
            parts = [of[self._at[expert]] for expert in chosen]
            return torch.cat(parts) if len(parts) > 1 else parts[0]

        tokens, ids, weights = map(rows, self._sorted)
        y = execute(experts.executor, self.x[tokens], ids, weights, experts)
        self._parts.index_copy_(0, rows(self._order), y)

    def sum(self) -> Tensor:
        """[T, H]."""
        return self._parts.view(*self.shape, -1).sum(1)


class OneToken:
    """As `Choices`, of a single token on a CPU, where sorting them takes longer than to compute an
    expert."""

    def __init__(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.x, self._ids, self._weights = x, ids.tolist()[0], weights
        self._y: list[Tensor] = []  # of experts that are still to be weighted, fp32
        self._rows: dict[int, int] = {}  # expert → its row of that
        self._weighted: dict[int, Tensor] = {}  # of others

    def compute(self, experts: SeamExperts, chosen: Sequence[int]) -> None:
        """What these experts contribute, by the layer's executor."""
        executor, E = experts.executor, experts.num_experts
        y = executor.parts(self.x, chosen, experts) if isinstance(executor, GEMV) else None
        if y is not None:
            self._rows |= zip(chosen, count(len(self._rows)))
            self._y.append(y)
            return
        for expert in chosen:
            ids = torch.tensor([[e if e == expert else E for e in self._ids]])
            self._weighted[expert] = execute(executor, self.x, ids, self._weights, experts)

    def sum(self) -> Tensor:
        """[1, H]; in the order of choices or of experts, whichever came first."""
        parts = [y for _, y in sorted(self._weighted.items())]
        if self._y:
            rows = np.array([[self._rows.get(expert, -1) for expert in self._ids]])
            parts.append(combine(torch.cat(self._y), rows, self._weights, self.x.dtype))
        return sum(parts[1:], parts[0])


def choices_of(x: Tensor, ids: Tensor, weights: Tensor, step: Step) -> Choices | OneToken:
    """Those of a layer's step."""
    if len(x) == 1 and x.is_cpu:
        return OneToken(x, ids, weights)
    tokens = {request.key.expert: request.tokens for request in step.requests + step.away}
    return Choices(x, ids, weights, tokens)


class PromptChunks:
    """Warns, once, when a prompt comes in chunks that each read experts anew."""

    def __init__(self, spec: MoESpec) -> None:
        self._least = PREFILL * spec.E / spec.K  # tokens that want all experts
        self._prompt = self._told = False

    def begin(self, info: ForwardInfo, before: Iterable[Event]) -> None:
        """A forward pass begins, after one of these events."""
        follows = self._prompt and info.cached and not self._told
        self._prompt = info.phase == "prefill" and info.tokens >= self._least
        if not (follows and self._prompt):
            return
        if nbytes := sum(event.bytes for event in before if event.kind.startswith("read")):
            self._told = True
            warnings.warn(
                f"this prompt comes in chunks, and each of them reads the experts that memory does not "
                f"hold: {nbytes / 1e6:,.1f} MB for the one before. A larger prefill_chunk_size, or none, "
                f"reads them fewer times",
                stacklevel=2,
            )
