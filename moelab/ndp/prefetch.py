"""Dataset-free prefetching (GPU-NDP §III-D, Fig. 7): the prompt says which experts its answer will
need.

Between prefill and decode the x most used experts of each layer are loaded into GPU memory: as many
as fit, in the paper's own ablation at most TopK (§IV-D). Beyond the paper, `places` tells from the
prompt alone what x would have been worth. Not modelled: the "remaining critical experts" (§III-D,
2), of which nothing more is said.

    counts [L, E] → resident, bool [L, E]       decode ids [D, L, K]
"""

from __future__ import annotations

import numpy as np

from moelab.ndp.costs import Costs


def experts_that_fit(costs: Costs, tokens: int) -> int:
    """x, the most experts of each layer that fit beside keys and values of prompt and answer."""
    fit = int(costs.free_gpu_bytes(tokens) // (costs.spec.L * costs.spec.expert_bytes))
    return max(0, min(fit, costs.spec.E))


def most_used(counts: np.ndarray, x: int) -> np.ndarray:
    """The x most used experts of each layer as a mask [L, E]; equal counts go to the lower id."""
    mask = np.zeros(counts.shape, bool)
    np.put_along_axis(mask, np.argsort(-counts, axis=1, kind="stable")[:, :x], True, axis=1)
    return mask


def places(ids: np.ndarray, E: int) -> np.ndarray:
    """Rank of each choice [T, L, K] among its layer's experts, by how often the other T − 1 tokens
    use them.

    Int [T, L, K]: 0 is the most used, equal counts go to the lower id, "no expert" has rank E. A
    choice would have hit if more experts were prefetched than its rank."""
    found = np.empty(ids.shape, np.int64)
    for layer in range(ids.shape[1]):
        own = np.zeros((len(ids), E + 1), np.int64)
        np.put_along_axis(own, ids[:, layer].astype(np.int64), 1, axis=1)
        others = (own.sum(0) - own)[:, :E]
        place = np.full((len(ids), E + 1), E)
        np.put_along_axis(
            place, np.argsort(-others, axis=1, kind="stable"), np.arange(E)[None], axis=1
        )
        found[:, layer] = np.take_along_axis(place, ids[:, layer].astype(np.int64), axis=1)
    return found


def hits(resident: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Which choices [D, L, K] are resident experts: bool [D, L, K]; "no expert" is not."""
    padded = np.pad(resident, ((0, 0), (0, 1)))
    return padded[np.arange(len(resident))[:, None], ids]
