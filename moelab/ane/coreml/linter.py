"""A linter for saved Core ML packages: will this graph run on the Neural Engine, and what does it waste there?

Source: NPUMoE Fig. 4 (what the ANE runs), §3.2 (sizes, convolutions instead of linear layers), §4.2 (graph size), and
what people found out with real devices, since Apple documents little of it. Each rule has an id, a severity and the
source it rests on; a report lists every operation with a verdict and every finding with its rule.

    error     the ANE does not run it, or Core ML does not load it       warning     it may fall back or wastes work
    note      worth knowing; a graph with only notes is clean

Verdicts are predictions: whether an operation really ran on the ANE only a Mac's compute plan tells. Left out: the
inside of control flow, which itself is an error; measured speed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


from moelab.ane.coreml.lint_rules import RULES, SEVERITIES, Finding, Rule, verdict
from moelab.ane.coreml.package import Function, Package, read_package
from moelab.table import text_table


@dataclass(frozen=True)
class OpRow:
    """How often a function has an operation, and whether the ANE runs it: "supported", "unsupported" or "risky"."""

    function: str
    type: str
    count: int
    verdict: str
    why: str


@dataclass(frozen=True)
class Report:
    """What the linter has to say of a package.

    Attributes
    ----------
    weight_bytes : of the package's weight file.
    ops : every operation type of every function, constants left out.
    findings : errors first.
    """

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

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def table(self) -> str:
        """The report as text."""
        lines = [f"{self.path}: {self.weight_bytes / 1e6:,.1f} MB of weights, {'clean' if self.clean else 'not clean'}",
                 text_table(["function", "operation", "count", "on the ANE", "because"],
                            [[op.function, op.type, str(op.count), op.verdict, op.why] for op in self.ops])]
        if self.findings:
            lines.append(text_table(["severity", "rule", "where", "finding"],
                                    [[f.severity, f.rule, f.where, f.text] for f in self.findings]))
        return "\n".join(lines)


def lint(package: Package | str | Path) -> Report:
    """Judge a saved package by all rules of `lint_rules.RULES`.

    Raises
    ------
    FileNotFoundError, ValueError, ImportError : as `read_package`.
    """
    package = package if isinstance(package, Package) else read_package(package)
    ops, findings = [], []
    for function in package.functions.values():
        for kind, count in sorted(function.counts().items()):
            ops.append(OpRow(function.name, kind, count, *verdict(kind)))
        for rule in RULES.values():
            findings += _found(rule, function, package)
    findings = list(dict.fromkeys(findings))            # functions that share weights repeat what is said of these
    return Report(str(package.path), package.weight_bytes, tuple(ops),
                  tuple(sorted(findings, key=lambda f: SEVERITIES.index(f.severity))))


def _found(rule: Rule, function: Function, package: Package) -> Iterator[Finding]:
    for where, text in rule.check(function, package):
        yield Finding(rule.id, rule.severity, where, text, rule.source)
