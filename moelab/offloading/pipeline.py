"""The I/O threads and the decode workers: they execute what the `LoadQueue` hands out, under one
lock.

Source: ZipMoE §3.3 (one I/O thread, several decompression workers, work-conserving); Speculating
Experts Algorithm 1 (the next layer's experts are loaded while this one's are computed). Each thread
takes the first operation that can be done, this layer's before the next one's, so an order can make
a layer slow, but not wrong and not stuck.

Experts are read one after another, in pieces, of which `DEPTH` are under way at a time: so the disk
has the next request when it has served one, even where the thread that waited for it waits for a
core, and an expert can be computed while the next one is read. They are done in the order in which
they began: so the order in which experts are summed up is no matter of chance. A prefetch is read
alone, and between two of its pieces what is demanded overtakes it. To the timeline, the disk serves
the read that ends first before the others: so its events do not overlap, and last as long as it is
busy."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import torch

from moelab.offloading import load_queue
from moelab.offloading.decoders import decoder
from moelab.offloading.link import PinnedReader
from moelab.offloading.load_queue import USES, Load, LoadQueue, Phase, PrefetchCounts, read_name
from moelab.offloading.run import Timeline
from moelab.offloading.slots import Slots
from moelab.offloading.threads import step_back
from moelab.specs import Event, ExpertKey
from moelab.store.reader import Chunks, Piece, Reader

clock = time.perf_counter
DEPTH = 3  # pieces at the same time: while a thread takes its next one, the disk still has two
_PART = {"e": "E", "sm": "SM", "full": "both"}
#: what a layer waits for: experts that can be computed, an error, or None: "look again whether to
#: go on"
Ready = SimpleQueue


class Read:
    """A read under way.

    pieces : of it, that nobody reads yet.    left : how many have not been read.    busy : threads that are at it.
    since, new : when it began, or what it has last told the timeline, and bytes since then;
    together: nbytes, seconds."""

    def __init__(self, load: Load, kinds: tuple[str, ...]) -> None:
        self.load, self.kinds, self.chunks, self.pieces, self.left, self.busy = (
            load,
            kinds,
            [],
            deque(),
            0,
            0,
        )
        self.since, self.new, self.nbytes, self.seconds, self.error = 0.0, 0, 0, 0.0, None

    @property
    def done(self) -> bool:
        return not (self.pieces or self.busy)


class Bell:
    """Wakes up to `n` threads that wait for something to do, without a lock: whoever rings can be
    interrupted, or be the garbage collector within one of the threads. A ring is a token in a
    queue; n of them wake everybody."""

    def __init__(self, n: int) -> None:
        self._n, self._tokens = n, SimpleQueue()
        self.wait = self._tokens.get

    def ring(self) -> None:
        while self._tokens.qsize() < self._n:
            self._tokens.put(None)


class Pipeline:
    """Memory, files and threads around a `LoadQueue`.

    The thread that runs the model may be interrupted at any line, by Ctrl-C. It changes what all
    threads share in `change` only, waits only on queues, and rings only bells: so no lock stays
    taken and nobody waits for what it would have done. A change that was left half done ends with
    this pipeline: the engine `stop`s it and makes another.

    needed : when the disk has last read what the running layer demands, or else when the layer
        came.
    computed : thread → seconds for which it has used a core: to copy what it reads, to check, to
        decode.
    before : the pipeline whose memory this one takes over, and `held`, the slots there that are
    certain to be filled."""

    def __init__(
        self,
        slots: Slots,
        reader: Reader,
        workers: int,
        timeline: Timeline,
        ahead: int = 0,
        counts: PrefetchCounts | None = None,
        before: Pipeline | None = None,
        held: dict[ExpertKey, dict[str, int]] | None = None,
    ) -> None:
        self.slots, self.reader, self.timeline, self.closed, self.needed = (
            slots,
            reader,
            timeline,
            False,
            clock(),
        )
        self.computed: dict[str, float] = {}
        self.chunks: dict[tuple[str, int], Chunks] = (
            before.chunks if before else {}
        )  # of (kind, slot)
        two_stages = decoder(slots).two_stages
        self.queue = LoadQueue(
            slots.count,
            ahead,
            held=held,
            counts=counts,
            tensors=lambda key: reader.store.layers[key.layer].tensors,
            separable=lambda load, name: (
                two_stages and self.chunks["e", load.slots["e"]].entries[name].separable
            ),
            in_place=slots.sizes.in_place,
            workers=workers,
            shards=lambda load, name: (
                self.chunks["e", load.slots["e"]].entries[name].shards if two_stages else 1
            ),
        )
        self._lock, self._io, self._work = threading.Lock(), Bell(DEPTH), Bell(workers)
        self._lands = (
            slots.link is not None and slots.sizes.in_place
        )  # what is read is copied to a GPU
        self._sends = self._lands and isinstance(reader, PinnedReader)
        self._served = 0.0  # when the disk has last ended a read
        self._reading: list[Read] = []  # as they began
        self._ready: Ready = SimpleQueue()  # the running layer's
        self._living: set[int] = set()  # threads that run, whatever `threading` says
        self._ended: SimpleQueue[None] = SimpleQueue()
        loops = {
            f"disk {i}": (self._read_loop, f"disk {i}") for i in range(0 if self._sends else DEPTH)
        } | {
            f"worker {i}": (self._work_loop, f"worker {i}")
            for i in range(0 if slots.sizes.in_place else workers)
        }
        self.threads = [
            threading.Thread(target=self._run, args=loop, name=f"moelab {name}", daemon=True)
            for name, loop in loops.items()
        ]

    def open(self) -> None:
        for thread in self.threads:
            thread.start()

    def change(self, how: Callable[..., Any], *args: Any) -> Any:
        """Call `how`, a method of the queue, under the lock, and wake the threads if loads were
        admitted."""
        before = self.queue.admitted
        result = self._locked(self._changed, how, *args)
        if self.queue.admitted != before and self._sends:
            self._locked(self._send)
        elif self.queue.admitted != before:
            self._io.ring()
            self._work.ring()
        return result

    def _send(self) -> None:
        """All that can be read is sent from pinned memory: it may be computed as soon as the GPU
        has been told so."""
        copies = []
        while (found := self.queue.next_read()) is not None:
            load, kinds = found
            copies.append((load.key, load.slots["full"], chunks := self.reader.held(*load.key)))
            self.queue.read_done(load, kinds, chunks.nbytes)
        self.slots.send(copies)

    def settle(self) -> None:
        """Let the timeline and the queue know how long the GPU took for what was sent."""
        for key, begin, end, nbytes in self.slots.link.landed() if self._sends else ():
            self.timeline.add(Event("link", "read", *key, begin, end, nbytes))
            self.queue.reads = self.queue.reads._replace(
                seconds=self.queue.reads.seconds + end - begin
            )

    def _locked(self, how: Callable[..., Any], *args: Any) -> Any:
        """In one line: an interruption comes before the lock is taken, or within `how`, but never
        between the last line of a block and its end."""
        with self._lock:
            return how(*args)

    def begin(self, *step: Any) -> tuple[Ready, list[Any]]:
        """`LoadQueue.begin` for (layer, requests, evicted); returns where the layer's experts will
        arrive, and the requests that are left."""
        self._ready = ready = SimpleQueue()
        return ready, self.change(self.queue.begin, *step, ready.put)

    def next_ready(self, ready: Ready, check: Callable[[], None]) -> ExpertKey:
        """Wait for an expert that is loaded; `check` raises what shall end the waiting, and is
        called on `wake`."""
        start, found = clock(), None
        while found is None:
            check()
            found = ready.get()
        if isinstance(found, BaseException):
            raise found
        self.queue.waits.took(waited := clock() - start)
        if waited > 2e-6:
            self.timeline.add(Event("compute", "wait", *found, start, start + waited))
        return found

    def tensors(self, key: tuple[int, int], reuse: bool = False) -> dict[str, torch.Tensor]:
        """The tensors of an expert (layer, expert) that is loaded; `reuse` as of
        `Slots.tensors`."""
        return self.slots.tensors(self.queue.held[key]["full"], *key, reuse)

    def wake(self) -> None:
        self._ready.put(None)

    def halt(self) -> None:
        """Tell the threads to end when they have done what they are at; does not wait for it."""
        self.closed = True
        self._io.ring()
        self._work.ring()
        self.wake()

    def stop(self) -> None:
        """End the threads; what they are doing is finished first."""
        self.halt()
        while self._living:  # `join` alone may, interrupted once, no longer wait
            with suppress(Empty):
                self._ended.get(timeout=0.05)  # what an interrupted `stop` has taken does not come
        for thread in self.threads:
            if thread.ident is not None:  # else it was not started, or ends at once
                thread.join()
        if self._sends and self.slots is not None:
            self.slots.link.rest()

    def end(self) -> None:
        """Stop, and let go of files and memory; by another thread where the garbage collector,
        which runs in any, asks one of these to."""
        self.halt()
        if threading.current_thread() in self.threads:
            threading.Thread(target=self.end, name="moelab close", daemon=True).start()
            return
        self.stop()
        self.free()

    def forked(self) -> None:
        """In a child process there are no threads, and their locks may be taken: what runs ends
        with an error."""
        self._lock, self.threads, self.closed = threading.Lock(), [], True
        self._living.clear()
        self.timeline.forked()
        self._ready.put(
            RuntimeError(
                "the process was forked while this model was loading experts: run it again"
            )
        )

    def free(self) -> None:
        """Let go of files and memory, after `stop`."""
        self.reader.close()
        self.queue.held.clear()
        self.chunks.clear()
        self.slots = None

    def _run(self, loop: Callable[..., None], *args: str) -> None:
        """The life of a thread; if it ends too early, because a change was left half done, so does
        everything else."""
        me = threading.get_ident()
        self._living.add(me)  # before it looks whether to begin at all
        try:
            loop(*args)
        except BaseException as error:
            self._ready.put(error)
            self.halt()
        finally:
            self._living.discard(me)
            self._ended.put(None)

    def _next(self, bell: Bell, find: Callable[[], Any]) -> Any:
        """Wait for something to do; None when the pipeline is closed."""
        while not self.closed:
            with self._lock:
                found = find()
            if found is not None:
                return found
            bell.wait()
        return None

    def _changed(self, how: Callable[..., Any], *args: Any) -> Any:
        """Call `how`, and let the queue know of the reads that are done, none before one that is
        demanded and began earlier."""
        result = how(*args)
        for read in list(self._reading):
            if read.load.phase is Phase.DROPPED:  # nobody wants the rest
                read.pieces.clear()
            if read.done:
                self._reading.remove(read)
                error, read.error = read.error, None  # a thread that waits still has its last read
                self.queue.read_done(read.load, read.kinds, read.nbytes, error, read.seconds)
            elif not read.load.ahead:
                break
        return result

    def _read_loop(self, me: str) -> None:
        while (found := self._next(self._io, self._next_piece)) is not None:
            self._read(me, *found)
            self.computed[me] = time.thread_time()

    def _next_piece(self) -> tuple[Read, list[Piece]] | None:
        """Of what the running layer demands, or else, if nothing else is being read, of a
        prefetch."""
        found = next(
            (read for read in self._reading if read.pieces and read.load.keep is not None), None
        )
        if found is None and (new := self.queue.next_read(bool(self._reading))) is not None:
            self._reading.append(found := self._plan(*new))
        if found is None and not any(read.busy for read in self._reading):
            found = next((read for read in self._reading if read.pieces), None)
        if found is None:
            return None
        found.busy, found.since = found.busy + 1, found.since or clock()
        return found, found.pieces.popleft() if found.pieces else []

    def _plan(self, load: Load, kinds: tuple[str, ...]) -> Read:
        """What there is to read; an error belongs to the caller of the model."""
        read = Read(load, kinds)
        try:
            parts = {_PART[kind]: self.slots.bytes(kind, load.slots[kind]) for kind in kinds}
            # To a GPU an expert is copied at once, so it is one piece.
            whole = self._lands
            read.chunks, pieces = self.reader.plan(
                *load.key, parts, None if whole else load_queue.PIECE
            )
            read.pieces.extend([pieces] if whole else ([piece] for piece in pieces))
            read.left = len(read.pieces)
        except BaseException as error:
            read.error = error
        return read

    def _read(self, me: str, read: Read, pieces: list[Piece]) -> None:
        error = None
        try:
            nbytes = sum(map(self.reader.fill, pieces))
            if self._lands:
                self._check(me, read)
                self.slots.land(read.load.slots["full"], *read.chunks)
            if (
                self._locked(self._landed, read, nbytes)
                and self.slots.sizes.in_place
                and not self._lands
            ):
                self._check(me, read)
        except BaseException as caught:  # whatever it is belongs to the caller of the model
            error = caught
        self.change(self._released, read, error)
        if read.done:
            self._work.ring()

    def _landed(self, read: Read, nbytes: int) -> bool:
        """A piece has been read: whether it was the last. The timeline is told of a whole read, or
        of each piece of a prefetch."""
        read.new, read.left = read.new + nbytes, max(read.left - 1, 0)
        if not read.left or read.load.ahead:
            begun, self._served = max(read.since, self._served), clock()
            self.timeline.add(
                Event("disk", read_name(read.kinds), *read.load.key, begun, self._served, read.new)
            )
            read.nbytes, read.seconds = read.nbytes + read.new, read.seconds + self._served - begun
            read.since, read.new = 0.0, 0
        if read.load.keep is not None:
            self.needed = clock()
        return not read.left

    def _check(self, me: str, read: Read) -> None:
        """What was read in place can be computed once its checksums are compared: by the thread
        that has just read it, as another would have to wake up. The others go on reading, so the
        disk is not its own meanwhile."""
        if not self.reader.verify:
            return
        start = clock()
        for chunks in read.chunks:
            self.reader.check(chunks)
        self.timeline.add(
            Event(me.replace("disk", "worker"), "check", *read.load.key, start, clock())
        )

    def _released(self, read: Read, error: BaseException | None) -> None:
        """A thread is done with a piece."""
        read.busy -= 1
        if error is not None:
            read.error = error
            read.pieces.clear()
        if read.done and read.error is None and read.load.phase is Phase.LOADING:
            self.chunks.update(
                ((kind, read.load.slots[kind]), part) for kind, part in zip(read.kinds, read.chunks)
            )

    def _next_decode(self) -> tuple[Load, str, str, dict[str, Chunks]] | None:
        """The queue's, and the chunks that it uses: of a dropped load they may soon be
        another's."""
        if (found := self.queue.next_decode()) is None:
            return None
        load, _, operation = found
        return *found, {kind: self.chunks[kind, load.slots[kind]] for kind in USES[operation]}

    def _work_loop(self, me: str) -> None:
        step_back()
        decode = decoder(self.slots)
        while (found := self._next(self._work, self._next_decode)) is not None:
            load, tensor, operation, chunks = found
            start, error = clock(), None
            name, shard = tensor if isinstance(tensor, tuple) else (tensor, None)
            try:
                # Checked here and not when they were read: decoding finds them cached.
                for kind in chunks if self.reader.verify else ():
                    if kind in load.lacks:
                        self.reader.check(chunks[kind], name, shard)
                out = self.slots.tensors(load.slots["full"], load.key.layer)[name]
                decode(operation, chunks, name, out, load.slots["full"], shard)
            except BaseException as caught:
                error = caught
            else:
                self.timeline.add(Event(me, operation, *load.key, start, clock()))
            self.computed[me] = time.thread_time()
            self.change(self.queue.decode_done, load, tensor, operation, error)
