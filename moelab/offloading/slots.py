"""The engine's memory: three arrays of equal slots, allocated once, for E-chunks, SM-chunks and
joined tensors.

Source: ZipMoE §4 (cache pools are preallocated as contiguous regions). A slot is large enough for
any expert of the store and begins on a multiple of 4096 bytes; nothing is copied or allocated while
a model runs. Under the codecs "raw" and "bf12", and in few bits, an expert lies as it is computed,
so it is read *in place* and needs no other slot.

`e`, `sm`: uint8 views of a slot; `full`: one expert's tensors, each at a multiple of 64 bytes, in
place of 4096."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moelab.cache.pools import Pools
from moelab.offloading.link import host_memory, link_to
from moelab.store.codec import RAW
from moelab.store.headers import DTYPES
from moelab.store.layout import ALIGN, ExpertStore, TensorEntry, aligned, run
from moelab.store.reader import Chunks

TOUCHED = 64 << 20  # bytes whose pages a thread touches at a time


@dataclass(frozen=True)
class Sizes:
    """Bytes of a slot of each kind: the largest expert's tensors, E-chunks and SM-chunks, aligned;
    nothing of the last two if experts are read in place."""

    full: int
    e: int
    sm: int
    in_place: bool = False

    @classmethod
    def of(cls, store: ExpertStore, in_place: bool | None = None) -> Sizes:
        """`in_place` : whether to read experts in place; by default if they lie so in the store."""
        experts = [entries for layer in store.layers for entries in layer.experts]
        if in_place if in_place is not None else store.in_place:
            return cls(max(run(entries, "both")[1] for entries in experts), 0, 0, True)
        return cls(
            full=max(_offsets(entries)[1] for entries in experts),
            e=max(run(entries, "E")[1] for entries in experts),
            sm=max(run(entries, "SM")[1] for entries in experts),
        )

    @property
    def in_flight(self) -> int:
        """Bytes that one expert takes while it is read and decoded."""
        return self.full + self.e + self.sm


class Slots:
    """`count[kind]` slots of each kind; who holds which, the `LoadQueue` knows."""

    def __init__(
        self,
        store: ExpertStore,
        count: dict[str, int],
        sizes: Sizes | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.sizes, self.device, self.count = sizes or Sizes.of(store), torch.device(device), count
        self.link = link_to(self.device)
        on_host = ("e", "sm", "full") if self.link is None else ("e", "sm")
        self._chunks = {
            kind: host_memory(count[kind] * getattr(self.sizes, kind), self.device, self)
            for kind in on_host
        }
        self._landing: dict[
            int, np.ndarray
        ] = {}  # slot of a GPU → what is read for it, and spare ones
        self._spare: list[np.ndarray] = []
        if "full" in self._chunks:
            self._full = torch.from_numpy(self._chunks["full"])
        else:
            self._full = torch.empty(
                count["full"] * self.sizes.full, dtype=torch.uint8, device=self.device
            )
        self._store, self._views, self._scratch, kinds = store, {}, {}, {}
        self._packed = self.sizes.in_place and not store.raw
        self._matrices: dict[
            int, tuple[list[str], list[tuple[str, ...]], np.ndarray, np.ndarray]
        ] = {}
        # layer → a number that layers share whose experts have tensors of the same shapes
        self._shapes = [
            kinds.setdefault(tuple(layer.tensors.values()), len(kinds)) for layer in store.layers
        ]

    @property
    def nbytes(self) -> int:
        return self._full.nbytes + sum(self._chunks[kind].nbytes for kind in ("e", "sm"))

    def bytes(self, kind: str, slot: int) -> np.ndarray:
        """The memory of a slot that the CPU reaches: uint8; pinned if there is a GPU, which `land`
        copies it to."""
        size = getattr(self.sizes, kind)
        if kind not in self._chunks:
            if slot not in self._landing:
                try:
                    self._landing[slot] = self._spare.pop()
                except IndexError:  # more are read at a time than ever before
                    self._landing[slot] = host_memory(size, self.device, self)
            return self._landing[slot]
        return self._chunks[kind][slot * size : (slot + 1) * size]

    def land(self, slot: int, chunks: Chunks) -> None:
        """Copy an expert that was read, to be computed as it lies, to its slot of a GPU's
        memory."""
        with self.link.into(slot):
            begin = slot * self.sizes.full
            self._full[begin : begin + len(chunks.data)].copy_(
                torch.from_numpy(chunks.data), non_blocking=True
            )
        if (memory := self._landing.pop(slot, None)) is not None:
            self._spare.append(memory)

    def send(self, copies: list[tuple[Any, int, Chunks]]) -> None:
        """As `land` from pinned memory, of (what, slot, chunks), but only the GPU waits."""
        size = self.sizes.full
        self.link.send(
            (
                what,
                torch.from_numpy(chunks.data),
                slot,
                self._full[slot * size : slot * size + len(chunks.data)],
            )
            for what, slot, chunks in copies
        )

    def touch(self) -> None:
        """Pre-fault all pages, by all threads: or the first prompt would wait for them, or find
        there are none."""
        with ThreadPoolExecutor() as pool:
            for memory in self._chunks.values():
                list(
                    pool.map(
                        lambda begin: memory[begin : begin + TOUCHED : ALIGN].fill(0),
                        range(0, len(memory), TOUCHED),
                    )
                )

    def tensors(
        self, slot: int, layer: int, expert: int = 0, reuse: bool = False
    ) -> dict[str, torch.Tensor]:
        """The tensors of an expert in a slot of joined tensors; packed ones are unpacked into new
        memory or, with `reuse`, into that of the call before."""
        if self.link is not None:
            self.link.arrive([slot])
        entries, key = self._store.layers[layer].experts[expert], (slot, self._shapes[layer])
        if key in self._views:
            return self._views[key]
        memory = self._full[slot * self.sizes.full : (slot + 1) * self.sizes.full]
        if not self.sizes.in_place:
            offsets, _ = _offsets(entries)
            found = {name: _view(entry, memory[offsets[name] :]) for name, entry in entries.items()}
        else:
            found = {
                name: _view(entry, memory[offset:])
                if entry.codec is RAW
                else self._unpacked(name, entry, memory[offset:end], reuse)
                for name, (offset, end, entry) in _in_place(entries).items()
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
            from moelab.store import bf12_triton  # the one codec that is read there in place

            return bf12_triton.unpack(blob, out)
        entry.codec.decompress(blob.numpy(), out)
        return out

    def matrices(
        self, slots: list[int], layer: int, experts: list[int]
    ) -> dict[str, tuple[str, np.ndarray]] | None:
        """How kernels find the tensors of experts of this layer in slots of joined tensors: name →
        (codec or format, int64 [experts, 4] as `moelab.kernels.products.multiply` takes them). None
        if some are packed otherwise than others, or as kernels do not read them."""
        if self.link is not None:
            self.link.arrive(slots)
        if layer not in self._matrices:
            of = [
                _matrices(entries, self.sizes.in_place)
                for entries in self._store.layers[layer].experts
            ]
            rows = np.array([[one[name][1] for one in of] for name in of[0]])  # [names, experts, 4]
            moves = np.zeros_like(rows)  # slots by which the columns move: addresses of memory
            moves[..., 0], moves[..., 1] = (
                1,
                [[one[name][0] != "raw" for one in of] for name in of[0]],
            )
            codecs = [tuple(one[name][0] for name in of[0]) for one in of]
            self._matrices[layer] = (
                list(of[0]),
                codecs,
                rows + moves * self._full.data_ptr(),
                moves * self.sizes.full,
            )
        names, codecs, rows, moves = self._matrices[layer]
        (found, *others) = {codecs[expert] for expert in experts}
        if others or "" in found:
            return None
        chosen = np.array(experts)
        places = moves.take(chosen, 1) * np.array(slots)[:, None] + rows.take(chosen, 1)
        return {name: (codec, table) for name, codec, table in zip(names, found, places)}


def slot_counts(pools: Pools, copies: int, in_flight: int) -> dict[str, int]:
    """How many slots of each kind hold `copies` of what the pools keep, and `in_flight` experts
    more."""
    return {
        "full": copies * pools.F + in_flight,
        "e": copies * (pools.C + pools.E) + in_flight,
        "sm": copies * (pools.C + pools.S) + in_flight,
    }


def _offsets(entries: dict[str, TensorEntry]) -> tuple[dict[str, int], int]:
    """Where each joined tensor of an expert begins in a slot, and the slot's size."""
    offsets, at = {}, 0
    for name, entry in entries.items():
        offsets[name] = at
        at += -(-entry.nbytes // 64) * 64
    return offsets, aligned(at)


def _in_place(entries: dict[str, TensorEntry]) -> dict[str, tuple[int, int, TensorEntry]]:
    """name → (begin, end in a slot that the expert is read into, entry)."""
    begin, found = run(entries, "both")[0], {}
    for name, entry in entries.items():
        (chunk,) = entry.planes[0][1]
        found[name] = chunk.offset - begin, chunk.offset - begin + chunk.length, entry
    return found


def _matrices(entries: dict[str, TensorEntry], in_place: bool) -> dict[str, tuple[str, list[int]]]:
    """name → (codec or format, "" for one that kernels do not read; its row of `Slots.matrices`,
    from the beginning of the slot on)."""
    if not in_place:
        return {name: ("raw", [offset, 0, 0, 0]) for name, offset in _offsets(entries)[0].items()}
    found = {}
    for name, (offset, end, entry) in _in_place(entries).items():
        kernel = entry.codec.kernel(entry.dtype, entry.shape)
        row = entry.codec.row(offset, end - offset, entry.shape) if kernel else [offset, 0, 0, 0]
        found[name] = kernel, row
    return found


def _view(entry: TensorEntry, memory: torch.Tensor) -> torch.Tensor:
    return memory[: entry.nbytes].view(DTYPES[entry.dtype]).view(entry.shape)


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
    room, copies = budget - staging * sizes.in_flight, L if scope == "layer" else 1
    if plan is None:
        return Pools(F=min(E * L, room // sizes.full) // copies), staging
    needed = copies * plan.nbytes(sizes.full, sizes.sm, sizes.e)
    if needed > room:
        raise ValueError(
            f"the plan {plan} takes {needed / 1e6:,.1f} MB; of the budget of {budget / 1e6:,.1f} MB, "
            f"{room / 1e6:,.1f} MB are left beside {staging} in-flight loads"
        )
    return plan, staging
