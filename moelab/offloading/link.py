"""The link to a GPU: experts are copied between the CPU's memory and slots of its memory while it
computes.

Source: Speculating Experts §5.1 (experts in pinned memory, copied beside the compute stream);
ZipMoE §3.3, §4. One stream brings experts, one takes them back, as a link carries both ways at
once. From pinned memory the thread that computes sends experts by itself, as that takes less than
to wake another, and only the GPU waits; threads that read or decode send what they have ready.

No byte of a slot is overwritten while something reads it, and nothing reads one that is not there
yet. Whatever writes into a slot waits for the event of what was last done with the expert that has
left it (`leave`: computing, and where its bytes are taken back, that copy, which has itself waited
for the computing), and for a copy that was sent there and not waited for. Whatever reads a slot
waits for the copy that was sent there (`arrive`); it was enqueued by who then computes, or takes
back, in the same thread or under the same lock. Copies on one stream keep their order."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from moelab.store.reader import aligned_buffer

#: what computes what waits for a link
GPU = "gpu compute"
#: CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM of cuda.h
SAME_ADDRESSES = 91


class Link:
    """Copies to one GPU and back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._there, self._back = self.new_stream(), self.new_stream()
        # slot → what is done last with an expert that leaves it
        self._left: dict[int, Any] = {}
        # slot → (number, end) of what was sent there and has not been used
        self._coming: dict[int, tuple[int, Any]] = {}
        # (number, what, when it was sent, begin, end, bytes) of what may be under way
        self._sent: list[tuple[int, Any, float, Any, Any, int]] = []
        self._number = 0
        self._order = threading.Lock()  # of what brings experts
        self._until = 0.0  # when the last copy that has landed was there
        #: number of a copy → when the GPU had nothing to compute before it was there
        self._needed: dict[int, Any] = {}

    # what a GPU does

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def now(self) -> Any:
        """The stream that this thread computes on."""
        return torch.cuda.current_stream(self.device)

    def run(self, stream: Any, do: Callable[[], object]) -> tuple[Any, Any]:
        """(begin, end) of what `do` tells a GPU, behind what the stream has to do."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            begin.record(stream)
            do()
            end.record(stream)
        return begin, end

    # copies

    def send(
        self,
        what: Any,
        source: torch.Tensor,
        out: torch.Tensor,
        slot: int | None = None,
        after: Any = None,
    ) -> Any:
        """Copy pinned memory, when the event `after` has come, to a slot, behind what was sent
        before; returns the event of its end at once, see `arrive`. In any thread; without a slot
        nothing arrives."""
        copy = partial(out.copy_, source, non_blocking=True)
        return self.behind(what, copy, source.numel(), slot, after)

    def behind(
        self,
        what: Any,
        do: Callable[[], object],
        nbytes: int,
        slot: int | None,
        after: Any = None,
    ) -> Any:
        """As `send`, of what `do` tells the GPU."""
        with self._order:
            if slot is not None:
                self._write(self._there, slot)
            if after:
                self._there.wait_event(after)
            begin, end = self.run(self._there, do)
            self._number += 1
            if slot is not None:
                self._coming[slot] = self._number, end
            self._sent.append((self._number, what, time.perf_counter(), begin, end, nbytes))
        return end

    def overwrite(self, slot: int) -> None:
        """What this thread tells the GPU from now on may write into a slot. Nobody else does before
        that has left, or the GPU has come to rest."""
        self._write(self.now(), slot)
        self._left.pop(slot, None)

    def _write(self, stream: Any, slot: int) -> None:
        """A stream is going to write into a slot."""
        for event in (self._left.get(slot), self._coming.pop(slot, (0, None))[1]):
            if event:
                stream.wait_event(event)

    def take_back(self, source: torch.Tensor, out: torch.Tensor, after: Iterable[Any]) -> Any:
        """Copy memory of the GPU to pinned memory, beside what is sent and computed, when these
        events have come; returns the event of its end at once."""
        for event in after:
            self._back.wait_event(event)
        return self.run(self._back, partial(out.copy_, source, non_blocking=True))[1]

    def arrive(self, slots: Iterable[int]) -> None:
        """What this thread tells the GPU from now on is done when what was sent to these slots is
        there."""
        if coming := [self._coming.pop(slot) for slot in slots if slot in self._coming]:
            number, last = max(coming, key=itemgetter(0))  # as all before it are there, then
            if self.device.type == "cuda" and self._sent and number >= self._sent[0][0]:
                self._needed[number] = self.run(self.now(), lambda: None)[0]
            self.now().wait_event(last)

    def landed(self) -> Iterator[tuple[Any, float, float, int]]:
        """(what, begin, end, bytes) of what was sent and is there, in order: a copy begins when it
        was sent, or when the one before it was there, and takes as long as the GPU says. Behind one
        that was waited for, the wait: the host, which only tells the GPU to wait, knows nothing of
        it."""
        while self._sent and self._sent[0][4].query():
            number, what, sent, begin, end, nbytes = self._sent.pop(0)
            start = max(sent, self._until)
            self._until = start + begin.elapsed_time(end) / 1e3
            yield what, start, self._until, nbytes
            needed = self._needed.pop(number, None)
            if needed and needed.query() and (waited := needed.elapsed_time(end) / 1e3) > 0:
                yield (GPU, "wait", what[2]), self._until - waited, self._until, 0

    def rest(self) -> None:
        """Wait until nothing is under way: only then may the memory on either side become
        another's."""
        self._there.synchronize()
        self._back.synchronize()
        self._coming.clear()

    def leave(self, slot: int) -> Any:
        """The expert in this slot leaves it when what this thread has told the GPU to compute is
        done; returns that event."""
        self.arrive([slot])
        done = self._left[slot] = self.now().record_event()
        return done

    def leave_after(self, slot: int, event: Any) -> None:
        """The expert leaves when this has come, too, which has waited for `leave`."""
        self._left[slot] = event


def link_to(device: torch.device) -> Link | None:
    """None to the CPU, which computes where is read."""
    return None if device.type == "cpu" else Link(device)


def host_memory(n: int, device: torch.device, owner: Any) -> np.ndarray:
    """`n` bytes of the CPU's memory from a multiple of 4096 on; for a GPU pinned as long as the
    owner lives, where the system lets it be. torch's own pinned memory would take up to twice as
    much, the next power of two."""
    memory = aligned_buffer(n)
    pin(memory, device, owner)
    return memory


def pin(memory: np.ndarray, device: torch.device, owner: Any) -> Callable[[], object] | None:
    """Pin memory for a GPU as long as the owner lives; returns what ends that earlier. None, with a
    warning, where the system refuses; then it is as true, and slower. None on a CPU."""
    if device.type != "cuda" or not len(memory):
        return None
    status = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, len(memory), 0)
    if not int(status):
        return weakref.finalize(owner, _unpin, memory)
    with suppress(RuntimeError):  # CUDA keeps the error for whoever launches next
        torch.zeros(1, dtype=torch.uint8, device=device)
    warnings.warn(
        f"the system refuses to pin {len(memory) / 1e9:.1f} GB of memory for the GPU ({status}), so "
        f"experts are copied from pageable memory: slower, as the driver copies each twice and the "
        f"CPU waits for it. Give less, host='8GB', or raise the limit (ulimit -l; in WSL, memory= in "
        f".wslconfig)",
        stacklevel=2,
    )
    return None


@cache
def shares_addresses(device: torch.device) -> bool:
    """Whether a GPU finds pinned memory at the CPU's own addresses, as its driver says. If not, with a
    warning, only copies reach it: a kernel's read would end the program's use of the GPU."""
    found = ctypes.c_int()
    handle = ctypes.c_int()
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(OSError):
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        if not driver.cuDeviceGet(ctypes.byref(handle), index):
            driver.cuDeviceGetAttribute(ctypes.byref(found), SAME_ADDRESSES, handle)
    if not found.value:
        warnings.warn(
            "this GPU does not find pinned memory at the CPU's own addresses, so it runs no token "
            "alone: the host decides layer by layer",
            stacklevel=2,
        )
    return bool(found.value)


def _unpin(memory: np.ndarray) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
