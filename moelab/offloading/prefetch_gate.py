"""The prefetch gate: experts are read ahead only where that has been seen to make tokens faster.

What prefetching costs depends on the machine: the predictor's time, memory and cores that reading
shares with computing, threads that are woken. So the whole is measured. Tokens are decoded in the
way that is best so far, at first on demand; now and then one is tried in the other way and compared
with those just before it. How many experts a token loads does not depend on prefetching, so what it
takes longer for having more of them is taken off (regression). With the gains x of the tokens tried
so far, shares of a token's time,

    g = (Σ x − RISK) / (n + 1)

is what prefetching is taken to gain: it has to prove itself. It is best if g > 0, and the next
trial comes after
|g| / `COST` tokens, so that trials cost that share of the time at most: the first one after RISK /
COST tokens, and never where the disk rests too little before layers that demand reads for anything
to be gained.

Which of the predicted experts to read follows from Speculating Experts §5.1, eq. (1): what can be
hidden is the time, a seconds on average, for which the disk would rest before a layer. Say that it
is memoryless. Then a read under way when the layer comes has hidden a seconds if it was of a right
expert, which has the probability p; a wrong one delays a demand, if there is one (probability q),
by half a piece of τ seconds, as demands overtake prefetches between pieces:

    read it if  p · a  >  (1 − p) · q · τ/2

p is a mean by the expert's rank in the prediction, over those that were not resident. Means are
exponential, and apart for prefill and decode. Left out: slots and evictions, since prefetched
experts have slots of their own and evict nothing; and whether some layers gain while others lose by
the costs that only the whole shows."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from statistics import median
from typing import Any

from moelab.cache.residency import Request, Residency, Step
from moelab.intervals import Mean, typical
from moelab.offloading.load_queue import PIECE, Reads
from moelab.specs import ExpertKey, State

FIRST = 0.5  # the precision assumed before any was seen
RECENT = 16  # tokens, and trials, that are compared
FEW = 4  # tokens of the best way, that the first trial is compared with
RISK = 0.1  # of a token's time: what a trial is taken to lose before any was made; at most twice that counts
COST = 0.005  # of all time, for tokens that a trial makes slower


class Layer:
    """Means of a layer: seconds for which the disk rests before it, whether it demands reads, the
    precision by rank; the last begins as that of all layers together, as a deep model would else
    have to learn each layer's anew."""

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


def gained(tokens: Sequence[tuple[int, float]], loads: int, seconds: float) -> float:
    """Share of a token's time by which one of so many loads is faster than these tokens, (loads,
    seconds) each, say that it would be. What one more load takes is the median over pairs of them
    (Theil, Sen), which a disturbed token does not move."""
    slopes = [(s - t) / (n - m) for (n, s), (m, t) in combinations(tokens, 2) if n != m]
    each = max(median(slopes), 0.0) if slopes else 0.0
    expected = typical(s - each * (n - loads) for n, s in tokens)
    return 1 - seconds / expected if expected > 0 else 0.0


class PrefetchGate:
    """One for an engine, or for a simulation of it; it is told what happens, and knows no clock.

    trials : False prefetches in every token, as for a recorded run whose tokens took turns when it
    ran."""

    def __init__(self, trials: bool = True) -> None:
        self.announced: dict[
            int, tuple[Layer, dict[int, int]]
        ] = {}  # layer → it, {expert not resident: rank}
        self._phases: defaultdict[str, Phase] = defaultdict(Phase)
        self._reads, self._read, self._bytes = Reads(), Mean(), Mean()
        self._trials, self._best = trials, not trials
        self._on = self._then = self._best  # prefetches: this token, the next one
        self._tokens = {
            on: deque(maxlen=RECENT) for on in (False, True)
        }  # (loads, seconds) of the latest
        self._gains, self._since = deque(maxlen=RECENT), 0  # of trials; tokens since the latest
        self.begin("decode")

    def begin(self, phase: str) -> None:
        """A forward pass of this phase begins."""
        self.now, self._decoding, self._at = self._phases[phase], phase == "decode", -1
        self._asked, self._loads = False, 0

    @property
    def opens(self) -> bool:
        """Whether predictors are asked for anything in this forward pass, or had better not be
        listening."""
        return self._open(self._at + 1)

    @property
    def gain(self) -> float:
        """What prefetching is taken to save of a token's time."""
        return (sum(self._gains) - RISK) / (len(self._gains) + 1)

    @property
    def most(self) -> float:
        """Seconds of a token that prefetching could hide by eq. (1): the disk rests before layers
        that demand reads."""
        return sum(
            layer.idle.value * layer.demands.value
            for layer in self._phases["decode"].layers.values()
        )

    def wants(self, layer: int) -> bool:
        """Whether a predictor shall be asked for this layer: where a rank pays, and now and then
        elsewhere."""
        of = self.now.layers[layer]
        return self._open(layer) and (
            not of.precision
            or not self._best
            or self._since % RECENT == 0
            or any(self.pays(of, rank) for rank in of.precision)
        )

    def rested(self, layer: int, seconds: float) -> None:
        """The layer comes; so long ago the disk had read what was demanded before."""
        self.now.layers[layer].idle.took(seconds)

    def pays(self, of: Layer, rank: int) -> bool:
        """Whether to read an expert of this rank ahead."""
        p, piece = (
            of.precise(rank).value,
            self._read.value * min(1.0, PIECE / max(self._bytes.value, 1.0)),
        )
        return not of.idle.count or p * of.idle.value > (1 - p) * of.demands.value * piece / 2

    def requests(
        self, residency: Residency, layer: int, experts: Iterable[int], reads: Reads
    ) -> list[Request]:
        """What to prefetch of the experts predicted for a layer, the likeliest first: of those that
        are not FULL, the
        ones that should pay. reads : what the disk has read so far."""
        self._note(reads)
        if not 0 <= layer < residency.L:
            return []
        opens, of, found, ranks = self._open(layer), self.now.layers[layer], [], {}
        for rank, expert in enumerate(dict.fromkeys(experts)):
            key = ExpertKey(layer, expert)
            if 0 <= expert < residency.E and (state := residency.state(key)) is not State.FULL:
                ranks[expert] = rank
                if opens and self.pays(of, rank):
                    found.append(Request(key, 1, state, State.MISSED))
        if ranks:
            self.announced[layer] = of, ranks
        return found

    def came(self, step: Step) -> None:
        """A layer came and wants these experts: learn from what was predicted."""
        self._at, loads = (
            step.layer,
            sum(request.state is not State.FULL for request in step.requests),
        )
        self._loads += loads
        self.now.layers[step.layer].demands.add(loads > 0)
        if (announced := self.announced.pop(step.layer, None)) is not None:
            (of, ranks), wanted = announced, {request.key.expert for request in step.requests}
            for expert, rank in ranks.items():
                of.learn(rank, expert in wanted)

    def ended(self, seconds: float) -> None:
        """The forward pass took so long. If there are predictions, it counts, and the token after
        the next is decided about."""
        if not (self._decoding and self._asked and self._trials):
            return
        self._since += 1
        if self._on is not self._best and self._tokens[self._best]:
            x = gained(self._tokens[self._best], self._loads, seconds)
            self._gains.append(max(-2 * RISK, min(2 * RISK, x if self._on else -x)))
            self._since = 0
        self._tokens[self._on].append((self._loads, seconds))
        self._best = self.gain > 0
        self._on, self._then = self._then, self._best
        if (
            self._on is self._best
            and len(self._tokens[self._best]) >= FEW
            and self._since + 1 >= abs(self.gain) / COST
        ):
            self._then = not self._best if self.most > COST * seconds else False

    def _open(self, layer: int) -> bool:
        """Whether the token that a layer belongs to prefetches: the next one, if this one has
        passed it."""
        self._asked = True
        return not self._decoding or (self._on if layer > self._at else self._then)

    def _note(self, reads: Reads) -> None:
        if (n := reads.count - self._reads.count) > 0:
            self._read.took((reads.seconds - self._reads.seconds) / n)
            self._bytes.add((reads.nbytes - self._reads.nbytes) / n)
        self._reads = reads


@contextmanager
def ungated(engine: Any) -> Iterator[None]:
    """Meanwhile an engine prefetches in every token: to see what prefetching does, whether or not
    it pays."""
    kept, engine.gate = engine.gate, PrefetchGate(trials=False)
    try:
        yield
    finally:
        engine.gate = kept
