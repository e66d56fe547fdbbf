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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from moelab.offloading.link import copying, host_memory
from moelab.offloading.load_queue import USES, Load, Phase, Piece
from moelab.offloading.slots import Slots, places
from moelab.store import bits
from moelab.store.bits import as_bytes
from moelab.store.codec import RAW
from moelab.store.codecs import unpack_plane
from moelab.store.headers import DTYPES
from moelab.store.reader import Chunks, decode_tensor, named
from moelab.store.stages import decompress, recover

#: an operation of `load_queue.USES` → what does it, with the chunks that it uses
OPERATIONS = {"decompress": decompress, "recover": recover, "decode": decode_tensor}


def on_cpu(kind: str, chunks: dict[str, Chunks], piece: Piece, out: torch.Tensor) -> None:
    """Both stages, or one of them, into memory of the CPU.

    kind : "decompress", "recover" or "decode", which is both. Raises StoreError for a damaged
        chunk."""
    name, shard = piece
    if shard is not None:
        begin, end = chunks[USES[kind][0]].entries[name].bounds(shard)
        out = out.view(-1)[begin:end]
    OPERATIONS[kind](*chunks.values(), name, out, shard)


@dataclass(eq=False)
class Passage:
    """Where an expert passes on its way to a GPU. A tensor of N weights has 2N bytes at its place in
    a slot: for sign-mantissa bytes, then for exponents.

    host : pinned memory, that exponents are decompressed into.    there : the GPU's; without it the
        GPU reads the CPU's.    sent : tensors whose sign-mantissa bytes are there.
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
        self._slots, self._link = slots, slots.link
        self._lock = threading.Lock()
        self._passages: dict[Load, Passage] = {}
        self._spare: list[Passage] = []
        self._made = 0
        self._reads: dict[int, list[Any]] = {}  # slot "sm" → as `Passage.reads`

    def __call__(self, kind: str, chunks: dict[str, Chunks], piece: Piece, load: Load) -> None:
        """As `on_cpu`, into the load's slot of the GPU."""
        name, shard = piece
        entries = chunks[USES[kind][0]].entries
        entry = entries[name]
        passage = self._passage(load)
        place = slice(*places(entries, False)[0][name][:2])
        host = passage.host[place]
        slot = load.slots["full"]
        out = self._slots.full(slot)[place].view(DTYPES[entry.dtype])
        if not (entry.shards and recovers(self._slots.device)):
            decode_tensor(*chunks.values(), name, host.view(out.dtype).view(entry.shape))
            passage.reads.append(self._copy(load, host, out.view(torch.uint8), slot))
            return
        part = slice(0, entry.n) if shard is None else slice(*entry.bounds(shard))
        sm, e = host.view(2, entry.n)[:, part]
        there = None if passage.there is None else passage.there[place].view(2, entry.n)[:, part]
        if kind != "decompress":
            self.announce(load, chunks["sm"])
        if kind != "recover":
            with named(chunks["e"], name):
                unpack_plane(chunks["e"].plane(name, 0, shard), as_bytes(e, writable=True))
            if there is not None:
                passage.reads.append(self._copy(load, e, there[1]))
        if kind == "decompress":
            return
        if there is None:
            sm = self._sign_mantissa(chunks["sm"], name, shard, sm)
        else:
            sm, e = there
        done = self._tell(load, "gpu", "recover", partial(_join, e, sm, out[part]), 0, slot)
        if there is None:
            passage.reads.append(done)
            self._reads.setdefault(load.slots["sm"], []).append(done)

    def announce(self, load: Load, chunks: Chunks) -> None:
        """SM-chunks in memory go over the link, unless they have already."""
        passage = self._passage(load)
        if passage.there is None or not recovers(self._slots.device):
            return
        found = places(chunks.entries, False)[0]
        with self._lock:  # so that who finds one sent is told behind it
            for name, (begin, _, entry) in found.items():
                if not entry.shards or name in passage.sent:
                    continue
                own = passage.host[begin : begin + entry.n]
                source = self._sign_mantissa(chunks, name, None, own)
                done = self._copy(load, source, passage.there[begin : begin + entry.n])
                passage.sent.add(name)
                passage.reads.append(done)
                self._reads.setdefault(load.slots["sm"], []).append(done)

    def wait_for(self, slot: int) -> None:
        """Until the GPU has read what lay in a slot for SM-chunks."""
        for event in self._reads.pop(slot, ()):
            event.synchronize()

    def _sign_mantissa(
        self, chunks: Chunks, name: str, shard: int | None, out: torch.Tensor
    ) -> torch.Tensor:
        """Sign-mantissa bytes where they lie or, compressed ones, decompressed into `out`."""
        plane = chunks.plane(name, 1, shard)
        if plane.codec is RAW:
            return torch.from_numpy(plane.shards[0])
        with named(chunks, name):
            unpack_plane(plane, as_bytes(out, writable=True))
        return out

    def _copy(
        self, load: Load, source: torch.Tensor, out: torch.Tensor, slot: int | None = None
    ) -> Any:
        return self._tell(load, "link", "send", copying(source, out), source.numel(), slot)

    def _tell(self, load: Load, resource: str, kind: str, *what: Any) -> Any:
        return self._link.behind((resource, kind, load.key), *what)

    def _passage(self, load: Load) -> Passage:
        with self._lock:
            if load not in self._passages:
                ended = Phase.LOADED, Phase.DROPPED
                for of in [of for of in self._passages if of.phase in ended and not of.busy]:
                    self._spare.append(self._passages.pop(of))
                passage = self._spare.pop(0) if self._spare else self._made_anew()
                for event in passage.reads:
                    event.synchronize()
                self._passages[load] = Passage(passage.host, passage.there)
            return self._passages[load]

    def _made_anew(self) -> Passage:
        slots, i = self._slots, self._made
        self._made += 1
        host = host_memory(slots.sizes.full, slots.device, self)
        return Passage(torch.from_numpy(host), slots.passing(i))


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
    if out.is_cuda:
        from moelab.store import stages_triton

        stages_triton.join(exponents, sign_mantissa, out)
    else:
        bits.join(exponents.numpy(), sign_mantissa.numpy(), as_bytes(out, True).view(np.uint16))


def decoder(slots: Slots) -> Callable[[str, dict[str, Chunks], Piece, Load], None]:
    """What workers decode with, into a load's slot."""
    if slots.link is not None:
        return OnGPU(slots)

    def decode(kind: str, chunks: dict[str, Chunks], piece: Piece, load: Load) -> None:
        tensors = slots.tensors(load.slots["full"], load.key.layer)
        on_cpu(kind, chunks, piece, tensors[piece.tensor])

    return decode
