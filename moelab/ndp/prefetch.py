"""Dataset-free prefetching (GPU-NDP §III-D, Fig. 7): the prompt says which experts its answer will need.

Three steps: count the experts of every layer during prefill; between prefill and decode load the x most used of each
layer into GPU memory; decode. x starts at 1 and grows until no further expert of every layer fits; the paper's own
ablation stops at TopK (§IV-D). The counterpart takes the counts from other data instead (calibration); how good either
is, is the share of prefetched experts that a decode step uses (Fig. 6) and the share of what it uses that is there.

    counts [L, E] → resident, bool [L, E]       decode ids [D, L, K]
"""

from __future__ import annotations

import numpy as np

from moelab.ndp.costs import Costs
from moelab.ndp.routing import Routing, recorded_routing
from moelab.trace import RoutingTrace


def experts_that_fit(costs: Costs, tokens: int, limit: int | None = None) -> int:
    """x, grown from 1 until another expert for each layer would not fit; 0 where not even one does.

    tokens : prompt and answer, whose keys and values need their room. limit : stop there at the latest.
    """
    spec, free = costs.spec, costs.free_gpu_bytes(tokens)
    limit = spec.E if limit is None else min(limit, spec.E)
    x = 0
    while x < limit and (x + 1) * spec.L * spec.expert_bytes <= free:
        x += 1
    return x


def most_used(counts: np.ndarray, x: int) -> np.ndarray:
    """The x most used experts of each layer as a mask [L, E]; equal counts go to the lower id."""
    mask = np.zeros(counts.shape, bool)
    np.put_along_axis(mask, np.argsort(-counts, axis=1, kind="stable")[:, :x], True, axis=1)
    return mask


def dataset_free(routing: Routing, x: int) -> np.ndarray:
    """Resident experts [L, E] chosen by the prompt itself."""
    return most_used(routing.counts(), x)


def calibrated(routing: Routing, x: int) -> np.ndarray:
    """Resident experts [L, E] chosen by other data."""
    return most_used(routing.history, x)


def hits(resident: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Which choices [D, L, K] are of resident experts: bool [D, L, K]; "no expert" is never one."""
    padded = np.pad(resident, ((0, 0), (0, 1)))
    return padded[np.arange(len(resident))[:, None], ids]


def utilisation(resident: np.ndarray, ids: np.ndarray) -> float:
    """Share of the prefetched experts that a decode step uses, on average: Fig. 6; nan without any."""
    held = resident.sum() * len(ids)
    return float(hits(resident, ids).sum() / held) if held else float("nan")


def hit_rate(resident: np.ndarray, ids: np.ndarray) -> float:
    """Share of a decode step's experts that are resident; equal to the utilisation where x = K."""
    routed = (ids < resident.shape[1]).sum()
    return float(hits(resident, ids).sum() / routed) if routed else float("nan")


def compare(trace: RoutingTrace, x: int, history: np.ndarray | None = None, samples: int = 2000,
            seed: int = 0) -> dict[str, tuple[float, float, float]]:
    """Fig. 6 on a recorded trace: utilisation of both ways and their difference, as (mean, low, high).

    Means over sequences, with 95 % bootstrap intervals over sequences; the difference is paired. Sequences without a
    prefill or a decode are left out.

    history : counts [L, E] of the calibration data; None is, for each sequence, all others.

    Raises
    ------
    ValueError : no sequence has both phases.
    """
    rows = []
    for sequence in range(trace.sequences):
        try:
            routing = recorded_routing(trace, sequence, history)
        except ValueError:
            continue
        rows.append([utilisation(way(routing, x), routing.decode) for way in (dataset_free, calibrated)])
    if not rows:
        raise ValueError("no sequence of the trace has a prefill and a decode; record a generation, not only prompts")
    table = np.array([[free, known, free - known] for free, known in rows])
    picks = np.random.default_rng(seed).integers(len(table), size=(samples, len(table)))
    low, high = np.quantile(table[picks].mean(1), [0.025, 0.975], axis=0)
    names = ("dataset-free", "calibrated", "difference")
    return {name: (float(table[:, i].mean()), float(low[i]), float(high[i])) for i, name in enumerate(names)}
