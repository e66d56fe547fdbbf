"""EPLB: which experts to hold twice, and where, so that every device computes about as much as the
others.

Source: DeepSeek's Expert Parallelism Load Balancer, as published with DeepSeek-V3 and announced in
AWS Neuron's MoE guide, "Future Optimizations". Spare places go to replicas (`replicate`), then
replicas are packed onto devices (`pack`); with expert groups on several nodes (group-limited
routing), first groups onto nodes. Left out: moving replicas while a model runs.

    load [E], tokens or shares of them     devices · places = E + spare
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from moelab.parallel.sharding import Placement


@dataclass(frozen=True)
class Balance:
    placement: Placement
    replicas: tuple[int, ...]  # [E], how often each expert is held
    device_load: tuple[float, ...]  # of each device if replicas share their expert's load equally

    @property
    def ratio(self) -> float:
        """Max/mean of the devices' loads."""
        mean = sum(self.device_load) / len(self.device_load)
        return max(self.device_load) / mean if mean else 1.0


def measure(load: Sequence[float], placement: Placement) -> Balance:
    """How even any placement is under a load [E]."""
    replicas = placement.replicas.tolist()
    share = [value / n for value, n in zip(load, replicas, strict=True)]
    return Balance(
        placement, tuple(replicas), tuple(sum(share[e] for e in held) for held in placement.devices)
    )


def balance(
    load: Sequence[float], devices: int, spare: int = 0, nodes: int = 1, groups: int = 1
) -> Balance:
    """Place E experts and `spare` replicas on devices, as many on each.

    load : tokens of each expert [E], as a calibration counted them; devices must divide E + spare.
    nodes, groups : with more than one node, experts come in `groups` of consecutive ones that stay
        on a node; where the nodes do not divide the groups, all devices are balanced as one.
    """
    E = len(load)
    if not E or not all(0 <= value < inf for value in load):
        raise ValueError(
            "load must have one number for each expert, none of them negative, infinite or undefined"
        )
    if devices < 1 or spare < 0 or (E + spare) % devices:
        raise ValueError(
            f"{E} experts and {spare} spare places do not fill {devices} devices equally: "
            f"{-E % max(devices, 1)} spare places do"
        )
    if nodes < 1 or devices % nodes or groups < 1 or E % groups:
        raise ValueError(
            f"nodes must divide the {devices} devices and groups the {E} experts; they are {nodes} and "
            f"{groups}"
        )
    if groups % nodes:
        nodes = groups = 1
    size = E // groups
    group_load = [sum(load[g * size : (g + 1) * size]) for g in range(groups)]
    held: list[tuple[int, ...]] = []
    for on_node in pack(group_load, nodes):
        experts = [e for g in on_node for e in range(g * size, (g + 1) * size)]
        replicas = replicate([load[e] for e in experts], (E + spare) // nodes)
        copies = [e for e, n in zip(experts, replicas) for _ in range(n)]
        weight = [load[e] / n for e, n in zip(experts, replicas) for _ in range(n)]
        held += [
            tuple(sorted(copies[i] for i in items)) for items in pack(weight, devices // nodes)
        ]
    return measure(load, Placement(tuple(held), E))


def replicate(load: Sequence[float], places: int) -> list[int]:
    """Replicas of each expert: one, and every further place to the expert with the most load per
    replica."""
    replicas = [1] * len(load)
    heap = [(-value, e) for e, value in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(places - len(load)):
        _, e = heap[0]
        replicas[e] += 1
        heapq.heapreplace(heap, (-load[e] / replicas[e], e))
    return replicas


def pack(weights: Sequence[float], bins: int) -> list[list[int]]:
    """The items of each bin, equally many in each: heaviest first, to the lightest bin that has a
    place left."""
    size = len(weights) // bins
    packed: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0.0, b) for b in range(bins)]
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        total, b = heapq.heappop(heap)
        packed[b].append(item)
        if len(packed[b]) < size:
            heapq.heappush(heap, (total + weights[item], b))
    return packed
