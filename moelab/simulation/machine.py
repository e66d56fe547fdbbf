"""A machine in simulated time: disk, decode workers and compute, each at one thing at a time.

What they do next, a `LoadQueue` says, the engine's own; how long that takes, a `Machine`. All that
happens is an `Event`, as in a real run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count

from moelab.base.specs import Event, ExpertKey, State
from moelab.cache.residency import Request, Step
from moelab.offloading.load_queue import HOLDS, KINDS, USES, Load, LoadQueue, Piece, read_name
from moelab.simulation.costs import Machine

DISK = -1
HOST = -2
GPU = -3


class SimulatedMachine:
    """Disk, workers and compute with a clock.

    Workers take tensors or shards of them, as the engine's do; here all are of equal size. Compute runs the experts
    that are FULL in ascending order, or in one go where `Delays.together` says so, then the others
    as they are loaded. Time passes in `run` and `spend` only, and what is under way goes on from
    layer to layer. An expert that compute waits for comes `Machine.handover` later. A GPU that runs a
    token `alone` computes a layer's experts in one go when all are there.

    slots : of each kind.
    resident : (key, state) of what is in memory.
    ahead : how many experts may be prefetched.
    source : where experts come from, "disk" or "link".
    """

    def __init__(
        self,
        machine: Machine,
        slots: Mapping[str, int],
        resident: Iterable[tuple[ExpertKey, State]] = (),
        ahead: int = 0,
        start: float = 0.0,
        source: str = "disk",
    ) -> None:
        self.machine = machine
        self._source = source
        self.delays = machine.delays
        number = {kind: count() for kind in KINDS}
        tensors = range(self.delays.N if self.delays.decode else 1)
        self.queue = LoadQueue(
            slots,
            ahead,
            held={
                key: {kind: next(number[kind]) for kind in HOLDS[state]}
                for key, state in resident
                if state is not State.MISSED
            },
            tensors=lambda key: tensors,
            shards=lambda load, tensor: self.delays.shards,
            workers=machine.workers,
        )
        self._part = 1 / len(tensors)
        #: seconds of an operation on one tensor
        self._seconds = {kind: getattr(self.delays, kind) * self._part for kind in USES}
        self.now = start
        self.events: list[Event] = []
        self._running: list[tuple[float, int, Callable[[], None]]] = []  # heap of end, who, then
        self._disk_free = self._compute_free = True
        self._idle = list(range(machine.workers))
        self._computed_until = start
        self._layer, self._left = -1, 0  # _left: for compute to do
        self._requests: dict[ExpertKey, Request] = {}
        self._ready: deque[list[ExpertKey]] = deque()  # computed in one go
        self.alone = False
        self._lacking = 0  # experts of the step that are not there
        self._sent: set[Load] = set()  # whose signs and mantissas have been given to the link
        self._link_until = self._joined_until = start
        self._joins = count(GPU, -1)
        # what is to be copied while nothing else is, and what is or was
        self._coming: list[ExpertKey] = []
        self._come: list[ExpertKey] = []

    def timeline(self) -> list[Event]:
        """All events so far, also those under way, in order of their start."""
        return sorted(self.events, key=lambda event: event.start)

    def spend(self, layer: int, seconds: float) -> None:
        """Compute does something else than experts; disk and workers go on with what is
        prefetched."""
        if seconds > 0:
            self._left = 1
            self._compute(Event("compute", "other", layer, -1, self.now, self.now + seconds))
            self.run()

    def begin(self, step: Step) -> None:
        """A layer's step comes: its experts that are FULL can be computed, and those that are not
        computed here."""
        self._layer, self._left = step.layer, len(step.requests) + len(step.away)
        (base, each), start = self.machine.far, self.now + self.machine.trip
        for request in step.away:
            end = start + base + each * request.tokens
            aside = Event("host", "expert", *request.key, start, end)
            self._begin(HOST, aside, lambda: self.loaded(None))
            start = end
        self._requests = {request.key: request for request in step.requests}
        there = [request.key for request in step.requests if request.state is State.FULL]
        self._lacking = len(step.requests) - len(there)
        if not (self.alone and self._lacking):
            at_once = there and (self.alone or self.delays.together)
            self._ready.extend([there] if at_once else [[key] for key in there])

    def load(self, step: Step) -> None:
        """Experts come that nothing is computed with yet."""
        self._left = len(step.loads)

    def loaded(self, key: ExpertKey | None) -> None:
        """One of them is there, or was computed elsewhere."""
        self._left -= 1

    def ready(self, key: ExpertKey) -> None:
        """An expert of the step is loaded."""
        self._lacking -= 1
        if not self.alone:
            self._ready.append([key])
        elif not self._lacking:
            self._ready.append([*self._requests])

    def run(self) -> None:
        """Go on until compute has nothing left to do."""
        while self._left:
            self._start()
            self.now = self._running[0][0]
            while self._running and self._running[0][0] == self.now:
                heappop(self._running)[2]()  # all that end together, before anything starts
        self._wait(self.now)  # for what compute is not needed for

    def beside(self, keys: Iterable[ExpertKey]) -> None:
        """Experts come to stay, as far as nothing else has to come."""
        self._coming = [*keys]
        self._come = [*keys]

    def settle(self) -> None:
        """Wait for them; those that a layer has not fetched to stay get slots now."""
        while self._coming or not self._disk_free:
            self._start()
            self.now = self._running[0][0]
            heappop(self._running)[2]()
        for key in self._come:
            if key not in self.queue.held:
                self.queue.keep(key, self.queue.free["full"][0])
        self._wait(self.now)

    def resize(self, evicted: Iterable[ExpertKey], slots: Mapping[str, int], ahead: int) -> None:
        """Between two forward passes, have other slots, as of `LoadQueue.resize`."""
        self.finish()
        for key in evicted:
            self.queue.leave(key)
        self.queue.resize(slots, ahead)

    def finish(self) -> None:
        """End what disk and workers are at, and begin nothing more."""
        while self._running:
            heappop(self._running)[2]()

    def _start(self) -> None:
        """Let everybody who is free take what can be done."""
        if self._disk_free and (found := self.queue.next_read()) is not None:
            self._read(*found)
        elif self._disk_free and self._coming:
            self._transfer(self._coming.pop(0), ("e", "sm"))
        while self._idle and (found := self.queue.next_decode()) is not None:
            self._decode(*found)
        if self._compute_free and self._ready:
            self._compute_experts(self._ready.popleft())

    def _read(self, load: Load, kinds: tuple[str, ...]) -> None:
        if "sm" not in load.reads:
            self._announce(load)

        def done(nbytes: int) -> None:
            if "sm" in kinds:
                self._announce(load)
            self.queue.read_done(load, kinds, nbytes)

        self._transfer(load.key, kinds, done)

    def _transfer(
        self,
        key: ExpertKey,
        kinds: tuple[str, ...],
        done: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        """Disk or link bring an expert's parts; `done` is told of how many bytes."""
        seconds, nbytes = self.delays.read(key, "e" in kinds, "sm" in kinds)
        self._disk_free = False

        def then() -> None:
            self._disk_free = True
            done(nbytes)

        end = self.now + seconds
        read = Event(self._source, read_name(kinds), *key, self.now, end, nbytes)
        self._begin(DISK, read, then)

    def _decode(self, load: Load, piece: Piece, operation: str) -> None:
        worker = heappop(self._idle)
        far = self.delays.send > 0
        parts = 1 if piece.shard is None else self.delays.shards
        seconds = self._seconds[operation]
        if far:  # which leaves recovery to the GPU
            seconds = self._seconds["decompress"] * (operation != "recover")

        def then() -> None:
            heappush(self._idle, worker)
            if far and operation != "recover":
                self._cross(load, self._part / parts)
            if far and operation != "decompress":
                self._join(load, piece, operation, parts)
            else:
                self.queue.decode_done(load, piece, operation)

        if operation != "decompress":
            self._announce(load)
        end = self.now + seconds / parts
        self._begin(worker, Event(f"worker {worker}", operation, *load.key, self.now, end), then)

    def _announce(self, load: Load) -> None:
        """Signs and mantissas that are there go over the link."""
        if self.delays.send and load not in self._sent:
            self._sent.add(load)
            self._cross(load, 1.0)

    def _cross(self, load: Load, share: float) -> None:
        """A share of one of the planes is given to the link."""
        start = max(self.now, self._link_until)
        self._link_until = start + share * self.delays.send / 2
        nbytes = max(1, round(share * self.delays.sm_bytes))
        self.events.append(Event("link", "send", *load.key, start, self._link_until, nbytes))

    def _join(self, load: Load, piece: Piece, operation: str, parts: int) -> None:
        """The GPU recovers what has crossed the link by then."""
        start = max(self.now, self._link_until, self._joined_until)
        self._joined_until = start + self._seconds["recover"] / parts
        joined = Event("gpu", "recover", *load.key, start, self._joined_until)
        self._begin(
            next(self._joins), joined, partial(self.queue.decode_done, load, piece, operation)
        )

    def _compute_experts(self, keys: list[ExpertKey]) -> None:
        start = self.now
        if start > self._computed_until:
            start += 0.0 if self.alone else self.machine.handover
            self._wait(start)
        only = keys[0].expert if len(keys) == 1 else -1
        end = start + self.delays.at_once([self._requests[key] for key in keys])
        self._compute(Event("compute", "expert", keys[0].layer, only, start, end), keys)

    def _wait(self, until: float) -> None:
        """Compute has had nothing to do since it computed."""
        if until > self._computed_until:
            waited = Event("compute", "wait", self._layer, -1, self._computed_until, until)
            self.events.append(waited)
            self._computed_until = until

    def _compute(self, event: Event, keys: Sequence[ExpertKey] = ()) -> None:
        self._compute_free = False

        def then() -> None:
            self._computed_until = self.now
            self._compute_free = True
            self._left -= max(len(keys), 1)
            requests = [self._requests[key] for key in keys]
            if leaving := [request for request in requests if request.keep is not State.FULL]:
                self.queue.computed(leaving)

        self._begin(self.machine.workers, event, then)

    def _begin(self, who: int, event: Event, then: Callable[[], None]) -> None:
        """`who` begins something, and `then` has done it; of those that end together the disk is
        first, compute last."""
        heappush(self._running, (event.end, who, then))
        self.events.append(event)
