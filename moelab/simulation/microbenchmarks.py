"""Microbenchmarks: reading, decoding and computing experts as the engine does, one at a time and
side by side.

`Microbenchmarks.once` runs every measurement of `moelab.simulation.profile` once, on other experts
of the store. Reads find the system's cache dropped, products find the expert gone from the
processor's cache, and the model's other parts run in real forward passes whose experts answer
nothing.

Disk, workers and computation share cores and memory, so two and all three of them also run side by
side, as the engine runs them: "expert beside decode" is one expert on one token while another is
decoded, "decode beside expert and read" a decoding while one is computed and one read, "expert
alone" the same just before.

`quick_delays` measures with a store's first experts in a moment. Left out: contention with the
model's other parts, or of many tokens; the engine itself (`moelab.simulation.observed`); attention
to a long past; devices but the CPU."""

from __future__ import annotations

import inspect
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations
from threading import Event
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from moelab.cache.residency import Pools, Residency
from moelab.models.experts import SeamExperts, assignments, execute, seam_of
from moelab.models.seam import discover
from moelab.offloading.loading import DEPTH
from moelab.offloading.requests import Delays
from moelab.offloading.slots import Sizes, Slots
from moelab.offloading.threads import one_thread_pays, threads
from moelab.specs import State
from moelab.store.headers import NAMES
from moelab.store.layout import ALIGN, Chunk, ExpertStore, TensorEntry
from moelab.store.reader import (
    Chunks,
    Reader,
    aligned_buffer,
    cast,
    decode,
    decode_tensor,
    empty_tensors,
)
from moelab.store.stages import decompress, recover
from moelab.zipmoe.affinity import default_order

READS = tuple(1 << bits for bits in (16, 18, 20, 22, 24))  # bytes
EXPERT_TOKENS, FORWARD_TOKENS = (1, 2, 4, 8, 16, 64), (1, 4, 16, 64)
#: bytes of decoded experts that computing goes round in, and of compressed ones that decoding does,
#: so that they find none in the processor's cache
ROUND_TRIP, CODED = 256 << 20, 32 << 20
COPY, MATMUL, ENOUGH = 64 << 20, 512, 0.1  # bytes, rows and columns, seconds of a product in all


class Microbenchmarks:
    """All measurements, one after another, and their samples; decoded experts lie in the engine's
    kind of memory, from which an executor takes what is `at` {expert: slot}."""

    def __init__(
        self,
        store: ExpertStore,
        model: Any,
        reader: Reader,
        pool: ThreadPoolExecutor,
        workers: int,
        rng: np.random.Generator,
        executor: Callable[..., torch.Tensor] | None = None,
        compact: bool = False,
    ) -> None:
        self.store, self.model, self.reader = store, model, reader
        self.workers, self.rng, self.executor = workers, rng, executor
        self.seconds: dict[str, list[float]] = {}
        self.timed = partial(_timed, self.seconds)
        self.done, self.calls = -1, []  # rounds; when each layer's experts were called
        experts = sum(len(layer.experts) for layer in store.layers)
        sizes = Sizes.of(store, None if compact or not store.few_bits else False)
        self.kept = max(workers, min(experts, ROUND_TRIP // sizes.full))
        coded = 0 if sizes.in_place else max(1, min(experts, CODED // (sizes.e + sizes.sm)))
        self.slots = Slots(store, {"full": self.kept + coded, "e": workers, "sm": workers}, sizes)
        self.slots.touch()
        self.buffers = [
            {"E": self.slots.bytes("e", i), "SM": self.slots.bytes("sm", i)} for i in range(workers)
        ]
        self.full: dict[int, tuple[int, int]] = {}  # slot → (layer, expert) that it holds
        self.whole: dict[int, Chunks] = {}  # the same, of what is read in place
        self.together = min(
            store.spec.K, self.kept
        )  # so many slots in turn hold experts of one layer
        for slot in range(self.kept):
            layer, expert = self._pick(slot)
            self.full[slot] = layer, expert
            if self.slots.sizes.in_place:
                (self.whole[slot],) = reader.read_parts(
                    layer, expert, {"both": self.slots.bytes("full", slot)}
                )
            else:
                decode(
                    *reader.read_parts(layer, expert, self.buffers[0]),
                    self.slots.tensors(slot, layer, expert),
                )
        #: compressed experts (layer, expert, E-chunks, SM-chunks), decoded into the slots after
        #: those that are kept
        self.coded = [
            (*key, *reader.read_parts(*key, {"E": None, "SM": None}))
            for key in (self._pick() for _ in range(coded))
        ]
        largest = max(
            getattr(layer, "size", 0) for layer in store.layers
        )  # a checkpoint has no file a layer
        self.sizes = [size for size in READS if size <= largest]
        self.pieces = Reader(_Pieces(store), reader.mode, reader.bandwidth, verify=False)
        self.pages = [aligned_buffer(max(self.sizes, default=0)) for _ in range(DEPTH)]
        self.copied = torch.zeros(COPY // 4), torch.zeros(COPY // 4)
        self.products = [
            torch.randn(MATMUL, MATMUL).to(dtype) for dtype in {torch.float32, model.dtype}
        ]
        self.experts = [seam_of(layer.experts) for layer in discover(model)]
        self.one_thread = executor is None and not sizes.in_place and one_thread_pays(store, model)
        self.spare = [
            {part: reader.buffer(part) for part in (("both",) if sizes.in_place else ("E", "SM"))}
            for _ in range(DEPTH)
        ]
        for buffer in (*self.pages, *(buffer for parts in self.spare for buffer in parts.values())):
            buffer[:] = 0  # pre-faulted
        self.work = {
            "decode": self._decoding,
            "read": self._reading,
            "expert": lambda: self._computing(1),
        }
        # one asks those that read, one checks what is read in place; as in the engine, none steps
        # back
        self.disk = ThreadPoolExecutor(DEPTH + 2)
        self.pools = {"read": self.disk, "decode": self.disk if sizes.in_place else pool}
        self.residency = Residency(
            len(store.layers),
            max(len(layer.experts) for layer in store.layers),
            Pools(F=experts // 4),
        )

    def once(self) -> None:
        self.done += 1
        (self._read_in_place if self.slots.sizes.in_place else self._read_and_decode)()
        with threads(1 if self.one_thread else torch.get_num_threads()):
            for kind in self.work:
                self._alone(kind)
            if self.one_thread:
                self.seconds["one thread"] = self.seconds["expert alone"]
            for kinds in (*combinations(self.work, 2), self.work):
                self._side_by_side(*kinds)
        for size in self.sizes:
            layer = int(
                self.rng.choice(
                    [i for i, layer in enumerate(self.store.layers) if layer.size >= size]
                )
            )
            places = ALIGN * self.rng.integers(
                (self.store.layers[layer].size - size) // ALIGN + 1, size=DEPTH
            )
            self._read(
                f"read {size}",
                *(
                    (self.pieces.read, layer, (place, size), "both", buffer)
                    for place, buffer in zip(places.tolist(), self.pages)
                ),
            )
        self._computing(1)()  # torch's threads have slept meanwhile
        for tokens in EXPERT_TOKENS:
            self.timed(f"expert {tokens}", self._computing(tokens))
        if self.executor is not None:
            compute = self._together()
            self.timed(f"experts {len(self.at)}", compute)
        for tokens in FORWARD_TOKENS:
            self._forward(tokens)
        self.timed("copy", self.copied[0].copy_, self.copied[1])
        for matrix in self.products:  # of bf16 it takes long where none is built in
            if (
                sum(self.seconds.get(name := f"matmul {matrix.dtype}".replace("torch.", ""), ()))
                < ENOUGH
            ):
                self.timed(
                    name, linear, matrix, matrix
                )  # with the second one turned, as models have weights

    def _pick(self, slot: int | None = None) -> tuple[int, int]:
        """Some expert, or one for a slot: of the layer of those beside it, and none of them."""
        others = (
            set()
            if slot is None
            else {self.full[i] for i in self._beside(slot) if i != slot and i in self.full}
        )
        layer = next(iter(others))[0] if others else int(self.rng.integers(len(self.store.layers)))
        free = [(layer, expert) for expert in range(len(self.store.layers[layer].experts))]
        free = [
            key for key in free if key not in others
        ] or free  # a layer may have fewer than a token chooses
        return free[int(self.rng.integers(len(free)))]

    def _beside(self, slot: int) -> range:
        start = slot - slot % self.together
        return range(start, min(start + self.together, self.kept))

    def _read(self, name: str, *jobs: tuple) -> Any:
        """The first of as many reads as the engine has pieces under way; what is timed is its share
        of all. After others, as in the engine, which reads a layer's experts in a row: what follows
        a pause takes up to twice as long."""
        self._reading()()
        read, start = self._at_once(*jobs), time.perf_counter()
        first, *_ = read()
        self.seconds.setdefault(name, []).append((time.perf_counter() - start) / len(jobs))
        return first

    def _at_once(self, *jobs: tuple) -> Callable[[], list[Any]]:
        """Does reads (function, layer, …) at the same time; nothing of these layers is cached."""
        for _, layer, *_ in jobs:
            self.reader.drop_cache(layer)
        return lambda: list(self.disk.map(lambda job: job[0](*job[1:]), jobs))

    def _read_parts(
        self, name: str, key: tuple[int, int], parts: dict[str, np.ndarray]
    ) -> list[Chunks]:
        others = [
            (self.reader.read_parts, *self._pick(), {part: spare[part] for part in parts})
            for spare in self.spare[1:]
        ]
        return self._read(name, (self.reader.read_parts, *key, parts), *others)

    def _read_in_place(self) -> None:
        """What there is to do for an expert of a raw store: one read, and checking it."""
        whole = []
        for i in range(self.workers):
            slot = (self.done * self.workers + i) % self.kept
            key = self._pick(slot)
            whole += self._read_parts("read both", key, {"both": self.slots.bytes("full", slot)})
            self.full[slot], self.whole[slot] = key, whole[-1]
            self.seconds.setdefault("read E", []).append(self.seconds["read both"][-1])
        list(
            self.pools["decode"].map(
                lambda chunks: self.timed(
                    "decode", self._checked, "decode", lambda *_: None, chunks, chunks, {}
                ),
                whole,
            )
        )
        self.seconds["decompress"] = self.seconds["decode"]
        for name in ("read SM", "recover"):
            self.seconds.setdefault(name, []).extend([0.0] * self.workers)

    def _read_and_decode(self) -> None:
        self._read_parts("read both", self._pick(), self.buffers[0])
        work = []
        for i, buffers in enumerate(self.buffers):
            slot = (self.done * self.workers + i) % self.kept
            key = self._pick(slot)
            (e,) = self._read_parts("read E", key, {"E": buffers["E"]})
            (sm,) = self._read_parts("read SM", key, {"SM": buffers["SM"]})
            self.full[slot] = key
            work.append((e, sm, self.slots.tensors(slot, *key)))
        # As after a read, the processor's cache holds nothing of what is decoded, which a quarter
        # of the time would be.
        for name, stage in (("decode", decode), ("decompress", _decompress), ("recover", _recover)):
            for (e, *_), buffers in zip(work, self.buffers):
                self.reader.read_parts(e.layer, e.expert, buffers)
            list(
                self.pools["decode"].map(
                    lambda given: self.timed(name, self._checked, name, stage, *given), work
                )
            )

    def _checked(
        self, name: str, stage: Callable[..., Any], e: Chunks, sm: Chunks, out: dict
    ) -> None:
        """As the engine's workers do: check, then use."""
        for chunks in {"decompress": [e], "recover": [sm]}.get(name, [e] if e is sm else [e, sm]):
            if self.reader.verify:
                self.reader.check(chunks)
        stage(e, sm, out)

    def _again(
        self, kind: str, spans: list[tuple[float, float]], enough: Callable[[], bool], begun: Event
    ) -> None:
        """Work of one kind after another, on other experts."""
        try:
            while not enough():
                work, start = self.work[kind](), time.perf_counter()
                begun.set()
                work()
                spans.append((start, time.perf_counter()))
        finally:
            begun.set()

    def _alone(self, kind: str) -> None:
        spans: list[tuple[float, float]] = []
        again = partial(self._again, kind, spans, lambda: len(spans) == 3, Event())
        again() if kind == "expert" else self.pools[kind].submit(again).result()
        self.seconds.setdefault(f"{kind} alone", []).append(
            statistics.median(end - start for start, end in spans)
        )

    def _side_by_side(self, *kinds: str) -> None:
        """Kinds of work again and again, all but the last in a thread of its own, until each has
        been done three times; what counts are the medians of those that ran beside the others from
        beginning to end."""
        spans: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        (*behind, here), over = kinds, Event()
        begun = {kind: Event() for kind in kinds}
        others = [
            self.pools[kind].submit(self._again, kind, spans[kind], over.is_set, begun[kind])
            for kind in behind
        ]
        for kind in behind:
            begun[kind].wait()
        first = time.perf_counter()
        try:
            self._again(
                here,
                spans[here],
                lambda: (
                    any(other.done() for other in others)
                    or min(len(done) - bisect_left(done, (first,)) for done in spans.values()) >= 3
                ),
                begun[here],
            )
        finally:
            last = time.perf_counter()
            over.set()
        for other in others:
            other.result()
        for kind in kinds:
            beside = " and ".join(sorted({*kinds} - {kind}))
            self.seconds.setdefault(f"{kind} beside {beside}", []).append(
                statistics.median(
                    end - start for start, end in spans[kind] if first <= start and end <= last
                )
            )

    def _decoding(self) -> Callable[[], Any]:
        if not self.slots.sizes.in_place:
            layer, expert, *chunks = self.coded[i := int(self.rng.integers(len(self.coded)))]
            return partial(
                self._checked,
                "decode",
                decode,
                *chunks,
                self.slots.tensors(self.kept + i, layer, expert),
            )
        chunks = self.whole[int(self.rng.integers(self.kept))]
        return partial(self._checked, "decode", lambda *_: None, chunks, chunks, {})

    def _reading(self) -> Callable[[], Any]:
        return self._at_once(
            *((self.reader.read_parts, *self._pick(), spare) for spare in self.spare)
        )

    def _computing(self, tokens: int) -> Callable[[], torch.Tensor]:
        """Computes an expert as the engine would that has just loaded it."""
        slot = int(self.rng.integers(self.kept))
        (layer, expert), dtype = self.full[slot], self.model.dtype
        self.at = {expert: slot}
        x, w = torch.randn(tokens, self.store.spec.H).to(dtype), torch.ones(tokens, dtype=dtype)
        rows, experts = torch.arange(tokens), self.experts[layer]
        if self.executor is not None:
            return partial(
                execute, self.executor, x, torch.full((tokens, 1), expert), w[:, None], experts
            )
        return lambda: experts.contribution(x, rows, w, self(layer, expert))

    def _together(self) -> Callable[[], torch.Tensor]:
        """Computes a token's experts in one call, as the engine has its executor compute those that
        are in memory."""
        slots = self._beside(int(self.rng.integers(self.kept)))
        layer, dtype = self.full[slots[0]][0], self.model.dtype
        self.at = {self.full[slot][1]: slot for slot in slots}
        return partial(
            execute,
            self.executor,
            torch.randn(1, self.store.spec.H).to(dtype),
            torch.tensor([[*self.at]]),
            torch.ones(1, len(self.at), dtype=dtype),
            self.experts[layer],
        )

    def __call__(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        return cast(
            self.slots.tensors(self.at[expert], layer, expert, reuse=True), self.model.dtype
        )

    def matrices(
        self, layer: int, experts: list[int], dtype: torch.dtype
    ) -> dict[str, tuple[str, np.ndarray]] | None:
        """As `EngineSource.matrices`."""
        stored = {entry.dtype for entry in self.store.entries(layer, experts[0]).values()}
        slots = [self.at[expert] for expert in experts]
        return self.slots.matrices(slots, layer, experts) if stored == {NAMES[dtype]} else None

    def _forward(self, tokens: int) -> None:
        vocabulary = self.model.get_input_embeddings().num_embeddings
        ids = torch.from_numpy(self.rng.integers(vocabulary, size=(1, tokens)))
        arguments = {
            "input_ids": ids,
            "decoder_input_ids": ids,
            "logits_to_keep": 1,
        }  # `generate` keeps one, too
        taken = inspect.signature(self.model.forward).parameters
        self.calls.clear()
        start = time.perf_counter()
        self.model(**{name: value for name, value in arguments.items() if name in taken})
        end = time.perf_counter()
        self.seconds.setdefault(f"other {tokens}", []).append(
            (self.calls[-1] - start) / len(self.calls)
        )
        self.seconds.setdefault(f"head {tokens}", []).append(end - self.calls[-1])

    def without_experts(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: SeamExperts
    ) -> torch.Tensor:
        """An executor whose experts all answer nothing; what it costs to hand out and to sum up is
        left in, and to decide as the engine does."""
        routed = assignments(ids, experts.num_experts)
        step = self.residency.begin(
            experts.layer, {expert: len(tokens) for expert, _, tokens in routed}
        )
        default_order(
            [request for request in step.requests if request.state is not State.FULL],
            Delays(1, 1, 1, 1, 1, 0),
            self.workers,
        )
        nothing = [
            (expert, tokens, x.new_zeros(len(tokens), x.shape[1])) for expert, _, tokens in routed
        ]
        out = experts.accumulate(x, nothing)
        self.calls.append(time.perf_counter())
        return out


class _Pieces(ExpertStore):
    """A store whose expert (place, size) of a layer is so many bytes of its file, whatever they
    are."""

    checksum = None

    def __init__(self, store: ExpertStore) -> None:
        self.folder, self.layers = store.folder, store.layers

    def entries(self, layer: int, piece: tuple[int, int]) -> dict[str, TensorEntry]:
        place, size = piece
        return {"piece": TensorEntry("U8", (size,), "", (("raw", (Chunk(place, size, ""),)),))}


def _timed(
    seconds: dict[str, list[float]], name: str, function: Callable[..., Any], *args: Any
) -> Any:
    start = time.perf_counter()
    result = function(*args)
    seconds.setdefault(name, []).append(time.perf_counter() - start)
    return result


def _decompress(e: Chunks, sm: Chunks, out: dict[str, torch.Tensor]) -> None:
    for name in out:
        if e.entries[name].separable:
            decompress(e, name, out[name])


def _recover(e: Chunks, sm: Chunks, out: dict[str, torch.Tensor]) -> None:
    """Also decodes at once what cannot be decoded in two stages."""
    for name in out:
        if e.entries[name].separable:
            recover(sm, name, out[name])
        else:
            decode_tensor(e, sm, name, out[name])


def experts_bytes(store: ExpertStore) -> list[list[list[int]]]:
    """[L][E] of the bytes of each expert's two reads, [E-chunks, SM-chunks]: exact; experts
    compress differently."""
    return [
        [
            [store.stored_bytes(i, expert, part) for part in ("E", "SM")]
            for expert in range(len(layer.experts))
        ]
        for i, layer in enumerate(store.layers)
    ]


def shards_of(store: ExpertStore) -> int:
    return max(len(entry.planes[0][1]) for entry in store.entries(0, 0).values())


def quick_delays(store: ExpertStore, model: Any, in_place: bool, compact: bool = False) -> Delays:
    """Medians of five reads, decodings and computations of the store's first experts: the scheduler
    that orders reads by them needs their ratios, not their last digit.

    in_place : whether experts are computed from the bytes that were read, of which only checksums
        are left to compare; unless `compact`, packed ones are unpacked for it.
    """
    experts, tried = (
        seam_of(discover(model)[0].experts),
        range(min(5, len(store.layers[0].experts))),
    )
    out, took, unpack = None, {}, in_place and not compact and not store.raw
    timed = partial(_timed, took)
    with Reader(store) as reader, torch.inference_mode():
        buffers, last = (
            {part: reader.buffer(part) for part in ("E", "SM", "both")},
            len(store.layers) - 1,
        )
        for i in range(5):
            e, sm = (
                timed(part, reader.read, 0, tried[i % len(tried)], part, buffers[part])
                for part in ("E", "SM")
            )
            expert = i % len(
                store.layers[last].experts
            )  # of another layer: the system may have cached this one
            timed("both", reader.read, last, expert, "both", buffers["both"])
            out = out or empty_tensors(e.entries)
            timed("decompress", _decompress, e, sm, out)
            timed(
                "recover",
                _recover,
                e,
                sm,
                {name: tensor for name, tensor in out.items() if e.entries[name].separable},
            )
            timed("decode", *((reader.check, e) if in_place else (decode, e, sm, out)))
            weights = {name: t.to(model.device) for name, t in cast(out, model.dtype).items()}
            for tokens in (1, 16):
                x = torch.zeros(tokens, store.spec.H, dtype=model.dtype, device=model.device)
                timed(
                    str(tokens),
                    lambda: (unpack and decode(e, sm, out), experts.ffn(x, weights).cpu()),
                )
    seconds = {name: statistics.median(values) for name, values in took.items()}
    token = max(0.0, (seconds["16"] - seconds["1"]) / 15)
    every = experts_bytes(store)
    e_bytes, sm_bytes = (
        round(statistics.fmean(every[0][i][part] for i in tried)) for part in (0, 1)
    )
    return Delays(
        e_read=seconds["E"],
        sm_read=seconds["SM"] * (sm_bytes > 0),
        decompress=seconds["decompress"],
        recover=seconds["recover"],
        expert_base=max(0.0, seconds["1"] - token),
        expert_token=token,
        K=shards_of(store),
        N=len(store.entries(0, 0)),
        e_bytes=e_bytes,
        sm_bytes=sm_bytes,
        decode=seconds["decode"],
        experts_bytes=every,
        read_both=seconds["both"],
    )
