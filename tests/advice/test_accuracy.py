"""Advice beside measurements: a tiny model end to end, and what is counted of settings, beside a
count by hand."""

import pytest

from moelab.advice import accuracy, simulated
from moelab.advice.accuracy import contenders, run
from moelab.advice.model import AS_IS
from moelab.advice.ways import Way
from moelab.specs import MoESpec
from tests.depth import depth

SPEC = MoESpec(
    "tiny", "qwen3_moe", 2, (0, 1), 8, 2, 64, 64, vocab=1024, heads=2, kv_heads=1, head_dim=32
)


@pytest.fixture
def two_forms(monkeypatch):
    for module in (simulated, accuracy):
        monkeypatch.setattr(module, "forms_of", lambda model: [AS_IS, "bf12"])


@pytest.mark.stress
def test_settings_are_advised_and_run(in_this_process, two_forms, tmp_path):
    found = run((0.4,), (50, 100), folder=tmp_path, quick=True, specs=depth((SPEC,), (SPEC, SPEC)))
    assert set(found["settings"]) == {
        f"tiny, 40% of experts, 50 MB/s, {loss}" for loss in accuracy.LOSSES
    }
    for row in found["settings"].values():
        assert row["advised ÷ best"] >= 1 and row["predicted s"] > 0 and row["measured s"] > 0
    assert found["summary"]["settings"] == 2 and "stopped in" not in found["conditions"]


def test_contenders_are_the_fastest_and_one_of_each_form_and_executor():
    def way(form, tpot, executor="fast", cache="lru"):
        return Way(form, 0.0, 100, 50, 60, 0.5, 1.0, tpot, 1.0, executor=executor, cache=cache)

    ways = [
        way("bf12", 1),
        way("bf12", 2, cache="lfu"),
        way("bf12", 3, cache="lrfu"),
        way(AS_IS, 4),
        way(AS_IS, 5, "exact"),
        way("huffman", 6),
    ]
    assert contenders(ways) == [ways[0], ways[1], ways[3], ways[4]]
