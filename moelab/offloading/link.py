"""The link to a GPU: experts are copied from pinned memory into slots of its memory while it
computes.

Source: Speculating Experts §5.1 (all experts in pinned memory, copied beside the compute stream);
ZipMoE §3.3, §4. A copy waits for one thing only: that what was computed with the expert that has
left its slot is done. Threads that read or decode copy on streams of their own and wait for it.
From pinned memory the thread that computes sends experts by itself, as that takes less than to wake
another, and only the GPU waits."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from moelab.base.progress import progress
from moelab.store.layout import ExpertStore, run
from moelab.store.reader import Chunks, Reader, aligned_buffer


class Link:
    """Copies to one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._mine = threading.local()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # slot → what the compute stream does last with an expert that leaves it
        self._left: dict[int, Any] = {}
        # slot → (number, end) of what was sent there and has not been used
        self._coming: dict[int, tuple[int, Any]] = {}
        # (what, when it was sent, begin, end, bytes) of what may be under way
        self._sent: list[tuple[Any, float, Any, Any, int]] = []
        self._number = 0
        self._order = threading.Lock()  # of what is told to the one stream
        self._until = 0.0  # when the last copy that has landed was there

    @contextmanager
    def into(self, slot: int) -> Iterator[None]:
        """What a thread tells the GPU within the block, to fill a slot, runs beside what is
        computed; waits for it."""
        if not hasattr(self._mine, "stream"):
            self._mine.stream = torch.cuda.Stream(self.device)
        stream = self._mine.stream
        left = self._left.get(slot)
        with torch.cuda.stream(stream):
            if left is not None:
                stream.wait_event(left)
            yield
        stream.synchronize()

    def send(self, copies: Iterable[tuple[Any, torch.Tensor, int, torch.Tensor]]) -> None:
        """Copy (what, pinned memory, slot, memory in it) one after the other, behind what was sent
        before; returns at once, see `arrive`."""
        for what, source, slot, out in copies:
            copy = partial(out.copy_, source, non_blocking=True)
            self.behind(what, copy, source.numel(), slot)

    def behind(
        self, what: Any, do: Callable[[], object], nbytes: int = 0, slot: int | None = None
    ) -> Any:
        """Tell the GPU something behind all that was sent before; returns at once what can
        `synchronize()`, which only a thread that loads may. Any thread may call this.

        what, nbytes : for `landed`.    slot : that this fills: behind what was computed with the
            expert that has left it, and see `arrive`."""
        with self._order, torch.cuda.stream(self._stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if (left := self._left.get(slot)) is not None:
                self._stream.wait_event(left)
            begin.record(self._stream)
            do()
            end.record(self._stream)
            self._number += 1
            if slot is not None:
                self._coming[slot] = self._number, end
            self._sent.append((what, time.perf_counter(), begin, end, nbytes))
            return end

    def arrive(self, slots: Iterable[int]) -> None:
        """What this thread tells the GPU from now on is done when what was sent to these slots is
        there."""
        if coming := [self._coming.pop(slot) for slot in slots if slot in self._coming]:
            last = max(coming, key=itemgetter(0))[1]  # as all before it are there, then
            torch.cuda.current_stream(self.device).wait_event(last)

    def landed(self) -> Iterator[tuple[Any, float, float, int]]:
        """(what, begin, end, bytes) of what was sent and is there, in order: a copy begins when it
        was sent, or when the one before it was there, and takes as long as the GPU says."""
        while self._sent and self._sent[0][3].query():
            what, sent, begin, end, nbytes = self._sent.pop(0)
            start = max(sent, self._until)
            self._until = start + begin.elapsed_time(end) / 1e3
            yield what, start, self._until, nbytes

    def rest(self) -> None:
        """Wait until nothing is under way: only then may the memory on either side become
        another's. Here torch's own streams are waited for, too: of what they have not done yet, torch
        may have given the memory to somebody else."""
        if self._stream is not None:
            torch.cuda.synchronize(self.device)
        self._coming.clear()

    def leave(self, slots: Iterable[int]) -> None:
        """The experts in these slots leave them when what this thread has told the GPU to compute
        is done."""
        done = torch.cuda.current_stream(self.device).record_event()
        self._left |= dict.fromkeys(slots, done)


def link_to(device: torch.device) -> Link | None:
    """None to the CPU, which computes where is read."""
    return None if device.type == "cpu" else Link(device)


def host_memory(n: int, device: torch.device, owner: Any) -> np.ndarray:
    """`n` bytes of the CPU's memory from a multiple of 4096 on; for a GPU pinned as long as the
    owner lives. torch's own pinned memory would take up to twice as much, the next power of two.
    MemoryError if they cannot be had."""
    memory = aligned_buffer(n)
    if device.type == "cuda" and n:
        status = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, n, 0)
        if int(status):
            raise MemoryError(f"{n:,} bytes of memory cannot be pinned for the GPU ({status})")
        weakref.finalize(owner, _unpin, memory)
    return memory


def _unpin(memory: np.ndarray) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


class PinnedReader(Reader):
    """All experts of a store as they are stored, in pinned memory: read and checked once, when this
    is made.

    device : the GPU that they will be copied to. options : of `Reader`; a bandwidth is refused, as
    a link has its own."""

    def __init__(self, store: ExpertStore, device: torch.device, **options: Any) -> None:
        if options.get("bandwidth") is not None:
            raise ValueError(
                "bandwidth throttles a disk, and with mode='pinned' nothing is read from one: leave out "
                "one of the two"
            )
        super().__init__(store, **options)
        layers = enumerate(store.layers)
        keys = [(layer, e) for layer, of in layers for e in range(len(of.experts))]
        ends = np.cumsum([run(store.entries(*key), "both")[1] for key in keys]).tolist()
        memory = host_memory(ends[-1], device, self)
        self._held: dict[tuple[int, int], Chunks] = {}

        def read(key: tuple[int, int], begin: int, end: int) -> Chunks:
            return self.read(*key, "both", memory[begin:end])

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            found = pool.map(read, keys, [0, *ends], ends)
            found = progress(found, "reading experts", total=len(keys), unit="experts")
            self._held = dict(zip(keys, found))
        self.verify = False  # nobody else can write there

    def read_parts(
        self, layer: int, expert: int, parts: dict[str, np.ndarray | None]
    ) -> list[Chunks]:
        """As of `Reader`, where nothing is left to read: the buffers stay as they are."""
        if (whole := self._held.get((layer, expert))) is None:
            return super().read_parts(layer, expert, parts)
        found = []
        for part in parts:
            offset, length = run(whole.entries, part)
            begin = offset - whole.offset if length else 0
            data = whole.data[begin : begin + length]
            nbytes = self.store.stored_bytes(layer, expert, part)
            found.append(replace(whole, part=part, data=data, offset=offset, nbytes=nbytes))
        return found

    def held(self, layer: int, expert: int) -> Chunks:
        """An expert, whole."""
        return self._held[layer, expert]
