"""What a plan does with real tokens: executed, dropped, padded, launched, as exact counts (NPUMoE §4.1, Table 3).

On the ANE an expert executes at most its capacity of a chunk's tokens, and its graph computes all rows of every chunk
in which any of its experts has a token; a group that nobody chose is not launched. On the CPU an expert executes all
its tokens and no row more, and so does every expert for a chunk of a single token, as in `moelab.ane.runtime`. Counting
needs only how many tokens each expert got in each chunk: who of them is dropped does not change how many are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moelab.ane.plan import Plan


@dataclass(frozen=True, eq=False)
class Account:
    """Exact counts over all chunks, each int64 [L].

    routed : choices of an expert by a token. executed : those that are computed; the others are dropped.
    slots : rows computed, padding included. launches : expert graphs run on the ANE, at most `plan.launches` a chunk.
    """

    routed: np.ndarray
    executed: np.ndarray
    slots: np.ndarray
    launches: np.ndarray

    @property
    def drop_rate(self) -> float:
        """Dropped choices over routed ones, over all layers (Table 3, "token drop rate")."""
        return 1 - float(self.executed.sum() / max(self.routed.sum(), 1))

    @property
    def padded_fraction(self) -> float:
        """Share of the computed rows that are padding (Table 3, "padded tokens"; §5.8: of all computed tokens)."""
        return 1 - float(self.executed.sum() / max(self.slots.sum(), 1))


def count(plan: Plan, loads: Any) -> Account:
    """The account of a plan under loads [n, L, E], tokens that each expert gets in each chunk.

    `calibration.chunk_loads(trace, plan.chunk)` gives them, or `loads_of_ids`.

    Raises
    ------
    ValueError : loads of another model or of larger chunks.
    """
    loads = check_loads(plan, loads)
    executed, slots, launches = loads.sum((0, 2)), loads.sum((0, 2)), np.zeros(plan.spec.L, dtype=np.int64)
    alone = loads.sum(2) <= plan.spec.K                     # [n, L], chunks of a single token
    for l, layer in enumerate(plan.layers):
        for group in layer.on("ane"):
            mine = loads[:, l, list(group.experts)][~alone[:, l]]                               # [≤ n, G]
            launched = int(mine.any(1).sum())
            executed[l] -= np.maximum(mine - group.capacity, 0).sum()
            slots[l] += launched * group.slots - mine.sum()
            launches[l] += launched
    return Account(loads.sum((0, 2)), executed, slots, launches)


def loads_of_ids(ids: Any, chunk: int, E: int) -> np.ndarray:
    """Tokens that each expert gets in each chunk, from ids [T, L, K]: int64 [n, L, E]; the last chunk may be shorter.

    The id E ("no expert") is not counted.
    """
    ids = np.asarray(ids)
    T, L, K = ids.shape
    loads = np.zeros((-(-T // chunk), L, E + 1), dtype=np.int64)
    token, layer, _ = np.indices(ids.shape)
    np.add.at(loads, (token // chunk, layer, ids), 1)
    return loads[:, :, :E]


def check_loads(plan: Plan, loads: Any) -> np.ndarray:
    """Loads as int64 [n, L, E] that belong to the plan; ValueError else."""
    loads = np.asarray(loads)
    if loads.ndim != 3 or loads.shape[1:] != (plan.spec.L, plan.spec.E) or not len(loads):
        raise ValueError(f"loads are {list(loads.shape)}, not chunks by {plan.spec.L} layers by {plan.spec.E} experts")
    if loads.max() > plan.chunk:
        raise ValueError(f"an expert has {int(loads.max())} tokens in a chunk of {plan.chunk}; cut the loads for it")
    return loads
