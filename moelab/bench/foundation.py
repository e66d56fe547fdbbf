"""Memory of opening a checkpoint without its experts, slowdown by recording, and time of saving a trace."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

import moelab
from moelab.bench.external_engines import write_unstacked
from moelab.bench.measure import in_process, seconds
from moelab.models.synthesize import synthesize
from moelab.specs import MoESpec
from moelab.trace import RoutingTrace

OPEN = """
import json, sys, time
import moelab.opening, torch, transformers
from moelab.offloading.metrics import process
base, start = process()["peak_rss_bytes"], time.perf_counter()
model = moelab.open_model(sys.argv[1], experts=sys.argv[2])
print(json.dumps({"peak": process()["peak_rss_bytes"], "imports": base, "seconds": time.perf_counter() - start}))
"""


def write_checkpoint(folder: Path, size: float = 2e9) -> int:
    """A synthetic Qwen3-MoE checkpoint of about `size` bytes, one file a layer, as the hub lays it out; its bytes."""
    E, H, I = 32, 1024, 1024
    layers = max(1, round(size / (E * 3 * H * I * 2)))
    spec = MoESpec("foundation", "qwen3_moe", layers, tuple(range(layers)), E, 4, H, I, vocab=4096, heads=8, kv_heads=2,
                   head_dim=128)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        write_unstacked(synthesize(Path(temporary) / "stacked", spec), folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def opening() -> dict[str, float]:
    """Peak memory (bytes) and seconds of opening a 2 GB checkpoint in the hub's layout, external and resident."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        result = {"checkpoint bytes": float(write_checkpoint(folder))}
        for experts in ("external", "resident"):
            found = in_process(OPEN, folder, experts)
            result |= {f"{experts} peak bytes": found["peak"], f"{experts} seconds": found["seconds"],
                       "imports alone bytes": found["imports"]}
    return result


def recording() -> dict[str, float]:
    """Seconds of a plain forward pass of the small model and of the same under `record`, interleaved medians."""
    model = moelab.open_model()
    ids = torch.randint(1, model.config.vocab_size, (8, 256), generator=torch.Generator().manual_seed(0))
    mask, rows = torch.ones_like(ids), ids.tolist()

    @torch.no_grad()
    def forward() -> None:
        model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    times = [(seconds(forward), seconds(lambda: moelab.record(model, rows, batch_size=len(rows))))
             for _ in range(12)][1:]                                # the first round warms up
    plain, recorded = zip(*times)
    ratios = [r / p for p, r in times]
    return {"forward seconds": median(plain), "record seconds": median(recorded),
            "record ÷ forward": median(ratios), "record ÷ forward, worst": max(ratios)}


def saving() -> dict[str, float]:
    """Median seconds of saving and of loading a trace of 100,000 tokens, and its bytes."""
    T, L, E, K = 100_000, 48, 128, 8
    generator, column = torch.Generator().manual_seed(0), torch.arange(T, dtype=torch.int32)
    trace = RoutingTrace(
        ids=torch.randint(0, E, (T, L, K), generator=generator, dtype=torch.int16),
        weights=torch.rand((T, L, K), generator=generator), phase=(column % 2).to(torch.uint8), sequence=column // 512,
        position=column % 512, tokens=column, spec=MoESpec("bench", "bench", L, tuple(range(L)), E, K, 8, 8),
        model_id="0" * 16)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.safetensors"
        # a loaded trace is mapped: counting touches every page
        times = [(seconds(trace.save, path), seconds(lambda: RoutingTrace.load(path).counts())) for _ in range(3)]
        saves, loads = zip(*times)
        return {"trace bytes": float(path.stat().st_size), "save seconds": median(saves), "load seconds": median(loads)}


def run() -> dict[str, Any]:
    return {"opening": opening(), "recording": recording(), "trace": saving()}
