"""A model that is larger than the machine: the whole geometry of Qwen3-30B-A3B, lossless and in
four bits.

One store after another is synthesized, since few disks hold all of them, and opened in a process of
its own with the same memory for experts; the limit is that of `moelab.bench.engine`. Then one model
takes its tokens on demand and with prefetching in turn, as in `moelab.bench.prefetch`: two
processes would rather compare the machine's moods. Tokens are random and given and weights are
synthetic, so the hit rate is this model's own: in deep synthetic models tokens agree more about
their experts than in trained ones. The next layer's router on this layer's router input predicts.

Arms may be measured at different times, as each takes long: rows of others stay in the file."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from moelab.api import open_model
from moelab.arguments import number, one_of, several, whole
from moelab.bench import ENGINE
from moelab.bench.grid import Experiment, against_limit
from moelab.bench.measure import working
from moelab.bench.prefetch import PrefetchBenchmark, row
from moelab.bench.synthesize import scaled, synthesize
from moelab.cards import load_model
from moelab.records import Numbers, Records
from moelab.registry import make
from moelab.specs import MoESpec
from moelab.store import codecs, fewbit
from moelab.store.layout import ExpertStore

STORED = ("bf12", "huffman", "int4")
ARMS = ("on demand", "hint")


def run(
    model: str | MoESpec = "Qwen3-30B-A3B",
    stored: Iterable[str] = STORED,
    memory: str = "14GB",
    folder: str | None = None,
    scale: float = 1.0,
    rounds: int = 1,
    prompt: int = 128,
    decode: int = 32,
    executor: str = "fast",
) -> Records:
    import psutil

    spec = scaled(load_model(model) if isinstance(model, str) else model, scale)
    stored = list(stored)
    conditions = {
        "model": f"{spec.name}, {spec.num_layers} layers, synthetic",
        "experts in bf16 GB": spec.experts_bytes / 1e9,
        "memory GB": psutil.virtual_memory().total / 1e9,
        "executor": executor,
        "tokens": f"random and given; prompts of {prompt}, then {decode} more, batch 1",
        "rounds": rounds,
    }
    title = f"{memory} of experts in memory"
    rows = {}
    limits = {}
    turns = {}
    with working(folder) as place:
        bench = Experiment(
            spec, place, prompt, decode, rounds, {}, reference={"result": "the model does not fit"}
        )
        for name in stored:
            if new := not (bench.folder / name).exists():
                form = "quantize" if name in fewbit.FORMATS else "codec"
                synthesize(bench.folder / name, model, scale, **{form: name})
            found, reports = bench.compare(
                name, {name: bench.moelab(name, memory, executor=executor)}, name
            )
            rows[name] = found[name]
            if "result" not in (report := reports[name][-1]):
                limits[name] = against_limit(reports[name]) | {
                    "other weights GB": report["others_bytes"] / 1e9,
                    "budget GB": report["budget_bytes"] / 1e9,
                }
                turns[name] = in_turn(bench.folder / name, memory, executor, prompt, decode)
            if new and folder is None:
                shutil.rmtree(bench.folder / name)
    return {
        "conditions": conditions,
        title: rows,
        "against the limit": limits,
        "prefetching, tokens in turn": turns,
    }


def in_turn(store: Path, memory: str, executor: str, prompt: int, decode: int) -> Numbers:
    """Tokens on demand and with prefetching in turn, `decode` of each, after as many that fill the
    cache."""
    K = ExpertStore(store).spec.K
    model = open_model(store, memory=memory, executor=executor, prefetch=None, ahead=K, staging=K)
    with model.moelab:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(
            3, model.config.vocab_size, (1, prompt + 4 * decode), generator=generator
        )
        bench = PrefetchBenchmark(model, ids, partial(make, "predictor", "router", model))
        bench.begin(prompt)
        bench.turns(ARMS, decode // 2, f"{store.name}: filling the cache")
        demand, ahead = (
            row(taken) for taken in bench.turns(ARMS, decode, f"{store.name}: in turn").values()
        )
    return {
        "TPOT on demand s": demand["TPOT s"],
        "TPOT prefetching s": ahead["TPOT s"],
        "÷ on demand": ahead["TPOT s"] / demand["TPOT s"],
        "MB read on demand": demand["MB read"],
        "MB read": ahead["MB read"],
        "MB wasted": ahead["MB wasted"],
        "hidden reads": ahead["hidden reads"],
    }


MEASURES = ENGINE
OPTIONS = {
    "model": (None, "a model card"),
    "memory": (None, "for experts"),
    "stored": (several(one_of([*codecs.CODECS, *fewbit.FORMATS])), "codecs and formats"),
    "scale": (number(above=0, most=1), "part of the layers"),
    "folder": (
        None,
        "where the stores are kept, 110 GB, for the next time; else one at a time is there",
    ),
    "rounds": (whole(1), "processes an arm"),
    "prompt": (whole(1), "tokens of a prompt"),
    "decode": (whole(1), "tokens after it"),
    "executor": (None, "that computes"),
}
