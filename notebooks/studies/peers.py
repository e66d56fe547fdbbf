"""Engines on one task: the same tokens through moelab, transformers, accelerate or llama.cpp,
measured alike.

    python -m notebooks.studies.peers moelab '{"store": …, "budget": …, "tokens": [[…]], "prompt": 128}'

prints JSON as its last line. Tokens are given (teacher forcing), because a random model repeats
itself when it decodes greedily: its routing freezes, and every access hits the cache. "tokens" has
a row for each sequence of a batch: a prompt, then token by token. Starting needs the standard
library and numpy alone, so that an engine may live in another interpreter than moelab."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple
from importlib import import_module
from pathlib import Path
from typing import Any

from moelab.base.records import Record
from moelab.offloading.budget import own_groups
from moelab.offloading.metrics import process

#: name → the module and the class that runs it
ENGINES = {
    "moelab": (".peers", "Moelab"),
    "eager": (".peers", "Eager"),
    "mapped": (".peers", "Mapped"),
    "accelerate": (".peers", "Accelerate"),
    "llama.cpp": (".external_engines", "Llama"),
    "ik_llama.cpp": (".external_engines", "IkLlama"),
    "lru baseline": (".lru_baseline", "LRUBaseline"),
}
Sequences = list[list[int]]  # of tokens


def main(arguments: Sequence[str]) -> None:
    name = arguments[0]
    options = json.loads(arguments[1])
    # a line of its own, whatever the engine has printed
    print("\n" + json.dumps(run(name, options)), flush=True)
    sys.stderr.flush()
    os._exit(0)  # some engines crash while they are torn down


def run(name: str, options: Record) -> Record:
    """An engine's report; {"missing": reason} for one that is not installed."""
    gc.collect()  # of an engine that was closed just now
    try:
        module, kind = ENGINES[name]
        start = time.perf_counter()
        engine = getattr(import_module(module, __package__), kind)(options)
        opened = time.perf_counter() - start
    except ImportError as error:
        return {"missing": f"not installed ({error})"}
    report = engine.measure(options["tokens"], options["prompt"], options.get("logits"))
    peaks = process() | {"peak_group_bytes": group_peak()}
    return report | {"open_s": opened} | peaks | engine.report()


def group_peak() -> int | None:
    """The most memory that this process's control group has had, page cache included."""
    for group in own_groups()[:1]:
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            with suppress(OSError):
                return int((group / name).read_text())
    return None


def read_bytes() -> int | None:
    """What this process has read from disks so far; None on other systems than Linux."""
    try:
        return int(re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.M)[1])
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
        """Called once, between the prompt and the single tokens."""

    def report(self) -> Record:
        """Further entries of the report, asked for at the end."""
        return {}

    def measure(self, tokens: Sequences, prompt: int, logits_to: str | None = None) -> Record:
        """Feed a prompt of so many tokens, then the other tokens [B][T] one by one: `ttft_s`,
        `tpot_s` [tokens after it], bytes read by these, `digest` and `best` (argmax) of all logits,
        which a file `logits_to` may keep: fp32 [(1 + tokens) · B, V]."""
        seconds: list[float] = []
        best: list[int] = []
        kept: list[Any] = []
        digest = hashlib.sha256()
        at = 0
        before = None
        self.restart()
        while at < len(tokens[0]):
            n = 1 if at else prompt
            ids = [row[at : at + n] for row in tokens]
            at += n
            start = time.perf_counter()
            logits = self.feed(ids)
            seconds.append(time.perf_counter() - start)
            digest.update(logits.tobytes())
            if logits.dtype != "float32":  # bf16 as int16 has no order; as the upper half of fp32
                logits = (logits.astype("int32") << 16).view("float32")
            best += logits.argmax(-1).tolist()
            if logits_to:
                kept.append(logits.astype("float32"))
            if at == prompt:
                self.decoding()
                before = read_bytes()
        if logits_to:
            import numpy as np

            np.save(logits_to, np.concatenate(kept))
        return {
            "ttft_s": seconds[0],
            "tpot_s": seconds[1:],
            "decode_read_bytes": None if before is None else read_bytes() - before,
            "best": best,
            "digest": digest.hexdigest()[:16],
        }


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
    """Options: store, budget, and others of `open_model` as "options"; "predictor"; "ungated": it
    prefetches in every token, not where that has been seen to pay; "compressed": all experts in
    memory are kept compressed; "serial": a layer's experts are loaded, then computed."""

    def __init__(self, options: Record) -> None:
        from moelab import open_model

        self.options = options
        given = dict(options.get("options", {}))
        if options.get("compressed"):
            given["plan"] = compressed_pool
        if not given.get("speculate"):
            given["prefetch"] = options.get("predictor")
        model = open_model(options["store"], memory=options["budget"], **given)
        super().__init__(model)
        self.offloading = model.moelab
        self.offloading.engine.serial = bool(options.get("serial"))
        if options.get("ungated"):
            from moelab.offloading.prefetch_gate import PrefetchGate

            self.offloading.engine.controller.gate = PrefetchGate(trials=False)

    def decoding(self) -> None:
        """Remember the hits and misses of the prompt, which do not count."""
        counters = self.offloading.residency.counters
        self.before = sum(counters.hits.values()), counters.misses

    def report(self) -> Record:
        """What the run took, its limits and its memory, and what the simulator needs to play it
        again; the model is closed."""
        from moelab.simulation.simulator import replay

        from . import limits

        this = self.offloading
        metrics = this.metrics()
        least = metrics.read_bytes and replay(this.run, cache="belady").metrics()
        settings = this.run.settings
        workers = self.options.get("options", {}).get("workers", 1)
        forwards = list(this.forwards)
        records, decoded = limits.layer_records(list(this.timeline), forwards)
        rate = delivered(this.timeline, forwards)
        hits = sum(metrics.hits.values()) - self.before[0]
        misses = metrics.misses - self.before[1]
        steps = [
            [[layer, list(experts.items())] for layer, experts in forward] for forward in this.steps
        ]
        this.close()
        return {
            "others_bytes": this.store.weights_bytes,
            **stored(this.store),
            "decode_hit_rate": hits / max(hits + misses, 1),
            "least_read_bytes": least.read_bytes_per_token if least else 0.0,
            "metrics": asdict(metrics),
            "on_demand_s": limits.on_demand_limit(records, rate, decoded, workers),
            "overlapped_s": limits.overlapped_limit(records, rate, decoded, workers),
            "replay": {
                "steps": steps,
                "forwards": forwards,
                "pools": list(astuple(settings.pools)),
                "workers": workers,
                "staging": settings.staging,
            },
        }


def stored(store: Any) -> Record:
    """The share of their bf16 bytes that a store's experts take; nothing of a GGUF file's."""
    return {"stored_fraction": store.table()[-1]["fraction"]} if hasattr(store, "table") else {}


def delivered(events: Iterable[Any], forwards: Sequence[Any]) -> float:
    """The highest read rate of any forward (start, end, …), bytes a second while the disk was
    busy; infinite where nothing was read."""
    reads = [event for event in events if event.kind.startswith("read")]
    best = 0.0
    for start, end, *_ in forwards:
        mine = [event for event in reads if start <= event.start < end]
        if busy := sum(event.end - event.start for event in mine):
            best = max(best, sum(event.bytes for event in mine) / busy)
    return best or math.inf


def compressed_pool(_: Any, memory: Any, delays: Any) -> Any:
    """A plan: as many experts kept compressed as fit."""
    from moelab.cache.pools import Pools

    sizes = memory.sizes
    return Pools(C=min(memory.L * memory.E, memory.kept // (sizes.e + sizes.sm)))


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
    main(sys.argv[1:])
