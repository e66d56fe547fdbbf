"""What an expert's parts cost on this machine, from a handful of measurements that take a moment.

The scheduler orders reads by these; it needs their ratios, not their last digit. The profiler measures the same
thoroughly, see `moelab.offloading.profile`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from moelab.models.seam import discover
from moelab.offloading.slots import lies_as_in_memory
from moelab.schedule.requests import Delays
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader, decode, empty_tensors
from moelab.store.stages import decompress, recover, separable


def same_bits_on_one_thread(store: ExpertStore, model: Any, tokens: int = 8) -> bool:
    """Whether one thread computes a token's expert to the same bits as all threads do, tried on `tokens` tokens.

    Kernels share the rows of a product of a matrix and a vector out among threads, and a row's sum is one thread's.
    No library promises it, so it is tried on a real expert.
    """
    threads, experts = torch.get_num_threads(), discover(model)[0].experts
    if threads == 1 or model.device.type != "cpu":
        return False                                            # nothing to gain
    with Reader(store) as reader, torch.inference_mode():
        chunks = reader.read(0, 0)
        weights = {name: t.to(model.dtype) if t.is_floating_point() else t
                   for name, t in decode(chunks, chunks).items()}
        x, results = torch.randn(tokens, 1, store.spec.H, generator=torch.Generator().manual_seed(0)), []
        try:
            for n in (1, threads):
                torch.set_num_threads(n)
                results.append(torch.stack([experts.ffn(row.to(model.dtype), weights) for row in x]))
        finally:
            torch.set_num_threads(threads)
    return torch.equal(*results)


def experts_bytes(store: ExpertStore) -> list[list[list[int]]]:
    """[L][E] of the bytes of each expert's two reads, [E-chunks, SM-chunks]: exact; experts compress differently."""
    return [[[store.stored_bytes(i, expert, part) for part in ("E", "SM")] for expert in range(len(layer.experts))]
            for i, layer in enumerate(store.layers)]


def quick_delays(store: ExpertStore, model: Any, reader: Reader | None = None, samples: int = 5) -> Delays:
    """Medians of a few reads, decodings and computations of the store's first experts."""
    experts = discover(model)[0].experts
    ffn_dtype, H = model.dtype, store.spec.H
    reader, own = reader or Reader(store), reader is None
    took: dict[str, list[float]] = {name: [] for name in ("E", "SM", "decompress", "recover", "decode", "one", "many")}
    in_place = lies_as_in_memory(store)                         # then only its checksum is left to do
    buffers = {part: reader.buffer(part) for part in ("E", "SM")}
    out = None

    def timed(name: str, function: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = function()
        took[name].append(time.perf_counter() - start)
        return result
    try:
        for i in range(samples):
            expert = i % len(store.layers[0].experts)
            e, sm = (timed(part, lambda part=part: reader.read(0, expert, part, buffers[part])) for part in ("E", "SM"))
            out = out or empty_tensors(e.entries)
            names = [name for name in out if separable(e, name)]
            timed("decompress", lambda: [decompress(e, name, out[name]) for name in names])
            timed("recover", lambda: [recover(sm, name, out[name]) for name in names])
            timed("decode", lambda: reader.check(e) if in_place else decode(e, sm, out))
            weights = {name: t.to(model.device, ffn_dtype if t.is_floating_point() else None)
                       for name, t in out.items()}
            with torch.inference_mode():
                for name, tokens in (("one", 1), ("many", 16)):
                    x = torch.zeros(tokens, H, dtype=ffn_dtype, device=model.device)
                    timed(name, lambda: experts.ffn(x, weights))
    finally:
        if own:
            reader.close()
    seconds = {name: statistics.median(values) for name, values in took.items()}
    token = max(0.0, (seconds["many"] - seconds["one"]) / 15)
    every, tried = experts_bytes(store), range(min(samples, len(store.layers[0].experts)))
    e_bytes, sm_bytes = (round(statistics.fmean(every[0][i][part] for i in tried)) for part in (0, 1))
    return Delays(e_read=seconds["E"], sm_read=seconds["SM"], decompress=seconds["decompress"],
                  recover=seconds["recover"], expert_base=max(0.0, seconds["one"] - token), expert_token=token,
                  N=len(store.entries(0, 0)), e_bytes=e_bytes, sm_bytes=sm_bytes, decode=seconds["decode"],
                  experts_bytes=every)
