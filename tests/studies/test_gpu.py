"""The bench of a GPU as far as a CPU goes: its sections, of a small model, without a link."""

import pytest
import torch

from moelab.base.specs import DeviceSpec, Figure, MoESpec
from notebooks.studies import gpu
from notebooks.studies.grid import Experiment

SPEC = MoESpec(
    "small", "qwen3_moe", 2, (0, 1), 8, 2, 128, 128, vocab=128, heads=4, kv_heads=2, head_dim=32
)
CPU = torch.device("cpu")
RATES = {"memory_bandwidth": 3000, "link_bandwidth": 50, "host_memory_bandwidth": 60}
AT = DeviceSpec(
    "a GPU",
    {f"{name}_gbs": Figure(rate, "GB/s", "assumed", "") for name, rate in RATES.items()}
    | {"bf16_tflops": Figure(900, "TFLOPS", "assumed", "")},
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = Experiment(SPEC, tmp_path_factory.mktemp("gpu"), 16, 4, 1, routing="uniform", here=True)
    made.prepare(("raw", "bf12", "int4"))
    return made


@pytest.fixture(autouse=True)
def opened_on_a_cpu(monkeypatch):
    def opened(folder, device=None, of=gpu.open_model, **options):
        return of(folder, **options)

    monkeypatch.setattr(gpu, "open_model", opened)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it runs")
def test_it_needs_a_gpu():
    with pytest.raises(ValueError, match="CUDA GPU"):
        gpu.run()


def test_the_bound_is_hits_by_the_gpu_and_the_better_split_of_misses():
    best = min(max(part * 8 / 50, (1 - part) * 8 / 60) for part in torch.linspace(0, 1, 9999))
    assert gpu.bound(AT, 6e9, 8e9, True) == pytest.approx(2e-3 + float(best), rel=1e-3)
    assert gpu.bound(AT, 6e9, 8e9, False) == pytest.approx(2e-3 + 8 / 50)


def test_all_in_memory(bench):
    rows = gpu.resident(bench, CPU, ("raw", "int4"))
    assert list(rows) == ["eager", "exact, raw", "fast, raw", "fast, int4"]
    assert all(row["TPOT ms"] > 0 < row["TTFT ms"] for row in rows.values())
    assert rows["fast, raw"]["÷ raw"] == 1


def test_every_way_with_a_part_in_memory(bench, monkeypatch):
    monkeypatch.setitem(gpu.WAYS, "split", ({"hybrid": 1, "ahead": 0}, {"executor": "fast"}))
    rows = gpu.offloaded(bench, CPU, 0.4, list(gpu.WAYS), AT)
    assert len(rows) == 2 * len(gpu.WAYS)
    assert all(row["TPOT ms"] > 0 < row["÷ bound"] for row in rows.values())
    raw, packed = (rows[f"{form}, exact, 40% on the GPU"] for form in ("raw", "bf12"))
    assert 0 < raw["hit rate"] <= packed["hit rate"]  # which holds more in the same memory
    assert raw["MB copied"] > packed["MB copied"] > 0


def test_speculation_beside_eq_1(bench):
    (row,) = gpu.contexts(bench, CPU, (8,), AT).values()
    assert row["saved, low"] <= row["saved"] <= row["saved, high"] < 1
    assert 0 < row["largest saving by Eq. (1)"] <= 0.5
