"""A model that is larger than the machine: the whole geometry of Qwen3-30B-A3B, lossless and in four bits.

One store after another is synthesized, since few disks hold all of them, and opened in processes of its own with the
same memory for experts, loading on demand and prefetching in turn; the limit is that of `moelab.bench.engine`. Tokens
are random and given and weights are synthetic, so the hit rate is this model's own: in deep synthetic models tokens
agree more about their experts than in trained ones. The next layer's router on this layer's router input predicts.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moelab.arguments import number, one_of, several, whole
from moelab.bench.engine import against_limit
from moelab.bench.harness import EngineBenchmark
from moelab.bench.measure import load_average
from moelab.cards import load_model
from moelab.models.synthesize import scaled, synthesize
from moelab.specs import MoESpec
from moelab.store import codecs, fewbit

STORED = ("bf12", "huffman", "int4")


def run(model: str | MoESpec = "Qwen3-30B-A3B", stored: Iterable[str] = STORED, memory: str = "14GB",
        folder: str | None = None, scale: float = 1.0, rounds: int = 1, prompt: int = 128, decode: int = 32,
        executor: str = "fast") -> dict[str, dict[str, Any]]:
    import psutil
    spec = scaled(load_model(model) if isinstance(model, str) else model, scale)
    load, rows, limits = load_average(), {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        bench = EngineBenchmark(spec, Path(folder or temporary).expanduser().resolve(), prompt, decode, rounds, {},
                                reference={"result": "the model does not fit"})
        for name in stored:
            if new := not (bench.folder / name).exists():
                synthesize(bench.folder / name, model, scale,
                           **{"quantize" if name in fewbit.FORMATS else "codec": name})
            arms = {name: bench.moelab(name, memory, executor=executor),
                    f"{name}, prefetching": bench.moelab(name, memory, executor=executor, predictor="router",
                                                         ahead=spec.K)}
            found, reports = bench.compare(name, arms, name)
            rows |= found
            limits |= {arm: against_limit(reports[arm]) | {"other weights GB": reports[arm][0]["others_bytes"] / 1e9,
                                                           "budget GB": reports[arm][0]["budget_bytes"] / 1e9}
                       for arm in arms if "result" not in reports[arm][-1]}
            if new and folder is None:
                shutil.rmtree(bench.folder / name)
    conditions = {"model": f"{spec.name}, {spec.num_layers} layers, synthetic", "experts in bf16 GB":
                  spec.experts_bytes / 1e9, "memory GB": psutil.virtual_memory().total / 1e9, "executor": executor,
                  "tokens": f"random and given; prompts of {prompt}, then {decode} more, batch 1", "rounds": rounds,
                  "load average before": load}
    return {"conditions": conditions, f"{memory} of experts in memory": rows, "against the limit": limits,
            "samples": bench.samples}


OPTIONS = {
    "model": (None, "a model card"), "memory": (None, "for experts"),
    "stored": (several(one_of([*codecs.CODECS, *fewbit.FORMATS])), "codecs and formats"),
    "scale": (number(above=0, most=1), "part of the layers"),
    "folder": (None, "where the stores are kept, 110 GB, for the next time; else one at a time is there"),
    "rounds": (whole(1), "processes an arm"), "prompt": (whole(1), "tokens of a prompt"),
    "decode": (whole(1), "tokens after it"), "executor": (None, "that computes")}
