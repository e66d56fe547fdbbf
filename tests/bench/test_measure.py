"""A limit that is beaten is no limit: its share is said in words, and no aim that hangs on it is
met."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

from moelab.bench import engine, experts, harness, measure, peers
from moelab.offloading.slots import Slots
from moelab.specs import Event


@pytest.mark.parametrize("reached", [0.0, 0.5, 1.0, 1 + measure.TOLERANCE])
def test_a_share_within_the_limit_is_a_number(reached):
    assert measure.share(reached) == reached


@pytest.mark.parametrize("reached", [1.06, 1.2, 2.2])
def test_a_limit_that_is_beaten_is_said_to_be_invalid(reached):
    for found in (measure.share(reached), measure.multiple(1.0, reached)):
        assert found.startswith("limit invalid") and f"{reached:.2f}" in found
        assert not measure.aim(found, 0.8)["met"] and not measure.aim(found, 1.2, below=True)["met"]
    assert (
        measure.multiple(3.0, 2.0) == 1.5
        and measure.aim(1.5, 1.2)["met"]
        and not measure.aim(1.5, 1.2, below=True)["met"]
    )


def test_no_table_has_a_share_above_1():
    samples = {"transformers a": [4.0] * 3, "fast": [0.5] * 3}
    rows = experts.ExpertTimes(samples, read=8e9, flops=1e9, bandwidth=8e9, rate=1e9).rows()
    assert (
        rows["fast"]["of bandwidth"].startswith("limit invalid")
        and rows["transformers a"]["of roofline"] == 0.25
    )
    assert experts.ExpertTimes({"gemv": [0.5]}, 1e9, 0, 1e9, 1e9).reached.startswith(
        "limit invalid"
    )
    assert experts.ExpertTimes({"gemv": [2.0]}, 1e9, 0, 1e9, 1e9).reached == 0.5
    json.dumps(
        experts._aims(
            "bf16",
            "decode",
            rows | {**dict.fromkeys(experts.PACKED, rows["fast"]), "gemv": rows["fast"]},
        )
    )


def test_neighbours_in_a_round_compute_other_steps_each_after_another_one():
    calls = []
    arms = {name: lambda i, name=name: calls.append((name, i)) for name in "abcd"}
    samples = experts.rounds_of(arms, 9, "")
    assert calls[:4] == [(name, 0) for name in "abcd"] and all(
        len(of) == 8 for of in samples.values()
    )
    pairs = [(calls[i], calls[i + 1]) for i in range(4, len(calls), 2)]
    assert all(
        warm[0] == timed[0] and warm[1] != timed[1] and 0 not in (warm[1], timed[1])
        for warm, timed in pairs
    )
    timed = [counted for _, counted in pairs]
    assert all(a[1] != b[1] for a, b in zip(timed, timed[1:]) if a[0] != b[0])
    assert all(sorted(i for n, i in timed if n == name) == list(range(1, 9)) for name in "abcd")


@torch.inference_mode()
def test_limits_read_what_there_is_and_the_best_round_of_the_best_arm_counts(monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    layers = experts.Layers(4, 2, 64, 32, torch.bfloat16, 1e5)
    words = layers.stock[1].gate_up_proj.view(-1).view(torch.int64)
    loops = experts._loops()
    assert {int(loop(words.numpy())) for loop in loops.values()} == {
        int(words.sum())
    }  # every word, once
    monkeypatch.setattr(experts.Limits, "SQUARES", (16,))
    with ThreadPoolExecutor(2) as pool:
        limits = experts.Limits(layers, pool)
        assert {name.rpartition(", ")[2] for name in limits.products} == {"bfloat16", "float32"}
        samples = {name: [3.0, 2.0] for name in limits.arms}
        samples["memory, plain loop"] = [4.0, 1.0]
        samples["product 16 × 16 × 16, bfloat16"] = [5.0, 1e-6]
        bandwidth, rate = limits.best(samples)
        assert bandwidth == limits.nbytes == words.numel() * 8 and rate == pytest.approx(
            2 * 16**3 / 1e-6
        )
        for _name, arm in limits.arms.items():
            arm(1)


def test_the_rate_of_a_run_is_the_best_forwards():
    def read(start, end, nbytes, kind="read"):
        return Event("disk", kind, 0, 0, start, end, nbytes)

    events = [
        read(0, 1, 5),
        read(2, 3, 6),
        read(3, 4, 8, "read E"),
        Event("compute", "expert", 0, 0, 2, 9, 99),
    ]
    assert peers.delivered(
        events, [(0, 2, 1, "decode"), (2, 5, 1, "decode"), (5, 9, 1, "decode")]
    ) == {"during": 7.0}
    assert peers.delivered([], [(0, 1, 1, "decode")]) == {}


def test_reading_is_tried_at_several_depths_and_the_best_counts(tmp_path, monkeypatch):
    """A disk that answers four requests in the time of one: the rate is that of four at a time.
    Where the engine's experts lie, nothing is read."""
    from moelab.store import reader

    asked, at_once, now, times, into = [], [], set(), [], set()

    def slow(self, piece):
        asked.append((piece.of.layer, piece.of.expert))
        into.add(piece.of.data.ctypes.data)
        now.add(asked[-1])
        at_once.append(len(now))
        times.append(time.perf_counter())
        time.sleep(0.05)
        times.append(time.perf_counter())
        now.discard((piece.of.layer, piece.of.expert))

    store = reader_store(tmp_path)
    monkeypatch.setattr(reader.Reader, "fill", slow)
    slots = Slots(store, {"full": 9, "e": 0, "sm": 0})
    engine = SimpleNamespace(
        pipeline=SimpleNamespace(
            slots=slots,
            queue=SimpleNamespace(free={"full": [1, 2, 3, 5, 8]}),
            reader=reader.Reader(store, "buffered"),
        )
    )
    of = SimpleNamespace(
        options={"probe": 16}, offloading=SimpleNamespace(store=store, engine=engine)
    )
    rate = peers.Moelab.read_rate(of)
    assert into == {slots.bytes("full", slot).ctypes.data for slot in (1, 2, 3, 5, 8)}
    size = len(reader.Reader(store, "buffered").buffer())
    assert 16 * len(peers.DEPTHS) == len(asked) and len(set(asked)) == 16
    assert at_once[:16] == [1] * 16 and max(at_once) == max(peers.DEPTHS)
    one_by_one = 16 * size / (times[31] - times[0])
    assert 1.2 * one_by_one < rate < 4.2 * size / 0.05


def reader_store(tmp_path):
    from moelab.bench.reading import write_store

    return write_store(tmp_path / "store", [torch.zeros(8, 64, dtype=torch.bfloat16)] * 16, "raw")


def test_the_engines_limit_is_never_beaten_in_numbers(tmp_path):
    class Told(harness.EngineBenchmark):
        def report(self, arm, decode=None):
            return {
                "tpot_s": [0.1] * 3,
                "ttft_s": [1.0, 0.5],
                "on_demand_s": 0.2,
                "read_rate": 2e9,
                "experts_bytes": 4e9,
                "stored_fraction": 0.7,
                "limit": "",
                "digest": "",
                "best": [],
                "decode_read_bytes": 1,
                "decode_major_faults": 1,
                "decode_hit_rate": 0.5,
                "peak_rss_bytes": 1,
                "load_s": 1.0,
            }

    made = Told(engine.SPEC, tmp_path, 5, 3, 2, {})
    rows = engine.limit(made)["against the limit"]
    assert all(row["÷ limit"].startswith("limit invalid") for row in rows.values())
    assert not made.aims["raw, 50%: TPOT ÷ on-demand limit"]["met"]
