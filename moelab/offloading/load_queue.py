"""The life of an expert that is being loaded: one state machine, without threads, locks, files or
clock.

Source: ZipMoE §3.2, §3.3, §4; Speculating Experts Algorithm 1. The engine's threads call it under
one lock, the simulator from its event loop, so both follow the same rules.

    WAITING ─ slots ─▶ LOADING ─ last read and decode ─▶ LOADED: computed, or prefetched for later
                         └─ no longer wanted, or a prefetch that fails ─▶ DROPPED: gives its slots back when
                            nothing runs on it

Slots are numbers of three kinds: "e" and "sm" for the two compressed chunks of an expert, "full"
for its decoded tensors. Three rules exclude a deadlock. A load takes all the slots that it lacks at
once, so every load that has been admitted can finish. While an expert that already holds a chunk
waits, a missed one must leave a slot of each kind free. Prefetched loads always do, take at most
`ahead` slots of a kind, and only what no demand waits for: they need no memory of their own, and
where experts that stay have taken what was left free, they give way to a demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from moelab.specs import ExpertKey, State

KINDS = ("full", "e", "sm")
#: what of an expert is in memory → the slots that it holds
HOLDS = {
    State.FULL: ("full",),
    State.COMPRESSED: ("e", "sm"),
    State.SM: ("sm",),
    State.E: ("e",),
    State.MISSED: (),
}
#: a read of an order → the slots that it fills
FILLS = {"E": ("e",), "SM": ("sm",), "both": ("e", "sm")}
#: a decode operation → the slots that it uses
USES = {"decompress": ("e",), "recover": ("sm",), "decode": ("e", "sm")}


class Order(NamedTuple):
    """The order of one layer's operations, by expert id: what the disk reads, (expert, "E" or
    "SM"); in which order of priority workers take experts."""

    io: list[tuple[int, str]]
    decode: list[int]

    @property
    def reads(self) -> list[tuple[int, str]]:
        """`io` with neighbouring E and SM of an expert as one request, "both"."""
        merged: list[tuple[int, str]] = []
        for expert, part in self.io:
            if merged and merged[-1][0] == expert:
                merged[-1] = expert, "both"
            else:
                merged.append((expert, part))
        return merged


def given_order(requests: Iterable[Any]) -> Order:
    """Experts as they are given, of each first E, then SM."""
    missing = [request for request in requests if request.state is not State.FULL]
    io = [
        (request.key.expert, part)
        for request in missing
        for part in ("E", "SM")
        if not (request.state.has_e if part == "E" else request.state.has_sm)
    ]
    return Order(io, [request.key.expert for request in missing])


def plain_order(requests: Iterable[Any]) -> Order:
    """The experts with the most tokens first, as they compute longest; each in one read."""
    return given_order(sorted(requests, key=lambda r: (-r.tokens, r.key.expert)))


def read_name(kinds: tuple[str, ...]) -> str:
    """What the timeline calls a read."""
    return "read " + kinds[0].upper() if kinds in (("e",), ("sm",)) else "read"


Phase = Enum("Phase", "WAITING LOADING LOADED DROPPED")


@dataclass
class PrefetchCounts:
    """What became of prefetched experts: exact counts.

    begun : experts that got slots.    used : of those, experts that their layer then wanted.
    early : of these, those that were loaded before their layer came.
    nbytes, wasted : bytes prefetched, and of those, bytes of experts that were not wanted.
    """

    begun: int = 0
    used: int = 0
    early: int = 0
    nbytes: int = 0
    wasted: int = 0

    def reset(self) -> None:
        self.begun = self.used = self.early = self.nbytes = self.wasted = 0


@dataclass(eq=False, slots=True)
class Load:
    """An expert in flight.

    keep : the state in which it will stay; None while it is prefetched.
    slots : kind → slot that it holds.    lacks : kinds that it did not hold at first.    reads : kinds still to read.
    todo : tensor → what is left: "decode", "recover", or "decompressing" while that is under way.
    busy : operations under way.    nbytes : bytes read so far.
    """

    key: ExpertKey
    keep: State | None
    slots: dict[str, int]
    lacks: list[str]
    reads: set[str]
    todo: dict[str, str]
    batch: Batch
    phase: Phase = Phase.WAITING
    busy: int = 0
    nbytes: int = 0

    @property
    def decodable(self) -> bool:
        """Whether something of it could be decoded now, or at least decompressed."""
        return bool(self.phase is Phase.LOADING and self.todo and "e" not in self.reads)


@dataclass(eq=False, slots=True)
class Batch:
    """The loads of one layer: the running one, or one to come.

    ready : called with each expert that can be computed, or with the error that ends the layer.
    loads : not yet loaded, the most urgent first.    loaded : of a layer to come.
    waiting : for slots.    reads : not yet begun.
    leaving : loaded; they give slots back when they are computed.
    """

    ready: Callable[[Any], object] | None = None
    failed: bool = False
    loads: dict[ExpertKey, Load] = field(default_factory=dict)
    loaded: dict[ExpertKey, Load] = field(default_factory=dict)
    waiting: list[Load] = field(default_factory=list)
    leaving: set[ExpertKey] = field(default_factory=set)
    reads: list[tuple[Load, tuple[str, ...]]] = field(default_factory=list)

    def admitted(self) -> list[Load]:
        both = *self.loaded.values(), *self.loads.values()
        return [load for load in both if load.phase is not Phase.WAITING]

    def take_out(self, key: ExpertKey) -> Load | None:
        """A load that shall not go on; None if there is none of this expert."""
        load = self.loads.pop(key, None) or self.loaded.pop(key, None)
        self.reads = [read for read in self.reads if read[0] is not load]
        return load

    @property
    def stuck(self) -> bool:
        """Whether all its loads wait for slots, and nothing of it will give any back."""
        return len(self.waiting) == len(self.loads) > 0 and not self.leaving


class LoadQueue:
    """All loads in flight, who holds which slot, and what disk and workers shall do next.

    count : slots of each kind.
    ahead : prefetched experts that may hold slots at the same time.
    held : slots of the experts that are in memory already.
    tensors : of an expert, which are decoded one by one; by default it is decoded as one.
    separable : whether a tensor of a load can be decompressed before its SM-chunk is there.
    in_place : whether experts are read straight into their "full" slot, as they are in memory.
    admitted : how many loads have got their slots so far: when it grows, there may be something new
        to do.
    """

    def __init__(
        self,
        count: Mapping[str, int],
        ahead: int = 0,
        *,
        held: dict[ExpertKey, dict[str, int]] | None = None,
        counts: PrefetchCounts | None = None,
        tensors: Callable[[ExpertKey], Iterable[str]] = lambda key: ("",),
        separable: Callable[[Load, str], bool] = lambda load, tensor: True,
        in_place: bool = False,
    ) -> None:
        if ahead < 0:
            raise ValueError(f"ahead is {ahead}; it is a number of experts, 0 or more")
        self.ahead, self.held, self.counts = ahead, held or {}, counts or PrefetchCounts()
        self.tensors, self.separable, self.in_place = tensors, separable, in_place
        taken = {kind: {slots.get(kind) for slots in self.held.values()} for kind in KINDS}
        self.free = {
            kind: [i for i in range(count[kind]) if i not in taken[kind]] for kind in KINDS
        }
        self.running = Batch()
        self.prefetched: dict[int, Batch] = {}  # by layer
        self.admitted = self._ahead = 0  # _ahead: prefetched loads that hold slots
        self._reading_ahead: Load | None = None  # the prefetched load that is being read

    @property
    def busy(self) -> bool:
        """Whether anything is being loaded; may be asked without the lock."""
        return any(batch.loads for batch in self._batches())

    def begin(
        self,
        layer: int,
        requests: Iterable[Any],
        evicted: Iterable[ExpertKey],
        ready: Callable[[Any], object],
        order: Callable[[list[Any]], Order] = plain_order,
    ) -> None:
        """Begin a layer's step: free what is evicted, adopt what was prefetched and is wanted, drop
        what is not, and load the rest.

        requests : for experts that are not FULL: objects with `.key`, `.state` and `.keep`.
        ready : see `Batch`.
        order : of the requests that are left to load; ValueError if it is of other experts."""
        batch, wanted = Batch(ready), {request.key: request for request in requests}
        if (before := self.prefetched.pop(layer, None)) is not None:
            for load in before.admitted():  # for the others nothing has been done
                if load.key in wanted:
                    self._adopt(load, wanted.pop(load.key).keep, batch)
                else:
                    self._drop(load)
            batch.reads = [(load, kinds) for load, kinds in before.reads if load.batch is batch]
        for key in evicted:
            self._release(self.held.pop(key), KINDS)
            for other in self.prefetched.values():  # counted on what has just been released
                self._give_up(other, key)
        self.running = batch
        if left := list(wanted.values()):
            loads = [
                self._load(of.key, of.keep, self.held.setdefault(of.key, {}), batch) for of in left
            ]
            self._put(batch, loads, order(left))
        self._admit()

    def prefetch(self, layer: int, requests: Iterable[Any]) -> None:
        """Load experts for a layer to come, as they are given, behind everything that the running
        layer needs."""
        if layer not in self.prefetched:
            batch = self.prefetched[layer] = Batch()
            wanted = list(requests)
            loads = [
                self._load(of.key, None, dict(self.held.get(of.key, ())), batch) for of in wanted
            ]
            self._put(batch, loads, given_order(wanted))
            self._admit()

    def _give_up(self, batch: Batch, key: ExpertKey) -> None:
        """An expert that was to be prefetched has lost what it held."""
        if (load := batch.take_out(key)) is None:
            return
        if load.phase is Phase.WAITING:
            batch.waiting.remove(load)
        else:
            self._drop(load)

    def drop_prefetched(self) -> None:
        """Drop all prefetched loads: the forward pass that wanted them is over."""
        for layer in list(self.prefetched):
            for load in self.prefetched.pop(layer).admitted():
                self._drop(load)

    def computed(self, requests: Iterable[Any]) -> None:
        """Release the decoded tensors of experts that have been computed and shall not stay
        FULL."""
        for request in requests:
            slots = self.held[request.key]
            self.running.leaving.discard(request.key)
            self._release(slots, ("full",))
            if not slots:
                del self.held[request.key]
        self._admit()

    def next_read(self) -> tuple[Load, tuple[str, ...]] | None:
        """The first read whose load has its slots: (load, kinds of slots to fill). `read_done` must
        follow.

        One prefetch at most is being read, so that what is demanded next finds the disk free."""
        for batch in self._batches():
            if batch is not self.running and self._reading_ahead is not None:
                return None
            for i, (load, kinds) in enumerate(batch.reads):
                if load.phase is Phase.LOADING:
                    del batch.reads[i]
                    load.busy += 1
                    if load.keep is None:
                        self._reading_ahead = load
                    return load, kinds
        return None

    def next_decode(self) -> tuple[Load, str, str] | None:
        """The most urgent (load, tensor, operation of `USES`) that can begin. `decode_done` must
        follow."""
        for batch in self._batches():
            for load in batch.loads.values():
                if load.decodable and (found := self._operation(load)) is not None:
                    load.busy += 1
                    return load, *found
        return None

    def _operation(self, load: Load) -> tuple[str, str] | None:
        for tensor, stage in load.todo.items():
            if stage == "decompressing":
                continue
            if "sm" not in load.reads:
                del load.todo[tensor]
                return tensor, stage
            if stage == "decode" and self.separable(load, tensor):
                load.todo[tensor] = "decompressing"
                return tensor, "decompress"
        return None

    def read_done(
        self, load: Load, kinds: Iterable[str], nbytes: int, error: BaseException | None = None
    ) -> None:
        """So many bytes were read."""
        load.nbytes += nbytes
        if load is self._reading_ahead:
            self._reading_ahead = None
            self.counts.nbytes += nbytes
        if load.phase is Phase.DROPPED:
            self.counts.wasted += nbytes
        if error is None:
            load.reads.difference_update(kinds)
        self._done(load, error)

    def decode_done(
        self, load: Load, tensor: str, operation: str, error: BaseException | None = None
    ) -> None:
        if operation == "decompress":
            load.todo[tensor] = "recover"
        self._done(load, error)

    def _batches(self) -> list[Batch]:
        return [batch for batch in (self.running, *self.prefetched.values()) if not batch.failed]

    def _put(self, batch: Batch, given: list[Load], order: Order) -> None:
        """Line up loads in their order, behind those that are in the batch already."""
        loads = {load.key.expert: load for load in given}
        if set(order.decode) != loads.keys():
            raise ValueError(
                f"the order has experts {sorted(order.decode)}, but the requests leave {sorted(loads)} to "
                "decode; make the order from the same requests"
            )
        reads = [(expert, FILLS[part]) for expert, part in order.reads]
        if self.in_place:
            reads = [(expert, ("full",)) for expert in dict.fromkeys(expert for expert, _ in reads)]
        batch.reads += [(loads[expert], fills) for expert, fills in reads]
        urgent = dict.fromkeys([*(expert for expert, _ in reads), *order.decode])
        batch.waiting = [loads[expert] for expert in urgent]
        batch.loads |= {loads[expert].key: loads[expert] for expert in order.decode}

    def _load(
        self, key: ExpertKey, keep: State | None, slots: dict[str, int], batch: Batch
    ) -> Load:
        kinds = ("full",) if self.in_place else KINDS
        lacks = [kind for kind in kinds if kind not in slots]
        reads = set(lacks) if self.in_place else set(lacks) - {"full"}
        todo = {} if self.in_place else dict.fromkeys(self.tensors(key), "decode")
        return Load(key, keep, slots, lacks, reads, todo, batch)

    def _admit(self) -> None:
        """Give waiting loads the slots that they lack, the most urgent first."""
        self._admit_demanded()
        while self.running.stuck and (ahead := self._last_prefetched()) is not None:
            ahead.batch.take_out(ahead.key)
            self._drop(ahead)
            if ahead.busy:
                return  # `_done` admits again
            self._admit_demanded()
        if not self.running.waiting:
            self._admit_prefetched()

    def _admit_demanded(self) -> None:
        free, waiting = self.free, self.running.waiting
        holders = sum(bool(load.slots) for load in waiting)
        for load in list(waiting):
            if not free["full"]:
                break
            spare = 0 if load.slots else int(holders > 0)
            if all(len(free[kind]) > spare for kind in load.lacks):
                holders -= bool(load.slots)
                self._give(load)

    def _admit_prefetched(self) -> None:
        for load in [load for batch in self.prefetched.values() for load in batch.waiting]:
            if self._ahead == self.ahead:
                return
            if all(len(self.free[kind]) > 1 for kind in load.lacks):
                self._give(load)
                self._ahead += 1

    def _last_prefetched(self) -> Load | None:
        """Of the prefetched loads that hold slots, one of the layer that comes last."""
        ahead = [load for batch in self.prefetched.values() for load in batch.admitted()]
        return ahead[-1] if ahead else None

    def _give(self, load: Load) -> None:
        load.slots.update({kind: self.free[kind].pop() for kind in load.lacks})
        load.phase = Phase.LOADING
        load.batch.waiting.remove(load)
        self.admitted += 1

    def _release(self, slots: dict[str, int], kinds: Iterable[str]) -> None:
        for kind in slots.keys() & set(kinds):
            self.free[kind].append(slots.pop(kind))

    def _adopt(self, load: Load, keep: State, batch: Batch) -> None:
        """The running layer wants a prefetched expert."""
        self.counts.begun += 1
        self.counts.used += 1
        self.counts.early += load.phase is Phase.LOADED
        self._ahead -= 1
        self.held[load.key], load.keep, load.batch = load.slots, keep, batch
        batch.loads[load.key] = load
        if load.phase is Phase.LOADED:
            self._loaded(load)

    def _drop(self, load: Load) -> None:
        """Nobody wants a prefetched expert that has its slots."""
        self.counts.begun += 1
        self.counts.wasted += load.nbytes
        load.phase = Phase.DROPPED
        self._free_dropped(load)

    def _free_dropped(self, load: Load) -> None:
        if not load.busy:
            self._release(load.slots, load.lacks)  # what it held before is not its own
            self._ahead -= 1

    def _done(self, load: Load, error: BaseException | None) -> None:
        load.busy -= 1
        if load.phase is Phase.DROPPED:
            self._free_dropped(load)
            self._admit()
        elif error is not None and load.keep is None:  # its layer will load it itself
            load.batch.take_out(load.key)
            self._drop(load)
            self._admit()
        elif error is not None:
            load.batch.failed = True
            load.batch.ready(error)
        elif not (load.batch.failed or load.todo or load.reads or load.busy):
            load.phase = Phase.LOADED
            self._loaded(load)
            self._admit()

    def _loaded(self, load: Load) -> None:
        """Keep of its chunks what shall be kept, and let it be computed; one that is prefetched
        waits for its layer."""
        del load.batch.loads[load.key]
        if load.keep is None:
            load.batch.loaded[load.key] = load
            return
        if load.keep is not State.FULL:
            load.batch.leaving.add(load.key)
        self._release(load.slots, [kind for kind in ("e", "sm") if kind not in HOLDS[load.keep]])
        load.batch.ready(load.key)
