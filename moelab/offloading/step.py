"""A layer's step: what is loaded, evicted and prefetched for it.

The engine calls it with threads around, the simulator with a clock; nothing here knows of either,
so both decide the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """

    residency: Residency
    queue: LoadQueue
    gate: PrefetchGate
    order: Callable[[Sequence[Request]], Order]
    log: EngineRun | None = None
    balance: Balance | None = None
    announced: tuple[int, list[int]] | None = None  # layer to come, experts

    def begin_forward(self, phase: str, token: bool = False) -> list[Step]:
        """A forward pass begins, "prefill" or "decode"; returns steps to `load` before it. Of a
        `token` that a GPU runs alone, the steps are decided when it is over, by the rule that the GPU
        has followed."""
        self.announced = None
        self.gate.begin_forward(phase)
        if self.balance is not None:
            rates = self.balance.begin_forward(token)
            if self.log is not None:
                self.log.rating = rates
        return self.residency.begin_forward(phase, token)

    def end_forward(self, seconds: float | None, events: Iterable[Event] = ()) -> list[ExpertKey]:
        """It took so long (None: not to be compared with others, as it had drafts), of these events:
        what it has prefetched and not used is given up. Returns who leaves after a token's pass."""
        self.queue.drop_prefetched()
        events = [*events]
        if self.balance is not None:
            self.balance.end_forward(events)
        if seconds is not None:
            self.gate.end_forward(seconds, events, self.residency.L)
        return self.residency.end_forward()

    def announce(self, layer: int, experts: Iterable[int]) -> None:
        """A layer to come will probably choose these experts, the likeliest first; `load` of the
        next step prefetches them."""
        if self.queue.ahead and 0 <= layer < self.residency.L:
            self.announced = layer, [e for e in dict.fromkeys(experts) if e < self.residency.E]

    def decide(self, layer: int, tokens: Mapping[int, int]) -> Step:
        """Which experts of {expert: tokens} are in memory, which stay, and who leaves for them."""
        away: set[int] = set()
        if self.balance is not None:
            state = self.residency.state
            there = {expert for expert in tokens if state((layer, expert)) is State.FULL}
            away = self.balance.away(layer, tokens, there)
            if self.residency.spare:  # beside a GPU: who is there is nowhere else
                away -= there
        step = self.residency.begin(layer, tokens, away)
        if self.log is not None:
            self.log.layer(layer, tokens)
        return step

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
        if self.log is not None:
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
