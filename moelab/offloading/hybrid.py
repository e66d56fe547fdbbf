"""Transfer an expert, or compute it where it lies? (GPU-NDP §III-C, Eqs. 1 to 3, by measured rates.)

Two places compute at the same time. The near one has memory for some experts, and a link over which
others come; the far one computes an expert where its weights lie. The paper looks for the number E_g of
experts to send for which both take as long,

    T_w·E_g + T_g·E_g' + (S − 1)·T_a·N = (N + 1)·T_a + T_n·(K − E_g)

Here the same balance is kept in whole experts, for whatever a layer demands. E_g', the computing that
no transfer hides, is what a near place has left that computes each expert once it is there and the one
before is done. Experts that are there already have no transfer, so how many of those go to the far place
(Eq. 3) is the same question. An expert is the better placed near, the more time it takes far for each
second near: so by this they are sorted, and the first of them go near, as many as end soonest. Near
time grows with each and far time falls, so where they cross is found by bisection. It is the optimum
where all experts have as many tokens, as in decoding; else it may be off by about one expert's time.

No time is asked from a clock here: an engine and a simulation tell `Balance` the events of each forward
pass. What has not been measured counts as nothing, so it is tried; all is measured anew now and then. Left out: what a
transfer is worth to later tokens, and prefetching.

A GPU is driven alike: near events are "compute", copies "link", experts on the CPU "host", and `trip` is
what it takes activations to get there and back (T_a). Where it runs a whole token alone, it cannot ask: so
it is given beforehand how many of a layer's m misses it shall fetch (`Balance.shares`), by the same balance
for what is left to decide then. What is there is computed there, all have one token, and nothing is computed
before all has come (E_g' = E_g)."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from moelab.base.specs import Event

#: seconds as base + per unit
Linear = tuple[float, float]
LONG = 3
RECENT = 16  # measurements, of as many units, that count
ANEW = 256  # forward passes after which everything is measured anew


class Wanted(NamedTuple):
    """An expert that a layer demands; `nbytes` must come over the link, 0 if it is there."""

    expert: int
    tokens: int
    nbytes: int


class Rates(NamedTuple):
    """Seconds that were measured, launches included; nothing where nothing was.

    link : of an expert's transfer, by bytes.
    near, far : of computing one, by its tokens.
    trip : of a layer's activations to the far place and back, if it computes any; 0 where the events
        of the far place contain it.
    """

    link: Linear = (0.0, 0.0)
    near: Linear = (0.0, 0.0)
    far: Linear = (0.0, 0.0)
    trip: float = 0.0


def at(line: Linear, n: float) -> float:
    """Seconds of n units."""
    return line[0] + line[1] * n


def over_link(one: Wanted, rates: Rates) -> float:
    """Seconds of an expert's transfer, if it needs one."""
    return at(rates.link, one.nbytes) if one.nbytes else 0.0


def near_seconds(those: Iterable[Wanted], rates: Rates) -> float:
    """Until the near place has computed these: what is there first, then, as it arrives, what has the
    most tokens (Johnson 1954: the best order, as all take as long over the link)."""
    arrived = done = 0.0
    for one in sorted(those, key=lambda one: (one.nbytes > 0, -one.tokens)):
        arrived += over_link(one, rates)
        done = max(done, arrived) + at(rates.near, one.tokens)
    return done


def far_seconds(those: Collection[Wanted], rates: Rates) -> float:
    """Until the far place has computed these, one after another."""
    return bool(those) * rates.trip + sum(at(rates.far, one.tokens) for one in those)


def split(wanted: Iterable[Wanted], rates: Rates) -> tuple[list[Wanted], list[Wanted]]:
    """(those to compute near, those to compute where they lie) of a layer's experts."""

    def gain(one: Wanted) -> float:
        here = max(at(rates.near, one.tokens), over_link(one, rates))
        return at(rates.far, one.tokens) / here if here else float("inf")

    order = sorted(wanted, key=lambda one: (-gain(one), one.nbytes, -one.tokens, one.expert))

    def times(n: int) -> tuple[float, float]:
        return near_seconds(order[:n], rates), far_seconds(order[n:], rates)

    cross = bisect_left(range(len(order)), True, key=lambda n: times(n)[0] >= times(n)[1])
    best = min(max(cross - 1, 0), cross, key=lambda n: max(times(n)))
    return order[:best], order[best:]


class Balance:
    """Decides layer by layer which experts are computed where they lie.

    sizes : [L][E] of bytes that an expert's reads transfer.
    rates : to go by, one for each forward pass; by default what has been measured until then.
    K : experts of a token, where a GPU runs whole tokens.
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[tuple[int, ...]]],
        rates: Iterable[Rates] | None = None,
        K: int = 0,
    ) -> None:
        self.sizes, self.rates, self.K = sizes, Rates(), K
        self._mean = np.array([fmean(map(sum, of)) for of in sizes])
        self._token: np.ndarray | None = None  # `shares` of a token's pass
        self._given = None if rates is None else iter(rates)
        self._forwards = 0
        #: layer → its experts that are computed near, and far
        self._placed: dict[int, tuple[list[Wanted], list[Wanted]]] = {}

    def begin_forward(self, token: bool = False) -> Rates:
        """What decides in this forward pass; of a `token` that a GPU runs alone, `shares` does."""
        if self._given is not None:
            self.rates = next(self._given)
        if self._forwards % ANEW == 0:  # units → seconds
            self._link, self._near, self._far = (
                defaultdict(lambda: deque(maxlen=RECENT)) for _ in range(3)
            )
        self._forwards += 1
        self._token = self.shares() if token else None
        return self.rates

    def shares(self) -> np.ndarray:
        """How many of a layer's m misses are fetched, the first by id; the others are computed where
        they lie. int64 [L, K + 1], by m: of all numbers the one that ends first, of several the least
        (Eq. 1 of GPU-NDP, in whole experts)."""
        rates, (m, fetched) = self.rates, np.indices((self.K + 1, self.K + 1))
        left = m - fetched
        link = at(rates.link, self._mean)[:, None, None]
        here = fetched * link + (self.K - left) * at(rates.near, 1)
        there = (left > 0) * rates.trip + left * at(rates.far, 1)
        return np.where(left >= 0, np.maximum(here, there), np.inf).argmin(axis=2)

    def away(self, layer: int, tokens: Mapping[int, int], there: Collection[int]) -> set[int]:
        """The experts of {expert: tokens} to compute where they lie; `there` are in near memory."""
        sizes = self.sizes[layer]
        wanted = [Wanted(e, n, 0 if e in there else sum(sizes[e])) for e, n in tokens.items()]
        if self._token is None:
            placed = split(wanted, self.rates)
        else:
            order = sorted(wanted, key=lambda one: (one.nbytes > 0, one.expert))
            misses = sum(one.nbytes > 0 for one in wanted)
            near = len(order) - misses + int(self._token[layer, misses])
            placed = order[:near], order[near:]
        self._placed[layer] = placed
        return {one.expert for one in placed[1]}

    def end_forward(self, events: Iterable[Event]) -> None:
        """What happened in the forward pass: the next one is decided by it, too. An event without an
        expert is of all that was sent, or computed near, in the layer."""
        took = defaultdict(float)
        for event in events:
            seconds = event.end - event.start
            near, far = self._placed.get(event.layer, ((), ()))
            if event.resource == "link":
                if came := event.expert >= 0 or sum(one.nbytes > 0 for one in near):
                    self._link[event.bytes / came].append(seconds / came)
            elif event.resource == "host":
                tokens = sum(one.tokens for one in far if one.expert == event.expert)
                self._far[tokens].append(seconds)
            elif event.kind == "expert" and near:
                took[event.layer] += seconds
        for layer, seconds in took.items():  # several at once are one event
            tokens = [one.tokens for one in self._placed[layer][0]]
            self._near[fmean(tokens)].append(seconds / len(tokens))
        self.rates = Rates(line(self._link), line(self._near), line(self._far), self.rates.trip)


def mean(seconds: Collection[float]) -> float:
    """The mean, 0 of nothing."""
    longest = LONG * median(seconds) if seconds else 0.0
    return fmean(min(one, longest) for one in seconds) if seconds else 0.0


def line(samples: Mapping[float, Collection[float]]) -> Linear:
    """(base, per unit) of seconds by a number, neither negative: through the mean of the number
    that came most."""
    points = {n: mean(seconds) for n, seconds in samples.items()}
    each = 0.0
    if not points:
        return 0.0, 0.0
    often = max(points, key=lambda n: len(samples[n]))
    if len(points) > 1:
        weights = [len(samples[n]) ** 0.5 for n in points]
        each = max(np.polyfit([*points], [*points.values()], 1, w=weights)[0].item(), 0.0)
    return max(points[often] - each * often, 0.0), each
