"""The prefetch gate: a predicted expert is read ahead only where that should gain more than it costs.

Source: Speculating Experts §5.1, eq. (1), for what there is to gain: the time for which the disk would rest before a
layer. Say that this time is memoryless, with mean a. Then whatever read begins in it, and however many came before, it
hides a seconds for each time that the layer comes while it is under way. A right one, with probability p, gains them,
times x: the part of a demanded read that a layer waits for, as it computes what is resident first. A wrong one delays a
demand, which comes with probability q, by half a piece of τ seconds, as demands overtake prefetches between two pieces.
Both slow computing down by c seconds. So an expert, before which n are prefetched, pays if

    (p · x · a  −  (1 − p) · q · τ/2) · (exp(−n · read/a) − exp(−(n + 1) · read/a))  >  c

p is a mean by the expert's rank in the prediction, over those that were not resident. All means are exponential, and
apart for prefill and decode. A predictor is asked if what its predictions gain exceeds its own time, else now and
then. Left out: slots and evictions, since prefetched experts have slots of their own and evict nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from moelab.cache.residency import Request, Residency, Step
from moelab.schedule.load_queue import PIECE, Reads
from moelab.specs import ExpertKey, State

MEMORY = 20         # values that a mean remembers
LONG = 3            # means: what takes longer than so many was disturbed, and counts as so long
FIRST = 0.5         # the precision assumed before any was seen
TRIES = 4           # predictions of a layer that are asked for in a row when it is tried
RARELY = 64         # times `TRIES` predictions are left out between two trials, at most
CONTROL = 32        # every so many predictions, at first `TRIES`, one is not followed: how long does it take without?


class Mean:
    """Plain of the first values, exponential from `MEMORY` on."""

    def __init__(self, value: float = 0.0, count: int = 0) -> None:
        self.value, self.count = value, count

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, MEMORY)
        self.value += (value - self.value) / self.count

    def took(self, seconds: float) -> None:
        self.add(min(seconds, LONG * self.value) if self.value else seconds)


class Layer:
    """What is known of predictions for a layer: means of the disk's rest before it, of whether it demands reads, of
    what a prediction gains and how long it takes, in seconds, and of the precision by rank, which begins as that of all
    layers together: a deep model would else have to learn each layer's from nothing."""

    def __init__(self, precision: dict[int, Mean]) -> None:
        self.idle, self.gain, self.asking, self.demands = Mean(), Mean(), Mean(), Mean(1.0, 1)
        self.all, self.precision = precision, {}
        self.tries, self.skipped, self.interval = 0, 0, 1

    def precise(self, rank: int) -> Mean:
        return self.precision.setdefault(rank, Mean(self.all[rank].value, 1))

    @property
    def pays(self) -> bool:
        return self.gain.value >= self.asking.value

    def wants(self) -> bool:
        """Whether to ask for a prediction: if it pays, or `TRIES` times in a row after ever longer intervals."""
        if self.pays:
            self.interval = max(1, self.interval // 2)
            return True
        if not self.tries:
            self.skipped += 1
            if self.skipped < TRIES * self.interval:
                return False
            self.tries, self.skipped, self.interval = TRIES, 0, min(2 * self.interval, RARELY)
            for mean in (self.gain, self.asking, *self.precision.values()):     # long ago: it counts little
                mean.count = min(mean.count, 2 * TRIES)
        self.tries -= 1
        return True


class Phase:
    """Prefill or decode: its layers, the precision by rank in all of them, seconds of a read, the part of one that is
    waited for, prefetches at a time, and how long the disk rests, in means of the layer, while it is not used and while
    it is."""

    def __init__(self) -> None:
        self.precision: defaultdict[int, Mean] = defaultdict(lambda: Mean(FIRST, 1))
        self.layers: defaultdict[int, Layer] = defaultdict(lambda: Layer(self.precision))
        self.read, self.exposed, self.together, self.quiet, self.busy = Mean(), Mean(), Mean(), Mean(), Mean()


class Announced(NamedTuple):
    """Experts that were predicted for a layer and not resident: expert → rank; whether those that should pay are being
    prefetched, None if there are none."""

    of: Layer
    ranks: dict[int, int]
    followed: bool | None


class PrefetchGate:
    """One for an engine, or for a simulation of it; it is told what happens, and knows no clock."""

    def __init__(self) -> None:
        self.announced: dict[int, Announced] = {}
        self._phases: defaultdict[str, Phase] = defaultdict(Phase)
        self._reads, self._bytes, self._windows = Reads(), Mean(), 0
        self.begin("decode")

    def begin(self, phase: str) -> None:
        """A forward pass of this phase begins."""
        self.now = self._phases[phase]

    def wants(self, layer: int) -> bool:
        """Whether a predictor shall be asked for this layer's experts."""
        return self.now.layers[layer].wants()

    def asked(self, layer: int, seconds: float) -> None:
        """A predictor took so long."""
        self.now.layers[layer].asking.took(seconds)

    def rested(self, layer: int, seconds: float) -> None:
        """The layer comes; so long ago the disk had read what was demanded before, but for the predictor's time."""
        idle = self.now.layers[layer].idle
        announced = self.announced.get(layer)
        # Predictions that should not pay are in neither mean: they are mostly of layers that seem to rest too little.
        if idle.value and announced is not None and announced.followed is not None:
            (self.now.busy if announced.followed else self.now.quiet).add(min(seconds / idle.value, LONG))
        idle.took(seconds)

    def waited(self, reads: int, seconds: float) -> None:
        """A layer of which nothing had been prefetched waited so long for so many experts."""
        if reads and self.now.read.value:
            self.now.exposed.add(seconds / (reads * self.now.read.value))

    def worth(self, of: Layer, rank: int, n: int) -> float:
        """Seconds that an expert of this rank gains if n are prefetched before it, but for `slower`."""
        p = of.precise(rank).value
        exposed = self.now.exposed.value if self.now.exposed.count else 1.0
        piece = self.now.read.value * min(1.0, PIECE / self._bytes.value if self._bytes.value else 1.0)
        each = p * exposed * of.idle.value - (1 - p) * of.demands.value * piece / 2
        return each * (self._rest(of, n) - self._rest(of, n + 1))

    def slower(self, of: Layer) -> float:
        """Seconds by which a prefetch slows computing down: what the disk rests longer while it is used."""
        quiet, busy = self.now.quiet, self.now.busy
        if min(quiet.count, busy.count) < TRIES:
            return 0.0
        return max(0.0, busy.value - quiet.value) * of.idle.value / self.now.together.value

    def requests(self, residency: Residency, layer: int, experts: Iterable[int], reads: Reads) -> list[Request]:
        """What to prefetch of the experts predicted for a layer, the likeliest first: of those that are not FULL, the
        ones that should pay. reads : what the disk has read so far."""
        self._note(reads)
        if not 0 <= layer < residency.L:
            return []
        of, gain, found, ranks = self.now.layers[layer], 0.0, [], {}
        slower = self.slower(of)
        for rank, expert in enumerate(dict.fromkeys(experts)):
            key = ExpertKey(layer, expert)
            if not 0 <= expert < residency.E or (state := residency.state(key)) is State.FULL:
                continue
            ranks[expert] = rank
            worth = self.worth(of, rank, len(found))
            if not of.idle.count or worth >= (slower if of.pays else 0.0):              # on trial, to measure `slower`
                gain += worth - slower
                found.append(Request(key, 1, state, State.MISSED))
        of.gain.add(gain)
        followed = True if found else None
        if found:
            self._windows += 1
            if self._windows % (CONTROL if self.now.quiet.count >= TRIES else TRIES) == 0:
                found, followed = [], False
            else:
                self.now.together.add(len(found))
        if ranks:
            self.announced[layer] = Announced(of, ranks, followed)
        return found

    def _rest(self, of: Layer, n: int) -> float:
        """The chance that the disk still rests after n reads."""
        return math.exp(-n * self.now.read.value / of.idle.value) if of.idle.value else float(not n)

    def _note(self, reads: Reads) -> None:
        if (n := reads.count - self._reads.count) > 0:
            self.now.read.took((reads.seconds - self._reads.seconds) / n)
            self._bytes.add((reads.nbytes - self._reads.nbytes) / n)
        self._reads = reads

    def came(self, step: Step) -> None:
        """A layer came and wants these experts: learn from what was predicted."""
        self.now.layers[step.layer].demands.add(any(request.state is not State.FULL for request in step.requests))
        if (announced := self.announced.pop(step.layer, None)) is not None:
            wanted = {request.key.expert for request in step.requests}
            for expert, rank in announced.ranks.items():
                for mean in (announced.of.precise(rank), announced.of.all[rank]):
                    mean.add(expert in wanted)
