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
pass, and whatever has not been measured lately counts as nothing, so it is tried. Left out: what a
transfer is worth to later tokens, and prefetching.

A GPU is driven alike: near events are "compute", copies "link", experts on the CPU "host", and `trip` is
what it takes activations to get there and back (T_a)."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from moelab.base.specs import Event

#: (units, seconds), in ascending order
Points = tuple[tuple[float, float], ...]
RECENT = 16  # measurements of a kind that a median is of
STALE = 64  # forward passes after which one that was not repeated is forgotten


class Wanted(NamedTuple):
    """An expert that a layer demands; `nbytes` must come over the link, 0 if it is there."""

    expert: int
    tokens: int
    nbytes: int


@dataclass(frozen=True)
class Rates:
    """Seconds that were measured, launches included; nothing where nothing was.

    link : of an expert's transfer, by bytes.
    near, far : of computing one, by its tokens.
    trip : of a layer's activations to the far place and back, if it computes any.
    """

    link: Points = ()
    near: Points = ()
    far: Points = ()
    trip: float = 0.0


@lru_cache(4096)
def seconds(points: Points, n: float) -> float:
    """On straight lines between points, in proportion beyond the last, and as the first below it."""
    for (a, low), (b, high) in pairwise(points):
        if a <= n <= b:
            return low + (high - low) * (n - a) / (b - a)
    if not points:
        return 0.0
    (first, least), (last, most) = points[0], points[-1]
    return least if n < first else most * n / last


def near_seconds(those: Iterable[Wanted], rates: Rates) -> float:
    """Until the near place has computed these: what is there first, then, as it arrives, what has the
    most tokens (Johnson 1954: the best order, as all take as long over the link)."""
    arrived = done = 0.0
    for one in sorted(those, key=lambda one: (one.nbytes > 0, -one.tokens)):
        if one.nbytes:
            arrived += seconds(rates.link, one.nbytes)
        done = max(done, arrived) + seconds(rates.near, one.tokens)
    return done


def far_seconds(those: Collection[Wanted], rates: Rates) -> float:
    """Until the far place has computed these, one after another."""
    return bool(those) * rates.trip + sum(seconds(rates.far, one.tokens) for one in those)


def split(wanted: Iterable[Wanted], rates: Rates) -> tuple[list[Wanted], list[Wanted]]:
    """(those to compute near, those to compute where they lie) of a layer's experts."""

    def gain(one: Wanted) -> float:
        here = max(seconds(rates.near, one.tokens), one.nbytes and seconds(rates.link, one.nbytes))
        return seconds(rates.far, one.tokens) / here if here else float("inf")

    order = sorted(wanted, key=lambda one: (-gain(one), one.nbytes, -one.tokens, one.expert))

    def times(n: int) -> tuple[float, float]:
        return near_seconds(order[:n], rates), far_seconds(order[n:], rates)

    cross = bisect_left(range(len(order)), True, key=lambda n: times(n)[0] >= times(n)[1])
    best = min(max(cross - 1, 0), cross, key=lambda n: max(times(n)))
    return order[:best], order[best:]


class Balance:
    """Decides layer by layer which experts are computed where they lie.

    sizes : [L][E] of bytes that a transfer takes.
    rates : to go by, one for each forward pass; by default what has been measured until then.
    """

    def __init__(
        self, sizes: Sequence[Sequence[int]], rates: Iterable[Rates] | None = None
    ) -> None:
        self.sizes, self.rates = sizes, Rates()
        self._given: Iterator[Rates] | None = None if rates is None else iter(rates)
        self._forward = 0
        #: of what, how many units, about → (units, seconds) lately; and in which forward last
        self._seen: dict[tuple[str, int], deque[tuple[float, float]]] = {}
        self._latest: dict[tuple[str, int], int] = {}
        self._near: dict[int, list[int]] = {}  # layer → tokens of the experts that it computes near
        self._far: dict[tuple[int, int], int] = {}  # (layer, expert) → its tokens

    def begin_forward(self) -> Rates:
        """What decides in this forward pass."""
        self._far.clear()
        if self._given is not None:
            self.rates = next(self._given)
        return self.rates

    def away(self, layer: int, tokens: Mapping[int, int], there: Collection[int]) -> set[int]:
        """The experts of {expert: tokens} to compute where they lie; `there` are in near memory."""
        near, far = split(
            (Wanted(e, n, 0 if e in there else self.sizes[layer][e]) for e, n in tokens.items()),
            self.rates,
        )
        self._near[layer] = [one.tokens for one in near]
        self._far |= {(layer, one.expert): one.tokens for one in far}
        return {one.expert for one in far}

    def end_forward(self, events: Iterable[Event]) -> None:
        """What happened in the forward pass: the next one is decided by it, too."""
        self._forward += 1
        near: dict[int, float] = defaultdict(float)
        for event in events:
            took = event.end - event.start
            if event.resource == "link":
                self._add("link", event.bytes, took)
            elif event.resource == "host":
                self._add("far", self._far.get(event[2:4], 1), took)
            elif event.kind == "expert":
                near[event.layer] += took
        for layer, took in near.items():
            n = len(self._near[layer])
            self._add("near", sum(self._near[layer]) / n, took / n)
        for what in [of for of, last in self._latest.items() if last < self._forward - STALE]:
            del self._seen[what], self._latest[what]
        self.rates = Rates(*map(self._points, ("link", "near", "far")), self.rates.trip)

    def _add(self, what: str, units: float, took: float) -> None:
        key = what, int(units).bit_length()
        self._seen.setdefault(key, deque(maxlen=RECENT)).append((units, took))
        self._latest[key] = self._forward

    def _points(self, what: str) -> Points:
        known = [zip(*of) for (kind, _), of in self._seen.items() if kind == what]
        return tuple(sorted((median(units), median(took)) for units, took in known))
