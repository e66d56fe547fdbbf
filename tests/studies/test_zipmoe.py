"""ZipMoE's models on its boards, simulated: rivals by hand, orders that must hold, and what its
claims ask for."""

import numpy as np
import pytest
import torch

from moelab import convert
from moelab.bench.synthesize import synthesize
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.cards import load_model
from moelab.claims import ledger
from moelab.simulation.routing import routing_of
from moelab.trace import PREFILL
from notebooks.studies import gpu, zipmoe
from tests.offloading.links import Delayed
from tests.studies.test_gpu import SPEC


@pytest.fixture(scope="module")
def qwen():
    return zipmoe.Machine.of("Qwen1.5-MoE-A2.7B", "jetson-agx-orin-32gb", 1.2, 6)


def test_rivals_read_what_they_must(qwen):
    """On demand and streaming by their bytes; with all experts in memory only the latter reads."""
    spec, steps = load_model("Qwen1.5-MoE-A2.7B"), qwen.routed("1/rank, drawn", 1, 0)[1][:4]
    read = spec.expert_bytes / 3.5e9
    busy = 2 * (14.3e9 - spec.L * spec.E * spec.expert_params) / spec.L
    expert = spec.expert_bytes / 204.8e9 + 2 * spec.expert_params / 27e12
    compute = busy / 204.8e9 + busy / 27e12 + 4 * expert
    half = qwen.without_cache(Pools(F=700), steps, 1)
    assert half["on demand"] == pytest.approx(24 * (compute + 4 * (1 - 700 / 1440) * read))
    assert half["streamed"] == pytest.approx(24 * 60 * read)
    enough = qwen.without_cache(Pools(F=1440), steps, 1)
    assert enough["on demand"] == pytest.approx(24 * compute)


def test_a_cache_is_filled_until_its_hit_rate_stands_still():
    """Two experts in turn are all there after two steps; one that comes in an eighth more of each
    window of 64 does so in all of the ninth."""
    turns = [[(0, {n % 2: 1})] for n in range(900)]
    cache = Residency(1, 9, Pools(F=4), "lru")
    assert zipmoe.fill([cache], turns) == 5 * zipmoe.WINDOW and cache.counters.hit_rate() == 1
    growing = [[(0, {0 if n % 64 < n // 64 * 8 else n: 1})] for n in range(900)]
    assert zipmoe.fill([Residency(1, 900, Pools(F=4), "lru")], growing) == 12 * zipmoe.WINDOW
    assert zipmoe.fill([cache], turns[:100]) == 100


@pytest.mark.parametrize("routing", ["as fitted", "1/rank, drawn"])
def test_lanes_are_texts_of_their_own_and_a_plan_has_seen_others(qwen, routing, monkeypatch):
    monkeypatch.setattr(zipmoe, "MOST", 8)
    monkeypatch.setattr(zipmoe, "WINDOW", 2)
    f, steps = qwen.routed(routing, 3, 0)
    assert np.isclose(f.sum(), 4) and (np.diff(f) <= 0).all() and len(steps) == 2 + zipmoe.TIMED
    for step in steps:
        assert [layer for layer, _ in step] == [*range(24)]
        assert all(sum(of.values()) == 12 and max(of.values()) <= 3 for _, of in step)


def test_plans_in_the_stationary_state(monkeypatch):
    """At 20 GB, popularity 1/rank: below 50 and 82 ms a token, and Algorithm 3 plans no better."""
    monkeypatch.setattr(zipmoe, "MOST", 320)
    for model, most in (("Qwen1.5-MoE-A2.7B", 0.050), ("DeepSeek-V2-Lite", 0.082)):
        board = zipmoe.Machine.of(model, "jetson-agx-orin-64gb", 1.2, 6)
        f, steps = board.routed("1/rank, drawn", 1, 0)
        ways = board.ways(f, 20 * 10**9)
        took, _ = board.stationary({n: ways[n] for n in ("planned", "by Algorithm 3")}, steps)
        assert took["planned"] <= min(most, took["by Algorithm 3"])


def test_compression_and_memory_help(qwen):
    f = zipmoe.inclusion_of_ranks(20, 4)
    assert np.isclose(f.sum(), 4) and f.max() <= 1 and (np.diff(f) <= 0).all()
    found = zipmoe.caching(qwen, (4, 12), *zipmoe.stretched(f, qwen.spec, 2, 0))
    assert all(of[12] < of[4] for of in found.values())
    assert found["planned, ZipMoE's rule"][4] < found["uncompressed, LRU"][4]


def test_prompts_are_as_long_as_a_file_or_a_trace_says(qwen, tmp_path):
    (tmp_path / "lengths").write_text("7\n31\n")
    assert zipmoe.Prompts(str(tmp_path / "lengths")).lengths == [7, 31]
    trace = routing_of(qwen.spec)[0].trace(qwen.spec, [6, 9])
    trace.phase[:5] = PREFILL
    trace.phase[6:10] = PREFILL
    trace.save(tmp_path / "trace.safetensors")
    assert zipmoe.Prompts(str(tmp_path / "trace.safetensors")).lengths == [5, 4]
    (tmp_path / "none").write_text("0")
    with pytest.raises(ValueError, match="no lengths"):
        zipmoe.Prompts(str(tmp_path / "none"))


def test_the_papers_iteration_converges_to_the_same():
    f = np.array([0.9, 0.6, 0.3, 0.2])
    rounds, error = zipmoe.ipf(f, 2)
    assert 5 < rounds < 300 and error < 1e-9


def test_a_trace_is_played_as_it_was_recorded(qwen):
    trace = routing_of(qwen.spec)[0].trace(qwen.spec, [6])
    f, steps, timed = zipmoe.traced(trace, 2)
    assert len(f) == qwen.spec.E and np.isclose(f.sum(), qwen.spec.K) and timed == 2
    assert [[*of] for step in steps for _, of in step] == trace.ids.flatten(0, 1).tolist()
    assert zipmoe.traced(trace, 50)[2] == 3


def test_bounds_are_over_all_rows_and_claims_name_what_is_there(monkeypatch):
    few = {"BOARDS": {"jetson-agx-orin-32gb": 10}, "READINGS": zipmoe.READINGS[:1], "SEEDS": 2}
    few |= {"BUDGETS": {"jetson-agx-orin-32gb": (10,)}, "MOST": 8, "WINDOW": 2, "TEXT": 32}
    few |= {"MODELS": ("Qwen1.5-MoE-A2.7B", "Switch-Large-128"), "BATCHES": (1, 4), "TIMED": 4}
    for name, value in few.items():
        monkeypatch.setattr(zipmoe, name, value)
    found = zipmoe.run(prompt=16)
    *tables, _, _, bounds, _ = found.values()
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
        pace = [1e3 / ms for ms in row["ms"]]
        assert alone[name]["tokens a second"] == pytest.approx(pace) and len(pace) == 2
        assert alone[name]["÷ LRU"] == pytest.approx(1 / (1 - row["less than LRU"]))
    for _, *names in [claim.metric for claim in ledger() if claim.metric[:1] == ("bench zipmoe",)]:
        for name in names:
            section, row, column = name.split(" | ")
            assert column in found[section][row], name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it runs")
def test_recovery_on_a_gpu_is_measured_on_one_only(tmp_path):
    with pytest.raises(ValueError, match="CUDA GPU"):
        zipmoe.run(store=str(tmp_path))


def test_recovery_is_timed_end_to_end(monkeypatch, tmp_path):
    def opened(folder, device=None, of=gpu.open_model, **options):
        return of(folder, **options)

    monkeypatch.setattr(gpu, "open_model", opened)
    monkeypatch.setattr("moelab.offloading.offload.link_to", Delayed)
    monkeypatch.setattr(zipmoe, "DECODED", 4)
    monkeypatch.setattr(zipmoe, "ROUNDS", 1)
    synthesize(tmp_path / "model", SPEC)
    convert(tmp_path / "model", tmp_path / "store", codec="huffman")
    rows = zipmoe.on_gpu(tmp_path / "store", torch.device("cpu"), 8, 2)
    assert len(rows) == 4
    for row in rows.values():
        assert row["TPOT ms"] > 0 < row["TTFT ms"]
        assert {f"overlap of {what}" for what in ("link", "gpu", "worker")} <= row.keys()
