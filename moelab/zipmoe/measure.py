"""What an expert's parts take here, measured in a moment with a store's first experts.

Source: ZipMoE §3.3 and appendix C, whose scheduler and planner take "offline-profiled decompression
and I/O delays". They need their ratios, not their last digit. Left out: how much disk, workers and
computation slow each other down; `moelab.simulation.fit` finds that in a run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from moelab.models.seam import discover
from moelab.simulation.costs import Delays
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader, cast, decode, decompress, empty_tensors

ROUNDS = 5


def quick_delays(store: ExpertStore, model: Any) -> Delays:
    """Medians of five reads, decodings and computations of the store's first experts. Computing
    counts as proportional to tokens, by which a schedule orders experts."""
    seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[name].append(time.perf_counter() - start)

    experts = discover(model)[0].seam
    entries = store.entries(0, 0)
    out = empty_tensors(entries)
    x = torch.zeros(1, store.spec.H, dtype=model.dtype, device=model.device)
    with Reader(store) as reader, torch.inference_mode():
        buffers = {part: reader.buffer(part) for part in ("E", "SM")}
        for i in range(ROUNDS):
            expert = i % len(store.layers[0].experts)
            read = {}
            for part, buffer in buffers.items():
                with timed(part):
                    read[part] = reader.read(0, expert, part, buffer)
            with timed("decompress"):
                for name in entries:
                    if entries[name].shards:
                        decompress(read["E"], name, out[name])
            with timed("decode"):
                decode(read["E"], read["SM"], out)
            weights = {name: t.to(model.device) for name, t in cast(out, model.dtype).items()}
            with timed("compute"):
                experts.ffn(x, weights).cpu()
    took = {name: median(values) for name, values in seconds.items()}
    return Delays(
        e_read=took["E"],
        sm_read=took["SM"] * (store.stored_bytes(0, 0, "SM") > 0),
        decompress=took["decompress"],
        recover=max(0.0, took["decode"] - took["decompress"]),
        expert_base=0.0,
        expert_token=took["compute"],
        N=len(entries),
        shards=max(1, *(entry.shards for entry in entries.values())),
    )
