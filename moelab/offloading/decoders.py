"""What a worker does to a compressed tensor: decompress its exponents, and recover it.

Source: ZipMoE §3.3 (recovery is a kernel of the GPU, beside decompression by the CPU) and §4 (chunks
are read into pinned memory). The paper's board has one memory for both. Here a GPU has its own, in
which the experts of pool F lie; what is kept of the pools C, S and E, compressed, lies in pinned
memory of the CPU, as read. SM-chunks go over the link while exponents are decompressed into pinned
memory, too, and follow them; recovery is behind both on the link's stream. So as many bytes cross
the link as the expert has.

A decoder takes (operation of `USES`, the chunks it uses, piece, load); on a GPU it returns when the
GPU has been told so."""

from __future__ import annotations

import threading
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from moelab.offloading.link import host_memory
from moelab.offloading.load_queue import USES, Load, Phase, Piece
from moelab.offloading.slots import Slots, places
from moelab.store import bits
from moelab.store.bits import as_bytes
from moelab.store.codec import RAW
from moelab.store.codecs import unpack_plane
from moelab.store.headers import DTYPES
from moelab.store.reader import Chunks, decode_tensor, decompress, named, recover

#: an operation of `load_queue.USES` → what does it, with the chunks that it uses
OPERATIONS = {"decompress": decompress, "recover": recover, "decode": decode_tensor}


def on_cpu(slots: Slots, kind: str, chunks: dict[str, Chunks], piece: Piece, load: Load) -> None:
    """Both stages, or one of them, into the load's slot of the CPU's memory.

    kind : "decompress", "recover" or "decode", which is both. Raises StoreError for a damaged
        chunk."""
    name, shard = piece
    out = slots.tensors(load.slots["full"], load.key.layer)[name]
    if shard is not None:
        begin, end = chunks[USES[kind][0]].entries[name].bounds(shard)
        out = out.view(-1)[begin:end]
    OPERATIONS[kind](*chunks.values(), name, out, shard)


@dataclass(eq=False)
class Passage:
    """Where an expert passes on its way to a GPU. A tensor of N weights has 2N bytes at its place in
    a slot: for sign-mantissa bytes, then for exponents.

    host : pinned memory, that is decompressed into.
    there : the GPU's; None: what is joined is
        copied when it is.
    sent : tensors whose sign-mantissa bytes are there.
    reads : events, each after the GPU has read something of `host`.
    """

    host: torch.Tensor
    there: torch.Tensor | None
    sent: set[str] = field(default_factory=set)
    reads: list[Any] = field(default_factory=list)


class OnGPU:
    """One for all threads: those that read `announce` SM-chunks, and `wait_for` slots.

    There are as many passages as experts are under way at a time, the first ones in memory of the
    GPU, too, which staging has counted."""

    def __init__(self, slots: Slots) -> None:
        self._slots, self._link, self._lock = slots, slots.link, threading.Lock()
        self._passages: dict[Load, Passage] = {}
        self._spare: list[Passage] = []
        self._reads: dict[int, list[Any]] = defaultdict(list)  # slot "sm" → as `Passage.reads`

    def __call__(self, kind: str, chunks: dict[str, Chunks], piece: Piece, load: Load) -> None:
        """As `on_cpu`, into the load's slot of the GPU."""
        name, shard = piece
        begin, end, entry = places(next(iter(chunks.values())).entries, False)[0][name]
        passage = self._passage(load)
        host = passage.host[begin:end]
        slot = load.slots["full"]
        out = self._slots.full(slot)[begin:end]
        if not (entry.shards and recovers(self._slots.device)):
            decode_tensor(*chunks.values(), name, host.view(DTYPES[entry.dtype]).view(entry.shape))
            passage.reads.append(self._copy(load, host, out, slot))
            return
        part = slice(0, entry.n) if shard is None else slice(*entry.bounds(shard))
        sm, e = host.view(2, entry.n)[:, part]
        there = None if passage.there is None else passage.there[begin:end].view(2, -1)[:, part]
        if "sm" in chunks:
            self.announce(load, chunks["sm"])
        if "e" in chunks:
            _unpack(chunks["e"], name, 0, shard, e)
            if there is not None:
                passage.reads.append(self._copy(load, e, there[1]))
        if "sm" in chunks:
            if there is not None:
                sm, e = there
            else:
                sm = _unpack(chunks["sm"], name, 1, shard, sm)
            join = partial(_join, e, sm, out.view(DTYPES[entry.dtype])[part])
            done = self._link.behind(("gpu", "recover", load.key), join, 0, slot)
            passage.reads.append(done)
            self._reads[load.slots["sm"]].append(done)

    def announce(self, load: Load, chunks: Chunks) -> None:
        """SM-chunks in memory go over the link, unless they have already."""
        passage = self._passage(load)
        if passage.there is None or not recovers(self._slots.device):
            return
        with self._lock:  # so that who finds one sent is told behind it
            for name, (begin, _, entry) in places(chunks.entries, False)[0].items():
                if entry.shards and name not in passage.sent:
                    end = begin + entry.n
                    source = _unpack(chunks, name, 1, None, passage.host[begin:end])
                    done = self._copy(load, source, passage.there[begin:end])
                    passage.sent.add(name)
                    passage.reads.append(done)
                    self._reads[load.slots["sm"]].append(done)

    def wait_for(self, slot: int) -> None:
        """Until the GPU has read what lay in a slot for SM-chunks."""
        for event in self._reads.pop(slot, ()):
            event.synchronize()

    def _copy(self, load: Load, *given: Any) -> Any:
        return self._link.send(("link", "send", load.key), *given)

    def _passage(self, load: Load) -> Passage:
        with self._lock:
            if load not in self._passages:
                ended = Phase.LOADED, Phase.DROPPED
                for of in [of for of in self._passages if of.phase in ended and not of.busy]:
                    self._spare.append(self._passages.pop(of))
                if not self._spare:
                    slots = self._slots
                    made = len(self._passages)
                    host = host_memory(slots.sizes.full, slots.device, self)
                    self._spare.append(Passage(torch.from_numpy(host), slots.passing(made)))
                passage = self._spare.pop(0)
                for event in passage.reads:
                    event.synchronize()
                self._passages[load] = Passage(passage.host, passage.there)
            return self._passages[load]


def _unpack(
    chunks: Chunks, name: str, i: int, shard: int | None, out: torch.Tensor
) -> torch.Tensor:
    """A plane's bytes where they lie or, if they are compressed, in `out`."""
    plane = chunks.plane(name, i, shard)
    if plane.codec is RAW:
        return torch.from_numpy(plane.shards[0])
    with named(chunks, name):
        unpack_plane(plane, as_bytes(out, writable=True))
    return out


@cache
def recovers(device: torch.device) -> bool:
    """Whether a device recovers tensors: a GPU for which Triton is installed, and the CPU."""
    if device.type != "cpu" and find_spec("triton") is None:
        warnings.warn(
            "Triton is not installed: compressed experts are recovered by the CPU, and sent whole",
            stacklevel=2,
        )
        return False
    return True


def _join(exponents: torch.Tensor, sign_mantissa: torch.Tensor, out: torch.Tensor) -> None:
    """On the link's stream, whose memory is what is copied here: nothing else waits for it."""
    planes = (plane.to(out.device, non_blocking=True) for plane in (exponents, sign_mantissa))
    if out.is_cuda:
        from moelab.store import unpack_triton

        unpack_triton.join(*planes, out)
    else:
        bits.join(*(plane.numpy() for plane in planes), as_bytes(out, True).view(np.uint16))
