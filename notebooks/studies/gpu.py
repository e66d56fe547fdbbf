"""A CUDA GPU: tokens with all experts in its memory, and with some of them, beside other engines.

Qwen3-30B-A3B's geometry with a few of its layers, synthetic, bf16, batch size 1. Source: Speculating
Experts §5.1 (experts in pinned memory, copied while others are computed). All arms of a section take
turns, in one process; llama.cpp's figures are those of its own `llama-bench`, with as many layers'
experts on the CPU as do not fit into the same memory."""

from __future__ import annotations

import gc
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from moelab import open_model, using
from moelab.base.arguments import number, one_of, several, whole
from moelab.base.records import Record
from moelab.base.specs import MoESpec
from moelab.bench.synthesize import scaled, synthesize
from moelab.cards import load_model
from moelab.checkpoint.convert import convert
from moelab.offloading.prefetch_gate import ungated

from .external_engines import write_gguf
from .peers import Accelerate, Transformers
from .timing import ENGINE, turns, working

#: name → options of `using`; "serial" copies all of a layer's experts, then computes (§5.1), and
#: "ungated" prefetches in every token, not where that has been seen to pay
ARMS = {
    "serial": {"executor": "fast", "prefetch": "none"},
    "exact": {"prefetch": "none"},
    "fast": {"executor": "fast", "prefetch": "none"},
    "fast, prefetching": {"executor": "fast", "prefetch": "router"},
    "ungated": {"executor": "fast", "prefetch": "router"},
    "speculative": {"executor": "fast", "speculate": "router"},
}
SECTIONS = ("tokens", "peers")


def row(reports: Iterable[Record], **more: Any) -> Record:
    """Medians of what `BenchmarkedEngine.measure` reports."""
    reports = list(reports)
    return {
        "TTFT ms": 1e3 * median(report["ttft_s"] for report in reports),
        "TPOT ms": 1e3 * median(median(report["tpot_s"]) for report in reports),
    } | more


@contextmanager
def opened(folder: Path, device: torch.device, **options: Any) -> Iterator[Transformers]:
    """A model on the GPU within the block; its memory is given back after it."""
    with open_model(folder, device=device, **options) as model:
        yield Transformers(model)
    del model
    _empty()


def _empty() -> None:
    """Give back a GPU's memory of what nobody has any more."""
    gc.collect()
    torch.cuda.empty_cache()


def tokens(
    folder: Path,
    device: torch.device,
    ids: list[int],
    rounds: int,
    prompt: int,
    shares: Iterable[float],
    room: int,
    ways: Iterable[str],
) -> Iterator[tuple[str, Record]]:
    """Everything in the GPU's memory; then shares of it, the others in pinned memory, in ways of
    `ARMS`. The first round of each counts nothing: kernels are compiled, and attention is planned
    for each length."""
    with (
        opened(folder / "model", device) as eager,
        opened(folder / "model", device, executor="fast") as fast,
    ):
        arms = {"eager": eager, "fast": fast}
        taken = defaultdict(list)
        for _, name in turns(list(arms), rounds + 1, "everything on the GPU"):
            taken[name].append(arms[name].measure([ids], prompt))
        del eager, fast, arms
    for name, found in taken.items():
        yield f"{name}, everything on the GPU", row(found[1:])
    for of in shares:
        with ExitStack() as stack:
            runs = {
                form: stack.enter_context(
                    opened(folder / form, device, memory=int(of * room), ahead=None)
                )
                for form in ("model", "bf12")
            }
            taken = defaultdict(list)
            last = {}
            for _, (form, arm) in turns(
                list(product(runs, ways)), rounds + 1, f"{of:.0%} on the GPU"
            ):
                model = runs[form].model
                engine = model.moelab.engine
                always = ungated(engine) if arm == "ungated" else nullcontext()
                with using(model, **ARMS[arm]), always:
                    engine.serial = arm == "serial"
                    model.moelab.reset()
                    taken[form, arm].append(runs[form].measure([ids], prompt))
                    last[form, arm] = model.moelab.metrics()
                    engine.serial = False
            del model, runs
        for (form, arm), found in taken.items():
            said = last[form, arm]
            more = {
                "waiting ms": 1e3 * said.stall_per_step,
                "hit rate": said.hit_rate,
                "MB copied": said.read_bytes_per_token / 1e6,
            }
            stored = "raw" if form == "model" else form
            yield f"{stored}, {arm}, {of:.0%} on the GPU", row(found[1:], **more)


def accelerate(
    place: Path, ids: list[int], spec: MoESpec, layers: Iterable[int], prompt: int
) -> Record:
    """transformers with accelerate: so many layers on the GPU, the others' weights in the CPU's
    memory. The first of two rounds does not count."""
    rows = {}
    for n in layers:
        options = {"model": str(place / "model"), "layers": n, "near": 0, "far": "cpu"}
        peer = Accelerate(options)
        found = [peer.measure([ids], prompt) for _ in range(2)]
        del peer
        _empty()
        rows[f"accelerate, {n} of {spec.num_layers} layers on the GPU"] = row(found[1:])
    return rows


def llama(program: str, place: Path, spec: MoESpec, layers: Iterable[int], **how: int) -> Record:
    """llama-bench with the experts of so many layers on the GPU, all others' on the CPU; how : its
    options -p (prompt), -n (tokens after it), -r (rounds)."""
    model = place / "model.gguf"
    if not model.exists():
        write_gguf(place / "model", model)
    rows = {}
    for n in layers:
        options = {
            "m": model,
            "ngl": 99,
            "ncmoe": spec.num_layers - n,
            "t": os.cpu_count(),
            "o": "json",
        }
        words = [str(word) for name, of in (options | how).items() for word in (f"-{name}", of)]
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=600)
        if done.returncode:
            found = {"result": f"failed: {(done.stderr.strip() or 'no word').splitlines()[-1]}"}
        else:
            speeds = {bool(test["n_gen"]): test["avg_ts"] for test in json.loads(done.stdout)}
            found = {"TTFT ms": 1e3 * how["p"] / speeds[False], "TPOT ms": 1e3 / speeds[True]}
        rows[f"llama.cpp, experts of {n} of {spec.num_layers} layers on the GPU"] = found
    return rows


def run(
    only: Iterable[str] = SECTIONS,
    folder: str | None = None,
    scale: float = 0.125,
    rounds: int = 3,
    contexts: Iterable[int] = (128,),
    decode: int = 32,
    shares: Iterable[float] = (0.25, 0.5),
    ways: Iterable[str] = tuple(ARMS),
    llama_bench: str | None = None,
    model: str | MoESpec = "Qwen3-30B-A3B",
) -> Record:
    if not torch.cuda.is_available():
        raise ValueError("this bench needs a CUDA GPU, and torch finds none here (moelab doctor)")
    device = torch.device("cuda", 0)
    shares, ways, (prompt, *longer) = list(shares), list(ways), list(contexts)
    spec = scaled(load_model(model) if isinstance(model, str) else model, scale)
    found: Record = {
        "conditions": {
            "GPU": torch.cuda.get_device_name(device),
            "CUDA": torch.version.cuda,
            "model": f"{spec.name}, {spec.num_layers} layers, synthetic",
            "experts GB": spec.experts_bytes / 1e9,
            "tokens": f"random; prompts of {prompt} or as told, then {decode}, batch 1",
            "rounds": rounds,
        }
    }
    with working(folder) as place:
        if not (place / "model").exists():
            synthesize(place / "model", spec)
        if not (place / "bf12").exists():
            convert(place / "model", place / "bf12", codec="bf12")
        draw = torch.Generator().manual_seed(0)
        most = max((prompt, *longer)) + decode
        ids = torch.randint(3, spec.vocab, (most,), generator=draw).tolist()
        for context in (prompt, *longer) if "tokens" in only else ():
            title = "tokens" if context == prompt else f"tokens, context {context}"
            given = device, ids[: context + decode], rounds, context
            found[title] = dict(tokens(place, *given, shares, spec.experts_bytes, ways))
        if "peers" in only:
            layers = [int(of * spec.num_layers) for of in shares]
            found["peers"] = accelerate(place, ids[: prompt + 8], spec, layers, prompt)
            if llama_bench:
                how = {"p": prompt, "n": decode, "r": rounds}
                found["peers"] |= llama(llama_bench, place, spec, [*layers, spec.num_layers], **how)
    return found


MEASURES = ENGINE
OPTIONS = {
    "only": (several(one_of(SECTIONS)), "sections"),
    "folder": (None, "where the model is kept, 25 GB, for the next time; else it is temporary"),
    "scale": (number(above=0, most=1), "part of the layers"),
    "rounds": (whole(1), "of every arm"),
    "contexts": (several(whole(1)), "tokens of a prompt; the paper's are 1024 to 65536"),
    "decode": (whole(1), "tokens after it"),
    "shares": (several(number(above=0, most=1)), "of the experts, in the GPU's memory"),
    "ways": (several(one_of(ARMS)), "of running a model whose experts do not all fit"),
    "llama_bench": (None, "llama.cpp's llama-bench, built for CUDA"),
}
