"""The prefetch gate: tokens prefetch only where that has been seen to make them faster.

What prefetching costs depends on the machine: the predictor's time, memory and cores that reading
shares with computing. So it is tried. Tokens are decoded the best way known, at first on demand;
now and then `TRIAL` tokens go the other way, and the faster of the two (median seconds of a token)
is the best way from then on. As long as the answer stays the same, trials become rarer.
Prefill always prefetches: a prompt wants nearly all experts, so nothing is guessed.

A link takes what it is given in order, and nobody waits for it on the host. So what is prefetched
must fit into the time in which it would idle: in tokens on demand the link's own time says how long
it idles in a layer, and how long an expert takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from moelab.base.specs import Event

TRIAL = 6  # tokens of a trial, and of the best way that it is compared with
SOON, SELDOM = 20, 640  # tokens between two trials: at first, and at most
GAIN = 0.01  # share of a token's time that the other way must gain to become the best


class PrefetchGate:
    """One for an engine, or for a simulation of it; it is told how long tokens take.

    trials : False prefetches in every token.
    """

    def __init__(self, trials: bool = True) -> None:
        self._trials = trials
        self._best = not trials  # whether the best way prefetches
        self._trying = False  # the other way, in this token
        self._seconds: list[float] = []  # of the tokens since the way last changed
        self._usual = 0.0
        self._wait = SOON
        self._rooms: list[float] = []  # of the last tokens: experts that a link has time for
        self.begin_forward("decode")

    def begin_forward(self, phase: str) -> None:
        """A forward pass of this phase begins."""
        self._decoding = phase == "decode"
        self._asked = False

    @property
    def enabled(self) -> bool:
        """Whether this forward pass prefetches; whoever has predictions asks."""
        self._asked = True
        return not self._decoding or self._best is not self._trying and self.room != 0

    @property
    def room(self) -> int | None:
        """How many experts may be prefetched in a layer of this forward pass; None: any number."""
        if not (self._trials and self._decoding and self._rooms):
            return None
        return int(median(self._rooms))

    def end_forward(self, seconds: float, events: Iterable[Event] = (), layers: int = 1) -> None:
        """The forward pass of so many layers took so long; it counts if somebody had predictions.

        events : of it; those of a link tell how long that was busy."""
        if not (self._trials and self._decoding and self._asked):
            return
        if self._best is self._trying or self.room == 0:
            self._watch(seconds, events, layers)
        self._seconds.append(seconds)
        if self._trying and len(self._seconds) == TRIAL:
            self._judge(median(self._seconds))
        elif not self._trying and len(self._seconds) == self._wait:
            self._usual = median(self._seconds[-TRIAL:])
            self._trying = True
            self._seconds = []

    def _watch(self, seconds: float, events: Iterable[Event], layers: int) -> None:
        """A token on demand: what else would a link have had time for?"""
        sent = [event for event in events if event.resource == "link"]
        if busy := sum(event.end - event.start for event in sent):
            each = busy / len({event[2:4] for event in sent})
            room = max(0.0, seconds - busy) / layers / each
            self._rooms = [*self._rooms[1 - TRIAL :], room]

    def _judge(self, seconds: float) -> None:
        """The other way took so long a token."""
        if seconds < (1 - GAIN) * self._usual:
            self._best = not self._best
            self._wait = SOON
        else:
            self._wait = min(2 * self._wait, SELDOM)
        self._trying = False
        self._seconds = []


@contextmanager
def ungated(engine: Any) -> Iterator[None]:
    """Meanwhile an engine prefetches in every token, whether or not it pays."""
    controller = engine.controller
    kept = controller.gate
    controller.gate = PrefetchGate(trials=False)
    try:
        yield
    finally:
        controller.gate = kept
