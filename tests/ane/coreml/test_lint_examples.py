"""Careless graphs are found fault with, each for its own mistake and for nothing else, and the careful one is not."""

import pytest

pytest.importorskip("coremltools")

from moelab.ane.coreml.lint_examples import careless  # noqa: E402
from moelab import open_model  # noqa: E402
from moelab.models import plug  # noqa: E402

RULES = {"the paper's layout": {"row-padding"}, "one expert, capacities 16, 32 or 64": {"fig4-dynamic-shape"},
         "int8 weights": {"quantised-conv"}, "capacity 40": {"align-16"}, "one expert, capacity 16": {"tiny-graph"},
         "the router": {"fig4-linear", "fig4-topk"}}


def test_each_mistake_is_found_by_its_own_rule(tmp_path):
    model = open_model(experts="external")                      # of the shipped model's sizes no rule complains
    good, bad = careless(plug(model)[0].experts, model.spec, tmp_path)
    assert good.clean and not good.findings
    assert {name: {finding.rule for finding in report.findings} for name, report in bad.items()} == RULES
    assert not any(report.clean for report in bad.values())
    assert len(list(tmp_path.glob("*.mlpackage"))) == len(bad) + 1
