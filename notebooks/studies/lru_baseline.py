"""The baseline for offloading engines: one global LRU cache of raw expert slots.

Four threads read misses of a raw store past the system's cache, each expert in one request, while
the hits of the same layer are computed with transformers' eager arithmetic."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
import torch

import moelab
from moelab.models import assignments, plug
from moelab.store.headers import DTYPES
from moelab.store.layout import ExpertStore, run
from moelab.store.reader import Reader, aligned_buffer

from .peers import Transformers


class LRUBaseline(Transformers):
    """Options: model, "store": its experts, raw, "budget": bytes of the cache, at least a layer's
    experts."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(moelab.open_model(options["model"], experts="external"))
        store = ExpertStore(options["store"])
        self.reader = Reader(store, verify=False)
        begin, size = run(entries := store.entries(0, 0), "both")
        slots = options["budget"] // size
        if slots < store.spec.E:
            raise ValueError(
                f"the LRU baseline has {slots} slots; it needs one for each of a "
                f"layer's {store.spec.E} experts"
            )
        self.memory = aligned_buffer(slots * size).reshape(slots, size)
        at = {name: of.planes[0][1][0].offset - begin for name, of in entries.items()}
        self.tensors = [
            {
                name: torch.from_numpy(slot[at[name] :][: of.nbytes])
                .view(DTYPES[of.dtype])
                .view(of.shape)
                for name, of in entries.items()
            }
            for slot in self.memory
        ]
        self.free = list(range(slots))
        self.slot = OrderedDict()  # (layer, expert) → slot, oldest first
        self.threads = ThreadPoolExecutor(4)
        self.decoding()
        plug(self.model, executor=self)

    def decoding(self) -> None:
        """Begin to count hits and misses."""
        self.hits = self.misses = 0

    def read(self, key: tuple[int, int], slot: np.ndarray) -> tuple[int, int]:
        """Read an expert, (layer, expert), into a slot; returns which."""
        self.reader.read(*key, buffer=slot)
        return key

    def __call__(self, x: Any, ids: Any, weights: Any, experts: Any) -> Any:
        """An executor: hits are computed while misses are read, then those in the order in which
        they arrive."""
        parts = {
            (experts.layer, expert): (choice, tokens)
            for expert, choice, tokens in assignments(ids, experts.num_experts)
        }
        hits = [key for key in parts if key in self.slot]
        misses = [key for key in parts if key not in self.slot]
        for key in hits:
            self.slot.move_to_end(key)  # in use: never the oldest
        loads = []
        for key in misses:
            self.slot[key] = self.free.pop() if self.free else self.slot.popitem(last=False)[1]
            loads.append(self.threads.submit(self.read, key, self.memory[self.slot[key]]))
        self.hits, self.misses = self.hits + len(hits), self.misses + len(misses)

        def compute(key: tuple[int, int]) -> tuple[int, Any, Any]:
            choice, tokens = parts[key]
            return (
                key[1],
                tokens,
                experts.contribution(
                    x, tokens, weights[tokens, choice], self.tensors[self.slot[key]]
                ),
            )

        results = [compute(key) for key in hits] + [
            compute(load.result()) for load in as_completed(loads)
        ]
        return experts.accumulate(x, results)

    def report(self) -> dict[str, Any]:
        """How many experts were there; ends the threads."""
        self.threads.shutdown()
        return {"decode_hit_rate": self.hits / max(self.hits + self.misses, 1)}
