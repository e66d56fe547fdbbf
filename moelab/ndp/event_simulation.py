"""One MoE layer as a SimPy simulation: every transfer and every expert is an event, and the link is
queued for.

The link and the GPU do one thing at a time; activations go before weights that wait. Units start
when the first token has arrived and send outputs back in as many rounds as they have tokens, at
most one an expert. What the link reads from a unit's DRAM, where that is shared, delays the unit's
experts.

Events: resources "gpu", "link", "host" and "unit 0" …; kinds "read activations" and "read weights"
(the link; these carry bytes), "expert" and, on a unit, "wait" (for its DRAM)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import simpy

from moelab.ndp.closed_form import dram_seconds, send_seconds
from moelab.ndp.costs import Costs
from moelab.ndp.plans import Plan
from moelab.specs import Event

ACTIVATIONS, WEIGHTS = 0, 1  # priorities on the link: the lower goes first


def simulate_layer(
    plan: Plan, costs: Costs, layer: int = -1, start: float = 0.0
) -> tuple[float, list[Event]]:
    """Seconds that the layer takes, and its events from `start` on."""
    env, events = simpy.Environment(), []
    link, gpu, first_token = simpy.PriorityResource(env), simpy.Resource(env), env.event()
    step, receivers = plan.step, plan.receivers.tolist()
    experts, gpu_work, sending = (
        step.experts.tolist(),
        costs.gpu(step.tokens),
        send_seconds(plan, costs),
    )

    def work(resource: str, kind: str, expert: int, seconds: float, bytes: int = 0) -> Iterator:
        began = start + env.now
        yield env.timeout(float(seconds))
        events.append(Event(resource, kind, layer, expert, began, start + env.now, bytes))

    def over_link(
        kind: str, seconds: float, bytes: int, priority: int, expert: int = -1
    ) -> Iterator:
        with link.request(priority=priority) as turn:
            yield turn
            yield from work("link", kind, expert, seconds, bytes)

    def activations(tokens: int) -> Iterator:
        if tokens:
            yield from over_link(
                "read activations",
                tokens * costs.activation,
                tokens * costs.activation_bytes,
                ACTIVATIONS,
            )

    def on_gpu(a: int, seconds: float) -> Iterator:
        with gpu.request() as turn:
            yield turn
            yield from work("gpu", "expert", experts[a], seconds)

    def send() -> Iterator:
        """GPU to units: the first token, the others; then weights to the GPU, piece by piece."""
        first = (
            min(1, plan.tokens_in) if plan.broadcast else sum(tokens > 0 for tokens in receivers)
        )
        yield from activations(first)
        first_token.succeed()
        yield from activations(plan.tokens_in - first)
        for a in np.flatnonzero(plan.moved):
            share, pieces = plan.moved[a], plan.pieces
            marks = (
                np.rint(share * costs.spec.expert_bytes * np.arange(pieces + 1) / pieces)
                .astype(int)
                .tolist()
            )
            for before, after in zip(marks, marks[1:]):
                if after > before:
                    yield from over_link(
                        "read weights", sending[a] / pieces, after - before, WEIGHTS, experts[a]
                    )
                env.process(on_gpu(a, share * gpu_work[a] / pieces))

    def unit(
        name: str, shares: np.ndarray, seconds: np.ndarray, tokens: int, waits: float = 0.0
    ) -> Iterator:
        """A unit or the host: its experts in order, outputs on the way."""
        yield first_token
        if waits:
            yield from work(name, "wait", -1, waits)
        mine = np.flatnonzero(shares)
        rounds, sent = min(tokens, len(mine)), 0
        for i, a in enumerate(mine, 1):
            yield from work(name, "expert", experts[a], shares[a] * seconds[a])
            due = tokens * max(0, i - (len(mine) - rounds)) // rounds
            env.process(activations(due - sent))
            sent = due

    for a in np.flatnonzero(plan.resident):
        env.process(on_gpu(a, plan.resident[a] * gpu_work[a]))
    env.process(send())
    for u, (shares, waits) in enumerate(zip(plan.units.T, dram_seconds(plan, costs).tolist())):
        if receivers[u]:
            env.process(unit(f"unit {u}", shares, costs.unit(step.tokens), receivers[u], waits))
    if receivers[-1]:
        env.process(unit("host", plan.host, costs.cpu(step.tokens), receivers[-1]))
    env.run()
    return env.now, sorted(events, key=lambda event: event.start)


def event_seconds(plan: Plan, costs: Costs) -> float:
    """Seconds that the layer takes, as `closed_form.layer_seconds` says them."""
    return simulate_layer(plan, costs)[0]
