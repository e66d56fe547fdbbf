"""The baseline for offloading engines: one global LRU cache of raw expert slots.

Raw bf16 experts lie in one file (`lay_out`). Four threads read misses past the system's cache, each
expert in one request, while the hits of the same layer are computed with transformers' eager
arithmetic."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

import moelab
from moelab.base.files import atomic
from moelab.bench.peers import Transformers
from moelab.models import assignments, discover, plug

ALIGN = 4096


class LRUBaseline(Transformers):
    """Options: model, "experts": the file of `lay_out`, "slots": experts that the cache holds, at
    least E."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(moelab.open_model(options["model"], experts="external"))
        index = json.loads(Path(options["experts"]).with_suffix(".json").read_text())
        self.E = index["E"]
        self.stride = index["stride"]
        buffer = np.empty(options["slots"] * self.stride + ALIGN, np.uint8)
        memory = buffer[-buffer.ctypes.data % ALIGN :][: options["slots"] * self.stride].reshape(
            -1, self.stride
        )
        if len(memory) < self.E:
            raise ValueError(
                f"the LRU baseline has {len(memory)} slots; it needs one for each of a "
                f"layer's {self.E} experts"
            )
        self.memory = [memoryview(slot) for slot in memory]
        self.tensors = [
            {
                name: torch.from_numpy(slot[offset : offset + size])
                .view(getattr(torch, dtype))
                .view(shape)
                for name, (dtype, shape, offset, size) in index["tensors"].items()
            }
            for slot in memory
        ]
        self.free, self.slot = (
            list(range(len(memory))),
            OrderedDict(),
        )  # (layer, expert) → slot, oldest first
        try:
            self.file = os.open(options["experts"], os.O_RDONLY | os.O_DIRECT)
            self.direct = True
        except (AttributeError, OSError):  # not on this system, or file system
            self.file = os.open(options["experts"], os.O_RDONLY)
            self.direct = False
        self.threads = ThreadPoolExecutor(4)
        self.hits = 0
        self.misses = 0
        plug(self.model, executor=self)

    def decoding(self) -> None:
        """Begin to count hits and misses."""
        self.hits = self.misses = 0

    def read(self, key: tuple[int, int], slot: int) -> tuple[int, int]:
        """Read an expert, (layer, expert), into a slot; returns which."""
        got = 0
        place = (key[0] * self.E + key[1]) * self.stride
        while got < self.stride:
            n = os.preadv(self.file, [self.memory[slot][got:]], place + got)
            if not n:
                raise OSError(f"the file of experts ends within expert {key}")
            got += n
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
            loads.append(self.threads.submit(self.read, key, self.slot[key]))
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
        """How experts were read and how many were there; ends the threads."""
        self.threads.shutdown()
        os.close(self.file)
        return {
            "direct": self.direct,
            "decode_hit_rate": self.hits / max(self.hits + self.misses, 1),
        }


def lay_out(model: str | Path, path: Path) -> Path:
    """Write the file of experts for `LRUBaseline`: one after another, raw, each at a multiple of
    4096 bytes."""
    layers = [layer.seam for layer in discover(moelab.open_model(model, experts="external"))]
    tensors = {}
    at = 0
    for name, t in layers[0].weights(0).items():
        tensors[name] = str(t.dtype).removeprefix("torch."), list(t.shape), at, t.nbytes
        at += -(-t.nbytes // 64) * 64
    stride = -(-at // ALIGN) * ALIGN
    with atomic(path) as part:
        with open(part, "wb") as file:
            for layer in layers:
                for expert in range(layer.num_experts):
                    slot = bytearray(stride)
                    for name, t in layer.weights(expert).items():
                        _, _, offset, size = tensors[name]
                        slot[offset : offset + size] = (
                            t.contiguous().view(torch.uint8).numpy().tobytes()
                        )
                    file.write(slot)
        path.with_suffix(".json").write_text(
            json.dumps({"E": layers[0].num_experts, "stride": stride, "tensors": tensors})
        )
    return path
