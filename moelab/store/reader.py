"""Reading experts from a store: an expert's E-chunks, SM-chunks or both in one request, into a
buffer that is given.

Source: ZipMoE §3.3 (E-chunks and SM-chunks are read separately) and §4 (preallocated buffers).
O_DIRECT (Linux, "direct") and F_NOCACHE (macOS, "uncached") bypass the page cache, which would hold
what the expert cache keeps anyway: in 3 GB, a 5 GB model read 425 MB a token buffered instead of
230. So "auto" is the first of them that the system has; a file system that refuses it is read
"buffered". Bytes at any offset, as in a checkpoint, are read directly in whole blocks. If they begin as
far into a block in memory as in the file, only the first and the last block are copied; otherwise all
are, from a buffer that each thread has.

A tensor of 16-bit weights is decoded at once or in two stages (ZipMoE §3.2 and Fig. 6: decompression
needs the E-chunks only, recovery needs its result and the SM-chunks). The exponents of N weights, N
bytes, are decompressed into the upper half of the tensor's own 2N bytes, and recovery joins them from
the front: no other memory is needed. A shard is a tensor of its own, in its part of `out`.

Shapes: a buffer is uint8 and begins on a multiple of 4096; decoding gives the expert's tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moelab.base.forks import renew_in_children
from moelab.base.registry import require
from moelab.store import bits
from moelab.store.bits import as_bytes
from moelab.store.codecs import (
    PackedTensor,
    Plane,
    decompress_tensor,
    plane_bytes,
    unpack_plane,
)
from moelab.store.headers import DTYPES, Tensors
from moelab.store.layout import (
    AGAIN,
    ALIGN,
    Entries,
    ExpertFiles,
    StoreError,
    aligned,
    in_file,
    run,
)

KEPT = 64  # files that stay open; macOS allows a process 256
HUGE = 2 << 20  # bytes of a huge page
WINDOW = 1 << 20  # bytes, of each thread that reads what is not aligned
BLOCK = 512  # bytes: what disks are read by at least
NORESERVE = 0x4000  # of Linux: more addresses than there is memory


def modes() -> list[str]:
    """The modes of reading that this system has: "direct", "uncached", "buffered"."""
    direct = ["direct"] if hasattr(os, "O_DIRECT") else []
    uncached = ["uncached"] if hasattr(fcntl, "F_NOCACHE") else []
    return [*direct, *uncached, "buffered"]


def aligned_buffer(n: int, alignment: int = ALIGN) -> np.ndarray:
    """An uninitialised uint8 array of `n` bytes that begins on a multiple of `alignment` bytes; one
    to be read into, on Linux, in huge pages, for a direct read into scattered small ones took twice
    as long."""
    if alignment < ALIGN or n < HUGE // 8 or not hasattr(mmap, "MADV_HUGEPAGE"):
        room = np.empty(n + alignment, np.uint8)
    else:
        alignment = HUGE
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        memory = mmap.mmap(-1, -(-n // HUGE) * HUGE + HUGE, private)
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        room = np.frombuffer(memory, np.uint8)
    skip = -room.ctypes.data % alignment
    return room[skip : skip + n]


def give_back(memory: np.ndarray) -> None:
    """Let the system have the pages of an `aligned_buffer`, or a part of one; its bytes are lost."""
    memory = memory[-memory.ctypes.data % mmap.PAGESIZE :]
    whole = ctypes.c_size_t(len(memory) // mmap.PAGESIZE * mmap.PAGESIZE)
    advice = mmap.MADV_FREE if sys.platform == "darwin" else mmap.MADV_DONTNEED
    ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.ctypes.data), whole, advice)


def empty_tensors(entries: Entries) -> Tensors:
    """Uninitialised tensors for one expert, each at a multiple of 64 bytes, as CPU kernels want
    them."""
    return {
        name: torch.from_numpy(aligned_buffer(entry.nbytes, 64))
        .view(DTYPES[entry.dtype])
        .view(entry.shape)
        for name, entry in entries.items()
    }


@dataclass(frozen=True)
class Chunks:
    """A part of an expert in memory: `data` holds the file's bytes from `offset` on; `nbytes` of
    them were read."""

    layer: int
    expert: int
    part: str
    entries: Entries
    data: np.ndarray = field(repr=False)
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"the {self.part} chunks of expert {self.expert} of MoE layer {self.layer}"

    def plane(self, name: str, i: int, shard: int | None = None) -> Plane:
        """Plane `i` of a tensor or of one shard of it, as views of `data`."""
        codec, chunks = self.entries[name].planes[i]
        begins = (chunk.offset - self.offset for chunk in chunks)
        blobs = tuple(self.data[at : at + c.length] for at, c in zip(begins, chunks))
        if shard is not None and i == 0:
            blobs = blobs[shard : shard + 1]
        elif shard is not None:
            begin, end = self.entries[name].bounds(shard)
            blobs = (blobs[0][begin:end],)
        return Plane(codec, blobs)


class Reader(contextlib.AbstractContextManager):
    """Reads parts of experts into buffers; each read is one blocking call, from any number of
    threads.

    store : what to read; a `moelab.checkpoint.experts.CheckpointStore` has no checksums.
    mode : one of `modes()`, or "auto" for the first of them; where a file system refuses direct reads,
        the attribute becomes "buffered".
    bandwidth : bytes a second that reads of all threads together are throttled to, to stand for a
        slower disk (a token bucket without a burst); None for no limit.
    verify : whether `read` checks the chunks' checksums, at about 10 GB/s.
    """

    def __init__(
        self,
        store: ExpertFiles,
        mode: str = "auto",
        bandwidth: float | None = None,
        verify: bool = True,
    ) -> None:
        require("mode", mode, ["auto", *modes()])
        if bandwidth is not None and not bandwidth > 0:
            raise ValueError(f"bandwidth is {bandwidth} bytes a second; it must be above 0")
        self.store = store
        self.bandwidth = bandwidth
        self.verify = verify and store.checksum is not None
        self.bytes_read = 0
        #: (mode, file) → descriptor, opened when it is first read
        self._files: dict[tuple[str, Path], int] = {}
        #: part of an expert → offset, length, bytes to be read
        self._runs: dict[tuple[int, int, str], tuple[int, int, int]] = {}
        weakref.finalize(self, _close, self._files)
        self._free_at = 0.0
        self.forked()
        renew_in_children(self)
        self.mode = modes()[0] if mode == "auto" else mode
        self._own = threading.local()  # a thread's window

    def forked(self) -> None:
        """In a child process a thread that is not there may have taken the lock."""
        self._lock = threading.Lock()

    def buffer(self, part: str = "both") -> np.ndarray:
        """A new buffer for this part of any expert of the store."""
        experts = (entries for layer in self.store.layers for entries in layer.experts)
        return aligned_buffer(max(run(entries, part)[1] for entries in experts))

    def read(
        self, layer: int, expert: int, part: str = "both", buffer: np.ndarray | None = None
    ) -> Chunks:
        """Read the E-chunks ("E"), the SM-chunks ("SM") or both of one expert, in one request.

        buffer : uint8, large enough, beginning on a multiple of 4096 bytes (see `aligned_buffer`);
            by default new.

        Raises
        ------
        StoreError : the file is cut off, or a chunk does not match its checksum; names file, expert
            and offset.
        OSError : the system could not read; says the same.
        LookupError : there is no such expert.        ValueError : an unsuitable buffer.
        """
        (chunks,) = self.read_parts(layer, expert, {part: buffer})
        if self.verify:
            self.check(chunks)
        return chunks

    def read_parts(
        self, layer: int, expert: int, parts: dict[str, np.ndarray | None]
    ) -> list[Chunks]:
        """Read "E", "SM" or both, in this order, into a buffer each, in one request; without
        `check`."""
        found = [self._chunks(layer, expert, part, buffer) for part, buffer in parts.items()]
        filled = [chunks for chunks in found if len(chunks.data)]
        total = 0
        start = time.perf_counter()
        for path, offset, views in self.store.extents(filled) if filled else ():
            try:
                while views:
                    total += (n := self._request(path, views, offset))
                    if not n:
                        raise StoreError(
                            f"{path} is cut off at byte {offset:,}, inside {filled[0]}"
                        )
                    offset += n
                    while views and n >= len(views[0]):
                        n -= len(views.pop(0))
                    if n:
                        views[0] = views[0][n:]
            except OSError as error:
                words = f"reading {path} at byte {offset:,} ({filled[0]}) failed: {error.strerror}"
                raise OSError(error.errno, words) from error
        self._throttle(total, start)
        return found

    def _chunks(self, layer: int, expert: int, part: str, buffer: np.ndarray | None) -> Chunks:
        """A part that is still to be read, in its buffer."""
        key = (layer, expert, part)
        entries = self.store.entries(layer, expert)
        if key not in self._runs:
            self._runs[key] = *run(entries, part), self.store.stored_bytes(*key)
        offset, length, nbytes = self._runs[key]
        buffer = aligned_buffer(length) if buffer is None else buffer
        if len(buffer) < length or length and buffer.ctypes.data % ALIGN:
            raise ValueError(
                f"a buffer of {len(buffer):,} bytes at {buffer.ctypes.data % ALIGN}: {length:,} are "
                f"read, to a multiple of {ALIGN}. Reader.buffer() makes one"
            )
        return Chunks(layer, expert, part, entries, buffer[:length], offset, nbytes)

    def _throttle(self, total: int, start: float) -> None:
        with self._lock:
            self.bytes_read += total
            if self.bandwidth:
                self._free_at = max(self._free_at, start) + total / self.bandwidth
            wait = self._free_at - time.perf_counter()
        if wait > 0:
            time.sleep(wait)

    def _request(self, path: Path, views: list[memoryview], offset: int) -> int:
        """One positioned read; buffered from now on if the file system refuses direct ones."""
        try:
            with self._open(path) as fd:
                if self.mode == "direct" and not self.store.aligned:
                    return self._blocks(fd, np.frombuffer(views[0], np.uint8), offset)
                return os.preadv(fd, views, offset)
        except OSError as error:
            if self.mode != "direct" or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        self.mode = "buffered"
        return self._request(path, views, offset)

    def _blocks(self, fd: int, into: np.ndarray, offset: int) -> int:
        """One direct read of bytes that lie anywhere, into memory anywhere; returns how many."""
        if not hasattr(self._own, "window"):
            self._own.window = aligned_buffer(WINDOW)
        window, skip, n = self._own.window, offset % ALIGN, len(into)
        inner = slice(-offset % BLOCK, n - (offset + n) % BLOCK)
        if (into.ctypes.data - offset) % BLOCK == 0 and inner.start < inner.stop:
            skip = offset % BLOCK
            ends = window[: BLOCK * (skip > 0)], window[BLOCK : 2 * BLOCK * (inner.stop < n)]
            views = [of for of in (ends[0], into[inner], ends[1]) if len(of)]
            read = os.preadv(fd, views, offset - skip) - skip
            into[: inner.start] = ends[0][skip:]
            into[inner.stop :] = ends[1][: n - inner.stop]
            return min(n, max(0, read))
        end = min(skip + n, WINDOW)
        end = min(end, os.preadv(fd, [window[: aligned(end)]], offset - skip))
        n = max(0, end - skip)
        into[:n] = window[skip : skip + n]  # without the GIL
        return n

    @contextlib.contextmanager
    def _open(self, path: Path) -> Iterator[int]:
        """A file to read from, which stays open if fewer than `KEPT` do."""
        with self._lock:
            key = self.mode, path
            if (fd := self._files.get(key)) is None:
                fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.mode == "direct" else 0))
                if self.mode == "uncached":
                    fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
                if len(self._files) < KEPT:
                    self._files[key] = fd
            kept = key in self._files
        try:
            yield fd
        finally:
            if not kept:
                os.close(fd)

    def check(self, chunks: Chunks, only: str | None = None) -> None:
        """Raise StoreError unless the chunks, or those of the tensor `only`, match their
        checksums."""
        if self.store.checksum is None:
            return
        for name, chunk in in_file(chunks.entries):
            at = chunk.offset - chunks.offset
            data = chunks.data[at : at + chunk.length] if 0 <= at < len(chunks.data) else ()
            wanted = len(data) and (only is None or name.startswith(f"{only}.p"))
            if wanted and self.store.checksum(data) != chunk.checksum:
                file = self.store.layers[chunks.layer].file
                raise StoreError(
                    f"{self.store.folder / file} is damaged: chunk {chunks.layer}.{chunks.expert}.{name} "
                    f"(expert {chunks.expert} of MoE layer {chunks.layer}, {chunk.length:,} bytes at "
                    f"{chunk.offset:,}) does not match its checksum; {AGAIN}"
                )

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        _close(self._files)

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(files: dict[Any, int]) -> None:
    while files:  # each is forgotten first: closed twice, it may be another's by then
        os.close(files.popitem()[1])


def decode(e: Chunks, sm: Chunks, out: Tensors | None = None) -> Tensors:
    """The tensors of one expert from its E-chunks and its SM-chunks, which may be the same `Chunks`
    (part "both").

    out : tensors to write into, see `empty_tensors`.

    Raises StoreError if a chunk cannot be decoded."""
    out = empty_tensors(e.entries) if out is None else out
    for name in e.entries:
        decode_tensor(e, sm, name, out[name])
    return out


def decode_tensor(
    e: Chunks, sm: Chunks, name: str, out: torch.Tensor, shard: int | None = None
) -> None:
    """One tensor of an expert into `out`, as `decode` does with all of them, or one shard of it."""
    entry = e.entries[name]
    planes = tuple((e if i == 0 else sm).plane(name, i, shard) for i in range(len(entry.planes)))
    with named(e, name):
        decompress_tensor(PackedTensor(planes), out)


def decompress(e: Chunks, name: str, out: torch.Tensor, shard: int | None = None) -> None:
    """The first of two stages, which can begin before the sign-mantissa bytes are read: the exponents
    of a tensor that has `shards`, or of one of them, into the upper half of `out`. Raises StoreError
    if damaged."""
    with named(e, name):
        unpack_plane(e.plane(name, 0, shard), as_bytes(out, writable=True)[out.numel() :])


def recover(sm: Chunks, name: str, out: torch.Tensor, shard: int | None = None) -> None:
    """The second stage: join the exponents in the upper half of `out` with the sign-mantissa bytes,
    in place."""
    words = as_bytes(out, writable=True).view(np.uint16)
    with named(sm, name):
        bits.recover(plane_bytes(sm.plane(name, 1, shard), len(words)), words)


def cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """An expert's tensors, those of floating-point numbers in `dtype`."""
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


@contextlib.contextmanager
def named(chunks: Chunks, name: str) -> Iterator[None]:
    """Let the error for a chunk that cannot be decoded, a StoreError, say which it is."""
    try:
        yield
    except ValueError as error:
        raise StoreError(
            f"{name} of expert {chunks.expert} of MoE layer {chunks.layer} cannot be decoded: "
            f"{error}"
        ) from error


class StoreExperts:
    """A source for the seam, `plug(model, source=StoreExperts(store))`: reads and decodes an expert
    on each call. Options as of `Reader`."""

    def __init__(self, store: ExpertFiles, **options: Any) -> None:
        self.store = store
        self.reader = Reader(store, **options)
        self.identity = store.identity
        self.name = f"{store.spec.name} in {store.folder}"

    def __call__(self, layer: int, expert: int) -> Tensors:
        """The tensors of one expert, each at a multiple of 64 bytes; raises what `Reader.read` and
        `decode` raise."""
        chunks = self.reader.read(layer, expert)
        return decode(chunks, chunks)
