"""Engines on one task: the same tokens through moelab, transformers, accelerate, llama.cpp or
ftllm, measured alike.

    python -m moelab.bench.peers moelab '{"store": …, "budget": …, "tokens": [[…]], "prompts": [128,
    128]}'

prints JSON as its last line. Tokens are given (teacher forcing), because a random model repeats
itself when it decodes greedily: its routing freezes, and every access hits the cache. "tokens" has
a row for each sequence of a batch; each prompt begins new sequences, and the last continue token by
token. CPU only; only ftllm samples, as it cannot be given tokens. Starting needs the standard
library and numpy alone, so that an engine may live in another interpreter than moelab."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

from moelab.bench.memory_limit import drop_cached
from moelab.offloading.metrics import process
from moelab.records import Numbers, Record

#: name → the module and the class that runs it
ENGINES = {
    "moelab": ("moelab.bench.peers", "Moelab"),
    "eager": ("moelab.bench.peers", "Eager"),
    "mapped": ("moelab.bench.peers", "Mapped"),
    "accelerate": ("moelab.bench.peers", "Accelerate"),
    "llama.cpp": ("moelab.bench.external_engines", "Llama"),
    "ftllm": ("moelab.bench.external_engines", "Ftllm"),
    "lru baseline": ("moelab.bench.lru_baseline", "LRUBaseline"),
}
RAPL = Path("/sys/class/powercap")
Sequences = list[list[int]]  # of tokens
DEPTHS = (1, 2, 4)  # queue depths at which the read rate is measured
FOUND = ("hits", "misses", "evictions", "read_bytes")  # what engine and simulator must agree upon


def main(arguments: Sequence[str]) -> int:
    name = arguments[0]
    options = json.loads(arguments[1])
    if options.get("cgroup"):
        Path(options["cgroup"]).write_text(str(os.getpid()))
    print(
        "\n" + json.dumps(run(name, options)), flush=True
    )  # a line of its own, whatever the engine has printed
    sys.stderr.flush()
    os._exit(0)  # some engines crash while they are torn down


def run(name: str, options: Record) -> Record:
    """An engine's report; {"missing": reason} for one that is not installed."""
    gc.collect()  # of an engine that was closed just now
    start = time.perf_counter()
    try:
        module, kind = ENGINES[name]
        engine = getattr(import_module(module), kind)(options)
    except ImportError as error:
        return {"missing": f"not installed ({error})"}
    loaded = time.perf_counter() - start
    report = engine.measure(options["tokens"], options["prompts"], options.get("logits"))
    return {"load_s": loaded, **report, **counters(), **engine.report()}


def counters() -> Record:
    """Bytes that this process has read from disks, its major page faults, peak memory and seconds
    on processors, and joules of all processors, so far."""
    return {
        "read_bytes": _proc("io", r"^read_bytes: (\d+)"),
        **process(),
        "cpu_s": time.process_time(),
        "joules": joules(),
    }


def joules() -> float | None:
    """What processor packages, by Linux's RAPL counters, and NVIDIA's GPUs, by NVML, have used;
    None where neither can be read. RAPL's begin anew now and then: a difference below zero is none.
    Apple's are not read."""
    try:
        cores = sum(int(path.read_text()) for path in RAPL.glob("intel-rapl:?/energy_uj")) / 1e6
    except OSError:  # not ours to read
        cores = 0.0
    return cores + gpu_joules() or None


def gpu_joules() -> float:
    """Of all GPUs, since the driver was loaded; 0 without nvidia-ml-py, a driver, or counters
    (before Volta)."""
    try:
        import pynvml
    except ImportError:
        return 0.0
    try:
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles)) / 1e3  # mJ
    except pynvml.NVMLError:
        return 0.0


def _proc(file: str, pattern: str) -> int | None:
    """A number in a file of /proc/self; None on other systems."""
    try:
        return int(re.search(pattern, Path("/proc/self", file).read_text(), re.M)[1])
    except (OSError, TypeError):
        return None


class BenchmarkedEngine(ABC):
    """What every engine can do: `restart` its sequences, and `feed` them tokens for the logits
    after the last ones."""

    @abstractmethod
    def restart(self) -> None:
        """The next tokens begin new sequences."""

    @abstractmethod
    def feed(self, ids: Sequences) -> Any:
        """The logits [B, V] after the last of `ids` [B][T]: a numpy array, fp32 or the bits of bf16
        as int16."""

    def decoding(self) -> None:
        """Called once, between the prompts and the single tokens."""

    def report(self) -> Record:
        """Further entries of the report, asked for at the end."""
        return {}

    def measure(
        self, tokens: Sequences, prompts: list[int], logits_to: str | None = None
    ) -> Record:
        """Feed prompts of the given lengths, each of new sequences, then the other tokens [B][T]
        one by one: `ttft_s` [prompts], `tpot_s` [tokens after them], bytes read, faults, processor
        seconds and joules of each phase, `digest`, `best` (argmax) of all logits, which a file
        `logits_to` may keep: fp32 [(prompts + tokens) · B, V]."""
        found: Record = {"ttft_s": [], "tpot_s": [], "best": []}
        digest = hashlib.sha256()
        at = 0
        last = counters()
        kept = []

        def step(n: int, seconds: list[float]) -> None:
            nonlocal at
            ids = [row[at : at + n] for row in tokens]
            at = at + n
            start = time.perf_counter()
            logits = self.feed(ids)
            seconds.append(time.perf_counter() - start)
            digest.update(logits.tobytes())
            if (
                logits.dtype != "float32"
            ):  # bf16 as int16 has no order; as the upper half of an fp32 it does
                logits = (logits.astype("int32") << 16).view("float32")
            found["best"] += logits.argmax(-1).tolist()
            if logits_to:
                kept.append(logits.astype("float32"))

        def phase(name: str) -> None:
            nonlocal last
            before = last
            last = counters()
            for key in ("read_bytes", "major_faults", "cpu_s", "joules"):
                found[f"{name}_{key}"] = (
                    None if None in (before[key], last[key]) else last[key] - before[key]
                )

        for number, length in enumerate(prompts):
            self.restart()
            step(length, found["ttft_s"])
            phase("prompt" if not number else "next_prompts")
        self.decoding()
        while at < len(tokens[0]):
            step(1, found["tpot_s"])
        phase("decode")
        if logits_to:
            import numpy as np

            np.save(logits_to, np.concatenate(kept))
        return found | {"digest": digest.hexdigest()[:16]}


class Transformers(BenchmarkedEngine):
    """Any model of transformers', where it is."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def restart(self) -> None:
        """Begin a new generation, with an empty KV cache."""
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)

    def feed(self, ids: Sequences) -> Any:
        """Read so many more tokens of each sequence; returns the logits of the last, [batch, V]."""
        import torch

        with torch.inference_mode():
            logits = (
                self.model(
                    input_ids=torch.tensor(ids, device=self.model.device),
                    past_key_values=self.cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                .logits[:, -1]
                .cpu()
            )
        return (
            logits.view(torch.int16).numpy()
            if logits.dtype == torch.bfloat16
            else logits.float().numpy()
        )


class Moelab(Transformers):
    """Options: store, budget, and others of `open_model` as "options"; "trace": a file for its
    steps and what it took besides; "predictor"; "ungated": it prefetches in every token, not where
    that has been seen to pay; "probe": experts that are read to measure the disk; "compressed": the
    budget is divided into staging, which must be given, and experts kept compressed."""

    def __init__(self, options: Record) -> None:
        import_module("transformers.models.auto.modeling_auto")  # its memory is reported apart
        from moelab import open_model

        self.options, self.imports = options, process()["peak_rss_bytes"]
        given = dict(options.get("options", {}))
        if options.get("compressed"):
            given["plan"] = compressed_pool(options["store"], options["budget"], given["staging"])
        super().__init__(
            open_model(
                options["store"],
                memory=options["budget"],
                prefetch=options.get("predictor"),
                **given,
            )
        )
        self.offloading = self.model.moelab
        if options.get("ungated"):
            from moelab.offloading.prefetch_gate import PrefetchGate

            self.offloading.engine.controller.gate = PrefetchGate(trials=False)

    def decoding(self) -> None:
        """Remember the hits and misses of the prompt, which do not count."""
        counters = self.offloading.residency.counters
        self.before = sum(counters.hits.values()), counters.misses

    def report(self) -> Record:
        """What the run took, its limits and its memory; the model is closed."""
        from moelab.bench.limits import (
            belady_hits,
            layer_records,
            on_demand_limit,
            overlapped_limit,
            request_count,
        )
        from moelab.offloading.budget import kv_bytes

        this = self.offloading
        peak = process()["peak_rss_bytes"]
        anonymous = _proc("status", r"^RssAnon:\s*(\d+)")
        metrics = this.metrics()
        workers = self.options.get("options", {}).get("workers", 1)
        forwards = list(this.forwards)
        spec = this.store.spec
        records, decoded = layer_records(list(this.timeline), forwards)
        rates = (
            self.rates | {"after": self.read_rate(free=False)} | delivered(this.timeline, forwards)
        )
        rate = max(rates.values())
        hits = sum(metrics.hits.values()) - self.before[0]
        misses = metrics.misses - self.before[1]
        pools = this.run.settings.pools
        asked = [step for forward in this.steps for step in forward]
        best = (
            belady_hits(asked, pools.F) / request_count(asked)
            if pools.capacity == pools.F
            else None
        )
        if self.options.get("trace"):
            self._write_trace(metrics, forwards, workers)
        this.close()
        return {
            "imports_rss_bytes": self.imports,
            "peak_rss_bytes": peak,
            "anonymous_bytes": anonymous and 1024 * anonymous,
            "budget_bytes": this.budget,
            "others_bytes": this.store.weights_bytes,
            "kv_bytes": kv_bytes(spec, len(self.options["tokens"]) * self.cache.get_seq_length()),
            "experts_bytes": spec.experts_bytes,
            "stored_fraction": this.store.table()[-1]["fraction"],
            "read_rate": rate,
            "read_rates": rates,
            "decode_hit_rate": hits / max(hits + misses, 1),
            "belady_hit_rate": best,
            "metrics": asdict(metrics),
            "on_demand_s": on_demand_limit(records, rate, decoded, workers) if decoded else None,
            "overlapped_s": overlapped_limit(records, rate, decoded, workers) if decoded else None,
        }

    def _write_trace(self, metrics: Any, forwards: list[Any], workers: int) -> None:
        """What the simulator needs to play this run again."""
        this = self.offloading
        steps = [
            [[layer, list(experts.items())] for layer, experts in forward] for forward in this.steps
        ]
        settings = this.run.settings
        whole = {
            "steps": steps,
            "forwards": forwards,
            "pools": list(astuple(settings.pools)),
            "workers": workers,
            "staging": settings.staging,
            "found": [getattr(metrics, key) for key in FOUND],
        }
        Path(self.options["trace"]).write_text(json.dumps(whole))

    def measure(
        self, tokens: Sequences, prompts: list[int], logits_to: str | None = None
    ) -> Record:
        """As of `BenchmarkedEngine`, with the disk's rate before."""
        self.rates = {"before": self.read_rate()}
        return super().measure(tokens, prompts, logits_to)

    def read_rate(self, free: bool = True) -> float:
        """Bytes a second of reading "probe" random whole experts as the engine does, at the best of
        three depths, into its slots, of which only those that are `free` may be overwritten: into a
        few buffers that the processor's cache holds, it would be a fifth faster. 0 without
        slots."""
        layers = self.offloading.store.layers
        best = 0.0
        pipeline = self.offloading.engine.loader
        reader = pipeline.reader
        slots = pipeline.slots
        everyone = [
            (layer, expert)
            for layer in range(len(layers))
            for expert in range(len(layers[layer].experts))
        ]
        keys = random.Random(0).sample(everyone, min(self.options.get("probe", 64), len(everyone)))
        kinds = {"both": "full"} if slots.sizes.in_place else {"E": "e", "SM": "sm"}
        into = [
            {part: slots.bytes(kind, i) for part, kind in kinds.items()}
            for i in range(min(slots.count[kind] for kind in kinds.values()))
            if not free or all(i in pipeline.queue.free[kind] for kind in kinds.values())
        ]

        def part(i: int, depth: int) -> int:
            return sum(
                chunks.nbytes
                for key, parts in zip(keys[i::depth], cycle(into[i::depth]))
                for chunks in reader.read_parts(*key, parts)
            )

        with ThreadPoolExecutor(max(DEPTHS)) as pool:
            for depth in [depth for depth in DEPTHS if depth <= len(into)]:
                drop_cached(reader.store.folder)
                start = time.perf_counter()
                total = sum(pool.map(part, range(depth), [depth] * depth))
                best = max(best, total / (time.perf_counter() - start))
        drop_cached(reader.store.folder)
        return best


def delivered(events: Iterable[Any], forwards: Sequence[Any]) -> Numbers:
    """{"during": the highest read rate of any forward (start, end, …), bytes a second while the
    disk was busy}."""
    reads = [event for event in events if event.kind.startswith("read")]
    rates = []
    for start, end, *_ in forwards:
        mine = [event for event in reads if start <= event.start < end]
        if busy := sum(event.end - event.start for event in mine):
            rates.append(sum(event.bytes for event in mine) / busy)
    return {"during": max(rates)} if rates else {}


def compressed_pool(store: str, budget: float, staging: int) -> Any:
    """As many experts kept compressed as fit into bytes, or a share of what all experts take
    decoded."""
    from moelab.cache.pools import Pools
    from moelab.offloading.slots import Sizes
    from moelab.store.layout import ExpertStore

    opened = ExpertStore(store)
    sizes = Sizes.of(opened)
    experts = sum(len(layer.experts) for layer in opened.layers)
    everything = (
        experts * sizes.full + staging * sizes.in_flight
    )  # what `offload` takes the share of
    room = budget if isinstance(budget, int) else budget * everything
    return Pools(C=min(experts, int(room - staging * sizes.in_flight) // (sizes.e + sizes.sm)))


class Mapped(Transformers):
    """transformers' default: weights stay mapped from a checkpoint that is laid out as its
    parameters are. Option: "opened", the `experts` of `open_model`; "external" reads them one by
    one, for the same bits in little memory."""

    def __init__(self, options: Record) -> None:
        import moelab

        super().__init__(
            moelab.open_model(options["model"], experts=options.get("opened", "resident"))
        )


class Eager(Mapped):
    """transformers with all weights in this process's own memory, not mapped from a file."""

    def __init__(self, options: Record) -> None:
        super().__init__(options)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone()


class Accelerate(Transformers):
    """Offload of the last layers; options: "layers" that stay "near", by default in the CPU's
    memory; the others are "far", by default on the disk, in the folder "offload"."""

    def __init__(self, options: Record) -> None:
        import torch
        import transformers

        import_module("accelerate")
        transformers.utils.logging.disable_progress_bar()
        config = transformers.AutoConfig.from_pretrained(options["model"], trust_remote_code=False)
        near = options.get("near", "cpu")
        far = options.get("far", "disk")
        places = dict.fromkeys(
            ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), near
        )
        places |= {
            f"model.layers.{i}": near if i < options["layers"] else far
            for i in range(config.num_hidden_layers)
        }
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options["model"],
            trust_remote_code=False,
            dtype=torch.bfloat16,
            experts_implementation="eager",
            device_map=places,
            offload_folder=options.get("offload"),
        )
        super().__init__(model.eval())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
