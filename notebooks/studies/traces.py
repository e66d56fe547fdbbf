"""Routing traces that a notebook is given, of whatever program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from moelab.trace import DECODE, PREFILL, RoutingTrace, load


def given(paths: str, model: str = "") -> dict[str, RoutingTrace]:
    """Name → trace, of files by commas; `model` : whose they are, see `moelab.trace.load`. {}
    without a path.

    Raises ValueError: traces of different geometries, or two of one name."""
    found: dict[str, RoutingTrace] = {}
    for path in filter(None, map(str.strip, paths.split(","))):
        if (name := Path(path).stem) in found:
            raise ValueError(f"two traces are called {name!r}: rename the file {path}")
        found[name] = load(path, model or None)
    if len({trace.spec.fingerprint() for trace in found.values()}) > 1:
        raise ValueError(
            f"the traces {', '.join(found)} are of different models, whose experts cannot be "
            "compared: give those of one"
        )
    return found


def prompted(trace: RoutingTrace) -> RoutingTrace:
    """A trace whose texts have prompts and answers: itself or, if all of it is in one phase, with
    the first half of each text as its prompt, as a text is routed alike in both."""
    if len(trace.phase.unique()) == 2:
        return trace
    phase = torch.full_like(trace.phase, DECODE)
    for sequence in trace.sequence.unique():
        mine = torch.nonzero(trace.sequence == sequence).flatten()
        phase[mine[: len(mine) // 2]] = PREFILL
    return replace(trace, phase=phase)
