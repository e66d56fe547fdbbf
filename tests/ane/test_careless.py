"""Careless graphs are found fault with, each for its own mistake, and the careful one is not."""

import pytest

pytest.importorskip("coremltools")

from moelab.ane.careless import careless  # noqa: E402
from moelab.models import plug  # noqa: E402


def test_each_mistake_is_found(model, tmp_path):
    experts = plug(model)[0].experts
    good, bad = careless(experts, model.spec, tmp_path)
    rules = {name: {finding.rule for finding in report.findings} for name, report in bad.items()}
    assert not any(report.clean for report in bad.values())
    assert any("paper" in name for name in rules) and len({frozenset(found) for found in rules.values()}) >= 4
    assert {finding.rule for finding in good.findings} < set.union(*rules.values())
    assert len(list(tmp_path.glob("*.mlpackage"))) == len(bad) + 1
