"""EPLB: which experts to hold twice, and where, so that every device would compute about as much as
the others.

Source: DeepSeek's Expert Parallelism Load Balancer, as published with DeepSeek-V3 and announced in
AWS Neuron's MoE guide, "Future Optimizations". Spare places go to replicas (`replicate`), then
replicas are packed onto devices (`pack`). Left out: the hierarchical form, which first packs groups
of experts onto nodes; and running on such a placement, whose replicas take the memory for which
experts are spread here.

    load [E], tokens or shares of them     devices · places = E + spare     placement: the experts of each device
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain
from math import inf

from moelab.experts.sharding import share

#: the experts of each device; one may be on several devices, or twice on one
Placement = tuple[tuple[int, ...], ...]


def consecutive(E: int, devices: int) -> Placement:
    """Experts 0 … E−1 in order, as equally as can be, none twice."""
    ends = [0, *accumulate(share(E, devices))]
    return tuple(tuple(range(a, b)) for a, b in zip(ends, ends[1:]))


def device_loads(load: Sequence[float], placement: Placement) -> list[float]:
    """Of each device, if replicas share their expert's load equally."""
    replicas = Counter(chain(*placement))
    return [sum(load[e] / replicas[e] for e in experts) for experts in placement]


def imbalance(load: Sequence[float], placement: Placement) -> float:
    """Max/mean of the devices' loads."""
    loads = device_loads(load, placement)
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0


def balance(load: Sequence[float], devices: int, spare: int = 0) -> Placement:
    """Place E experts and `spare` replicas on devices, as many on each.

    load : tokens of each expert [E], as a calibration counted them; devices must divide E + spare.
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
    copies = [(e, load[e] / n) for e, n in enumerate(replicate(load, E + spare)) for _ in range(n)]
    bins = pack([weight for _, weight in copies], devices)
    return tuple(tuple(sorted(copies[i][0] for i in items)) for items in bins)


def replicate(load: Sequence[float], places: int) -> list[int]:
    """Replicas of each expert: one, and every further place to the expert with the most load per
    replica."""
    replicas = [1] * len(load)
    for _ in range(places - len(load)):
        busiest = max(range(len(load)), key=lambda e: load[e] / replicas[e])
        replicas[busiest] += 1
    return replicas


def pack(weights: Sequence[float], bins: int) -> list[list[int]]:
    """The items of each bin, equally many in each: heaviest first, to the lightest bin that has a
    place left."""
    size = len(weights) // bins
    packed: list[list[int]] = [[] for _ in range(bins)]
    total = [0.0] * bins
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        lightest = min((b for b in range(bins) if len(packed[b]) < size), key=total.__getitem__)
        packed[lightest].append(item)
        total[lightest] += weights[item]
    return packed
