"""The measurement of executors: a tiny run has every arm, its ratios are right, its arms compute the same."""

from types import SimpleNamespace

import torch

from moelab.bench import experts
from moelab.experts import gemm

SIZES = {"E": 4, "K": 2, "H": 32, "I": 16}


def test_a_tiny_run_has_all_sections():
    found = experts.run(**SIZES, tokens=6, cold=0, rounds=1, dtypes=["bf16"])
    for title in ("bf16 prefill, 6 tokens", "bf16 decode, 1 token"):
        rows = found[title]
        assert {f"transformers {name}" for name in experts.STOCK} | {"exact", "sorted", "gemv"} <= set(rows)
        assert all(row["ms"] > 0 and row["GB/s"] > 0 for row in rows.values())
        assert any(row["× transformers' best"] == 1 for name, row in rows.items() if name.startswith("transformers"))
    assert experts.PLANES in found["bf16 decode, 1 token"]
    assert len(found["aims"]) == 4 and all(isinstance(row["met"], bool) for row in found["aims"].values())


@torch.inference_mode()
def test_all_arms_compute_the_same():
    layers = experts.Layers(**SIZES, dtype=torch.bfloat16, cold=1e5)
    assert len(layers.stock) > 2
    for T in (1, 9):
        arms, read = layers.arms(T, 3)
        assert read <= 4 * layers.expert_bytes and (T > 1 or read == 2 * layers.expert_bytes)
        for i in range(3):
            results = {name: arm(i).float() for name, arm in arms.items()}
            for name, result in results.items():
                assert torch.allclose(result, results["transformers eager"], atol=0.05), name


@torch.inference_mode()
def test_packing_is_no_part_of_what_is_timed(monkeypatch):
    layers = experts.Layers(**SIZES, dtype=torch.float32, cold=1e5)
    arms, _ = layers.arms(1, 6)
    arms["packed"](0)
    monkeypatch.setattr(gemm, "_OPS", SimpleNamespace(_linear_pointwise=gemm._OPS._linear_pointwise))
    for i in range(1, 6):
        arms["packed"](i)               # other layers and experts; nothing is left to pack


def test_rows_of_known_timings():
    samples = {"transformers a": [4.0, 8.0, 4.0], "transformers b": [5.0, 10.0, 5.0], "fast": [2.0, 4.0, 1.0]}
    rows = experts.table(samples, read=8_000_000_000, flops=1e9, bandwidth=8e9, peak=1e9)
    assert rows["fast"]["× transformers' best"] == 2 and rows["transformers b"]["× transformers' best"] == 0.8
    assert rows["fast"]["GB/s"] == 4 and rows["fast"]["of bandwidth"] == 0.5 == rows["fast"]["of roofline"]
