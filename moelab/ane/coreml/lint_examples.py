"""Graphs as one might write them without thinking of the Neural Engine, for the linter to find fault with.

A linter that finds nothing proves nothing. Two experts of a model become six graphs, each with one mistake that NPUMoE
§3.2 and §4.2 or people with real devices warn of, beside one that is as `moelab.ane.coreml.convert` writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moelab.ane.coreml.ffn_graph import Enumerated, expert_of, save_ffn, save_program
from moelab.ane.coreml.linter import Report, lint
from moelab.ane.coreml.package import coremltools
from moelab.specs import MoESpec


def careless(experts: Any, spec: MoESpec, folder: str | Path) -> tuple[Report, dict[str, Report]]:
    """(the linter's report of a graph as it should be, those of the six careless ones by name).

    experts : a layer's experts behind the seam, of a model of that spec. folder : where the packages go.
    """
    two = [expert_of(experts, experts.weights(e)) for e in (0, 1)]
    folder, made = Path(folder), []

    def saved(save: Callable[..., Path], *what: Any, **options: Any) -> Report:
        made.append(folder / f"careless_{len(made)}.mlpackage")
        return lint(save(made[-1], *what, **options))

    return saved(save_ffn, two, 32), {
        "the paper's layout": saved(save_ffn, two, 32, layout="paper"),
        "one expert, capacities 16, 32 or 64": saved(save_ffn, two[:1], Enumerated((16, 32, 64))),
        "int8 weights": saved(save_ffn, two, 32, weights="int8"),
        "capacity 40": saved(save_ffn, two, 40),
        "one expert, capacity 16": saved(save_ffn, two[:1], 16),
        "the router": saved(save_program, _router(spec))}


def _router(spec: MoESpec) -> Any:
    """A router with its top-k inside, as a MIL program: x [256, H]."""
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    @mb.program(input_specs=[mb.TensorSpec(shape=(256, spec.H), dtype=types.fp16)],
                opset_version=coremltools().target.iOS18)
    def router(x):
        scores = mb.softmax(x=mb.linear(x=x, weight=np.full((spec.E, spec.H), 0.1, np.float16)), axis=-1)
        return mb.topk(x=scores, k=spec.K, axis=-1)
    return router
