"""What an offloaded model did: written by the engine, read by the metrics, replayed by the simulator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moelab.cache.pools import Pools
from moelab.cache.residency import CacheCounters, Residency
from moelab.offloading.metrics import Forward
from moelab.offloading.timeline import Timeline
from moelab.schedule.load_queue import PrefetchCounts
from moelab.schedule.requests import Delays
from moelab.specs import MoESpec


@dataclass(frozen=True)
class Settings:
    """How an engine is set up: with the steps of a run, all that a simulation of it needs.

    pools, policy, scope, margin : of its `Residency`.
    workers, staging, ahead : decode workers, loads in flight beyond what is kept, and of those prefetched.
    delays : of one expert on this machine; None for a resident model.
    dense_bytes : of all weights but the routed experts.
    """

    spec: MoESpec
    pools: Pools
    policy: Any
    scope: str
    margin: float | None
    workers: int
    staging: int
    ahead: int
    delays: Delays | None
    dense_bytes: int

    @classmethod
    def resident(cls, spec: MoESpec, dense_bytes: int) -> Settings:
        """Of a model with all its experts in memory, where nothing is read."""
        return cls(spec, Pools(F=spec.L * spec.E), "lru", "model", None, 1, spec.K, 0, None, dense_bytes)


class EngineRun:
    """Everything since the last `reset`.

    Attributes
    ----------
    settings : of the engine.
    timeline : the `Event`s.
    forwards : start, end, tokens and phase of each forward pass.
    steps : what they routed: for each forward a list of (layer, {expert: tokens}).
    guesses : what was announced for prefetching: for each forward a list of (layer, experts).
    fetched : what became of prefetched experts.
    """

    def __init__(self, settings: Settings, residency: Residency) -> None:
        self.settings, self._residency = settings, residency
        self.timeline, self.fetched = Timeline(), PrefetchCounts()
        self.reset()

    @property
    def counters(self) -> CacheCounters:
        """Hits, misses and evictions."""
        return self._residency.counters

    def reset(self) -> None:
        """Forget events, forwards and counts; what is in memory stays."""
        self.timeline.clear()
        self._residency.reset_counters()
        self.fetched.reset()
        self.forwards: list[Forward] = []
        self.steps: list[list[tuple[int, dict[int, int]]]] = []
        self.guesses: list[list[tuple[int, list[int]]]] = []
        self._in_forward = False

    # An interruption may leave out any of the calls below: so what begins removes what was left unfinished.

    def begin_forward(self) -> None:
        del self.steps[len(self.forwards):], self.guesses[len(self.forwards):]
        self.steps.append([])
        self.guesses.append([])
        self._in_forward = True

    def end_forward(self, forward: Forward) -> None:
        self._in_forward = False
        self.forwards.append(forward)
        self.timeline.compact()

    def layer(self, layer: int, tokens: dict[int, int]) -> None:
        """A layer runs; ignored outside a forward pass, where a part of the model was called by itself."""
        if self._in_forward:
            self.steps[-1].append((layer, tokens))

    def guess(self, layer: int, experts: Iterable[int]) -> None:
        """Experts are announced for a layer to come."""
        if self._in_forward:
            self.guesses[-1].append((layer, list(experts)))
