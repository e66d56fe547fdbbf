"""The forward passes of a recorded trace, one after the other, for what predicts from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moelab.base.progress import progress
from moelab.trace import DECODE, RoutingTrace


@dataclass(frozen=True)
class TracedPass:
    """One forward pass of one prompt: the rows [T] of a trace that it computed, and the layers that
    they passed."""

    trace: RoutingTrace
    rows: Tensor
    phase: int
    layers: list[int]

    def at(self, layer: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """s [T, H], r [T, H], ids [T, K], weights [T, K] of a layer."""
        columns = self.trace.router_inputs, self.trace.residuals, self.trace.ids, self.trace.weights
        s, r, ids, weights = (column[self.rows, layer].to(device) for column in columns)
        return s, r, ids.long(), weights


def walk(
    trace: RoutingTrace, token_by_token: bool = False
) -> Iterator[tuple[int, list[TracedPass]]]:
    """(prompt, its forward passes in order): encoder's prefill, decoder's, then decode steps, one
    by one or at once."""
    if trace.router_inputs is None or trace.residuals is None:
        raise ValueError(
            "this trace has no hidden states, so signals cannot be computed from it; "
            "moelab.record(model, prompts, hidden=True) records them"
        )
    for prompt in progress(range(trace.sequences), "scoring", unit="prompt"):
        rows = torch.nonzero(trace.sequence == prompt).flatten()
        phase = trace.phase[rows]
        passed = trace.router_inputs[rows].ne(0).any(-1)  # [T, L]: a stack's layers
        new = torch.ones(len(rows), dtype=torch.bool)  # whether a pass begins with this row
        new[1:] = (phase[1:] != phase[:-1]) | (passed[1:] != passed[:-1]).any(-1)
        if token_by_token:
            new |= phase == DECODE
        starts = [*torch.nonzero(new).flatten().tolist(), len(rows)]
        passes = []
        for a, b in zip(starts, starts[1:]):
            layers = torch.nonzero(passed[a]).flatten().tolist()
            passes.append(TracedPass(trace, rows[a:b], int(phase[a]), layers))
        yield prompt, passes
