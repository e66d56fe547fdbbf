"""What an expert's parts take here, measured in a moment with a store's first experts.

Source: ZipMoE §3.3 and appendix C, whose scheduler and planner take "offline-profiled decompression
and I/O delays". They need their ratios, not their last digit. Left out: how much disk, workers and
computation slow each other down; `moelab.simulation.fit` finds that in a run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean, median
from typing import Any

import torch

from moelab.models.seam import discover
from moelab.offloading.run import experts_bytes
from moelab.simulation.costs import Delays
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader, cast, decode_tensor, empty_tensors
from moelab.store.stages import decompress, recover

ROUNDS = 5
TOKENS = 16


def quick_delays(store: ExpertStore, model: Any) -> Delays:
    """Medians of five reads, decodings and computations of the store's first experts."""
    seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[name].append(time.perf_counter() - start)

    experts = discover(model)[0].seam
    entries = store.entries(0, 0)
    out = empty_tensors(entries)
    apart = [name for name in entries if entries[name].separable]
    with Reader(store) as reader, torch.inference_mode():
        buffers = {part: reader.buffer(part) for part in ("E", "SM")}
        for i in range(ROUNDS):
            expert = i % len(store.layers[0].experts)
            read = {}
            for part, buffer in buffers.items():
                with timed(part):
                    read[part] = reader.read(0, expert, part, buffer)
            with timed("decompress"):
                for name in apart:
                    decompress(read["E"], name, out[name])
            with timed("recover"):
                for name, tensor in out.items():
                    if name in apart:
                        recover(read["SM"], name, tensor)
                    else:
                        decode_tensor(read["E"], read["SM"], name, tensor)
            weights = {name: t.to(model.device) for name, t in cast(out, model.dtype).items()}
            for tokens in (1, TOKENS):
                x = torch.zeros(tokens, store.spec.H, dtype=model.dtype, device=model.device)
                with timed(f"{tokens} tokens"):
                    experts.ffn(x, weights).cpu()
    took = {name: median(values) for name, values in seconds.items()}
    token = max(0.0, (took[f"{TOKENS} tokens"] - took["1 tokens"]) / (TOKENS - 1))
    every = experts_bytes(store)
    e_bytes, sm_bytes = (round(fmean(pair[part] for pair in every[0])) for part in (0, 1))
    return Delays(
        e_read=took["E"],
        sm_read=took["SM"] * (sm_bytes > 0),
        decompress=took["decompress"],
        recover=took["recover"],
        expert_base=max(0.0, took["1 tokens"] - token),
        expert_token=token,
        N=len(store.entries(0, 0)),
        e_bytes=e_bytes,
        sm_bytes=sm_bytes,
        experts_bytes=every,
    )
