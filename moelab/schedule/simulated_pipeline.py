"""The engine's pipeline in simulated time: disk, workers and compute each take the first operation that is ready.

Source: ZipMoE §3.2, §3.3; Speculating Experts Algorithm 1 for what is fetched ahead. It makes the requests that the
engine makes, has its staging buffers, and recovery is a worker's operation. Time passes only in `run` and `spend`, and
what is under way goes on from layer to layer, so the disk reads for the next layer while this one is computed.

Left out: that reads and decompression slow each other down, and the cost of the threads' handshakes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Any

from moelab.schedule.affinity import Order
from moelab.schedule.requests import Delays
from moelab.specs import Event, ExpertKey, State

#: what the scheduler calls a read → what the timeline calls it
READS = {"E": "read E", "SM": "read SM", "both": "read"}


class Load:
    """An expert on its way to being computed; `request` has `.key`, `.tokens`, `.state` and `.keep`.

    keep : in which state it will stay; None while it has only been guessed.    rank : who goes first.
    placed : whether it takes a place.    busy : operations under way on it.    nbytes : read so far.
    """

    __slots__ = ("key", "tokens", "keep", "rank", "has_e", "has_sm", "decompressed", "whole", "placed", "busy",
                 "dropped", "nbytes")

    def __init__(self, request: Any, rank: int = -1, guessed: bool = False) -> None:
        self.key, self.tokens, self.rank = request.key, request.tokens, rank
        self.keep = None if guessed else request.keep
        self.has_e, self.has_sm, self.whole = request.state.has_e, request.state.has_sm, request.state is State.FULL
        self.decompressed = self.placed = self.dropped = False
        self.busy = self.nbytes = 0


class Queue:
    """What is to be done for loads: reads in order, and a heap of (rank, load) with work for a worker."""

    def __init__(self, reads: Iterable[tuple[Load, str]] = (), work: Iterable[tuple[int, Load]] = ()) -> None:
        self.reads, self.work = list(reads), list(work)
        heapify(self.work)

    def put(self, loads: dict[int, Load], order: Order) -> None:
        """Line up loads, by expert, in the order that was made for them."""
        self.reads += [(loads[expert], part) for expert, part in order.reads]
        for load in loads.values():
            if load.has_e:
                heappush(self.work, (load.rank, load))


class SimulatedPipeline:
    """One disk, L workers and compute; its verbs are those of the engine's pipeline.

    - Disk: one read at a time, neighbouring E and SM of an expert as one; the first of the order whose expert has
      a place or can get one. (Strictly in order, a block of more experts than places would be stuck: it reads all
      E-chunks before the first SM-chunk.)
    - Workers: the first expert in order of priority that has something ready: decompress (E is there), recover
      (decompressed, SM is there), or both as one, "decode".
    - Compute: FULL experts in ascending order, then the others as they become ready.
    - Places: staging buffers. An expert that isn't FULL takes one when its first read or decompression starts. It
      gives it back when it is decoded, if it is then kept as FULL in the pool's own buffer, else when it is computed.
    - Fetched ahead are experts of a layer to come, behind all that the running layer needs: when all of its experts
      have a place, at most `ahead` others get one. When their layer comes, those that it wants are its own, before
      all others; the rest is dropped, and gives its place back when the operation that is under way has ended.

    Parameters
    ----------
    staging, ahead : places for any experts; places more, and how many experts may be fetched ahead.
    start : seconds on the clock of the timeline.

    Attributes
    ----------
    now : seconds.
    fetched : what became of experts fetched ahead, under the names of the engine's `Fetched`; a read counts when it
        begins.
    read_s, reads : seconds and number of the reads that have ended.
    """

    def __init__(self, delays: Delays, workers: int, staging: int | None = None, ahead: int = 0, start: float = 0.0
                 ) -> None:
        if workers < 1 or staging is not None and staging < 1:
            raise ValueError(f"{workers} workers and {staging} staging buffers: both must be at least 1")
        if ahead < 0:
            raise ValueError(f"ahead is {ahead}; it is a number of experts, 0 or more")
        self.delays, self.workers, self.ahead, self.now = delays, workers, ahead, start
        self.fetched: Counter[str] = Counter(begun=0, used=0, early=0, nbytes=0, wasted=0)
        self.read_s, self.reads, self._reading = 0.0, 0, 0.0
        self._seconds = {"decompress": delays.decompress, "recover": delays.recover, "decode": delays.decode_at_once}
        self._events: list[Event] = []
        self._running: list[tuple[float, int, str, Load | None]] = []   # end, resource (−1 disk, workers, compute), …
        self._idle, self._disk_free, self._compute_free, self._computed_until = list(range(workers)), True, True, start
        self._places, self._taken_ahead = inf if staging is None else staging + ahead, 0
        self._rank, self._layer, self._left = count(), -1, 0            # _left: for compute to do
        self._ready: deque[Load] = deque()
        self._needed, self._guessed = Queue(), Queue()                  # for this layer, for those to come
        self._unplaced = 0                                              # of this layer
        self._ahead: dict[int, dict[ExpertKey, Load]] = {}              # by layer; those that are whole are last

    def timeline(self) -> list[Event]:
        """All events so far, also those under way, in order of their start."""
        return sorted(self._events, key=lambda event: event.start)

    def spend(self, layer: int, until: float) -> None:
        """Compute does something else than experts; disk and workers go on with what is fetched ahead."""
        if until > self.now:
            self._left, self._compute_free = 1, False
            self._begin("compute", self.workers, "other", None, until, layer)
            self._computed_until = until
            self.run()

    def start(self, layer: int, requests: Iterable[Any], evicted: Iterable[ExpertKey] = ()) -> list[Any]:
        """Begin a layer's step with what is in memory and what was fetched ahead; returns the requests left for
        `load`. `evicted` : experts whose chunks are no longer there."""
        requests = sorted(requests, key=lambda request: request.key.expert)
        self._layer, self._left = layer, len(requests)
        self._ready.extend(Load(request) for request in requests if request.state is State.FULL)
        missing = {request.key: request for request in requests if request.state is not State.FULL}
        for key, load in self._ahead.pop(layer, {}).items():
            if load.placed and key in missing:
                self._adopt(load, missing.pop(key))
            else:
                self._drop(load)
        for key in evicted:
            for loads in self._ahead.values():
                if key in loads:
                    self._drop(loads.pop(key))
        self._sort_out()
        return list(missing.values())

    def load(self, requests: Iterable[Any], order: Order) -> None:
        """Make the rest of the step's experts whole, in this order."""
        by_expert = {request.key.expert: request for request in requests}
        if set(order.decode) != by_expert.keys():
            raise ValueError(f"the order has experts {sorted(order.decode)}, but the requests leave "
                             f"{sorted(by_expert)} to decode; make the order from the same requests")
        self._unplaced = len(by_expert)
        self._needed.put({expert: Load(by_expert[expert], next(self._rank)) for expert in order.decode}, order)

    def fetch(self, layer: int, requests: Iterable[Any], order: Order) -> None:
        """Fetch experts ahead that aren't FULL, for a layer to come, in this order."""
        if layer in self._ahead:
            return
        by_expert = {request.key.expert: request for request in requests}
        loads = {expert: Load(by_expert[expert], next(self._rank), guessed=True) for expert in order.decode}
        self._ahead[layer] = {load.key: load for load in loads.values()}
        self._guessed.put(loads, order)

    def drop_ahead(self) -> None:
        """Forget what has been fetched ahead."""
        for loads in self._ahead.values():
            for load in loads.values():
                self._drop(load)
        self._ahead.clear()
        self._sort_out()

    def run(self) -> None:
        """Go on until compute has nothing left to do."""
        while self._left:
            self._start(self._needed)
            self._admit()
            self._start(self._guessed)
            self._start_compute()
            self.now = self._running[0][0]
            while self._running and self._running[0][0] == self.now:    # all that end together, before anything starts
                self._end(*heappop(self._running)[1:])

    # --------------------------------------------------------------------------------------- what starts, and what ends

    def _begin(self, resource: str, number: int, kind: str, load: Load | None, end: float, layer: int = -1,
               nbytes: int = 0) -> None:
        self._events.append(Event(resource, kind, *(load.key if load else (layer, -1)), self.now, end, nbytes))
        heappush(self._running, (end, number, kind, load))

    def _start(self, queue: Queue) -> None:
        """Let disk and workers take what they can of a queue."""
        for i, (load, part) in enumerate(queue.reads if self._disk_free else ()):
            if self._has_place(load):
                del queue.reads[i]
                kind, self._disk_free = READS[part], False
                self._reading, nbytes = self.delays.read(load.key, kind != "read SM", kind != "read E")
                load.busy += 1
                load.nbytes += nbytes
                self.fetched["nbytes"] += nbytes if load.keep is None else 0
                self._begin("disk", -1, kind, load, self.now + self._reading, nbytes=nbytes)
                break
        without_place = []
        while queue.work and self._idle:
            rank, load = heappop(queue.work)
            if self._has_place(load):
                worker = heappop(self._idle)
                kind = "recover" if load.decompressed else "decode" if load.has_sm else "decompress"
                load.busy += 1
                self._begin(f"worker {worker}", worker, kind, load, self.now + self._seconds[kind])
            else:
                without_place.append((rank, load))
        for entry in without_place:
            heappush(queue.work, entry)

    def _start_compute(self) -> None:
        if self._compute_free and self._ready:
            load = self._ready.popleft()
            if self.now > self._computed_until:
                self._events.append(Event("compute", "wait", self._layer, -1, self._computed_until, self.now))
            self._computed_until, self._compute_free = self.now + self.delays.expert(load.tokens), False
            self._begin("compute", self.workers, "expert", load, self._computed_until)

    def _end(self, resource: int, kind: str, load: Load | None) -> None:
        if resource == self.workers:
            self._compute_free = True
            self._left -= 1
            if load is not None:
                self._give_back(load)
            return
        load.busy -= 1
        if resource < 0:
            self._disk_free = True
            self.reads, self.read_s = self.reads + 1, self.read_s + self._reading
            load.has_e, load.has_sm = load.has_e or kind != "read SM", load.has_sm or kind != "read E"
        else:
            heappush(self._idle, resource)
            load.decompressed = True
            load.whole = kind != "decompress"
        if load.dropped:
            if not load.busy:
                self._give_back(load)
        elif load.whole:
            self._hand_over(load)
        elif kind in ("read", "read E") or load.decompressed and load.has_sm:
            heappush((self._guessed if load.keep is None else self._needed).work, (load.rank, load))

    # ----------------------------------------------------------------------------------- places, and whose they are

    def _has_place(self, load: Load) -> bool:
        """Whether a load has a place; one that is needed now takes one if there is any."""
        if not load.placed and load.keep is not None and self._places:
            load.placed = True
            self._places -= 1
            self._unplaced -= 1
        return load.placed

    def _admit(self) -> None:
        """Give places to what is fetched ahead, if the running layer needs none."""
        if self._unplaced or not self._ahead:
            return
        for load in (load for loads in self._ahead.values() for load in loads.values() if not load.placed):
            if not self._places or self._taken_ahead == self.ahead:
                return
            load.placed = True
            self._places -= 1
            self._taken_ahead += 1

    def _give_back(self, load: Load) -> None:
        self._places += load.placed
        self._taken_ahead -= load.placed and load.keep is None
        load.placed = False

    def _hand_over(self, load: Load) -> None:
        """An expert is whole: it can be computed, or waits for its layer."""
        if load.keep is None:
            self._ahead[load.key.layer][load.key] = self._ahead[load.key.layer].pop(load.key)       # to the end
            return
        if load.keep is State.FULL:
            self._give_back(load)
        self._ready.append(load)

    def _adopt(self, load: Load, request: Any) -> None:
        """What was fetched ahead is needed by the layer that has come."""
        self.fetched.update(begun=1, used=1, early=load.whole)
        self._taken_ahead -= 1
        load.keep, load.tokens = request.keep, request.tokens
        if load.whole:
            self._hand_over(load)

    def _drop(self, load: Load) -> None:
        """Nobody needs what was fetched ahead."""
        load.dropped = True
        self.fetched.update(begun=load.placed, wasted=load.nbytes)
        if not load.busy:
            self._give_back(load)

    def _sort_out(self) -> None:
        """Put adopted loads into the queue of what is needed, which is empty, and leave out dropped ones."""
        reads, work = self._guessed.reads, self._guessed.work
        self._needed = Queue([item for item in reads if item[0].keep is not None],
                             [item for item in work if item[1].keep is not None])
        self._guessed = Queue([item for item in reads if item[0].keep is None and not item[0].dropped],
                              [item for item in work if item[1].keep is None and not item[1].dropped])
