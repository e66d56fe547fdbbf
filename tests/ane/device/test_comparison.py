"""Comparisons with the paper: claims are those published, ranges those of all runs; contradictions are arithmetic."""

import pytest

from moelab.ane.device import comparison, inconsistencies
from moelab.ane.device.comparison import RIVALS, baselines, claimed, least_and_most, ratio
from moelab.ane.device.device_model import REFERENCE_BYTES, DeviceModel
from moelab.ane.plan import MAX_GRAPH_BYTES
from moelab.ane.device.published import CLAIMS, END_TO_END, TABLE_4


@pytest.fixture(scope="module")
def found():
    return comparison.study("Phi-tiny-MoE", runs=[(256, 256), (512, 256)], systems=(*RIVALS, "npumoe"))


def test_claims_are_those_published():
    assert claimed("Phi-3.5-MoE", (1024, 256), "ttft") == {"cpu": (2.07, 2.07), "naive": (5.55, 5.55),
                                                           "anemll": (1.95, 1.95)}
    assert claimed("Phi-3.5-MoE", (1, 1), "ttft") == {}
    assert claimed("Phi-3.5-MoE", (4096, 256), "cpu cycles")["naive"] == (2.09, 3.70)
    assert {(c.prompt, c.chunk) for c in CLAIMS if c.prompt} <= set(comparison.RUNS)            # each is modelled


def test_ranges_are_over_all_runs_and_systems(found):
    ratios = [run[s].ttft_s / run["npumoe"].ttft_s for run in found.values() for s in RIVALS]
    assert baselines(found, "ttft") == (min(ratios), max(ratios))
    of_cpu = [ratio(run, "ttft", "cpu") for run in found.values()]
    assert least_and_most(found, lambda run: ratio(run, "ttft", "cpu")) == baselines(found, "ttft", ("cpu",))
    assert baselines(found, "ttft", ("cpu",)) == (min(of_cpu), max(of_cpu))


def test_the_cheapest_slot_is_of_a_graph_that_fits():
    device = DeviceModel.of()
    grid = comparison.slot_grid(device)
    assert grid[8, 32] == pytest.approx(device.rates.graph_ms(8, 32) / 256)
    allowed = {at: value for at, value in grid.items() if at[0] * REFERENCE_BYTES <= MAX_GRAPH_BYTES}
    at = comparison.cheapest_slot(grid)
    assert grid[at] == min(allowed.values()) and at[0] <= 8 and max(G for G, _ in grid) == 16


def test_contradictions_by_hand():
    as_slots, as_tokens = inconsistencies.expert_ffn()
    assert (as_slots, as_tokens) == (pytest.approx(4 * 16 * 32 * 0.26), pytest.approx(1024 * 0.26))
    assert abs(as_slots - TABLE_4["expert FFN"][3]) < 2
    sums = inconsistencies.table_4_sums()
    assert sums[3] == pytest.approx(1 + 1.24 + 0.37 + 530.91 + 775.52 + 398.34)
    assert abs(sums[0] - TABLE_4["total"][0]) < 2.5 and abs(sums[3] - TABLE_4["total"][3]) > 400
    assert inconsistencies.EIGHT_EXPERTS == 1200
    where = [one.where for one in inconsistencies.contradictions()]
    assert len(set(where)) == len(where) == 9
    for metric, gains in END_TO_END.items():                    # §5.2's ranges of Qwen3 are their least and most
        claim = next(c for c in CLAIMS if (c.model, c.metric) == ("Qwen3-30B-A3B", metric))
        assert (claim.low, claim.high) == (min(gains.values()), max(gains.values()))
    qwen = next(one for one in inconsistencies.contradictions() if one.where == "§5.2, gains of Qwen3-MoE")
    assert "1.26" in qwen.but and f"{1.139 / 0.572:.2f}" in qwen.but
