"""A CUDA GPU with all experts in its memory, with some of them, and beside other engines.

Qwen3-30B-A3B's geometry with a few of its layers, routed as the real model, batch size 1. Source:
Speculating Experts §5.1 (experts in pinned memory, copied while others are computed) and Eq. (1);
GPU-NDP §III-C (misses divided between link and CPU). All arms of a section take turns, in one process;
the first round of each counts nothing, as kernels are compiled in it. llama.cpp's figures are those of
its own `llama-bench` (`build_llama.sh` builds it), with as many layers' experts on the CPU as do not
fit into the same memory. `gpu_session.sh` runs the tests, this bench and a profile in one go.

A token's bound is (bytes of hits ÷ the GPU's memory rate) + (bytes of misses ÷ (link + CPU)), by rates
that are measured in the same run; with no CPU computing, the link's alone."""

from __future__ import annotations

import gc
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from moelab import open_model, using
from moelab.advice import gpu_machine
from moelab.base.arguments import number, one_of, several, whole
from moelab.base.records import Record
from moelab.base.specs import DeviceSpec, MoESpec
from moelab.bench.synthesize import scaled
from moelab.cards import load_model
from moelab.offloading.prefetch_gate import ungated

from . import ratios
from .external_engines import write_gguf
from .grid import ROUTING, Experiment
from .overlap import overlap
from .peers import Accelerate, Transformers
from .timing import ENGINE, turns, working

FORMS = ("raw", "bf12", "int8", "int4", "mxfp4")
LOSSLESS = FORMS[:2]
DEMAND, SPECULATIVE = "fast", "speculative"
#: name → (options of `open_model`, of `using`): "split" lets the CPU compute a part of the misses,
#: "serial" copies all of a layer's experts, then computes (§5.1), and "ungated" prefetches in every
#: token, not where that has been seen to pay
WAYS: dict[str, tuple[Record, Record]] = {
    "serial": ({}, {"executor": "fast"}),
    "exact": ({}, {}),
    DEMAND: ({}, {"executor": "fast"}),
    "split": ({"hybrid": max(1, (os.cpu_count() or 2) - 1)}, {"executor": "fast"}),
    "prefetching": ({}, {"executor": "fast", "prefetch": "router"}),
    "ungated": ({}, {"executor": "fast", "prefetch": "router"}),
    SPECULATIVE: ({}, {"executor": "fast", "speculate": "router"}),
}
SECTIONS = ("resident", "offloaded", "contexts", "peers")
#: figures of a card: of the GPU's memory, the link to it, the CPU's memory
RATES = "memory_bandwidth", "link_bandwidth", "host_memory_bandwidth"


def bound(card: DeviceSpec, hits: float, misses: float, split: bool) -> float:
    """The least seconds of a token that reads so many bytes of experts at a card's rates."""
    near, link, far = (1e9 * card[f"{name}_gbs"] for name in RATES)
    return hits / near + misses / (link + far * split)


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


Measure = Callable[[], Record]


def interleaved(arms: dict[str, Measure], rounds: int, title: str) -> dict[str, list[Record]]:
    """What each arm reports in every round but a first one."""
    taken = defaultdict(list)
    for _, name in turns(list(arms), rounds + 1, title):
        taken[name].append(arms[name]())
    return {name: found[1:] for name, found in taken.items()}


def row(reports: Iterable[Record], **more: Any) -> Record:
    """Medians of what `BenchmarkedEngine.measure` reports."""
    reports = list(reports)
    return {
        "TTFT ms": 1e3 * median(report["ttft_s"] for report in reports),
        "TPOT ms": 1e3 * tpot(reports),
    } | more


def tpot(reports: Iterable[Record]) -> float:
    """Seconds a token: the median of the rounds' medians."""
    return median(median(report["tpot_s"]) for report in reports)


def resident(bench: Experiment, device: torch.device, forms: Sequence[str]) -> Record:
    """Everything in the GPU's memory: transformers' eager and ours, in each format."""
    given = bench.tokens, bench.prompt
    with ExitStack() as stack:

        def opens(form: str, **options: Any) -> Measure:
            model = stack.enter_context(opened(bench.folder / form, device, **options))
            return lambda: model.measure(*given)

        arms = {"eager": opens("model"), "exact, raw": opens("raw", memory=1.0)}
        for form in forms:
            arms[f"fast, {form}"] = opens(form, executor="fast", memory=1.0)
        found = interleaved(arms, bench.rounds, "everything on the GPU")
    base = tpot(found[f"fast, {forms[0]}"])
    return {
        name: row(reports, **{f"÷ {forms[0]}": tpot(reports) / base})
        for name, reports in found.items()
    }


def offloaded(
    bench: Experiment, device: torch.device, share: float, ways: Sequence[str], at: DeviceSpec
) -> Record:
    """A share of the experts' memory on the GPU, each lossless format in each of `WAYS`."""
    budget = int(share * bench.spec.experts_bytes)
    rows = {}
    for form in LOSSLESS:
        with ExitStack() as stack:
            models: dict[str, Transformers] = {}
            last: dict[str, Record] = {}

            def arm(way: str) -> Measure:
                how, use = WAYS[way]
                if (key := repr(how)) not in models:
                    options = {"memory": budget, "ahead": None, "executor": "fast"} | how
                    folder = bench.folder / form  # noqa: B023
                    models[key] = stack.enter_context(opened(folder, device, **options))  # noqa: B023
                run = models[key]

                def measure() -> Record:
                    model = run.model
                    engine = model.moelab.engine
                    with (
                        using(model, **use),
                        ungated(engine) if way == "ungated" else nullcontext(),
                    ):
                        engine.serial = way == "serial"
                        model.moelab.reset()
                        found = run.measure(bench.tokens, bench.prompt)
                        last[way] = of_run(model, at, way == "split")  # noqa: B023
                        engine.serial = False
                    return found

                return measure

            arms = {way: arm(way) for way in ways}
            found = interleaved(arms, bench.rounds, f"{form}, {share:.0%} on the GPU")
        for way, reports in found.items():
            said = last[way]
            said["÷ bound"] = 1e3 * tpot(reports) / said["bound ms"] if said["bound ms"] else None
            kept = {name: value for name, value in said.items() if value is not None}
            rows[f"{form}, {way}, {share:.0%} on the GPU"] = row(reports, **kept)
    return rows


def of_run(model: Any, at: DeviceSpec, split: bool) -> Record:
    """What a model's own metrics say of what was just measured; None for what they leave open."""
    said = model.moelab.metrics()
    spec = model.moelab.store.spec
    token = sum(model.moelab.run.settings.mean_bytes) * spec.K * spec.L  # of its routed experts
    hit_rate = said.hit_rate or 0.0
    prefill = said.read_bytes - (said.read_bytes_per_token or 0.0) * said.decode_tokens
    tiers = model.moelab.tiers
    pool = model.moelab.engine.loader.pool
    pinned = pool and pool.count * pool.size
    alone = (said.paths or {}).get("token", 0)
    python = said.python_per_layer
    return {
        "waiting ms": 1e3 * (said.stall_per_step or 0.0),
        "hit rate": said.hit_rate,
        "MB copied": (said.read_bytes_per_token or 0.0) / 1e6,
        "tokens that the GPU ran alone": alone / max(said.decode_tokens, 1),
        "experts by the CPU a token": (said.away or 0) / max(said.decode_tokens, 1),
        "Python ms a layer": None if python is None else 1e3 * python,
        "pinned ÷ not on the GPU": pinned and pinned / max(tiers.get("pinned", 0), 1),
        "bound ms": 1e3 * bound(at, hit_rate * token, (1 - hit_rate) * token, split),
        "prompt's bytes over the link ms": 1e3 * prefill / (1e9 * at[f"{RATES[1]}_gbs"]),
    }


def contexts(
    bench: Experiment, device: torch.device, lengths: Iterable[int], at: DeviceSpec
) -> Record:
    """Executing predictions against loading on demand, as in the paper with no more experts in the
    GPU's memory than are under way, and the most that Eq. (1) allows at the measured rates."""
    rows = {}
    spec = bench.spec
    for length in lengths:
        tokens = [row[: length + bench.decode] for row in bench.tokens]
        memory = 4 * spec.K * spec.expert_bytes
        with opened(bench.folder / "raw", device, memory=memory, ahead=None) as run:

            def measure(way: str) -> Record:
                with using(run.model, **WAYS[way][1]):  # noqa: B023
                    return run.measure(tokens, length)  # noqa: B023

            arms = {way: lambda way=way: measure(way) for way in (DEMAND, SPECULATIVE)}
            found = interleaved(arms, max(bench.rounds, 6), f"context {length}")
        pairs = zip(found[DEMAND], found[SPECULATIVE])
        saved = [1 - median(two["tpot_s"]) / median(one["tpot_s"]) for one, two in pairs]
        middle, low, high = ratios.median(saved)
        most = overlap(spec, at, length)
        rows[f"context {length}"] = {
            "on demand ms": 1e3 * tpot(found[DEMAND]),
            "speculative ms": 1e3 * tpot(found[SPECULATIVE]),
            "saved": middle,
            "saved, low": low,
            "saved, high": high,
            "largest saving by Eq. (1)": most.gain / most.tpot,
        }
    return rows


def accelerate(bench: Experiment, layers: Iterable[int]) -> Record:
    """transformers with accelerate: so many layers on the GPU, the others' weights in the CPU's
    memory; of eight tokens, as each takes long. The first of two rounds does not count."""
    rows = {}
    tokens = [row[: bench.prompt + 8] for row in bench.tokens]
    for n in layers:
        options = {"model": str(bench.folder / "model"), "layers": n, "near": 0, "far": "cpu"}
        peer = Accelerate(options)
        found = [peer.measure(tokens, bench.prompt) for _ in range(2)]
        del peer
        _empty()
        rows[f"accelerate, {n} of {bench.spec.num_layers} layers on the GPU"] = row(found[1:])
    return rows


def llama(program: str, place: Path, spec: MoESpec, layers: Iterable[int], **how: int) -> Record:
    """llama-bench with the experts of so many layers on the GPU, all others' on the CPU; how : its
    options -p (prompt), -n (tokens after it), -r (rounds)."""
    rows = {}
    for (kind, name), n in product((("BF16", "model.gguf"), ("Q8_0", "Q8_0.gguf")), layers):
        model = place / name
        if not model.exists():
            write_gguf(place / "model", model, kind)
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
        rows[f"llama.cpp {kind}, experts of {n} of {spec.num_layers} layers on the GPU"] = found
    return rows


def run(
    only: Iterable[str] = SECTIONS,
    folder: str | None = None,
    scale: float = 0.125,
    rounds: int = 3,
    prompts: Sequence[int] = (128, 1024),
    lengths: Sequence[int] = (1024, 4096, 16_384),
    decode: int = 32,
    shares: Sequence[float] = (0.25, 0.5),
    ways: Sequence[str] = tuple(WAYS),
    forms: Sequence[str] = FORMS,
    llama_bench: str | None = None,
    routing: str = "fitted",
    model: str | MoESpec = "Qwen3-30B-A3B",
) -> Record:
    if not torch.cuda.is_available():
        raise ValueError("this bench needs a CUDA GPU, and torch finds none here (moelab doctor)")
    device = torch.device("cuda", 0)
    spec = scaled(load_model(model) if isinstance(model, str) else model, scale)
    with working(folder) as place:
        place.mkdir(parents=True, exist_ok=True)
        most = max(*prompts, *lengths)
        bench = Experiment(spec, place, most, decode, rounds, routing=routing, here=True)
        bench.prepare(dict.fromkeys((*LOSSLESS, *forms)))
        at = gpu_machine.measured(device, torch.cuda.get_device_name(device))
        found: Record = {
            "conditions": {
                "GPU": torch.cuda.get_device_name(device),
                "CUDA": torch.version.cuda,
                "model": f"{spec.name}, {spec.num_layers} layers, synthetic",
                "experts GB": spec.experts_bytes / 1e9,
                "tokens": f"given; {bench.routed}; {decode} after each prompt, batch 1",
                "rounds": rounds,
            },
            "rates": {name: {"GB/s": at[f"{name}_gbs"]} for name in RATES},
        }
        tokens = bench.tokens or []
        for bench.prompt in prompts:
            bench.tokens = [row[: bench.prompt + decode] for row in tokens]
            title = f"prompt {bench.prompt}"
            if "resident" in only:
                found[f"resident, {title}"] = resident(bench, device, forms)
            if "offloaded" in only:
                sections = (offloaded(bench, device, share, ways, at) for share in shares)
                found[f"offloaded, {title}"] = {k: v for rows in sections for k, v in rows.items()}
            if "peers" in only:
                layers = [int(of * spec.num_layers) for of in shares]
                rows = accelerate(bench, layers)
                if llama_bench:
                    how = {"p": bench.prompt, "n": decode, "r": rounds}
                    layers = [*layers, spec.num_layers]
                    rows |= llama(llama_bench, place, spec, layers, **how)
                found[f"peers, {title}"] = rows
        if "contexts" in only:
            bench.tokens = tokens
            found["contexts"] = contexts(bench, device, lengths, at)
    return found


MEASURES = ENGINE
OPTIONS = {
    "only": (several(one_of(SECTIONS)), "sections"),
    "folder": (None, "where the model is kept, 25 GB, for the next time; else it is temporary"),
    "scale": (number(above=0, most=1), "part of the layers"),
    "rounds": (whole(1), "of every arm that count"),
    "prompts": (several(whole(1)), "tokens of a prompt, of all sections but contexts"),
    "lengths": (several(whole(1)), "tokens before those that are decoded, of contexts"),
    "decode": (whole(1), "tokens after them"),
    "shares": (several(number(above=0, most=1)), "of the experts, in the GPU's memory"),
    "ways": (several(one_of(WAYS)), "of running a model whose experts do not all fit"),
    "forms": (several(one_of(FORMS)), "of the experts, all in the GPU's memory"),
    "routing": ROUTING,
    "llama_bench": (None, "llama.cpp's llama-bench, built for CUDA"),
}
