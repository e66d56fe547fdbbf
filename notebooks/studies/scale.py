"""A model that is larger than the machine: the whole geometry of Qwen3-30B-A3B, lossless and in
four bits.

One store after another is synthesized, since few disks hold all of them, and opened in a process of
its own with the same memory for experts, on demand and with prefetching in turn
(`grid`, which has the limits, too). Tokens are given and routed as fitted to a
real trace; with uniform routing the hit rate is that of random routers. The next layer's router on this layer's router input predicts.

Forms may be measured at different times, as each takes long: rows of others stay in the file."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from moelab.base.arguments import number, one_of, several, whole
from moelab.base.records import Records
from moelab.base.specs import MoESpec
from moelab.bench.synthesize import scaled, synthesize
from moelab.cards import load_model
from moelab.store import codecs, fewbit

from .grid import ROUTING, Experiment, Tables, measured
from .timing import ENGINE, working


def run(
    model: str | MoESpec = "Qwen3-30B-A3B",
    stored: Iterable[str] = ("bf12", "huffman", "int4"),
    memory: str = "14GB",
    folder: str | None = None,
    scale: float = 1.0,
    rounds: int = 1,
    prompt: int = 128,
    decode: int = 32,
    executor: str = "fast",
    routing: str = "fitted",
    here: bool = False,
) -> Records:
    import psutil

    spec = scaled(load_model(model) if isinstance(model, str) else model, scale)
    conditions = {
        "model": f"{spec.name}, {spec.num_layers} layers, synthetic",
        "experts in bf16 GB": spec.experts_bytes / 1e9,
        "memory GB": psutil.virtual_memory().total / 1e9,
        "executor": executor,
        "rounds": rounds,
    }
    none = {"result": "the model does not fit"}
    with working(folder) as place:
        bench = Experiment(
            spec, place, prompt, decode, rounds, reference=none, routing=routing, here=here
        )
        told = f"given; {bench.routed}; prompts of {prompt}, then {decode} more, batch 1"
        conditions["tokens"] = told

        def tables() -> Tables:
            for form in stored:
                if new := not (place / form).exists():
                    how = {"quantize" if form in fewbit.FORMATS else "codec": form}
                    synthesize(place / form, spec, routing=bench.wanted(), **how)
                bench.tokens = [bench.sequence(place / form)]
                ahead = {"options": {"predictor": "router"}}
                arms = {
                    form: bench.moelab(form, memory, executor=executor),
                    f"{form}, prefetching": bench.moelab(form, memory, executor=executor, **ahead),
                }
                yield f"{memory} of experts in memory", bench, form, arms
                if new and folder is None:
                    shutil.rmtree(place / form)

        return measured(tables(), conditions)


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
    "routing": ROUTING,
}
