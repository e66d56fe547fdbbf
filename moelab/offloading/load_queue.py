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
where experts that stay have taken what was left free, they give way to a demand. What was hot in
earlier sessions, and counts as there, is loaded behind all that, `WARMED` at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import count, islice
from typing import Any, NamedTuple

from moelab.base.registry import make
from moelab.base.specs import ExpertKey, State

KINDS = ("full", "e", "sm")
WARMED = 4  # loads at the same time that nobody waits for yet: a demand waits for no more
#: what of an expert is in memory → the slots that it holds
HOLDS = {
    State.FULL: ("full",),
    State.COMPRESSED: ("e", "sm"),
    State.SM: ("sm",),
    State.E: ("e",),
    State.MISSED: (),
}
#: a decode operation → the slots that it uses
USES = {"decompress": ("e",), "recover": ("sm",), "decode": ("e", "sm")}
#: what one read is of → the slots that it fills
FILLS = {"E": ("e",), "SM": ("sm",), "both": ("e", "sm")}
#: state → what is left to read of an expert
LACKS = {State.MISSED: "both", State.E: "SM", State.SM: "E"}


class Order(NamedTuple):
    """The order of one layer's operations, by expert id.

    io : what the disk reads, (expert, "E", "SM" or "both" in one request): what is read apart can be
        decompressed while the rest is read; one request is made and decoded in one go.
    decode : the experts, the most urgent first: they get slots and workers in this order.
    """

    io: list[tuple[int, str]]
    decode: list[int]


def given_order(requests: Iterable[Any]) -> Order:
    """Experts as they are given, each in one read."""
    missing = [request for request in requests if request.state is not State.FULL]
    io = [(of.key.expert, LACKS[of.state]) for of in missing if of.state in LACKS]
    return Order(io, [request.key.expert for request in missing])


def plain_order(requests: Iterable[Any]) -> Order:
    """The experts with the most tokens first, as they compute longest."""
    return given_order(sorted(requests, key=lambda r: (-r.tokens, r.key.expert)))


def order_of(scheduler: Any, delays: Any, workers: int) -> Callable[[Any], Order]:
    """A scheduler, by its name or (requests, delays, workers) → `Order`, as it is called with
    requests alone. None is `plain_order`, as is the default where no delays are known."""
    if scheduler is None or scheduler == "default" and delays is None:
        return plain_order
    order = make("scheduler", scheduler) if isinstance(scheduler, str) else scheduler
    return lambda requests: order(requests, delays, workers)


def read_name(kinds: tuple[str, ...]) -> str:
    """What the timeline calls a read."""
    return "read " + kinds[0].upper() if kinds in (("e",), ("sm",)) else "read"


class Piece(NamedTuple):
    """What one worker decodes: a tensor, or one shard of it."""

    tensor: Any
    shard: int | None = None


Phase = Enum("Phase", "WAITING LOADING LOADED DROPPED")


@dataclass
class PrefetchCounts:
    """What became of prefetched experts: exact counts.

    begun : experts that got slots.
    used : of those, experts that their layer then wanted.
    wasted : bytes of experts that were not wanted.
    """

    begun: int = 0
    used: int = 0
    wasted: int = 0

    def reset(self) -> None:
        self.begun = self.used = self.wasted = 0


@dataclass(eq=False, slots=True)
class Load:
    """An expert in flight.

    keep : the state in which it will stay; None while it is prefetched.
    slots : kind → slot that it holds.
    lacks : kinds that it did not hold at first.
    reads : kinds still to read.
    todo : piece → what is left: "decode", "recover", or "decompressing" while that is under way.
    busy : operations under way.
    nbytes : bytes read so far.
    warm : whether it counts as there already.
    """

    key: ExpertKey
    keep: State | None
    slots: dict[str, int]
    lacks: list[str]
    reads: set[str]
    todo: dict[Piece, str]
    phase: Phase = Phase.WAITING
    busy: int = 0
    nbytes: int = 0
    warm: bool = False


class LoadQueue:
    """All loads in flight, who holds which slot, and what disk and workers shall do next.

    slots : how many there are of each kind: those that are held, and of others the first.
    ahead : prefetched experts that may hold slots at the same time.
    tensors : of an expert, which are decoded one by one.
    shards : of a tensor of a load that can be decoded apart, and decompressed before its SM-chunk is
        there; 0 of one that cannot.
    workers : that decode: where fewer tensors wait for them, these are decoded shard by shard.
    held : slots by kind of the experts that are in memory already.
    counts : of what is prefetched.
    in_place : whether experts are read straight into their "full" slot, as they are in memory.
    moved : told when an expert has come to stay in a "full" slot (True), and when it leaves one.

    demanded : what the running layer needs, the most urgent first, until it needs nothing more of it.
    prefetched : what a layer to come will probably need, the most urgent first.
    late : what counts as there and is not: its load, if that has begun, as of the first few.
    admitted : how many loads have got their slots so far: when it grows, there may be something new
        to do.
    """

    def __init__(
        self,
        slots: Mapping[str, int],
        ahead: int,
        tensors: Callable[[ExpertKey], Iterable[Any]],
        shards: Callable[[Load, Any], int],
        workers: int,
        *,
        held: dict[ExpertKey, dict[str, int]] | None = None,
        counts: PrefetchCounts | None = None,
        in_place: bool = False,
        moved: Callable[[ExpertKey, int, bool], object] = lambda key, slot, stays: None,
    ) -> None:
        self.held, self.counts = held or {}, counts or PrefetchCounts()
        self._kinds = KINDS
        self._fills = FILLS
        self._tensors = tensors
        self._shards = shards
        self._workers = workers
        self._moved = moved
        if in_place:
            self._kinds, self._fills = ("full",), dict.fromkeys(FILLS, ("full",))
            self._tensors = lambda key: ()
        self.free: dict[str, list[int]] = {}
        self.resize(slots, ahead)
        self.demanded: dict[ExpertKey, Load] = {}
        self.prefetched: dict[ExpertKey, Load] = {}
        self.late: dict[ExpertKey, Load | None] = {}
        self.admitted = self._ahead = 0  # _ahead: prefetched loads that hold slots
        #: reads not yet begun, the most urgent first
        self._reads: list[tuple[Load, tuple[str, ...]]] = []
        self._reading_ahead: Load | None = None  # the prefetched load that is being read
        self._ready: Callable[[Any], object] | None = None

    def resize(self, slots: Mapping[str, int], ahead: int) -> None:
        """Between two forward passes, when nothing runs, have other numbers of slots and of experts
        that may be prefetched."""
        self.ahead = ahead
        for kind in KINDS:
            taken = {of[kind] for of in self.held.values() if kind in of}
            others = (i for i in count() if i not in taken)
            self.free[kind] = [*islice(others, slots[kind] - len(taken))]

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
        ready : called with each expert that can be computed, or with the error that ends the layer.
        order : of the requests that are left to load; ValueError if it is of other experts."""
        self._ready = ready
        wanted = {request.key: request for request in requests}
        for key in [key for key in wanted if self.late.get(key)]:
            load = self.demanded[key] = self.late.pop(key)
            load.keep = wanted.pop(key).keep
        for load in [load for load in self.prefetched.values() if load.key.layer == layer]:
            if load.key in wanted and load.phase is not Phase.WAITING:
                self._adopt(load, wanted.pop(load.key).keep)
            else:
                self._drop(load)
        for key in evicted:
            self.leave(key)
            if key in self.prefetched:  # which has counted on what has just been released
                self._drop(self.prefetched[key])
        if left := [*wanted.values()]:
            loads = [self._stay(of.key, of.keep) for of in left]
            for key in wanted:
                self.late.pop(key, None)
            self._line_up(self.demanded, loads, order(left))
        reads = (read for read in self._reads if read[0].phase is not Phase.DROPPED)
        # what is demanded first
        self._reads = sorted(reads, key=lambda of: of[0].keep is None or of[0].key in self.late)
        self._admit()

    def keep(self, key: ExpertKey, slot: int) -> None:
        """An expert is whole in a slot that was free, without having been loaded from here."""
        self.free["full"].remove(slot)
        self.held[key] = {"full": slot}
        self._moved(key, slot, True)

    def leave(self, key: ExpertKey) -> None:
        """An expert leaves memory."""
        if key not in self.late:
            self._leaves(key)
            self._release(self.held.pop(key), KINDS)
        elif load := self.late.pop(key):
            del self.held[key]
            load.phase = Phase.DROPPED
            self._free_dropped(load)

    def warm(self, keys: Iterable[ExpertKey], ready: Callable[[Any], object]) -> None:
        """Before the first step: load experts that count as there, the first of them first. `ready` is
        called with an error."""
        self._ready, self.late = ready, dict.fromkeys(keys)
        self._admit()

    def prefetch(self, requests: Iterable[Any]) -> None:
        """Load experts for a layer to come, none of them FULL, as they are given, behind everything
        that the running layer needs."""
        wanted = [request for request in requests if request.key not in self.prefetched]
        loads = [self._load(of.key, None, dict(self.held.get(of.key, ()))) for of in wanted]
        self._line_up(self.prefetched, loads, given_order(wanted))
        self._admit()

    def drop_prefetched(self) -> None:
        """Drop all prefetched loads: the forward pass that wanted them is over."""
        for load in list(self.prefetched.values()):
            self._drop(load)

    def computed(self, requests: Iterable[Any]) -> None:
        """Release the decoded tensors of experts that have been computed and shall not stay
        FULL."""
        for request in requests:
            slots = self.held[request.key]
            self.demanded.pop(request.key, None)
            self._leaves(request.key)
            self._release(slots, ("full",))
            if not slots:
                del self.held[request.key]
        self._admit()

    def next_read(
        self, wanted: Callable[[ExpertKey], bool] = lambda key: True
    ) -> tuple[Load, tuple[str, ...]] | None:
        """The first read, of experts that are `wanted`, whose load has its slots: (load, kinds of
        slots to fill). `read_done` must follow.

        One prefetch at most is being read, so that what is demanded next finds the disk free."""
        for i, (load, kinds) in enumerate(self._reads):
            if load.keep is None and self._reading_ahead:
                return None
            if load.phase is Phase.LOADING and wanted(load.key):
                del self._reads[i]
                load.busy += 1
                if load.keep is None:
                    self._reading_ahead = load
                return load, kinds
        return None

    @property
    def readable(self) -> int:
        """Reads that can begin."""
        return sum(load.phase is Phase.LOADING for load, _ in self._reads)

    def next_decode(self) -> tuple[Load, Piece, str] | None:
        """The most urgent (load, piece, operation of `USES`) that can begin. `decode_done` must
        follow."""
        warming = filter(None, islice(self.late.values(), WARMED))
        loads = (*self.demanded.values(), *self.prefetched.values(), *warming)
        ready = ((load, piece) for load in loads for piece in self._decodable(load))
        load, piece = next(ready, (None, None))
        if not load:
            return None
        if piece.shard is None and load.todo[piece] == "decode":
            piece = self._split(load, piece, ready)
        stage = load.todo.pop(piece)
        if "sm" in load.reads:
            load.todo[piece] = "decompressing"
            stage = "decompress"
        load.busy += 1
        return load, piece, stage

    def _split(self, load: Load, piece: Piece, ready: Iterator[tuple[Load, Piece]]) -> Piece:
        """A tensor or, where fewer than one for each worker are left to decode now, the first of its
        shards, which take its place."""
        shards = self._shards(load, piece.tensor)
        others = (1 for of, one in ready if one.shard is None and of.todo[one] == "decode")
        if shards < 2 or sum(islice(others, self._workers)) >= self._workers - 1:
            return piece
        del load.todo[piece]
        parts = [Piece(piece.tensor, shard) for shard in range(shards)]
        load.todo |= dict.fromkeys(parts, "decode")
        return parts[0]

    def _decodable(self, load: Load) -> Iterator[Piece]:
        """The pieces of a load of which a worker can do something now."""
        if load.phase is Phase.LOADING and "e" not in load.reads:
            early = "sm" in load.reads
            for piece, stage in load.todo.items():
                able = stage == "decode" and self._shards(load, piece.tensor) if early else True
                if stage != "decompressing" and able:
                    yield piece

    def read_done(
        self, load: Load, kinds: Iterable[str], nbytes: int, error: BaseException | None = None
    ) -> None:
        """So many bytes were read."""
        load.nbytes += nbytes
        if load is self._reading_ahead:
            self._reading_ahead = None
        if load.phase is Phase.DROPPED:
            self.counts.wasted += nbytes
        if not error:
            load.reads.difference_update(kinds)
        self._done(load, error)

    def decode_done(
        self, load: Load, piece: Piece, operation: str, error: BaseException | None = None
    ) -> None:
        if operation == "decompress":
            load.todo[piece] = "recover"
        self._done(load, error)

    def _load(self, key: ExpertKey, keep: State | None, slots: dict[str, int]) -> Load:
        lacks = [kind for kind in self._kinds if kind not in slots]
        reads = set(lacks).intersection(self._fills["both"])
        todo = dict.fromkeys(map(Piece, self._tensors(key)), "decode")
        return Load(key, keep, slots, lacks, reads, todo)

    def _stay(self, key: ExpertKey, keep: State) -> Load:
        """A load of an expert that holds all that it gets."""
        load = self._load(key, keep, self.held.setdefault(key, {}))
        load.warm = key in self.late
        return load

    def _line_up(self, those: dict[ExpertKey, Load], given: list[Load], order: Order) -> None:
        """Put loads behind those that are there already, in their order."""
        loads = {load.key.expert: load for load in given}
        if set(order.decode) != loads.keys():
            raise ValueError(
                f"the order has experts {sorted(order.decode)}, but the requests leave {sorted(loads)} to "
                "decode; make the order from the same requests"
            )
        those |= {loads[expert].key: loads[expert] for expert in order.decode}
        reads = ((loads[expert], self._fills[part]) for expert, part in order.io)
        self._reads += dict.fromkeys(reads)  # in place, an expert's two parts are one

    def _admit(self) -> None:
        """Give waiting loads the slots that they lack, the most urgent first."""
        while waiting := self.waiting:
            self._admit_demanded(waiting)
            if len(waiting := self.waiting) < len(self.demanded):  # some will give slots back
                break
            holding = [one for one in self.prefetched.values() if one.phase is not Phase.WAITING]
            if not holding:
                break
            self._drop(holding[-1])
            if holding[-1].busy:  # `_done` admits again
                break
        if not waiting:
            self._admit_prefetched()
            self._admit_warm()

    @property
    def waiting(self) -> list[Load]:
        """What the running layer needs and has no slots for; may be asked without the lock."""
        demanded = [*self.demanded.values()]
        return [load for load in demanded if load.phase is Phase.WAITING]

    def _fits(self, kinds: Iterable[str], spare: int = 1) -> bool:
        """Whether more slots than `spare` are free of each kind."""
        return all(len(self.free[kind]) > spare for kind in kinds)

    def _admit_demanded(self, waiting: list[Load]) -> None:
        holders = sum(bool(load.slots) for load in waiting)
        for load in waiting:
            if self._fits(load.lacks, 0 if load.slots else holders > 0):
                holders -= bool(load.slots)
                self._give(load)

    def _admit_prefetched(self) -> None:
        for load in self.prefetched.values():
            if self._ahead == self.ahead:
                return
            if load.phase is Phase.WAITING and self._fits(load.lacks):
                self._give(load)
                self._ahead += 1

    def _admit_warm(self) -> None:
        for key, load in [*islice(self.late.items(), WARMED)]:
            if not load and self._fits(self._kinds):
                self.late[key] = load = self._stay(key, State.FULL)
                self._give(load)
                self._reads.append((load, self._fills["both"]))

    def _give(self, load: Load) -> None:
        # that which has been free longest: on a GPU what left another may still be copied back
        load.slots.update({kind: self.free[kind].pop(0) for kind in load.lacks})
        load.phase = Phase.LOADING
        self.admitted += 1

    def _leaves(self, key: ExpertKey) -> None:
        if (slot := self.held[key].get("full")) is not None:
            self._moved(key, slot, False)

    def _release(self, slots: dict[str, int], kinds: Iterable[str]) -> None:
        for kind in slots.keys() & set(kinds):
            self.free[kind].append(slots.pop(kind))

    def _adopt(self, load: Load, keep: State) -> None:
        """The running layer wants a prefetched expert."""
        self.counts.begun += 1
        self.counts.used += 1
        self._ahead -= 1
        del self.prefetched[load.key]
        self.held[load.key], self.demanded[load.key], load.keep = load.slots, load, keep
        if load.phase is Phase.LOADED:
            self._loaded(load)

    def _drop(self, load: Load) -> None:
        """Nobody wants a prefetched expert any more."""
        del self.prefetched[load.key]
        waited = load.phase is Phase.WAITING
        load.phase = Phase.DROPPED
        if not waited:
            self.counts.begun += 1
            self.counts.wasted += load.nbytes
            self._free_dropped(load)

    def _free_dropped(self, load: Load) -> None:
        if not load.busy:
            self._release(load.slots, load.lacks)  # what it held before is not its own
            self._ahead -= load.keep is None

    def _done(self, load: Load, error: BaseException | None) -> None:
        """An operation on it has ended."""
        load.busy -= 1
        if load.phase is Phase.DROPPED:
            self._free_dropped(load)
        elif error and load.keep is None:
            self._drop(load)  # its layer will load it itself
        elif error:
            self._ready(error)
        elif not (load.todo or load.reads or load.busy):
            load.phase = Phase.LOADED
            if load.keep is not None:
                self._loaded(load)
        else:
            return
        self._admit()

    def _loaded(self, load: Load) -> None:
        """Keep of a demanded expert's chunks what shall be kept, and let it be computed."""
        if load.keep is State.FULL:
            self.demanded.pop(load.key, None)
            self._moved(load.key, load.slots["full"], True)
        self._release(load.slots, [kind for kind in ("e", "sm") if kind not in HOLDS[load.keep]])
        if self.late.pop(load.key, None) is None:  # the layer waits for it
            self._ready(load.key)
