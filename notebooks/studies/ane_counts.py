"""What a plan executes, drops and pads of counted chunks, beside notebook 06: exact, without a
model."""

from __future__ import annotations

from typing import Any

import numpy as np

from moelab.ane.plan import Account, ANEPlan, check_loads


def count(plan: ANEPlan, loads: Any) -> Account:
    """The account [L] of a plan under loads [n, L, E], tokens that each expert gets in each chunk.

    On the ANE an expert executes at most its capacity of a chunk's tokens, and its graph computes
    all rows of each chunk in which any of its experts has a token; on the CPU, and for a chunk of a
    single token, exactly its tokens."""
    loads = check_loads(plan, loads)
    executed, slots, launches = (
        loads.sum((0, 2)),
        loads.sum((0, 2)),
        np.zeros(plan.spec.L, dtype=np.int64),
    )
    alone = loads.sum(2) <= plan.spec.K  # [n, L], chunks of a single token
    for l, layer in enumerate(plan.layers):
        for group in layer.on("ane"):
            mine = loads[:, l, list(group.experts)][~alone[:, l]]  # [≤ n, G]
            launched = int(mine.any(1).sum())
            executed[l] -= np.maximum(mine - group.capacity, 0).sum()
            slots[l] += launched * group.slots - mine.sum()
            launches[l] += launched
    return Account(launches=launches, routed=loads.sum((0, 2)), executed=executed, slots=slots)
