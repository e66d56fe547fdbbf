"""The time of one MoE layer as a formula: the two sides of GPU-NDP's balance conditions, evaluated for any plan.

A layer ends when its slower side does. The units' side is Eq. 1's right: one token in, the busiest unit's experts, one
token out of each unit. The GPU's side is its left: the activations that share the link, the weights, and the GPU work
that the transfer does not hide, here by the exact rule for a pipeline of transfers and computations in pieces.

The formula is exact where only one side uses the link (MoE-OnDemand, tensor parallelism alone, MoNDE without a GPU
share, a prefetch hit). Where weights and outputs meet on the link it lets outputs slip in at no cost, and weights wait
for the other S − 1 tokens' outputs first, as Eq. 2 says; the event simulation queues both.

`layer_events` are the intervals that the formula takes for granted, in the records of the event simulation; an output
that slips in is drawn where it is assumed, over weights on the same link.
"""

from __future__ import annotations

import numpy as np

from moelab.ndp.costs import Costs
from moelab.ndp.plans import Plan
from moelab.specs import Event


def unit_seconds(plan: Plan, costs: Costs) -> np.ndarray:
    """How long each unit and, last, the host compute: [N + 1]."""
    units = costs.unit(plan.step.tokens) @ plan.units
    return np.append(units, costs.cpu(plan.step.tokens) @ plan.host)


def far_side(plan: Plan, costs: Costs) -> float:
    """Seconds until the last output of units and host is back: Eq. 1's right side; 0 if they have no work.

    Units that end together (tensor parallelism) return their tokens one after the other; others as they end.
    """
    busy = np.sort(unit_seconds(plan, costs)[plan.receivers > 0])
    if not len(busy):
        return 0.0
    return _first(plan) * costs.activation + float((busy + np.arange(len(busy), 0, -1) * costs.activation).max())


def _first(plan: Plan) -> int:
    """Hidden states on the link before the units begin: one for all, or one each."""
    return 1 if plan.broadcast else int((plan.receivers > 0).sum())


def gpu_side(plan: Plan, costs: Costs) -> float:
    """Seconds until the GPU has computed what is resident and what was moved: Eq. 2's left side; 0 without either."""
    return max((end for _, end in _arrivals(plan, costs)), default=float(costs.gpu(plan.step.tokens) @ plan.resident))


def _arrivals(plan: Plan, costs: Costs) -> list[tuple[float, float]]:
    """Of each moved expert, in order: when the last of its weights is here, and when the GPU has computed it."""
    if not plan.moved.any():
        return []
    work = costs.gpu(plan.step.tokens)
    done = float(work @ plan.resident)
    send, compute = plan.moved * costs.transfer(), plan.moved * work
    hidden = plan.tokens_out - int((plan.receivers > 0).sum())
    arrived = (plan.tokens_in + hidden) * costs.activation + np.cumsum(send)
    # an expert in p pieces ends no earlier than its last piece plus a p-th of the work, or its first plus all of it
    p = plan.pieces
    earliest = np.maximum(arrived + compute / p, arrived - send * (1 - 1 / p) + compute)
    found = []
    for a in np.flatnonzero(plan.moved):
        done = float(max(done + compute[a], earliest[a]))
        found.append((float(arrived[a]), done))
    return found


def link_seconds(plan: Plan, costs: Costs) -> float:
    """Seconds that the link needs for everything, activations and weights."""
    return (plan.tokens_in + plan.tokens_out) * costs.activation + float(plan.moved.sum()) * costs.transfer()


def layer_seconds(plan: Plan, costs: Costs) -> float:
    """Seconds of one MoE layer: the slower side, and no less than the link needs."""
    return max(far_side(plan, costs), gpu_side(plan, costs), link_seconds(plan, costs))


def layer_events(plan: Plan, costs: Costs, layer: int = -1, start: float = 0.0) -> tuple[float, list[Event]]:
    """`layer_seconds`, and what it assumes that GPU, link, units and host do, from `start` on."""
    experts, work, events = plan.step.experts.tolist(), costs.gpu(plan.step.tokens), []
    T_a, far, total = costs.activation, far_side(plan, costs), layer_seconds(plan, costs)

    def add(resource: str, kind: str, expert: int, begin: float, end: float, bytes: int = 0) -> float:
        events.append(Event(resource, kind, layer, expert, start + begin, start + end, bytes))
        return end

    def hidden_states(tokens: int, begin: float) -> float:
        return add("link", "read activations", -1, begin, begin + tokens * T_a, tokens * costs.activation_bytes)

    link = gpu = 0.0                                                # when each is free again
    busy = np.flatnonzero(plan.receivers).tolist()
    for tokens in (plan.tokens_in, plan.tokens_out - len(busy)):    # all inputs; outputs but the last of each unit
        link = hidden_states(tokens, link) if tokens else link
    for a in np.flatnonzero(plan.resident):
        gpu = add("gpu", "expert", experts[a], gpu, gpu + plan.resident[a] * work[a])
    for a, (arrived, end) in zip(np.flatnonzero(plan.moved), _arrivals(plan, costs)):
        link = add("link", "read weights", experts[a], link, arrived, round(plan.moved[a] * costs.spec.expert_bytes))
        gpu = add("gpu", "expert", experts[a], max(gpu, end - plan.moved[a] * work[a]), end)

    shares, ends = np.column_stack([plan.units, plan.host]), dict.fromkeys(busy, _first(plan) * T_a)
    for u in busy:
        name, rate = ("host", costs.cpu) if u == plan.units.shape[1] else (f"unit {u}", costs.unit)
        for a in np.flatnonzero(shares[:, u]):
            seconds = float(shares[a, u] * rate(plan.step.tokens[a]))
            ends[u] = add(name, "expert", experts[a], ends[u], ends[u] + seconds)
    late, out = total - far if total == link_seconds(plan, costs) else 0.0, 0.0     # where the link takes longest
    for end in sorted(ends.values()):
        out = hidden_states(1, max(out, end + late))
    return total, sorted(events, key=lambda event: event.start)
