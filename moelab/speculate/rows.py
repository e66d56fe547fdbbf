"""Training examples of an estimator from a trace on disk, a buffer at a time.

Source: Speculating Experts §6.1. A row (R of them) is a token at a predicting layer that passed
both layers and was dropped in neither. A buffer is filled with short stretches of tokens from
random places of the trace; files are read, not mapped, since mapped pages count as memory.

    residuals [T, L, H], ids and weights [T, L, K]  →  q [R, H]  →  start [R, E], the next routers' own logits on q
    router inputs [T, L, H]  →  logits [R, E]
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moelab.speculate.predictors import Quasi, of_model, teacher
from moelab.speculate.signals import DefaultVectors
from moelab.store.headers import DTYPES, read_header
from moelab.trace import HIDDEN, RoutingTrace, hidden_path

STRETCH = 2**20  # bytes of hidden states that are read at one place of a trace
BUFFER = 32 * 2**20  # bytes of hidden states that are shuffled together


class Rows:
    """Training examples from a trace or its path; hidden states that lie on disk stay there."""

    def __init__(
        self, trace: RoutingTrace | str | Path, model: Any, vectors: DefaultVectors, ahead: int
    ) -> None:
        trace = trace if isinstance(trace, RoutingTrace) else RoutingTrace.load(trace)
        if trace.router_inputs is None or trace.residuals is None:
            raise ValueError(
                "this trace has no hidden states to train on; moelab.record(model, prompts, "
                "hidden='train.safetensors') records them"
            )
        of_model(trace, model)
        self.quasi = Quasi(model, vectors=vectors, ahead=ahead)
        if not self.quasi.targets:
            raise ValueError(f"ahead is {ahead}, and no MoE layer has another one so far ahead")
        self.spec, self.model_id, self.T, self.H = (
            trace.spec,
            trace.model_id,
            len(trace),
            trace.residuals.shape[-1],
        )
        if not self.T:
            raise ValueError("this trace has no tokens; record some prompts")
        home = trace._hidden_home
        self.columns = {
            name: FileRows(hidden_path(home, name), name) if home else getattr(trace, name)
            for name in HIDDEN
        } | {"ids": trace.ids, "weights": trace.weights}
        token_bytes = 2 * trace.residuals[:1].nbytes
        self.stretch = max(1, STRETCH // token_bytes)  # tokens
        self.stretches = max(1, BUFFER // (self.stretch * token_bytes))  # a buffer
        self._whole: list[tuple[Tensor, ...]] = []

    def in_order(self) -> Iterator[list[tuple[int, int]]]:
        """The whole trace as buffers of (first token, end)."""
        size = self.stretch * self.stretches
        return ([(a, min(a + size, self.T))] for a in range(0, self.T, size))

    def spans(self, buffer: int, seed: int, most: int) -> list[tuple[int, int]]:
        """The stretches (first token, end) of the buffer with this number, at most `most`
        tokens."""
        n = math.ceil(self.T / self.stretch)
        epoch, place = divmod(buffer, math.ceil(n / self.stretches))
        order = torch.randperm(
            n, generator=torch.Generator().manual_seed(seed_of(seed, "stretches", epoch))
        )
        spans = []
        for i in order[place * self.stretches : (place + 1) * self.stretches].tolist():
            a = i * self.stretch
            b = min(a + self.stretch, self.T, a + most)
            most -= b - a
            if b > a:
                spans.append((a, b))
        return spans

    def buffers(self) -> Iterator[tuple[Tensor, ...]]:
        """What `read` gives of the whole trace in order; of one that is a single buffer it is kept
        for the next time, as validations go through it again and again."""
        if self.stretch * self.stretches < self.T:
            return map(self.read, self.in_order())
        self._whole = self._whole or [self.read(spans) for spans in self.in_order()]
        return iter(self._whole)

    @torch.no_grad()
    def read(self, spans: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(q [R, H], predicting layer [R], start and true logits [R, E] float32, true ids [R, K])
        of stretches of tokens."""
        s, r, ids, weights = (
            torch.cat([self.columns[name][a:b] for a, b in spans]).to(self.quasi.device)
            for name in (*HIDDEN, "ids", "weights")
        )
        ids = ids.long()
        passed = (ids != self.spec.E).any(-1)  # [T, L]
        parts = []
        for l, target in sorted(self.quasi.targets.items()):
            t = (passed[:, l] & passed[:, target.index]).nonzero().flatten()
            q = self.quasi.quasi(l, r[t, l], ids[t, l], weights[t, l])
            parts.append(
                (
                    q,
                    torch.full_like(t, l),
                    teacher(target, q),
                    teacher(target, s[t, target.index]),
                    ids[t, target.index],
                )
            )
        return tuple(torch.cat(part) for part in zip(*parts))

    def fingerprint(self) -> str:
        """Sixteen hex digits from tokens at 64 places of the trace."""
        places = sorted({i * (self.T - 1) // 63 for i in range(64)})
        return digest_of(
            [torch.tensor([self.T]), *(c[i : i + 1] for c in self.columns.values() for i in places)]
        )


class FileRows:
    """Rows of a tensor in a safetensors file, sliced as the tensor would be, but read, not
    mapped."""

    def __init__(self, path: Path, name: str) -> None:
        self.stored = read_header(path)[name]
        self.row = self.stored.slice(0).nbytes

    def __getitem__(self, rows: slice) -> Tensor:
        raw = torch.from_numpy(
            self.stored.read(rows.start * self.row, (rows.stop - rows.start) * self.row)
        )
        return raw.view(DTYPES[self.stored.dtype]).view(-1, *self.stored.shape[1:])


def seed_of(*parts: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "little")


def digest_of(tensors: Sequence[Tensor]) -> str:
    """Sixteen hex digits that name the contents of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
