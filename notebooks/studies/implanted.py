"""Do engines see a trace's routing in a synthetic model that it was implanted into?

A Qwen3-MoE of each trace's layers, experts and experts a token (`moelab.bench.implant`), narrow where
that does not matter (H, I), is run token by token in transformers, moelab and llama.cpp, in BF16 and
in few bits. Whose experts are counted: in transformers by hooks, in llama.cpp by its own results of
each layer (`llama_routing`); the hit rate is that of an LRU of a share of all experts on these ids.
moelab's is also its engine's own count, with as many slots, beside the same LRU. "slots right" are
those of the trace's that an engine chose; "a layer early" those that the next layer's router tells
from this layer's input, for which `implant.AHEAD` was aimed at.

`moelab bench implanted --traces FOLDER` takes all .npz files that `moelab.trace.load` reads, below
the folder; none is part of the project."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moelab import open_model, record
from moelab.base.arguments import number, whole
from moelab.base.records import Numbers, Record
from moelab.bench.implant import tokens_of
from moelab.bench.memory_limit import in_process
from moelab.bench.synthesize import synthesize
from moelab.cache.pools import Pools
from moelab.models.seam import discover
from moelab.trace import DECODE, RoutingTrace, load
from moelab.trace.statistics import hits_by_capacity

from .grid import GGUF, PYTHON, WRITE_GGUF, synthetic
from .timing import ENGINE, working

#: runs in llama.cpp's interpreter
LLAMA = str(Path(__file__).with_name("llama_routing.py"))

FOLLOWED = 32  # tokens of greedy decoding


@dataclass(frozen=True)
class Local:
    """A path on this machine, of which records say the name alone."""

    path: Path

    def __str__(self) -> str:
        return self.path.name


def local(text: str) -> Local:
    """A path that exists, read from a command line."""
    if not text or not Path(text).exists():
        raise ArgumentTypeError(f"there is no {text!r}")
    return Local(Path(text).absolute())


def whole_tokens(trace: RoutingTrace, tokens: int) -> RoutingTrace:
    """The first so many tokens that skip no layer, as one sequence, decoded."""
    rows = (trace.ids < trace.spec.E).all(2).all(1)
    kept = trace.select(rows & (rows.cumsum(0) <= tokens))
    return replace(
        kept,
        phase=torch.full_like(kept.phase, DECODE),
        sequence=torch.zeros_like(kept.sequence),
    )


def lru(ids: np.ndarray, E: int, slots: int) -> float:
    """Hit rate of one LRU, cold at the start, of ids [T, L, K]."""
    keys = (ids.astype(np.int64) + E * np.arange(ids.shape[1])[:, None]).reshape(-1)
    return float(hits_by_capacity(keys, E * ids.shape[1], "lru")[slots - 1] / len(keys))


def right(found: np.ndarray, wanted: np.ndarray) -> float:
    """Share of the slots of two ids [T, L, K] that agree, in any order."""
    return float((found[..., None] == wanted[..., None, :]).any(-1).mean())


def by_moelab(model: Path, tokens: list[int], slots: int) -> tuple[float, int]:
    """(hit rate of moelab's engine with an LRU, how many slots it had), token by token."""
    with open_model(model, memory="100%", plan=Pools(F=slots), cache="lru", prefetch=None) as lm:
        with torch.inference_mode():
            from transformers import DynamicCache

            cache = DynamicCache(config=lm.config)
            for token in tokens:
                lm(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        counters = lm.moelab.residency.counters
        hits = sum(counters.hits.values())
        return hits / (hits + counters.misses), lm.moelab.residency.pools.F


def early(model: Any, trace: RoutingTrace) -> float:
    """Share of slots that a layer's router tells from the input of the router before."""
    ids = []
    for layer in discover(model)[1:]:
        with torch.inference_mode():
            ids.append(layer.routing(layer.ask(trace.router_inputs[:, layer.index - 1]))[0])
    return right(torch.stack(ids, 1).numpy(), trace.ids[:, 1:].numpy())


def engines(
    trace: RoutingTrace, share: float, H: int, I: int, place: Path, python: str | None
) -> dict[str, Numbers]:
    """A row for the trace itself, and for each engine on a model that it is implanted into."""
    E, L = trace.spec.E, trace.spec.L
    slots = round(share * E * L)
    spec = synthetic("implanted", L, E, trace.spec.K, H, I)
    model = synthesize(place / "model", spec, routing=trace)
    tokens = tokens_of(model)
    wanted = trace.ids.numpy()
    rows: dict[str, Record] = {"the trace": {"LRU hits": lru(wanted, E, slots)}}

    def row(ids: np.ndarray) -> Record:
        return {"LRU hits": lru(ids, E, slots), "slots right": right(ids, wanted)}

    resident = open_model(model)
    start, end = tokens[:1], tokens[:FOLLOWED]
    followed = record(resident, [start], len(end), eos_token_id=None).tokens.tolist() == end
    given = record(resident, [tokens], hidden=True)
    rows["transformers"] = row(given.ids.numpy()) | {
        "a layer early": early(resident, given),
        "greedy decoding": "follows" if followed else "leaves the sequence",
    }
    del resident
    hits, had = by_moelab(model, tokens, slots)
    rows["moelab"] = {"LRU hits": hits, "LRU hits, its slots, the trace": lru(wanted, E, had)}
    for kind, name in GGUF.items():
        file = str(place / name)
        try:
            words = "-c", WRITE_GGUF, str(model), file, kind
            in_process(words, python=python)
            given_to = LLAMA, file, json.dumps([tokens]), str(place / "ids.npy")
            in_process(given_to, python=python)
            rows[f"llama.cpp {kind}"] = row(np.load(place / "ids.npy"))
        except (RuntimeError, OSError) as error:
            rows[f"llama.cpp {kind}"] = {"result": str(error)}
        Path(file).unlink(missing_ok=True)
    return rows


def run(
    traces: Local | None = None,
    tokens: int = 512,
    share: float = 0.25,
    width: int = 1024,
    inner: int = 32,
    only: Sequence[str] = (),
    python: Local | None = None,
) -> Record:
    if traces is None:
        raise ValueError("it needs routing traces: give --traces FOLDER (data/traces has four)")
    interpreter = str(python.path) if python else None
    found: Record = {}
    for path in sorted(traces.path.rglob("*.npz")):
        name = f"{path.parent.name} {path.stem}"
        if only and not any(word in name for word in only):
            continue
        try:
            trace = whole_tokens(load(path), tokens)
        except ValueError as error:
            print(f"{name}: left out: {error}")
            continue
        print(name, flush=True)
        with working(None) as place:
            try:
                rows = engines(trace, share, width, inner, place, interpreter)
            except ValueError as error:  # the routing cannot be implanted
                rows = {"the trace": {"result": str(error)}}
        digest = sha256(path.read_bytes()).hexdigest()[:16]
        rows["the trace"] |= {"tokens": len(trace), "sha256": digest}
        found[f"{name}, {share:.0%} of experts"] = rows
    return found


KIND = "exact"
MEASURES = (*ENGINE, "moelab/bench/implant.py", "moelab/bench/synthesize.py")
OPTIONS = {
    "traces": (local, "the folder of traces"),
    "tokens": (whole(2), "of each trace"),
    "share": (number(above=0, most=1), "of all experts in memory"),
    "width": (whole(32), "H of the models"),
    "inner": (whole(32), "I of the models"),
    "only": ({"nargs": "+"}, "traces with one of these words in their names"),
    "python": (local, PYTHON[1]),
}
