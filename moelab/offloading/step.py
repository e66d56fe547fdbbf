"""A layer's step: what is loaded, evicted and prefetched for it.

The engine calls it with threads around, the simulator with a clock; nothing here knows of either,
so both decide the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moelab.base.specs import Event, ExpertKey, State
from moelab.cache.residency import Request, Residency, Step
from moelab.offloading.hybrid import Balance
from moelab.offloading.load_queue import LoadQueue, Order
from moelab.offloading.prefetch_gate import PrefetchGate
from moelab.offloading.run import EngineRun


@dataclass(eq=False)
class StepController:
    """Decides the steps of one model, layer by layer.

    residency : which experts are kept.
    queue : what of them is loaded, and into which slots.
    gate : whether predictions are followed.
    order : in which order the experts of a step are read and decoded.
    log : records every step and every prediction.
    balance : which experts are computed where they lie; None: none are.
    lies : of a step, whether an expert lies where it can be computed away; one on a disk does not.
    """

    residency: Residency
    queue: LoadQueue
    gate: PrefetchGate
    order: Callable[[Sequence[Request]], Order]
    log: EngineRun | None = None
    balance: Balance | None = None
    lies: Callable[[ExpertKey], bool] = lambda key: True
    announced: tuple[int, list[int]] | None = None  # layer to come, experts
    #: who shall come beside the next token of what this one misses: given, or as many of what it has
    #: left as the link has time for
    wished: list[ExpertKey] | None = field(default_factory=list)
    _fetched: int = 0  # in this token's pass
    _each: float = 0.0  # seconds that the link takes for an expert

    def begin_forward(self, phase: str, token: bool = False) -> list[Step]:
        """A forward pass begins, "prefill" or "decode"; returns steps to `load` before it. Of a
        `token` that a GPU runs alone, the steps are decided when it is over, by the rule that the GPU
        has followed; `residency.coming` is copied beside it."""
        self.announced = None
        self._fetched = 0
        self.gate.begin_forward(phase)
        if self.balance:
            rates = self.balance.begin_forward(token)
            if self.log:
                self.log.rating = rates
        steps = self.residency.begin_forward(phase, token)
        if self.log:
            for key in self.residency.coming:
                self.log.predicted(key.layer, [key.expert])
        return steps

    def end_forward(self, seconds: float | None, events: Iterable[Event] = ()) -> list[ExpertKey]:
        """It took so long (None: not to be compared with others, as it had drafts), of these events:
        what it has prefetched and not used is given up. Returns who leaves after a token's pass."""
        self.queue.drop_prefetched()
        events = [*events]
        if self.balance:
            self.balance.end_forward(events)
        wished = self.wished
        if self.residency.free is not None:
            seconds, room = self._on_link(events)
            wished = self.residency.left[:room] if wished is None else wished
        if seconds is not None:
            self.gate.end_forward(seconds, events, self.residency.L)
        return self.residency.end_forward(wished)

    def _on_link(self, events: Iterable[Event]) -> tuple[float, int]:
        """Seconds of a token by a GPU's clock, and how many experts the link had time for beside what
        was fetched: in half of the time in which it was idle, as what is fetched may not wait."""
        spans = [(of.start, of.end) for of in events if of.resource in ("link", "compute")]
        linked = sum(of.end - of.start for of in events if of.resource == "link")
        if those := self._fetched + len(self.residency.coming):
            self._each = linked / those
        begin = min(spans, default=(0.0, 0.0))[0]
        end = max((end for _, end in spans), default=0.0)
        idle = end - begin - self._fetched * self._each
        return end - begin, int(idle / 2 / self._each) if self._each else 1

    def announce(self, layer: int, experts: Iterable[int]) -> None:
        """A layer to come will probably choose these experts, the likeliest first; `load` of the
        next step prefetches them."""
        if self.queue.ahead and 0 <= layer < self.residency.L:
            self.announced = layer, [e for e in dict.fromkeys(experts) if e < self.residency.E]

    def decide(self, layer: int, tokens: Mapping[int, int]) -> Step:
        """Which experts of {expert: tokens} are in memory, which stay, and who leaves for them."""
        away = set()
        if self.balance:
            state = self.residency.state
            there = {expert for expert in tokens if state((layer, expert)) is State.FULL}
            away = self.balance.away(layer, tokens, there)
            if self.residency.spare:  # beside a GPU: who is there is nowhere else
                away -= there
            if self.residency.free is None:
                away = {expert for expert in away if self.lies(ExpertKey(layer, expert))}
        step = self.residency.begin(layer, tokens, away)
        step.requests = [
            of._replace(state=State.MISSED) if of.key in self.queue.late else of
            for of in step.requests
        ]
        self._fetched += len(step.loads)
        if self.log:
            self.log.layer(layer, tokens)
        return step

    def found(self, layer: int, tokens: Mapping[int, int]) -> None:
        """`decide` where all experts are there for good."""
        self.residency.found(layer, tokens)
        if self.log:
            self.log.layer(layer, tokens)

    def load(self, step: Step, ready: Callable[[Any], object]) -> None:
        """Let the queue load what the step lacks, and prefetch behind that what was announced.

        ready : called with the key of each expert that is loaded, or with the error that ends the
        step."""
        announced = self.announced
        self.announced = None
        if step.loads or step.evicted or self.queue.prefetched:
            self.queue.begin(step.layer, step.loads, step.evicted, ready, self.order)
        if announced is None:
            return
        if self.log:
            self.log.predicted(*announced)
        if self.gate.enabled:
            layer, experts = announced
            keys = [ExpertKey(layer, expert) for expert in experts]
            state = self.residency.state
            missing = [key for key in keys if state(key) is not State.FULL]
            chosen = [
                Request(key, 1, state(key), State.MISSED) for key in missing[: self.gate.room]
            ]
            self.queue.prefetch(chosen)
