"""Dataset-free prefetching (GPU-NDP §III-D, Fig. 7): the prompt says which experts its answer will
need.

Between prefill and decode the x most used experts of each layer are loaded into GPU memory: as many
as fit, in the paper's own ablation at most TopK (§IV-D); ours are those of them that pay
(`simulation.NDPRun.pays`). Not modelled: the "remaining critical experts" (§III-D, 2), of which
nothing more is said.

    counts [L, E] → resident, bool [L, E]
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
