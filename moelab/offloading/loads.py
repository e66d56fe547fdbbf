"""Experts on their way to being whole, and which of their parts a thread can take up next.

Source: ZipMoE §3.2 (what a state leaves to do), §3.3 (an order of reads and of decoding). A *load* is one expert: the
slots that it has, the chunks that are in them, and what is left to read and to decode. A *job* is the loads of one
layer: of the layer that is being computed, or of one that is still to come, whose experts have been predicted.

Left out: threads, locks and memory (see the pipeline).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from queue import SimpleQueue

from moelab.offloading.slots import KINDS
from moelab.schedule.affinity import Order
from moelab.specs import ExpertKey, State
from moelab.store.reader import Chunks
from moelab.store.stages import separable

#: what the scheduler calls a read → the kinds of slots that it fills
PARTS = {"E": ("e",), "SM": ("sm",), "both": ("e", "sm")}
#: what a worker does → the chunks that it uses
USES = {"check": ("full",), "decompress": ("e",), "recover": ("sm",), "decode": ("e", "sm")}


class Held:
    """The slots that an expert has, what is in those of its chunks, and which of that has not been checked yet."""

    __slots__ = ("slots", "chunks", "unchecked")

    def __init__(self, other: Held | None = None) -> None:
        self.slots: dict[str, int] = dict(other.slots) if other else {}             # kind → slot
        self.chunks: dict[str, Chunks] = dict(other.chunks) if other else {}        # kind → what has been read
        self.unchecked: set[tuple[str, str]] = set(other.unchecked) if other else set()         # (kind, tensor)


class Load:
    """An expert on its way to being whole.

    keep : in which state it will stay; None while it has only been predicted.
    lacks : kinds of slots that it had not when it was begun.      reads : kinds that are still to be read.
    todo : tensor → "check" (read in place), "both" stages, "decompressing", or "recover".
    admitted : whether it has its memory.    busy : threads that are at it.    dropped : whether nobody wants it any
    more.    nbytes : what it has read.
    """

    __slots__ = ("key", "keep", "held", "lacks", "reads", "todo", "admitted", "busy", "dropped", "error", "job",
                 "nbytes")

    def __init__(self, key: ExpertKey, held: Held, keep: State | None, tensors: Iterable[str], in_place: bool,
                 verify: bool) -> None:
        kinds = ("full",) if in_place else KINDS
        self.key, self.held, self.keep = key, held, keep
        self.admitted, self.dropped, self.busy, self.error, self.job, self.nbytes = False, False, 0, None, None, 0
        self.lacks = [kind for kind in kinds if kind not in held.slots]
        self.reads = {kind for kind in (kinds if in_place else ("e", "sm")) if kind not in held.chunks}
        self.todo = dict.fromkeys(tensors, "check" if in_place else "both") if verify or not in_place else {}

    @property
    def whole(self) -> bool:
        return self.admitted and not (self.todo or self.reads or self.busy)

    def next_task(self, early: bool) -> tuple[str, str] | None:
        """(tensor, what to do with it) if there is something that can be done; taken off the list."""
        if not self.admitted or "e" in self.reads or "full" in self.reads:
            return None
        for name, stage in self.todo.items():
            if stage != "decompressing" and "sm" not in self.reads:
                del self.todo[name]
                return name, "decode" if stage == "both" else stage
            if early and stage == "both" and "sm" in self.reads and separable(self.held.chunks["e"], name):
                self.todo[name] = "decompressing"
                return name, "decompress"
        return None


@dataclass
class Fetched:
    """What became of the experts fetched ahead: exact counts.

    begun : experts that memory was given to.    used : of those, experts that were then wanted.
    early : of these, those that were whole before they were wanted.
    nbytes, wasted : bytes read ahead, and of those, bytes of experts that were not wanted.
    """

    begun: int = 0
    used: int = 0
    early: int = 0
    nbytes: int = 0
    wasted: int = 0

    def reset(self) -> None:
        self.begun = self.used = self.early = self.nbytes = self.wasted = 0


class Job:
    """The loads of one layer; `ready` fills up with experts that can be computed, an error, or None: "look again".

    early : whether exponents may be decompressed before the rest is there.
    done : loads that are whole of a layer that has not come yet.    adopted : loads that were begun before it came.
    """

    def __init__(self, layer: int, early: bool) -> None:
        self.layer, self.early, self.stopped = layer, early, False
        self.waiting: list[Load] = []                           # for memory
        self.reads: list[tuple[Load, tuple[str, ...]]] = []
        self.loads: dict[ExpertKey, Load] = {}                  # not yet whole, the most urgent first
        self.done: dict[ExpertKey, Load] = {}
        self.adopted: set[ExpertKey] = set()
        self.ready: SimpleQueue[ExpertKey | BaseException | None] = SimpleQueue()

    def put(self, loads: Iterable[Load], plan: Order, in_place: bool) -> None:
        """Line up loads that nothing has been done about, in the order of the plan, behind those that are there."""
        by_expert = {load.key.expert: load for load in loads}
        reads = ([(expert, ("full",)) for expert in dict.fromkeys(expert for expert, _ in plan.io)] if in_place else
                 [(expert, PARTS[part]) for expert, part in plan.reads])
        self.reads += [(by_expert[expert], kinds) for expert, kinds in reads]
        self.waiting = [by_expert[expert] for expert in dict.fromkeys([*(expert for expert, _ in reads), *plan.decode])]
        for expert in plan.decode:
            self.loads[by_expert[expert].key] = by_expert[expert]
            by_expert[expert].job = self

    def remove(self, key: ExpertKey) -> Load | None:
        """Take a load off all lists, if it is there."""
        load = self.loads.pop(key, None) or self.done.pop(key, None)
        self.waiting = [other for other in self.waiting if other is not load]
        self.reads = [(other, kinds) for other, kinds in self.reads if other is not load]
        return load

    def fail(self, error: BaseException) -> None:
        """End this layer with an error."""
        self.stopped = True
        self.ready.put(error)

    def next_read(self) -> tuple[Load, tuple[str, ...]] | None:
        """The first read whose expert has its memory; taken off the list."""
        for i, (load, kinds) in enumerate(self.reads):
            if load.admitted:
                del self.reads[i]
                return load, kinds
        return None

    def next_task(self) -> tuple[Load, tuple[str, str]] | None:
        """The most urgent tensor that can be worked on, and how; taken off the list."""
        for load in self.loads.values():
            if (task := load.next_task(self.early)) is not None:
                return load, task
        return None
