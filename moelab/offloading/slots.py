"""The engine's memory: three arrays of equal slots, allocated once, for E-chunks, SM-chunks and joined tensors.

Source: ZipMoE §4 (cache pools are preallocated as contiguous regions). A slot is large enough for any expert of the
store and begins on a multiple of 4096 bytes; nothing is copied or allocated while a model runs. In a raw store an
expert lies as it does in memory, so it is read *in place*, to where it is computed from, and needs no other slot.

`e`, `sm`: uint8 views of a slot; `full`: one expert's tensors, each at a multiple of 64 bytes, in place of 4096.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moelab.cache.pools import Pools
from moelab.store.headers import DTYPES
from moelab.store.layout import ALIGN, ExpertStore, aligned, run
from moelab.store.reader import aligned_buffer


@dataclass(frozen=True)
class Sizes:
    """Bytes of a slot of each kind: the largest expert's tensors, E-chunks and SM-chunks, aligned; nothing of the last
    two if experts are read in place."""

    full: int
    e: int
    sm: int
    in_place: bool = False

    @classmethod
    def of(cls, store: ExpertStore, in_place: bool | None = None) -> Sizes:
        """`in_place` : whether to read experts in place; by default if they lie so in the store."""
        experts = [entries for layer in store.layers for entries in layer.experts]
        if in_place if in_place is not None else lies_as_in_memory(store):
            return cls(max(_offsets(entries, ALIGN)[1] for entries in experts), 0, 0, True)
        return cls(full=max(_offsets(entries)[1] for entries in experts),
                   e=max(run(entries, "E")[1] for entries in experts),
                   sm=max(run(entries, "SM")[1] for entries in experts))

    @property
    def in_flight(self) -> int:
        """Bytes that one expert takes while it is read and decoded."""
        return self.full + self.e + self.sm


def lies_as_in_memory(store: ExpertStore) -> bool:
    """Whether the chunks of every expert are its tensors, one after another, as they are in memory: the codec "raw"."""
    return all(len(entry.planes) == 1 and entry.planes[0][0] == "raw" and len(entry.planes[0][1]) == 1
               for layer in store.layers for entries in layer.experts for entry in entries.values())


class Slots:
    """`count[kind]` slots of each kind; who holds which, the `LoadQueue` knows."""

    def __init__(self, store: ExpertStore, count: dict[str, int], sizes: Sizes | None = None,
                 device: torch.device | str = "cpu") -> None:
        self.sizes, self.device, self.count = sizes or Sizes.of(store), torch.device(device), count
        on_host = ("e", "sm", "full") if self.device.type == "cpu" else ("e", "sm")
        self._chunks = {kind: _host_memory(count[kind] * getattr(self.sizes, kind), self.device) for kind in on_host}
        if "full" in self._chunks:
            self._full = torch.from_numpy(self._chunks["full"])
        else:
            self._full = torch.empty(count["full"] * self.sizes.full, dtype=torch.uint8, device=self.device)
        self._store, self._views, self._places, kinds = store, {}, {}, {}
        # layer → a number that layers share whose experts have tensors of the same shapes
        self._shapes = [kinds.setdefault(tuple(layer.tensors.values()), len(kinds)) for layer in store.layers]

    @property
    def nbytes(self) -> int:
        return self._full.nbytes + sum(self._chunks[kind].nbytes for kind in ("e", "sm"))

    def bytes(self, kind: str, slot: int) -> np.ndarray:
        """The memory of a slot that the CPU reaches: uint8, pinned if there is a GPU."""
        size = getattr(self.sizes, kind)
        return self._chunks[kind][slot * size:(slot + 1) * size]

    def tensors(self, slot: int, layer: int) -> dict[str, torch.Tensor]:
        """The tensors of an expert of this layer in a slot of joined tensors."""
        key = slot, self._shapes[layer]
        if key not in self._views:
            entries = self._store.layers[layer].experts[0]
            memory = self._full[slot * self.sizes.full:(slot + 1) * self.sizes.full]
            offsets, _ = _offsets(entries, ALIGN if self.sizes.in_place else 64)
            self._views[key] = {
                name: memory[offsets[name]:offsets[name] + entry.nbytes].view(DTYPES[entry.dtype]).view(entry.shape)
                for name, entry in entries.items()}
        return self._views[key]

    def addresses(self, slots: list[int], layer: int) -> dict[str, np.ndarray]:
        """Where the tensors of experts of this layer lie in slots of joined tensors: name → int64 [slots]."""
        kind = self._shapes[layer]
        if kind not in self._places:
            self._places[kind] = {name: t.data_ptr() for name, t in self.tensors(0, layer).items()}
        skip = np.array(slots, np.int64) * self.sizes.full
        return {name: first + skip for name, first in self._places[kind].items()}


def slot_counts(pools: Pools, copies: int, in_flight: int) -> dict[str, int]:
    """How many slots of each kind hold `copies` of what the pools keep, and `in_flight` experts more."""
    return {"full": copies * pools.F + in_flight, "e": copies * (pools.C + pools.E) + in_flight,
            "sm": copies * (pools.C + pools.S) + in_flight}


def _host_memory(n: int, device: torch.device) -> np.ndarray:
    """`n` bytes of the CPU's memory from a multiple of 4096 on, pinned for a GPU; its pages are pre-faulted."""
    if device.type != "cuda":
        memory = aligned_buffer(n)
        memory[::ALIGN] = 0                     # or the first prompt would wait for its pages, or find there are none
        return memory
    pinned = torch.empty(n + ALIGN, dtype=torch.uint8, pin_memory=True).numpy()
    skip = -pinned.ctypes.data % ALIGN
    return pinned[skip:skip + n]


def _offsets(entries: dict, alignment: int = 64) -> tuple[dict[str, int], int]:
    """Where each tensor of an expert begins in a slot, and the slot's size."""
    offsets, at = {}, 0
    for name, entry in entries.items():
        offsets[name] = at
        at += -(-entry.nbytes // alignment) * alignment
    return offsets, aligned(at)
