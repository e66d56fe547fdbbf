"""The measurement of executors: a tiny run has every arm, its ratios are right, its arms compute
the same."""

import torch

from moelab.bench.layers import rounds_of
from notebooks.studies import experts

SIZES = {"E": 4, "K": 2, "H": 128, "I": 64}


def test_a_tiny_run_has_all_sections(monkeypatch):
    monkeypatch.setattr(experts.Limits, "SQUARE", 64)
    found = experts.run(**SIZES, tokens=6, cold=0, rounds=1)
    for title in ("bf16 prefill, 6 tokens", "bf16 decode, 1 token"):
        rows = found[title]
        assert {f"transformers {name}" for name in experts.STOCK} | {
            "exact",
            "sorted",
            "gemv",
        } <= set(rows)
        assert all(row["ms"] > 0 and row["GB/s"] > 0 for row in rows.values())
        assert any(
            row["× transformers' best"] == 1
            for name, row in rows.items()
            if name.startswith("transformers")
        )
    assert {*experts.PACKED} <= found["bf16 decode, 1 token"].keys()


@torch.inference_mode()
def test_all_arms_compute_the_same():
    layers = experts.TimedLayers(**SIZES, dtype=torch.bfloat16, cold=6e5)
    assert len(layers.stock) > 2
    for T in (1, 9):
        arms, read = layers.arms(T, 3)
        assert read <= 4 * layers.expert_bytes and (T > 1 or read == 2 * layers.expert_bytes)
        for i in range(3):
            results = {name: arm(i).float() for name, arm in arms.items()}
            expected = results["transformers eager"]
            for name, result in results.items():  # what rounds to few bits is near on the whole
                if name in experts.PACKED and not name.endswith("bf12"):
                    assert (result - expected).norm() < 0.2 * expected.norm(), name
                else:
                    assert torch.allclose(result, expected, atol=0.05), name


def test_rows_of_known_timings():
    samples = {
        "transformers a": [4.0, 8.0, 4.0],
        "transformers b": [5.0, 10.0, 5.0],
        "fast": [2.0, 4.0, 1.0],
    }
    rows = experts.ExpertTimes(samples, read=8e9, flops=1e9, bandwidth=8e9, rate=1e9).rows()
    assert (
        rows["fast"]["× transformers' best"] == 2
        and rows["transformers b"]["× transformers' best"] == 0.8
    )
    beaten = experts.ExpertTimes({"transformers a": [0.5]}, 8e9, 1e9, 8e9, 1e9).rows()
    assert beaten["transformers a"]["of bandwidth"].startswith("limit invalid")
    assert (
        rows["fast"]["GB/s"] == 4
        and rows["fast"]["of bandwidth"] == 0.5 == rows["fast"]["of roofline"]
    )


def test_neighbours_in_a_round_compute_other_steps_each_after_another_one():
    calls = []
    arms = {name: lambda i, name=name: calls.append((name, i)) for name in "abcd"}
    samples = rounds_of(arms, 9, "")
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
