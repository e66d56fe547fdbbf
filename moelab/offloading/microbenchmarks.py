"""What the profiler times, measurement by measurement: `Rounds.once` runs each of them once, on other experts.

Source: ZipMoE §3.3 and appendix C; see `moelab.offloading.profile`, which makes rounds and sums them up. An expert is
read with the system's cache dropped, decoded into the engine's kind of memory (`moelab.offloading.slots`), and computed
from tensors that have left the processor's cache since. The model's other parts run in real forward passes whose
experts answer nothing.

Shapes: x [tokens, H]; the names of the samples are those of `moelab.offloading.profile`.
Left out: contention, a past that attention looks back on, other devices than the CPU.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from moelab.models.seam import SeamExperts, assignments, discover
from moelab.offloading.slots import Sizes, Slots
from moelab.store.layout import ALIGN, Chunk, ExpertStore, TensorEntry
from moelab.store.reader import Chunks, Reader, aligned_buffer, decode, decode_tensor
from moelab.store.stages import decompress, recover, separable

READS = tuple(1 << bits for bits in (16, 18, 20, 22, 24))       # bytes
EXPERT_TOKENS, FORWARD_TOKENS = (1, 2, 4, 8, 16, 64), (1, 4, 16, 64)
#: bytes of decoded experts that computing goes round in, so that it finds none in the processor's cache
ROUND_TRIP = 256 << 20
COPY, MATMUL = 64 << 20, 512


class Rounds:
    """All measurements, one after another, and their samples."""

    def __init__(self, store: ExpertStore, model: Any, reader: Reader, pool: ThreadPoolExecutor, workers: int,
                 rng: np.random.Generator) -> None:
        self.store, self.model, self.reader, self.pool = store, model, reader, pool
        self.workers, self.rng = workers, rng
        self.seconds: dict[str, list[float]] = {}
        self.done, self.calls = -1, []                          # when each layer's experts were called
        experts = sum(len(layer.experts) for layer in store.layers)
        self.kept = max(workers, min(experts, ROUND_TRIP // Sizes.of(store).full))
        self.slots = Slots(store, {"full": self.kept, "e": workers, "sm": workers})
        self.buffers = [{"E": self.slots.bytes("e", i), "SM": self.slots.bytes("sm", i)} for i in range(workers)]
        for part in (part for pair in self.buffers for part in pair.values()):
            part[:] = 0                                         # its pages are there
        self.full: dict[int, int] = {}                          # slot → layer of the expert that it holds
        for slot in range(self.kept):
            layer, expert = self._pick()
            self.full[slot] = layer
            if self.slots.sizes.in_place:
                reader.read_parts(layer, expert, {"both": self.slots.bytes("full", slot)})
            else:
                decode(*reader.read_parts(layer, expert, self.buffers[0]), self.slots.tensors(slot, layer))
        largest = max(layer.size for layer in store.layers)
        self.sizes = [size for size in READS if size <= largest]
        self.pieces = Reader(_Pieces(store), reader.mode, reader.bandwidth, verify=False)
        self.buffer = aligned_buffer(max(self.sizes, default=0))
        self.buffer[:] = 0
        self.copied = torch.zeros(COPY // 4), torch.zeros(COPY // 4)
        self.products = [torch.randn(MATMUL, MATMUL).to(dtype) for dtype in {torch.float32, model.dtype}]
        self.experts = [layer.experts for layer in discover(model)]

    def timed(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = function(*args)
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def once(self) -> None:
        """Every measurement once."""
        self.done += 1
        (self._read_in_place if self.slots.sizes.in_place else self._read_and_decode)()
        for size in self.sizes:
            layer = int(self.rng.choice([i for i, layer in enumerate(self.store.layers) if layer.size >= size]))
            place = int(self.rng.integers((self.store.layers[layer].size - size) // ALIGN + 1)) * ALIGN
            self._read(f"read {size}", self.pieces.read, layer, (place, size), "both", self.buffer)
        for tokens in EXPERT_TOKENS:
            self._expert(tokens)
        for tokens in FORWARD_TOKENS:
            self._forward(tokens)
        self.timed("copy", self.copied[0].copy_, self.copied[1])
        for matrix in self.products:
            self.timed(f"matmul {matrix.dtype}".replace("torch.", ""), torch.matmul, matrix, matrix)

    def _pick(self) -> tuple[int, int]:
        layer = int(self.rng.integers(len(self.store.layers)))
        return layer, int(self.rng.integers(len(self.store.layers[layer].experts)))

    def _read(self, name: str, function: Callable[..., Any], layer: int, *args: Any) -> Any:
        self.reader.drop_cache(layer)
        return self.timed(name, function, layer, *args)

    def _read_in_place(self) -> None:
        """What there is to do for an expert of a raw store: one read, and checking it; the rest is nothing."""
        slots, whole = [(self.done * self.workers + i) % self.kept for i in range(self.workers)], []
        for slot in slots:
            key = self._pick()
            whole += self._read("read both", self.reader.read_parts, *key, {"both": self.slots.bytes("full", slot)})
            self.full[slot] = key[0]
            self.seconds.setdefault("read E", []).append(self.seconds["read both"][-1])
        list(self.pool.map(lambda chunks: self.timed("decode", self._checked, "decode", lambda *_: None, chunks, chunks,
                                                     {}), whole))
        self.seconds["decompress"] = self.seconds["decode"]
        for name in ("read SM", "recover"):
            self.seconds.setdefault(name, []).extend([0.0] * self.workers)

    def _read_and_decode(self) -> None:
        self._read("read both", self.reader.read_parts, *self._pick(), self.buffers[0])
        work = []
        for i, buffers in enumerate(self.buffers):
            key, slot = self._pick(), (self.done * self.workers + i) % self.kept
            (e,) = self._read("read E", self.reader.read_parts, *key, {"E": buffers["E"]})
            (sm,) = self._read("read SM", self.reader.read_parts, *key, {"SM": buffers["SM"]})
            self.full[slot] = key[0]
            work.append((e, sm, self.slots.tensors(slot, key[0])))
        for name, stage in (("decompress", _decompress), ("recover", _recover), ("decode", decode)):
            list(self.pool.map(lambda given: self.timed(name, self._checked, name, stage, *given), work))

    def _checked(self, name: str, stage: Callable[..., Any], e: Chunks, sm: Chunks, out: dict) -> None:
        """What the engine's workers do: check what they use, then use it."""
        for chunks in {"decompress": [e], "recover": [sm]}.get(name, [e] if e is sm else [e, sm]):
            if self.reader.verify:
                self.reader.check(chunks)
        stage(e, sm, out)

    def _expert(self, tokens: int) -> None:
        slot = int(self.rng.integers(self.kept))
        layer, dtype = self.full[slot], self.model.dtype
        x, w = torch.randn(tokens, self.store.spec.H).to(dtype), torch.ones(tokens, dtype=dtype)
        rows = torch.arange(tokens)

        def compute() -> torch.Tensor:
            weights = {name: t.to(dtype) if t.is_floating_point() else t
                       for name, t in self.slots.tensors(slot, layer).items()}
            return self.experts[layer].contribution(x, rows, w, weights)
        self.timed(f"expert {tokens}", compute)

    def _forward(self, tokens: int) -> None:
        vocabulary = self.model.get_input_embeddings().num_embeddings
        ids = torch.from_numpy(self.rng.integers(vocabulary, size=(1, tokens)))
        arguments = {"input_ids": ids, "decoder_input_ids": ids, "logits_to_keep": 1}       # `generate` keeps one, too
        taken = inspect.signature(self.model.forward).parameters
        self.calls.clear()
        start = time.perf_counter()
        self.model(**{name: value for name, value in arguments.items() if name in taken})
        end = time.perf_counter()
        self.seconds.setdefault(f"other {tokens}", []).append((self.calls[-1] - start) / len(self.calls))
        self.seconds.setdefault(f"head {tokens}", []).append(end - self.calls[-1])

    def without_experts(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
                        experts: SeamExperts) -> torch.Tensor:
        """An executor whose experts all answer nothing; what it costs to hand out and to sum up is left in."""
        nothing = [(expert, tokens, x.new_zeros(len(tokens), x.shape[1]))
                   for expert, _, tokens in assignments(ids, experts.num_experts)]
        out = experts.accumulate(x, nothing)
        self.calls.append(time.perf_counter())
        return out


class _Pieces(ExpertStore):
    """A store whose expert (place, size) of a layer is so many bytes of its file, whatever they are."""

    checksum = None

    def __init__(self, store: ExpertStore) -> None:
        self.folder, self.layers = store.folder, store.layers

    def entries(self, layer: int, piece: tuple[int, int]) -> dict[str, TensorEntry]:
        place, size = piece
        return {"piece": TensorEntry("U8", (size,), "", (("raw", (Chunk(place, size, ""),)),))}


def _decompress(e: Chunks, sm: Chunks, out: dict[str, torch.Tensor]) -> None:
    for name in out:
        if separable(e, name):
            decompress(e, name, out[name])


def _recover(e: Chunks, sm: Chunks, out: dict[str, torch.Tensor]) -> None:
    """The rest: what cannot be decoded in two stages is decoded when both parts are there."""
    for name in out:
        if separable(e, name):
            recover(sm, name, out[name])
        else:
            decode_tensor(e, sm, name, out[name])
