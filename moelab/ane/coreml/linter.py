"""A linter for saved Core ML packages: will this graph run on the Neural Engine, and what does it
waste there?

A report lists every operation with a verdict and every finding with its rule (`lint_rules`),
severity and source:

    error     the ANE does not run it, or Core ML does not load it       warning
    it may fall back or wastes work
    note      worth knowing; a graph with only notes is clean

Verdicts are predictions: whether an operation really ran on the ANE only a Mac's compute plan
tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moelab.ane.coreml.ffn_graph import expert_of, ffn, save_ffn, save_program
from moelab.ane.coreml.lint_rules import RULES, SEVERITIES, Finding, verdict
from moelab.ane.coreml.package import Package, coremltools, read_package
from moelab.specs import MoESpec
from moelab.table import text_table


@dataclass(frozen=True)
class OpRow:
    """How often a function has an operation, and whether the ANE runs it: "supported",
    "unsupported" or "risky"."""

    function: str
    type: str
    count: int
    verdict: str
    why: str


@dataclass(frozen=True)
class Report:
    """What the linter has to say of a package: every operation type of every function, and
    findings, errors first."""

    path: str
    weight_bytes: int
    ops: tuple[OpRow, ...]
    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        """Neither errors nor warnings."""
        return all(finding.severity == "note" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {"format": "moelab.ane.lint/1", "clean": self.clean} | asdict(self)

    def table(self) -> str:
        lines = [
            f"{self.path}: {self.weight_bytes / 1e6:,.1f} MB of weights, "
            f"{'clean' if self.clean else 'not clean'}",
            text_table(
                ["function", "operation", "count", "on the ANE", "because"],
                [[op.function, op.type, op.count, op.verdict, op.why] for op in self.ops],
            ),
        ]
        if self.findings:
            lines.append(
                text_table(
                    ["severity", "rule", "where", "finding"],
                    [[f.severity, f.rule, f.where, f.text] for f in self.findings],
                )
            )
        return "\n".join(lines)


def lint(package: Package | str | Path) -> Report:
    """Judge a saved package by all rules; raises what `read_package` raises."""
    package = package if isinstance(package, Package) else read_package(package)
    functions = package.functions.values()
    ops = tuple(
        OpRow(function.name, kind, count, *verdict(kind))
        for function in functions
        for kind, count in sorted(function.counts().items())
    )
    findings = dict.fromkeys(  # functions that share weights repeat what is said of these
        Finding(rule.id, rule.severity, where, text, rule.source)
        for function in functions
        for rule in RULES.values()
        for where, text in rule.check(function, package)
    )
    return Report(
        str(package.path),
        package.weight_bytes,
        ops,
        tuple(sorted(findings, key=lambda f: SEVERITIES.index(f.severity))),
    )


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
        "the paper's layout": saved(save_ffn, two, 32, layout="paper"),
        "one expert, capacities 16, 32 or 64": saved(save_program, flexible, inputs=[capacities]),
        "int8 weights": saved(save_ffn, two, 32, weights="int8"),
        "capacity 40": saved(save_ffn, two, 40),
        "one expert, capacity 16": saved(save_ffn, two[:1], 16),
        "the router": saved(save_program, router),
    }
