"""ZipMoE's models on its boards, simulated: rivals by hand, orders that must hold, and what its
claims ask for."""

import numpy as np
import pytest

from moelab.bench import zipmoe
from moelab.cards import load_device, load_model
from moelab.claims import load

BOARD = load_device("jetson-agx-orin-32gb")


@pytest.fixture(scope="module")
def qwen():
    return zipmoe.Machine.of("Qwen1.5-MoE-A2.7B", BOARD, 1.2)


def test_the_popularity_is_one_of_k_experts():
    f = zipmoe.inclusion_of_ranks(128, 8)
    assert np.isclose(f.sum(), 8) and f.max() <= 1 and (np.diff(f) <= 0).all()


def test_rivals_read_what_they_must(qwen):
    """On demand and streaming by their bytes; with all experts in memory nobody but the latter
    reads."""
    spec, steps = load_model("Qwen1.5-MoE-A2.7B"), qwen.steps("alike", 1, 0)
    read = spec.expert_bytes / 3.5e9
    busy = 2 * (14.3e9 - spec.L * spec.E * spec.expert_params) / spec.L
    compute = (
        busy / 204.8e9
        + busy / 27e12
        + 4 * (spec.expert_bytes / 204.8e9 + 2 * spec.expert_params / 27e12)
    )
    half = qwen.rivals(spec.experts_bytes // 2, steps, 1, 6)
    pools = (spec.experts_bytes // 2 - 8 * spec.expert_bytes) // spec.expert_bytes
    assert half["on demand"] == pytest.approx(24 * (compute + 4 * (1 - pools / 1440) * read))
    assert half["streamed"] == pytest.approx(24 * 60 * read)
    enough = qwen.rivals(spec.experts_bytes + 8 * spec.expert_bytes, steps, 1, 6)
    assert enough["on demand"] == pytest.approx(24 * compute) and enough["LRU"] < half["LRU"]
    assert tuple(half) == zipmoe.RIVALS


def test_compression_and_memory_help(qwen):
    steps = qwen.steps("1/rank", 1, 0)
    times = [qwen.best(round(gb * 1e9), "1/rank", steps, 6)[1] for gb in (5, 16)]
    assert times[1] < times[0] < qwen.rivals(5 * 10**9, steps, 1, 6)["LRU"]


def test_threads_cross_where_fig_4_does():
    """The rate of a thread was taken from there, so this is arithmetic: 3.5 GB/s over 1.2."""
    rows = zipmoe.threads(1.2)
    for row in rows.values():
        assert row["decompression ÷ read, 2 threads"] == pytest.approx(3.5 / 2.4) and row[
            "decompression ÷ read, 3 threads"
        ] == pytest.approx(3.5 / 3.6)
        assert row["a miss ÷ uncompressed, 6 threads"] <= row["a miss ÷ uncompressed, 1 threads"]


def test_bounds_are_over_all_rows_and_claims_name_what_is_there(monkeypatch):
    monkeypatch.setattr(zipmoe, "BOARDS", {"jetson-agx-orin-32gb": 10})
    monkeypatch.setattr(zipmoe, "READINGS", zipmoe.READINGS[:1])
    monkeypatch.setattr(zipmoe, "FILLED", 1)
    monkeypatch.setattr(zipmoe, "TIMED", 2)
    monkeypatch.setattr(zipmoe, "MODELS", ("Qwen1.5-MoE-A2.7B", "Switch-Large-128"))
    monkeypatch.setattr(zipmoe, "BATCHES", (1, 4))
    found = zipmoe.run(prompt=16)
    bounds = found["least and most over all of them (simulated)"]
    for what, rows, names in (
        ("TPOT", "TPOT (simulated)", [f"less than {r}" for r in zipmoe.RIVALS]),
        ("throughput", "throughput (simulated)", [f"÷ {r}" for r in zipmoe.RIVALS]),
    ):
        for kind, is_switch in (("decoders", False), ("encoder-decoder", True)):
            values = [
                row[n]
                for name, row in found[rows].items()
                if name.startswith("Switch") == is_switch
                for n in names
            ]
            assert bounds[f"{what}, {kind}"] == {"least": min(values), "most": max(values)}
    for _, *names in [claim.metric for claim in load() if claim.metric[:1] == ("bench zipmoe",)]:
        for name in names:
            section, row, column = name.split(" | ")
            assert column in found[section][row], name
