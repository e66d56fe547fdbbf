"""A CUDA GPU: recovery beside a copy, experts over the link beside computing, and tokens beside
other engines.

Qwen3-30B-A3B's geometry with a few of its layers, synthetic, bf16, batch size 1. Source: ZipMoE
§3.1 (recovery on the GPU); Speculating Experts §5.1 (experts in pinned memory, copied while others
are computed). All arms of a section take turns, in one process; llama.cpp's figures are those of
its own `llama-bench`, with as many layers' experts on the CPU as do not fit into the same memory.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from moelab import open_model, using
from moelab.arguments import number, one_of, several, whole
from moelab.bench import ENGINE
from moelab.bench.external_engines import write_gguf
from moelab.bench.measure import aim, share, turns, working
from moelab.bench.peers import Accelerate, Transformers
from moelab.bench.synthesize import scaled, synthesize
from moelab.cards import load_model
from moelab.checkpoint.convert import convert
from moelab.offloading.link import Link, host_memory
from moelab.records import Record
from moelab.specs import MoESpec
from moelab.store import bf12

EXPERT = 3 * 2048 * 768  # weights of one of Qwen3-30B-A3B's experts
WEIGHTS = 1 << 28  # that recovery is measured on: 512 MB, beyond any cache
ARMS = {
    "exact": {"prefetch": None},
    "fast": {"executor": "fast", "prefetch": None},
    "fast, prefetching": {"executor": "fast", "prefetch": "router"},
}
SECTIONS = ("recovery", "link", "tokens", "peers")


def timed(told: Callable[[], Any], rounds: int) -> float:
    """Median seconds of what the GPU is told, by its own clock; once before, uncounted."""
    taken = []
    for _ in range(rounds + 1):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        told()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return median(taken[1:])


def recovery(device: torch.device, rounds: int) -> Record:
    """Bytes read and written a second of joining planes and unpacking bf12, beside those of a copy
    of as many."""
    from moelab.store import bf12_triton, bits_triton

    weights = (0.02 * torch.randn(WEIGHTS // 16, device=device)).bfloat16().repeat(16)
    copied = torch.empty_like(weights)
    copy = timed(lambda: copied.copy_(weights), rounds)
    rate = 4 * WEIGHTS / copy
    low, high = torch.empty(2, WEIGHTS, dtype=torch.uint8, device=device)
    words = weights.view(torch.int16)
    out = torch.empty_like(weights)
    high.copy_(words >> 7)
    low.copy_(words << 1 | words >> 15 & 1)
    joined = 4 * WEIGHTS / timed(lambda: bits_triton.join(high, low, out), rounds)
    if not torch.equal(out.view(torch.int16), words):
        raise RuntimeError("joined weights differ from the weights that were split")
    part = weights[: WEIGHTS // 4].view(-1, 2048)
    blob = torch.frombuffer(bytearray(bf12.CODEC.compress(part.cpu())), dtype=torch.uint8).to(
        device
    )
    blobs = [blob.clone() for _ in range(4)]
    outs = [torch.empty_like(part) for _ in range(4)]

    def unpack() -> None:
        for packed, into in zip(blobs, outs):
            bf12_triton.unpack(packed, into)

    unpacked = 4 * (len(blob) + 2 * part.numel()) / timed(unpack, rounds)
    if not torch.equal(outs[-1].view(torch.int16), part.view(torch.int16)):
        raise RuntimeError("unpacked weights differ from the weights that were packed")
    return {
        "copy": {"GB/s": rate / 1e9},
        "joining planes": {"GB/s": joined / 1e9, "÷ copy": joined / rate},
        "unpacking bf12": {"GB/s": unpacked / 1e9, "÷ copy": unpacked / rate},
    }


def link(device: torch.device, rounds: int, experts: int = 256) -> Record:
    """Experts sent one by one from pinned memory, by the engine's link, alone and beside as long a
    computation."""
    to = Link(device)
    size = 2 * EXPERT
    whole = torch.from_numpy(host_memory(1 << 30, device, to)).random_(0, 256)
    host = whole[: size * (len(whole) // size)].view(-1, size)
    slots = torch.empty(32, size, dtype=torch.uint8, device=device)
    there = torch.empty_like(whole, device=device)
    a = torch.randn(4096, 4096, device=device).bfloat16()

    def seconds(copies: int, products: int) -> float:
        torch.cuda.synchronize(device)
        start = perf_counter()
        done = 0
        for i in range(experts):
            if i < copies:
                to.leave([i % 32])  # of the expert before
                to.send([(i, host[i % len(host)], i % 32, slots[i % 32])])
            due = products * (i + 1) // experts
            for _ in range(due - done):
                torch.mm(a, a)
            done = due
        torch.cuda.synchronize(device)
        return perf_counter() - start

    block = len(whole) / timed(lambda: there.copy_(whole, non_blocking=True), rounds)
    seconds(experts, 64)
    n = max(1, round(64 * seconds(experts, 0) / seconds(0, 64)))
    samples = [(seconds(experts, 0), seconds(0, n), seconds(experts, n)) for _ in range(3 * rounds)]
    alone, compute, together = (median(of) for of in zip(*samples))
    return {
        "1 GB at once": {"GB/s": block / 1e9},
        f"experts of {size / 1e6:.1f} MB": {
            "GB/s": experts * size / alone / 1e9,
            "ms": 1e3 * alone,
            "÷ 1 GB at once": experts * size / alone / block,
        },
        "computing alone": {"ms": 1e3 * compute},
        "both": {
            "GB/s": experts * size / together / 1e9,
            "ms": 1e3 * together,
            "longer of both ÷ both": median(
                max(copying, computing) / b for copying, computing, b in samples
            ),
        },
    }


def row(reports: Iterable[Record], **more: Any) -> Record:
    """Medians of what `BenchmarkedEngine.measure` reports."""
    reports = list(reports)
    return {
        "TTFT ms": 1e3 * median(report["ttft_s"][0] for report in reports),
        "TPOT ms": 1e3 * median(median(report["tpot_s"]) for report in reports),
    } | more


@contextmanager
def opened(folder: Path, device: torch.device, **options: Any) -> Iterator[Transformers]:
    """A model on the GPU within the block; its memory is given back after it."""
    with open_model(folder, device=device, **options) as model:
        yield Transformers(model)
    del model
    empty()


def empty() -> None:
    """Give back a GPU's memory of what nobody has any more."""
    gc.collect()
    torch.cuda.empty_cache()


def tokens(
    folder: Path,
    device: torch.device,
    ids: list[int],
    rate: float,
    rounds: int,
    prompt: int,
    shares: Iterable[float],
    room: int,
) -> Iterator[tuple[str, Record]]:
    """Everything in the GPU's memory; then shares of it, all experts in pinned memory. The first
    round of each counts nothing: kernels are compiled, and attention is planned for each length."""
    with (
        opened(folder / "model", device) as eager,
        opened(folder / "model", device, executor="fast") as fast,
    ):
        arms = {"eager": eager, "fast": fast}
        taken = defaultdict(list)
        for _, name in turns(list(arms), rounds + 1, "everything on the GPU"):
            taken[name].append(arms[name].measure([ids], [prompt]))
        del eager, fast, arms
    for name, found in taken.items():
        yield f"{name}, everything on the GPU", row(found[1:])
    for of in shares:
        with ExitStack() as stack:
            runs = {
                form: stack.enter_context(
                    opened(folder / form, device, memory=int(of * room), mode="pinned", ahead=None)
                )
                for form in ("model", "bf12")
            }
            taken = defaultdict(list)
            last = {}
            for _, (form, arm) in turns(
                list(product(runs, ARMS)), rounds + 1, f"{of:.0%} on the GPU"
            ):
                model = runs[form].model
                with using(model, **ARMS[arm]):
                    model.moelab.reset()
                    taken[form, arm].append(runs[form].measure([ids], [prompt]))
                    last[form, arm] = model.moelab.metrics()
            del model, runs
        for (form, arm), found in taken.items():
            said = last[form, arm]
            yield (
                f"{'raw' if form == 'model' else form}, {arm}, {of:.0%} on the GPU",
                row(
                    found[1:],
                    **{
                        "waiting ms": 1e3 * said.stall_per_step,
                        "hit rate": said.hit_rate,
                        "MB copied": said.read_bytes_per_token / 1e6,
                        "copying alone ms": 1e3 * said.read_bytes_per_token / rate,
                    },
                ),
            )


def accelerate(
    place: Path, ids: list[int], spec: MoESpec, layers: Iterable[int], prompt: int
) -> Record:
    """transformers with accelerate: so many layers on the GPU, the others' weights in the CPU's
    memory. The first of two rounds does not count."""
    rows = {}
    for n in layers:
        options = {"model": str(place / "model"), "layers": n, "near": 0, "far": "cpu"}
        peer = Accelerate(options)
        found = [peer.measure([ids], [prompt]) for _ in range(2)]
        del peer
        empty()
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
    prompt: int = 128,
    decode: int = 32,
    shares: Iterable[float] = (0.25, 0.5),
    llama_bench: str | None = None,
    model: str | MoESpec = "Qwen3-30B-A3B",
) -> Record:
    if not torch.cuda.is_available():
        raise ValueError("this bench needs a CUDA GPU, and torch finds none here (moelab doctor)")
    device = torch.device("cuda", 0)
    only = list(only)
    shares = list(shares)
    spec = scaled(load_model(model) if isinstance(model, str) else model, scale)
    found: Record = {
        "conditions": {
            "GPU": torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "CUDA": torch.version.cuda,
            "cores": os.cpu_count(),
            "model": f"{spec.name}, {spec.num_layers} layers, synthetic",
            "experts GB": spec.experts_bytes / 1e9,
            "tokens": f"random; prompts of {prompt}, then {decode}, batch 1",
            "rounds": rounds,
        }
    }
    aims: Record = {}
    if "recovery" in only:
        rows = found["recovery"] = recovery(device, 5 * rounds)
        aims["joining planes: rate ÷ that of a copy"] = aim(
            share(rows["joining planes"]["÷ copy"]), 0.8
        )
    rows = found["link"] = link(device, rounds)
    aims["copying beside computing: the longer alone ÷ both"] = aim(
        share(rows["both"]["longer of both ÷ both"]), 0.9
    )
    rate = 1e9 * rows["1 GB at once"]["GB/s"]
    with working(folder) as place:
        if {"tokens", "peers"} & set(only):
            if not (place / "model").exists():
                synthesize(place / "model", spec)
            if not (place / "bf12").exists():
                convert(place / "model", place / "bf12", codec="bf12")
        ids = torch.randint(
            3, spec.vocab, (prompt + decode,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        if "tokens" in only:
            found["tokens"] = dict(
                tokens(place, device, ids, rate, rounds, prompt, shares, spec.experts_bytes)
            )
        if "peers" in only:
            layers = [int(of * spec.num_layers) for of in shares]
            found["peers"] = accelerate(place, ids[: prompt + 8], spec, layers, prompt)
            if llama_bench:
                how = {"p": prompt, "n": decode, "r": rounds}
                found["peers"] |= llama(llama_bench, place, spec, [*layers, spec.num_layers], **how)
    return found | {"aims": aims}


MEASURES = ENGINE
OPTIONS = {
    "only": (several(one_of(SECTIONS)), "sections"),
    "folder": (None, "where the model is kept, 25 GB, for the next time; else it is temporary"),
    "scale": (number(above=0, most=1), "part of the layers"),
    "rounds": (whole(1), "of every arm"),
    "prompt": (whole(1), "tokens of a prompt"),
    "decode": (whole(1), "tokens after it"),
    "shares": (several(number(above=0, most=1)), "of the experts, in the GPU's memory"),
    "llama_bench": (None, "llama.cpp's llama-bench, built for CUDA"),
}
