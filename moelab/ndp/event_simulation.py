"""One MoE layer as a SimPy simulation: every transfer and every expert is an event, and the link is queued for.

The link and the GPU do one thing at a time; activations go before weights that wait. Units start when the first token
has arrived and send outputs back as they go, in as many rounds as they have tokens and at most one an expert; weights
come in pieces, and the GPU computes each when it has arrived.

Events are `moelab.specs.Event`: resources "gpu", "link", "host" and "unit 0" …; kinds "read activations" and
"read weights" (the link; these carry bytes) and "expert".
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import simpy

from moelab.ndp.costs import Costs
from moelab.ndp.plans import Plan
from moelab.specs import Event

ACTIVATIONS, WEIGHTS = 0, 1         # priorities on the link: the lower goes first


def simulate_layer(plan: Plan, costs: Costs, layer: int = -1, start: float = 0.0) -> tuple[float, list[Event]]:
    """Seconds that the layer takes, and its events from `start` on."""
    simulation = _Layer(plan, costs, layer, start)
    simulation.env.run()
    return simulation.env.now, sorted(simulation.events, key=lambda event: event.start)


def event_seconds(plan: Plan, costs: Costs) -> float:
    """Seconds that the layer takes, as `closed_form.layer_seconds` says them."""
    return simulate_layer(plan, costs)[0]


class _Layer:
    """The processes of one layer; time in seconds from its start."""

    def __init__(self, plan: Plan, costs: Costs, layer: int, start: float) -> None:
        self.plan, self.costs, self.layer, self.start = plan, costs, layer, start
        self.events: list[Event] = []
        self.env = simpy.Environment()
        self.link, self.gpu = simpy.PriorityResource(self.env), simpy.Resource(self.env)
        self.first_token = self.env.event()
        self.experts, step = plan.step.experts.tolist(), plan.step
        self.receivers = plan.receivers.tolist()
        gpu_work = costs.gpu(step.tokens)
        for a in np.flatnonzero(plan.resident):
            self.env.process(self.on_gpu(a, plan.resident[a] * gpu_work[a]))
        self.env.process(self.send(gpu_work))
        shares = np.column_stack([plan.units, plan.host])
        rates = [costs.unit(step.tokens)] * plan.units.shape[1] + [costs.cpu(step.tokens)]
        for u, work in enumerate(rates):
            if self.receivers[u]:
                name = "host" if u == len(rates) - 1 else f"unit {u}"
                self.env.process(self.unit(name, shares[:, u], work, self.receivers[u]))

    def work(self, resource: str, kind: str, expert: int, seconds: float, bytes: int = 0) -> Iterator:
        """Keep a resource, which the caller holds, busy, and record that."""
        began = self.start + self.env.now
        yield self.env.timeout(float(seconds))
        self.events.append(Event(resource, kind, self.layer, expert, began, self.start + self.env.now, bytes))

    def over_link(self, kind: str, seconds: float, bytes: int, priority: int, expert: int = -1) -> Iterator:
        with self.link.request(priority=priority) as turn:
            yield turn
            yield from self.work("link", kind, expert, seconds, bytes)

    def activations(self, tokens: int) -> Iterator:
        if tokens:
            yield from self.over_link("read activations", tokens * self.costs.activation,
                                      tokens * self.costs.activation_bytes, ACTIVATIONS)

    def on_gpu(self, a: int, seconds: float) -> Iterator:
        """Expert a of the plan, or a share or piece of it, when the GPU is free."""
        with self.gpu.request() as turn:
            yield turn
            yield from self.work("gpu", "expert", self.experts[a], seconds)

    def send(self, gpu_work: np.ndarray) -> Iterator:
        """GPU to units: the first token, the others; then weights to the GPU, piece by piece."""
        plan, costs = self.plan, self.costs
        first = min(1, plan.tokens_in) if plan.broadcast else sum(tokens > 0 for tokens in self.receivers)
        yield from self.activations(first)
        self.first_token.succeed()
        yield from self.activations(plan.tokens_in - first)
        for a in np.flatnonzero(plan.moved):
            share, pieces = plan.moved[a], plan.pieces
            marks = np.rint(share * costs.spec.expert_bytes * np.arange(pieces + 1) / pieces).astype(int).tolist()
            for before, after in zip(marks, marks[1:]):
                if after > before:
                    yield from self.over_link("read weights", share * costs.transfer() / pieces, after - before,
                                              WEIGHTS, self.experts[a])
                self.env.process(self.on_gpu(a, share * gpu_work[a] / pieces))

    def unit(self, name: str, shares: np.ndarray, work: np.ndarray, tokens: int) -> Iterator:
        """A unit or the host: its experts in order, outputs on the way."""
        yield self.first_token
        mine = np.flatnonzero(shares)
        rounds, sent = min(tokens, len(mine)), 0
        for i, a in enumerate(mine, 1):
            yield from self.work(name, "expert", self.experts[a], shares[a] * work[a])
            due = tokens * max(0, i - (len(mine) - rounds)) // rounds
            self.env.process(self.activations(due - sent))
            sent = due
