"""ZipMoE's models on its boards, simulated: rivals by hand, orders that must hold, and what its
claims ask for."""

import numpy as np
import pytest

from moelab.cards import load_model
from moelab.claims import load
from moelab.simulation.routing import routing_of
from notebooks.studies import zipmoe


@pytest.fixture(scope="module")
def qwen():
    return zipmoe.Machine.of("Qwen1.5-MoE-A2.7B", "jetson-agx-orin-32gb", 1.2, 6)


def test_rivals_read_what_they_must(qwen):
    """On demand and streaming by their bytes; with all experts in memory nobody but the latter
    reads."""
    spec, steps = load_model("Qwen1.5-MoE-A2.7B"), qwen.steps("alike", 1, 0)
    read = spec.expert_bytes / 3.5e9
    busy = 2 * (14.3e9 - spec.L * spec.E * spec.expert_params) / spec.L
    expert = spec.expert_bytes / 204.8e9 + 2 * spec.expert_params / 27e12
    compute = busy / 204.8e9 + busy / 27e12 + 4 * expert
    half = qwen.rivals(spec.experts_bytes // 2, steps, 1)
    pools = (spec.experts_bytes // 2 - 8 * spec.expert_bytes) // spec.expert_bytes
    assert half["on demand"] == pytest.approx(24 * (compute + 4 * (1 - pools / 1440) * read))
    assert half["streamed"] == pytest.approx(24 * 60 * read)
    enough = qwen.rivals(spec.experts_bytes + 8 * spec.expert_bytes, steps, 1)
    assert enough["on demand"] == pytest.approx(24 * compute) and enough["LRU"] < half["LRU"]


def test_compression_and_memory_help(qwen):
    steps = qwen.steps("1/rank", 1, 0)
    times = [qwen.best(round(gb * 1e9), "1/rank", steps)[1] for gb in (5, 16)]
    assert times[1] < times[0] < qwen.rivals(5 * 10**9, steps, 1)["LRU"]
    f = zipmoe.inclusion_of_ranks(20, 4)
    assert np.isclose(f.sum(), 4) and f.max() <= 1 and (np.diff(f) <= 0).all()
    found = zipmoe.caching(qwen, (4, 12), *zipmoe.stretched(f, qwen.spec, 2, 0))
    assert all(of[12] < of[4] for of in found.values())
    assert found["planned, ZipMoE's rule"][4] < found["uncompressed, LRU"][4]


def test_a_trace_is_played_as_it_was_recorded(qwen):
    trace = routing_of(qwen.spec)[0].trace(qwen.spec, [6])
    f, steps, timed = zipmoe.traced(trace, 2)
    assert len(f) == qwen.spec.E and np.isclose(f.sum(), qwen.spec.K) and timed == 2
    assert [[*of] for step in steps for _, of in step] == trace.ids.flatten(0, 1).tolist()
    assert zipmoe.traced(trace, 50)[2] == 3


def test_bounds_are_over_all_rows_and_claims_name_what_is_there(monkeypatch):
    few = {"BOARDS": {"jetson-agx-orin-32gb": 10}, "READINGS": zipmoe.READINGS[:1], "FILLED": 1}
    few |= {"MODELS": ("Qwen1.5-MoE-A2.7B", "Switch-Large-128"), "BATCHES": (1, 4)}
    for name, value in few.items():
        monkeypatch.setattr(zipmoe, name, value)
    found = zipmoe.run(prompt=16)
    *tables, bounds = found.values()
    for what, rows in zip(("TPOT", "TTFT", "throughput"), tables):
        for kind, is_switch in (("decoders", False), ("encoder-decoder", True)):
            values = [
                value
                for name, row in rows.items()
                for column, value in row.items()
                if name.startswith("Switch") == is_switch and column[0] in "l÷"
            ]
            assert bounds[f"{what}, {kind}"] == {"least": min(values), "most": max(values)}
    alone = {name.removesuffix(", batch 1"): of for name, of in tables[2].items()}
    for name, row in tables[0].items():  # one sequence's throughput is the inverse of TPOT
        assert alone[name]["tokens a second"] == pytest.approx(1e3 / row["ms"])
        assert alone[name]["÷ LRU"] == pytest.approx(1 / (1 - row["less than LRU"]))
    for _, *names in [claim.metric for claim in load() if claim.metric[:1] == ("bench zipmoe",)]:
        for name in names:
            section, row, column = name.split(" | ")
            assert column in found[section][row], name
