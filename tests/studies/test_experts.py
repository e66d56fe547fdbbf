"""The measurement of executors: a tiny run has every arm, its ratios are right, its arms compute
the same."""

import torch

from notebooks.studies import experts
from notebooks.studies.layers import rounds_of

SIZES = {"E": 4, "K": 2, "H": 128, "I": 64}


def test_a_tiny_run_has_all_sections(monkeypatch):
    monkeypatch.setattr(experts.Limits, "SQUARE", 64)
    found = experts.run(**SIZES, tokens=6, cold=0, rounds=1)
    stock = {f"transformers {name}" for name in experts.STOCK}
    for title in ("bf16 prefill, 6 tokens", "bf16 decode, 1 token"):
        rows = found[title]
        assert stock | {"exact", "sorted", "gemv"} <= set(rows)
        assert all(row["ms"] > 0 and row["GB/s"] > 0 for row in rows.values())
        assert 1 in {rows[name]["× transformers' best"] for name in stock}
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
    samples = {"transformers a": [4.0, 8.0, 4.0], "transformers b": [5.0, 10.0, 5.0]}
    samples["fast"] = [2.0, 4.0, 1.0]
    rows = experts.ExpertTimes(samples, read=8e9, flops=1e9, bandwidth=8e9, rate=1e9).rows()
    assert rows["fast"]["× transformers' best"] == 2
    assert rows["transformers b"]["× transformers' best"] == 0.8
    assert [rows["fast"][of] for of in ("GB/s", "of bandwidth", "of roofline")] == [4, 0.5, 0.5]
    beaten = experts.ExpertTimes({"transformers a": [0.5]}, 8e9, 1e9, 8e9, 1e9).rows()
    assert beaten["transformers a"]["of bandwidth"].startswith("limit invalid")


def test_neighbours_in_a_round_compute_other_steps_each_after_another_one():
    calls = []
    arms = {name: lambda i, name=name: calls.append((name, i)) for name in "abcd"}
    samples = rounds_of(arms, 9, "")
    assert calls[:4] == [(name, 0) for name in "abcd"]
    assert all(len(of) == 8 for of in samples.values())
    timed = calls[5::2]
    for warm, counted in zip(calls[4::2], timed):
        assert warm[0] == counted[0] and warm[1] != counted[1] and 0 not in (warm[1], counted[1])
    assert all(a[1] != b[1] for a, b in zip(timed, timed[1:]) if a[0] != b[0])
    assert all(sorted(i for n, i in timed if n == name) == list(range(1, 9)) for name in "abcd")
