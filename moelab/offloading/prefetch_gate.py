"""The prefetch gate: experts are read ahead as long as tokens take less time with it than without.

What prefetching costs depends on the machine: the predictor's time, memory and cores that reading shares with
computing, threads that are woken. So the whole is measured. In a trial, decoded tokens take turns with prefetching and
without; the others do what the trials so far have found best. How many experts a layer loads does not depend on
prefetching, so what a token takes longer for having more of them is taken off (regression; the mean of the middle half
is what counts, so disturbed tokens do not). The next trial comes after so many tokens that trials cost `COST`, sooner
as long as they do not agree.

Which of the predicted experts to read follows from Speculating Experts §5.1, eq. (1): what can be hidden is the time,
a seconds on average, for which the disk would rest before a layer. Say that it is memoryless. Then a read under way
when the layer comes has hidden a seconds if it was of a right expert, which has the probability p; a wrong one delays a
demand, if there is one (probability q), by half a piece of τ seconds, as demands overtake prefetches between pieces:

    read it if  p · a  >  (1 − p) · q · τ/2

p is a mean by the expert's rank in the prediction, over those that were not resident. Means are exponential, and apart
for prefill and decode. Left out: slots and evictions, since prefetched experts have slots of their own and evict
nothing; and whether some layers gain while others lose by the costs that only the whole shows.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, repeat
from statistics import median
from typing import NamedTuple

from moelab.cache.residency import Request, Residency, Step
from moelab.intervals import typical
from moelab.schedule.load_queue import PIECE, Reads
from moelab.specs import ExpertKey, State

MEMORY = 20         # values that a mean remembers
LONG = 3            # means: what takes longer than so many was disturbed, and counts as so long
FIRST = 0.5         # the precision assumed before any was seen
TRIAL = (True, False, False, True, True, False, False, True)        # with prefetching? balanced against any drift
TRIALS = 4          # trials that are remembered
COST = 0.005        # of all time, for tokens that a trial makes slower
AGAIN = 4           # trials' time until the next one, at most; twice as much for each, up to so many, that agreed
BEGIN = 0.005       # of a token's time, that prefetching must gain to begin; to end, it must lose


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
    """Means of a layer: seconds for which the disk rests before it, whether it demands reads, the precision by rank;
    the last begins as that of all layers together, as a deep model would else have to learn each layer's anew."""

    def __init__(self, of_all: defaultdict[int, Mean]) -> None:
        self.idle, self.demands = Mean(), Mean(1.0, 1)
        self.of_all, self.precision = of_all, {}

    def precise(self, rank: int) -> Mean:
        return self.precision.setdefault(rank, Mean(self.of_all[rank].value, 1))

    def learn(self, rank: int, right: bool) -> None:
        for mean in (self.precise(rank), self.of_all[rank]):
            mean.add(right)


class Phase:
    """Prefill or decode: its layers, and the precision by rank in all of them."""

    def __init__(self) -> None:
        self.precision: defaultdict[int, Mean] = defaultdict(lambda: Mean(FIRST, 1))
        self.layers: defaultdict[int, Layer] = defaultdict(lambda: Layer(self.precision))


class Arm(NamedTuple):
    """How a token is decoded: with prefetching or without, and whether to compare it."""

    prefetches: bool
    tried: bool


def gained(without: Sequence[tuple[int, float]], within: Sequence[tuple[int, float]]) -> float:
    """Share of a token's time that prefetching saves, from tokens as (loads, seconds). What one more load takes is the
    median over pairs of tokens of a side (Theil, Sen), which a disturbed token does not move."""
    slopes = [(s - t) / (n - m) for side in (without, within) for (n, s), (m, t) in combinations(side, 2) if n != m]
    each = median(slopes) if slopes else 0.0
    before, now = (typical(seconds - each * loads for loads, seconds in side) for side in (without, within))
    return (before - now) / (typical(seconds for _, seconds in without) or 1.0)


class PrefetchGate:
    """One for an engine, or for a simulation of it; it is told what happens, and knows no clock.

    trials : False prefetches in every token, as for a recorded run whose tokens took turns when it ran.
    """

    def __init__(self, trials: bool = True) -> None:
        self.announced: dict[int, tuple[Layer, dict[int, int]]] = {}        # layer → it, {expert not resident: rank}
        self._phases: defaultdict[str, Phase] = defaultdict(Phase)
        self._reads, self._read, self._bytes = Reads(), Mean(), Mean()
        self._tried = {arm: deque(maxlen=TRIALS * TRIAL.count(arm)) for arm in TRIAL}       # prefetches → its tokens
        self._schedule = self._arms() if trials else repeat(Arm(prefetches=True, tried=True))
        self._arm, self._then = next(self._schedule), next(self._schedule)                  # of this token, of the next
        self.begin("decode")

    def begin(self, phase: str) -> None:
        """A forward pass of this phase begins."""
        self.now, self._decoding, self._at = self._phases[phase], phase == "decode", -1
        self._asked, self._loads = False, 0

    def wants(self, layer: int) -> bool:
        """Whether a predictor shall be asked for this layer's experts."""
        arm, of = self._arm_of(layer), self.now.layers[layer]
        return arm.prefetches and (arm.tried or not of.precision or any(self.pays(of, rank) for rank in of.precision))

    def rested(self, layer: int, seconds: float) -> None:
        """The layer comes; so long ago the disk had read what was demanded before."""
        self.now.layers[layer].idle.took(seconds)

    def pays(self, of: Layer, rank: int) -> bool:
        """Whether to read an expert of this rank ahead."""
        p, piece = of.precise(rank).value, self._read.value * min(1.0, PIECE / max(self._bytes.value, 1.0))
        return not of.idle.count or p * of.idle.value > (1 - p) * of.demands.value * piece / 2

    def requests(self, residency: Residency, layer: int, experts: Iterable[int], reads: Reads) -> list[Request]:
        """What to prefetch of the experts predicted for a layer, the likeliest first: of those that are not FULL, the
        ones that should pay. reads : what the disk has read so far."""
        self._note(reads)
        if not 0 <= layer < residency.L:
            return []
        arm, of, found, ranks = self._arm_of(layer), self.now.layers[layer], [], {}
        for rank, expert in enumerate(dict.fromkeys(experts)):
            key = ExpertKey(layer, expert)
            if 0 <= expert < residency.E and (state := residency.state(key)) is not State.FULL:
                ranks[expert] = rank
                if arm.prefetches and self.pays(of, rank):
                    found.append(Request(key, 1, state, State.MISSED))
        if ranks:
            self.announced[layer] = of, ranks
        return found

    def came(self, step: Step) -> None:
        """A layer came and wants these experts: learn from what was predicted."""
        self._at, loads = step.layer, sum(request.state is not State.FULL for request in step.requests)
        self._loads += loads
        self.now.layers[step.layer].demands.add(loads > 0)
        if (announced := self.announced.pop(step.layer, None)) is not None:
            (of, ranks), wanted = announced, {request.key.expert for request in step.requests}
            for expert, rank in ranks.items():
                of.learn(rank, expert in wanted)

    def ended(self, seconds: float) -> None:
        """The forward pass took so long. It counts, and the next token's turn comes, if there are predictions."""
        if self._decoding and self._asked:
            if self._arm.tried:
                self._tried[self._arm.prefetches].append((self._loads, seconds))
            self._arm, self._then = self._then, next(self._schedule)

    def _arms(self) -> Iterator[Arm]:
        """Trials, and what was best between them. The last token of a trial has not run when it is decided."""
        best, agreed = False, 0
        while True:
            for prefetches in TRIAL:
                yield Arm(prefetches, True)
            gain = gained(self._tried[False], self._tried[True])
            before, best = best, gain > (0 if best else BEGIN)
            agreed = agreed + 1 if best == before else 0
            rest = min(len(TRIAL) / 2 * abs(gain) / COST, len(TRIAL) * AGAIN * 2 ** min(agreed, AGAIN))
            for _ in range(round(rest)):
                yield Arm(best, False)

    def _arm_of(self, layer: int) -> Arm:
        """The turn of the token that a layer belongs to: of the next one, if this one has passed it."""
        self._asked = True
        return Arm(True, True) if not self._decoding else self._arm if layer > self._at else self._then

    def _note(self, reads: Reads) -> None:
        if (n := reads.count - self._reads.count) > 0:
            self._read.took((reads.seconds - self._reads.seconds) / n)
            self._bytes.add((reads.nbytes - self._reads.nbytes) / n)
        self._reads = reads
