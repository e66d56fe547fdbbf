"""The time of one MoE layer as a formula: the two sides of GPU-NDP's balance conditions, evaluated
for any plan.

A layer ends when its slower side does. The units' side is Eq. 1's right. The GPU's side is its
left, with the GPU work that the transfer does not hide by the exact rule for a pipeline of
transfers and computations in pieces.

The formula is exact where only one side uses the link (MoE-OnDemand, tensor parallelism alone,
MoNDE without a GPU share, a prefetch hit). Where weights and outputs meet on the link it lets
outputs slip in at no cost, and weights wait for the other S − 1 tokens' outputs first, as Eq. 2
says; the event simulation queues both. All times are seconds.

Beyond the paper (`Hardware.shared_dram`): what is sent is read from the DRAM that the units read,
with priority, so a unit is busy until both are through: max(its work, bytes it computes and bytes
it sends ÷ its bandwidth)."""

from __future__ import annotations

import numpy as np

from moelab.ndp.costs import Costs
from moelab.ndp.plans import Plan


def dram_seconds(plan: Plan, costs: Costs) -> np.ndarray:
    """By which each unit's work takes longer, as the link reads from its DRAM: [N]; 0 where DRAM is
    not shared."""
    if not costs.hardware.shared_dram:
        return np.zeros(costs.hardware.units)
    read = (plan.units.sum(0) + plan.sent) * costs.spec.expert_bytes / costs.hardware.unit_bandwidth
    return np.maximum(0, read - costs.unit(plan.step.tokens) @ plan.units)


def send_seconds(plan: Plan, costs: Costs) -> np.ndarray:
    """On the link, of what is sent of each expert, piece by piece: [A]."""
    return (
        plan.moved * (costs.spec.expert_bytes / costs.hardware.link)
        + (plan.moved > 0) * plan.pieces * costs.hardware.latency
    )


def far_side(plan: Plan, costs: Costs) -> float:
    """Until the last output of units and host is back: Eq. 1's right side; 0 if they have no work.

    Units that end together (tensor parallelism) return their tokens one after the other; others as
    they end."""
    tokens = plan.step.tokens
    work = np.append(
        costs.unit(tokens) @ plan.units + dram_seconds(plan, costs), costs.cpu(tokens) @ plan.host
    )
    busy = np.sort(work[plan.receivers > 0])
    if not len(busy):
        return 0.0
    before = 1 if plan.broadcast else len(busy)  # hidden states on the link before the units begin
    return before * costs.activation + float(
        (busy + np.arange(len(busy), 0, -1) * costs.activation).max()
    )


def gpu_side(plan: Plan, costs: Costs) -> float:
    """Until the GPU has computed what is resident and what was moved: Eq. 2's left side; 0 without
    either."""
    work = costs.gpu(plan.step.tokens)
    done = float(work @ plan.resident)
    if not plan.moved.any():
        return done
    send = send_seconds(plan, costs)
    compute = plan.moved * work
    hidden = plan.tokens_out - int((plan.receivers > 0).sum())
    arrived = (plan.tokens_in + hidden) * costs.activation + np.cumsum(send)
    # an expert in p pieces ends no earlier than its last piece plus a p-th of the work, or its
    # first plus all of it
    p = plan.pieces
    earliest = np.maximum(arrived + compute / p, arrived - send * (1 - 1 / p) + compute)
    for a in np.flatnonzero(plan.moved):
        done = float(max(done + compute[a], earliest[a]))
    return done


def link_seconds(plan: Plan, costs: Costs) -> float:
    """Of all activations and weights over the link."""
    return (plan.tokens_in + plan.tokens_out) * costs.activation + float(
        send_seconds(plan, costs).sum()
    )


def layer_seconds(plan: Plan, costs: Costs) -> float:
    """Of one MoE layer: the slower side, and no less than the link needs."""
    return max(far_side(plan, costs), gpu_side(plan, costs), link_seconds(plan, costs))
