"""One MoE layer as a SimPy simulation: every transfer and every expert is an event, and the link is
queued for.

The link and the GPU do one thing at a time; activations go before weights that wait. Units start
when the first token has arrived and send outputs back in as many rounds as they have tokens, at
most one an expert. What the link reads from a unit's DRAM, where that is shared, delays the unit's
experts.

Events: resources "gpu", "link", "host" and "unit 0" …; kinds "read activations" and "read weights"
(the link; these carry bytes), "expert" and, on a unit, "wait" (for its DRAM)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import simpy

from moelab.base.specs import Event
from moelab.ndp.closed_form import dram_seconds, send_seconds
from moelab.ndp.costs import ACTIVATION_BYTES, Costs
from moelab.ndp.hardware import Hardware
from moelab.ndp.plans import Plan
from moelab.ndp.routing import PromptRouting
from moelab.ndp.simulation import NDPRun
from moelab.ndp.systems import System

ACTIVATIONS, WEIGHTS = 0, 1  # priorities on the link: the lower goes first


def simulate_layer(
    plan: Plan, costs: Costs, layer: int = -1, start: float = 0.0
) -> tuple[float, list[Event]]:
    """Seconds that the layer takes, and its events from `start` on."""
    run = _Layer(plan, costs, layer, start)
    run.env.run()
    return run.env.now, sorted(run.events, key=lambda event: event.start)


class _Layer:
    """The processes of one layer, ready to run."""

    def __init__(self, plan: Plan, costs: Costs, layer: int, start: float) -> None:
        self.plan = plan
        self.costs = costs
        self.layer = layer
        self.start = start
        self.env = simpy.Environment()
        self.events = []
        self.link, self.gpu = simpy.PriorityResource(self.env), simpy.Resource(self.env)
        self.first_token = self.env.event()
        step = plan.step
        self.receivers = plan.receivers.tolist()
        self.experts, self.gpu_work = step.experts.tolist(), costs.gpu(step.tokens)
        self.sending = send_seconds(plan, costs)
        for a in np.flatnonzero(plan.resident):
            self.env.process(self.on_gpu(a, plan.resident[a] * self.gpu_work[a]))
        self.env.process(self.send())
        waits = dram_seconds(plan, costs).tolist()
        for u, shares in enumerate(plan.units.T):
            if tokens := self.receivers[u]:
                seconds = costs.unit(step.tokens)
                self.env.process(self.unit(f"unit {u}", shares, seconds, tokens, waits[u]))
        if tokens := self.receivers[-1]:
            self.env.process(self.unit("host", plan.host, costs.cpu(step.tokens), tokens))

    def work(
        self, resource: str, kind: str, expert: int, seconds: float, bytes: int = 0
    ) -> Iterator:
        began = self.start + self.env.now
        yield self.env.timeout(float(seconds))
        end = self.start + self.env.now
        self.events.append(Event(resource, kind, self.layer, expert, began, end, bytes))

    def over_link(
        self, kind: str, seconds: float, bytes: int, priority: int, expert: int = -1
    ) -> Iterator:
        with self.link.request(priority=priority) as turn:
            yield turn
            yield from self.work("link", kind, expert, seconds, bytes)

    def activations(self, tokens: int) -> Iterator:
        if tokens:
            seconds = tokens * self.costs.activation
            size = tokens * ACTIVATION_BYTES * self.costs.spec.H
            yield from self.over_link("read activations", seconds, size, ACTIVATIONS)

    def on_gpu(self, a: int, seconds: float) -> Iterator:
        with self.gpu.request() as turn:
            yield turn
            yield from self.work("gpu", "expert", self.experts[a], seconds)

    def send(self) -> Iterator:
        """GPU to units: the first token, the others; then weights to the GPU, piece by piece."""
        plan = self.plan
        size = self.costs.spec.expert_bytes
        reached = sum(tokens > 0 for tokens in self.receivers)
        first = min(1, plan.tokens_in) if plan.broadcast else reached
        yield from self.activations(first)
        self.first_token.succeed()
        yield from self.activations(plan.tokens_in - first)
        for a in np.flatnonzero(plan.moved):
            share = plan.moved[a]
            pieces = plan.pieces
            marks = np.rint(share * size * np.arange(pieces + 1) / pieces).astype(int).tolist()
            for before, after in zip(marks, marks[1:]):
                if after > before:
                    yield from self.over_link(
                        "read weights",
                        self.sending[a] / pieces,
                        after - before,
                        WEIGHTS,
                        self.experts[a],
                    )
                self.env.process(self.on_gpu(a, share * self.gpu_work[a] / pieces))

    def unit(
        self, name: str, shares: np.ndarray, seconds: np.ndarray, tokens: int, waits: float = 0.0
    ) -> Iterator:
        """A unit or the host: its experts in order, outputs on the way."""
        yield self.first_token
        if waits:
            yield from self.work(name, "wait", -1, waits)
        mine = np.flatnonzero(shares)
        rounds = min(tokens, len(mine))
        sent = 0
        for i, a in enumerate(mine, 1):
            yield from self.work(name, "expert", self.experts[a], shares[a] * seconds[a])
            due = tokens * max(0, i - (len(mine) - rounds)) // rounds
            self.env.process(self.activations(due - sent))
            sent = due


class Loading(NDPRun):
    """A run with `loads`, the events of what is brought to the GPU between plans."""

    def __init__(self, hardware: Hardware, system: System, routing: PromptRouting) -> None:
        super().__init__(hardware, system, routing)
        self.loads = []

    def _load(self, layer: int, new: np.ndarray) -> float:
        before, size = self.now, self.costs.spec.expert_bytes
        for expert in np.flatnonzero(new).tolist():
            start, self.now = self.now, self.now + self.costs.transfer()
            self.loads.append(Event("link", "read weights", layer, expert, start, self.now, size))
        return self.now - before


def event_seconds(plan: Plan, costs: Costs) -> float:
    """Seconds that the layer takes, as `closed_form.layer_seconds` says them."""
    return simulate_layer(plan, costs)[0]


def timeline(
    hardware: Hardware, system: System, routing: PromptRouting, forwards: Iterable[int] = (1,)
) -> tuple[list[Event], list[tuple[float, float, int, str]]]:
    """(events, forwards) of chosen forwards by the event simulation, one after the other from time
    0.

    forwards : 0 is the prefill, with loading the prefetched experts after it; 1, 2 … the decode
        steps; shown in this order. Returned as (start, end, tokens, "prefill" or "decode"), which
        `metrics` takes.

    Raises ValueError: a forward that the answer does not have. Others as `simulate`.
    """
    chosen = sorted(set(forwards))
    D = len(routing.decode)
    if any(not 0 <= number <= D for number in chosen):
        raise ValueError(f"forwards are {chosen}; there are 0, the prefill, and 1 to {D}, decode")
    run = Loading(hardware, system, routing)
    events = []
    done = []
    left_out = 0.0
    for number in chosen if run.timeless else range(max(chosen, default=-1) + 1):
        began = run.now
        first = len(run.loads)
        dense = run.dense(number) / routing.spec.L
        shown = []

        def seconds(plan: Plan, costs: Costs) -> float:
            now = run.now - left_out
            shown.append(Event("gpu", "other", plan.step.layer, -1, now - dense, now))
            took, new = simulate_layer(plan, costs, plan.step.layer, now)
            shown.extend(new)
            return took

        run.forward(number, seconds)
        ended = run.now
        if not number:
            run.begin_decode()
        if number not in chosen:
            left_out += run.now - began
            continue
        events += shown + [
            load._replace(start=load.start - left_out, end=load.end - left_out)
            for load in run.loads[first:]
        ]
        done.append(
            (
                began - left_out,
                ended - left_out,
                1 if number else len(routing.prefill),
                "decode" if number else "prefill",
            )
        )
    return events, done
