"""The engine's memory: three arrays of equal slots for E-chunks, SM-chunks and joined tensors, at
addresses that stay.

Source: ZipMoE §4 (cache pools are preallocated as contiguous regions). A slot is large enough for
any expert of the store and begins on a multiple of 4096 bytes; nothing is copied or allocated while
a model runs. Under the codecs "raw" and "bf12", and in few bits, an expert lies as it is computed,
so it is read *in place* and needs no other slot.

`e`, `sm`: uint8 views of a slot; `full`: one expert's tensors, each at a multiple of 64 bytes, in
place of 4096."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from moelab.cache.pools import Pools
from moelab.offloading.link import Link, host_memory
from moelab.store.codec import RAW
from moelab.store.headers import DTYPES, NAMES
from moelab.store.layout import ExpertStore, TensorEntry, aligned, run
from moelab.store.reader import Chunks, aligned_buffer, give_back


@dataclass(frozen=True)
class Sizes:
    """Bytes of a slot of each kind: the largest expert's tensors, E-chunks and SM-chunks, aligned;
    nothing of the last two if experts are read in place.

    far : whether these two lie in memory of the CPU, beside a GPU's, and are not of one budget with
        the first."""

    full: int
    e: int
    sm: int
    in_place: bool = False
    far: bool = False

    @classmethod
    def of(cls, store: ExpertStore, in_place: bool | None = None) -> Sizes:
        """`in_place` : whether to read experts in place; by default if they lie so in the store."""
        experts = [entries for layer in store.layers for entries in layer.experts]
        if in_place if in_place is not None else store.in_place:
            return cls(max(run(entries, "both")[1] for entries in experts), 0, 0, True)
        return cls(
            full=max(places(entries, False)[1] for entries in experts),
            e=max(run(entries, "E")[1] for entries in experts),
            sm=max(run(entries, "SM")[1] for entries in experts),
        )

    @property
    def in_flight(self) -> int:
        """Bytes of the budget that one expert takes while it is read and decoded; on a GPU it passes
        through as many as it then has."""
        return 2 * self.full if self.far else self.full + self.e + self.sm


class Slots:
    """`count[kind]` slots of each kind; who holds which, the `LoadQueue` knows.

    most : as many of a kind as there may be once (`resize`): on a CPU addresses are reserved for
        them, which take no memory until they are written to."""

    def __init__(
        self,
        store: ExpertStore,
        count: dict[str, int],
        sizes: Sizes,
        device: torch.device,
        link: Link | None,
        most: int = 0,
    ) -> None:
        self.sizes, self.device, self.count, self.link = sizes, device, count, link
        self.most = 0
        with suppress(MemoryError, OSError):  # a system that reserves no more than it has
            aligned_buffer(most * (sizes.full + sizes.e + sizes.sm))
            self.most = most if link is None else 0
        #: kind → the memory of its slots that the CPU reaches
        self._host = {
            kind: host_memory(max(count[kind], self.most) * getattr(sizes, kind), device, self)
            for kind in (("e", "sm", "full") if self.link is None else ("e", "sm"))
        }
        if self.link is None:
            self._full = torch.from_numpy(self._host["full"])
        else:
            nbytes = count["full"] * self.sizes.full
            self._full = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            passing = 0 if self.sizes.in_place else count["passing"]
            self._passing = torch.empty(
                (passing, self.sizes.full), dtype=torch.uint8, device=self.device
            )
            # torch's own stream may not be done with what had this memory before
            self.link.now().synchronize()
        self._store = store
        self._views: dict[tuple[int, int], dict[str, torch.Tensor]] = {}  # of `tensors`
        self._scratch: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}  # unpacked with `reuse`
        self._packed = self.sizes.in_place and not store.raw
        self._located = Located(store, self.sizes.in_place)
        # layer → a number that layers share whose experts have tensors of the same shapes
        shapes: dict[tuple, int] = {}
        self._shapes = [
            shapes.setdefault(tuple(layer.tensors.values()), len(shapes)) for layer in store.layers
        ]

    def bytes(self, kind: str, slot: int, end: int | None = None) -> np.ndarray:
        """The memory of a slot, or of those from it to `end`, that the CPU reaches: uint8; pinned if there
        is a GPU."""
        size = getattr(self.sizes, kind)
        return self._host[kind][slot * size : (slot + 1 if end is None else end) * size]

    def full(self, slot: int) -> torch.Tensor:
        """The memory of a slot of what is computed, where that is: uint8."""
        return self._full[slot * self.sizes.full : (slot + 1) * self.sizes.full]

    def passing(self, i: int) -> torch.Tensor | None:
        """The i-th place of a GPU's memory that a compressed expert passes through, as large as a
        slot; None beyond the last one."""
        return self._passing[i] if i < len(self._passing) else None

    def send(self, what: Any, slot: int, chunks: Chunks, after: Any = None) -> Any:
        """Copy an expert, to be computed as it lies, to its slot of a GPU's memory, from the event
        `after` on; returns the event of its end, which only the GPU waits for."""
        there = self.full(slot)[: len(chunks.data)]
        return self.link.send(what, torch.from_numpy(chunks.data), there, slot, after)

    def give_back(self, free: Mapping[str, list[int]], held: Mapping[Any, dict[str, int]]) -> None:
        """Let the system have the memory of all slots but these; `held` are by expert and kind."""
        for kind, those in free.items() if self.most else ():
            used = {*those, *(of[kind] for of in held.values() if kind in of)}
            for before, after in pairwise([-1, *sorted(used), self.most]):
                give_back(self.bytes(kind, before + 1, after))

    def tensors(
        self, slot: int, layer: int, expert: int = 0, reuse: bool = False
    ) -> dict[str, torch.Tensor]:
        """The tensors of an expert in a slot of joined tensors; packed ones are unpacked into new
        memory or, with `reuse`, into that of the call before."""
        if self.link is not None:
            self.link.arrive([slot])
        entries = self._store.layers[layer].experts[expert]
        key = (slot, self._shapes[layer])
        if key in self._views:
            return self._views[key]
        memory = self.full(slot)
        found = {
            name: self._unpacked(name, entry, memory[begin:end], reuse)
            if self._packed and entry.codec is not RAW
            else memory[begin : begin + entry.nbytes].view(DTYPES[entry.dtype]).view(entry.shape)
            for name, (begin, end, entry) in places(entries, self.sizes.in_place)[0].items()
        }
        if not self._packed:
            self._views[key] = found
        return found

    def _unpacked(
        self, name: str, entry: TensorEntry, blob: torch.Tensor, reuse: bool
    ) -> torch.Tensor:
        out = self._scratch.get((name, entry.shape)) if reuse else None
        if out is None:
            out = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=self.device)
        if reuse:
            self._scratch[name, entry.shape] = out
        if blob.is_cuda:
            from moelab.store.unpack_triton import unpack

            with torch.cuda.device_of(blob):  # Triton launches on the thread's GPU
                return unpack(entry.codec, blob, out)
        entry.codec.decompress(blob.numpy(), out)
        return out

    def matrices(
        self, slots: list[int], layer: int, experts: list[int], dtype: torch.dtype
    ) -> dict[str, tuple[str, np.ndarray]] | None:
        """`Located.matrices` of experts in slots of joined tensors."""
        if self.link is not None:
            self.link.arrive(slots)
        begins = np.array(slots)[:, None] * self.sizes.full + self._full.data_ptr()
        return self._located.matrices(layer, experts, dtype, begins)


class Located:
    """How kernels find a store's tensors: a source of the seam."""

    def __init__(self, store: ExpertStore, in_place: bool) -> None:
        self._layers, self._in_place = store.layers, in_place
        self._tables: dict[int, tuple] = {}  # by layer

    def matrices(
        self, layer: int, experts: list[int], dtype: torch.dtype, begins: Any = 0
    ) -> dict[str, tuple[str, np.ndarray]] | None:
        """Of a layer's experts, whose bytes begin at int64 [experts, 1]: name → (codec or format, int64
        [experts, 4] as `moelab.kernels.products.multiply` takes them). None if they are not stored in
        this dtype, some are packed otherwise than others, or as kernels do not read them."""
        if layer not in self._tables:
            of = self._layers[layer].experts
            stored = {entry.dtype for entries in of for entry in entries.values()}
            self._tables[layer] = stored, *located(of, self._in_place)
        stored, names, codecs, rows, moves = self._tables[layer]
        (found, *others) = {codecs[expert] for expert in experts}
        if others or "" in found or stored != {NAMES.get(dtype)}:
            return None
        chosen = np.array(experts)
        # not by `take`, which lets go of the GIL
        where = np.ascontiguousarray(moves[:, chosen] * begins + rows[:, chosen])
        return {name: (codec, table) for name, codec, table in zip(names, found, where)}


def located(
    experts: list[dict[str, TensorEntry]], in_place: bool
) -> tuple[list[str], list[tuple[str, ...]], np.ndarray, np.ndarray]:
    """Of a layer's experts: names; each one's codecs or formats by name, "" for one that kernels do
    not read; rows, if its bytes began at address 0, and by how much they move with it, int64
    [names, experts, 4] both."""
    names = list(experts[0])
    codecs = []
    rows, moves = np.zeros((2, len(names), len(experts), 4), np.int64)
    for e, entries in enumerate(experts):
        where = places(entries, in_place)[0]
        found = []
        for n, (begin, end, entry) in enumerate(map(where.get, names)):
            codec = entry.codec if in_place else RAW
            found.append(codec.kernel(entry.dtype, entry.shape))
            if found[-1]:
                rows[n, e] = codec.row(begin, end - begin, entry.shape)
        codecs.append(tuple(found))
    moves[..., 0] = 1  # one address or, packed, two
    moves[..., 1] = rows[..., 1] > 0
    return names, codecs, rows, moves


def slot_counts(pools: Pools, copies: int, in_flight: int) -> dict[str, int]:
    """How many slots of each kind hold `copies` of what the pools keep, and `in_flight` experts
    more; through as many places of their own compressed ones pass to a GPU."""
    return {
        "full": copies * pools.F + in_flight,
        "e": copies * (pools.C + pools.E) + in_flight,
        "sm": copies * (pools.C + pools.S) + in_flight,
        "passing": in_flight,
    }


def places(
    entries: dict[str, TensorEntry], in_place: bool
) -> tuple[dict[str, tuple[int, int, TensorEntry]], int]:
    """(name → (begin, end in a slot, entry) of an expert's tensors, bytes of the slot): as they are
    read, or joined, each at a multiple of 64."""
    found = {}
    at = 0
    if in_place:
        first, length = run(entries, "both")
        for name, entry in entries.items():
            chunk = entry.planes[0][1][0]
            begin = chunk.offset - first
            found[name] = begin, begin + chunk.length, entry
        return found, length
    for name, entry in entries.items():
        found[name] = at, at + entry.nbytes, entry
        at += -(-entry.nbytes // 64) * 64
    return found, aligned(at)


def divide(
    budget: int,
    sizes: Sizes,
    L: int,
    E: int,
    plan: Pools | None,
    scope: str,
    workers: int,
    staging: int | None,
    ahead: int = 0,
) -> tuple[Pools, int]:
    """The pools (per layer if that is the scope) and the staging that fit into a budget of so many
    bytes: so much staging that `ahead` experts may be prefetched into it, and one demanded."""
    if staging is None:
        staging = max(1, min(workers + 2, budget // (4 * sizes.in_flight)))
    staging = max(staging, ahead + 1)
    room = budget - staging * sizes.in_flight
    copies = L if scope == "layer" else 1
    if plan is None:
        return Pools(F=min(E * L, room // sizes.full) // copies), staging
    parts = (0, 0) if sizes.far else (sizes.sm, sizes.e)
    needed = copies * plan.nbytes(sizes.full, *parts)
    if needed > room:
        raise ValueError(
            f"the plan {plan} takes {needed / 1e6:,.1f} MB; of the budget of {budget / 1e6:,.1f} MB, "
            f"{room / 1e6:,.1f} MB are left beside {staging} in-flight loads"
        )
    return plan, staging
