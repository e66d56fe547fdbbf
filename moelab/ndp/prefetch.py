"""Dataset-free prefetching (GPU-NDP §III-D, Fig. 7): the prompt says which experts its answer will need.

Three steps: count the experts of every layer during prefill; between prefill and decode load the x most used of each
layer into GPU memory; decode. x starts at 1 and grows until no further expert of every layer fits; the paper's own
ablation stops at TopK (§IV-D). How good a choice is, is the share of prefetched experts that a decode step uses (Fig.
6) and the share of what it uses that is there.

Beyond the paper, `places` tells from the prompt alone what x would have been worth: each of its tokens is met with the
experts that the *other* tokens would have prefetched, as an answer's token is with those that the prompt did.

    counts [L, E] → resident, bool [L, E]       decode ids [D, L, K]

Left out: the "remaining critical experts" that the intermediate step stages (§III-D, 2), of which nothing more is said.
"""

from __future__ import annotations

import numpy as np

from moelab.ndp.costs import Costs


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


def places(ids: np.ndarray, E: int) -> np.ndarray:
    """Place of each choice [T, L, K] among its layer's experts, by how often the other T − 1 tokens use them.

    int [T, L, K]; the most used expert has place 0, equal counts go to the lower id, as in `most_used`, and "no expert"
    is at E, behind all others. A choice would have hit if x experts were prefetched and its place is below x.
    """
    found = np.empty(ids.shape, np.int64)
    for layer in range(ids.shape[1]):
        own = np.zeros((len(ids), E + 1), np.int64)
        np.put_along_axis(own, ids[:, layer].astype(np.int64), 1, axis=1)
        others = (own.sum(0) - own)[:, :E]
        place = np.full((len(ids), E + 1), E)
        np.put_along_axis(place, np.argsort(-others, axis=1, kind="stable"), np.arange(E)[None], axis=1)
        found[:, layer] = np.take_along_axis(place, ids[:, layer].astype(np.int64), axis=1)
    return found


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
