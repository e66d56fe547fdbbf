"""Advice beside measurements: a tiny model end to end, and what is counted of settings."""

import pytest

from moelab.advice.model import AS_IS, Model
from moelab.base.specs import MoESpec
from notebooks.studies import advise as accuracy
from tests.depth import depth

SPEC = MoESpec(
    "tiny", "qwen3_moe", 2, (0, 1), 8, 2, 64, 64, vocab=1024, heads=2, kv_heads=1, head_dim=32
)


def test_settings_are_advised_and_run(in_this_process, tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "SEARCH", 0.5)
    monkeypatch.setattr(Model, "forms", lambda model: [AS_IS, "bf12"])
    specs = depth((SPEC,), (SPEC, SPEC))
    monkeypatch.setattr(accuracy, "load_model", lambda name: SPEC)
    found = accuracy.run((0.4,), (50, 100), folder=tmp_path, quick=True, specs=specs)
    assert set(found["settings"]) == {
        f"tiny, 40% of experts, 50 MB/s, {loss}" for loss in accuracy.LOSSES
    }
    for row in found["settings"].values():
        assert row["advised ÷ best"] >= 1 and row["predicted s"] > 0 and row["measured s"] > 0
        assert row["predicted at least s"] <= row["predicted s"] <= row["predicted at most s"]
    assert found["summary"]["settings"] == 2 and "stopped in" not in found["conditions"]
    monkeypatch.setattr(accuracy, "settings", lambda *_: pytest.fail("it was measured before"))
    again = accuracy.run((0.4,), (50, 100), folder=tmp_path, quick=True, specs=specs)
    assert again["settings"] == found["settings"]


def test_a_setting_whose_advice_could_not_run_is_no_success():
    ran = {
        "advised ÷ best": 1.2,
        "predicted ÷ measured": 0.9,
        "cores that others kept busy": 1.0,
        "predicted at least s": 1.0,
        "measured s": 2.0,
        "predicted at most s": 3.0,
    }
    missed = ran | {"measured s": 4.0}
    counted = accuracy.summary({"a": ran, "b": {"result": "no room"}, "c": missed})
    assert list(counted.values()) == [3, 2, 0, 1.2, 2, 1, 0.9, 0.9, 0.9]
    assert accuracy.summary({})["worst advised ÷ best"] is None
