"""Six graphs that were not written for the Neural Engine, and one that was: what the linter says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moelab.ane.coreml.ffn_graph import expert_of, ffn, save_ffn, save_program
from moelab.ane.coreml.linter import Report, lint
from moelab.ane.coreml.package import coremltools
from moelab.base.specs import MoESpec


def lint_examples(
    experts: Any, spec: MoESpec, folder: str | Path
) -> tuple[Report, dict[str, Report]]:
    """(report of a good graph, reports of six bad ones by name), saved in `folder`.

    experts : a layer's experts behind the seam, of a model of that spec.
    """
    ct = coremltools()
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import get_new_symbol, types

    @mb.program(
        input_specs=[mb.TensorSpec(shape=(256, spec.H), dtype=types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def router(x):
        scores = mb.softmax(
            x=mb.linear(x=x, weight=np.full((spec.E, spec.H), 0.1, np.float16)), axis=-1
        )
        return mb.topk(x=scores, k=spec.K, axis=-1)

    two = [expert_of(experts, experts.weights(e)) for e in (0, 1)]

    @mb.program(
        input_specs=[mb.TensorSpec(shape=(1, spec.H, 1, get_new_symbol()), dtype=types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def flexible(x):
        return ffn(mb, x, two[0])

    @mb.program(
        input_specs=[mb.TensorSpec(shape=(64, spec.H, 1, 1), dtype=types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def rows_first(x):
        parts = mb.split(x=x, num_splits=2, axis=0)
        outs = [ffn(mb, part, of, name=f"e{g}") for g, (part, of) in enumerate(zip(parts, two))]
        return mb.concat(values=outs, axis=0, name="y")

    capacities = ct.TensorType(
        name="x",
        shape=ct.EnumeratedShapes([(1, spec.H, 1, C) for C in (16, 32, 64)]),
        dtype=np.float16,
    )
    folder = Path(folder)
    made = []

    def saved(save: Callable[..., Path], *what: Any, **options: Any) -> Report:
        made.append(folder / f"example_{len(made)}.mlpackage")
        return lint(save(made[-1], *what, **options))

    return saved(save_ffn, two, 32), {
        "the paper's layout": saved(save_program, rows_first),
        "one expert, capacities 16, 32 or 64": saved(save_program, flexible, inputs=[capacities]),
        "int8 weights": saved(save_ffn, two, 32, weights="int8"),
        "capacity 40": saved(save_ffn, two, 40),
        "one expert, capacity 16": saved(save_ffn, two[:1], 16),
        "the router": saved(save_program, router),
    }
