"""What a plan executes, drops and pads of counted chunks, beside notebook 06: exact, without a
model."""

from __future__ import annotations

from typing import Any

import numpy as np

from moelab.ane.plan import Account, ANEPlan


def count(plan: ANEPlan, loads: Any) -> Account:
    """The account of a plan, all layers together, under loads [n, L, E], tokens that each expert
    gets in each chunk."""
    return sum(by_layer(plan, loads), Account())


def by_layer(plan: ANEPlan, loads: Any) -> list[Account]:
    """The same, of each layer; `chunks` stays 0.

    On the ANE an expert executes at most its capacity of a chunk's tokens, and its graph computes
    all rows of each chunk in which any of its experts has a token; on the CPU, and for a chunk of a
    single token, exactly its tokens."""
    loads = check_loads(plan, loads)
    accounts = []
    alone = loads.sum(2) <= plan.spec.K  # [n, L], chunks of a single token
    for l, layer in enumerate(plan.layers):
        routed = int(loads[:, l].sum())
        executed, slots, launches = routed, routed, 0
        for group in layer.on("ane"):
            mine = loads[:, l, list(group.experts)][~alone[:, l]]  # [≤ n, G]
            launched = int(mine.any(1).sum())
            executed -= int(np.maximum(mine - group.capacity, 0).sum())
            slots += launched * group.slots - int(mine.sum())
            launches += launched
        accounts.append(Account(routed, executed, slots, launches=launches))
    return accounts


def check_loads(plan: ANEPlan, loads: Any) -> np.ndarray:
    """Loads as int64 [n, L, E] that belong to the plan; ValueError else."""
    loads = np.asarray(loads)
    if loads.ndim != 3 or loads.shape[1:] != (plan.spec.L, plan.spec.E) or not len(loads):
        raise ValueError(
            f"loads are {list(loads.shape)}, not chunks by {plan.spec.L} layers by "
            f"{plan.spec.E} experts"
        )
    if loads.max() > plan.chunk:
        raise ValueError(
            f"an expert has {int(loads.max())} tokens in a chunk of {plan.chunk}; cut the "
            "loads for it"
        )
    return loads
