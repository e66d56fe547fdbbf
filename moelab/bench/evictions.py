"""Eviction policies on recorded routing: exact counts of misses, Belady's and prediction across tokens among them.

Prompts are decoded token by token, one after another, with a cache for a share of the experts that is never emptied;
every policy of the registry decides about the same steps, those of `BY_LAYER` with a pool for each layer, too.
"next-token" is fitted to another trace (`moelab.speculate.next_token`). `bench prediction` prints them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from moelab.cache.next_token import NextTokenPolicy
from moelab.cache.policies import DEFAULT_POLICY, POLICIES, Belady
from moelab.cache.pools import Pools
from moelab.cache.residency import SCOPES, Residency
from moelab.progress import progress
from moelab.speculate.next_token import NextToken, fit
from moelab.specs import State
from moelab.trace import RoutingTrace

BY_LAYER = ("lru", "lfu", "lrfu")
#: rows are (policy, scope)
DEFAULT, OURS, CEILING = (DEFAULT_POLICY, "model"), ("next-token", "model"), ("belady", "model")


def steps(trace: RoutingTrace) -> list[tuple[int, int, dict[int, int]]]:
    """(row of the trace, layer, {expert: 1}), token by token, prompt after prompt; no prefill."""
    ids, E = trace.ids.tolist(), trace.spec.E
    return [(row, layer, dict.fromkeys((e for e in chosen if e != E), 1))
            for row in torch.argsort(trace.sequence.long(), stable=True).tolist()
            for layer, chosen in enumerate(ids[row]) if chosen[0] != E]


def misses(trace: RoutingTrace, policy: Any, scope: str, share: float) -> np.ndarray:
    """Misses in each sequence, int64 [P], with memory for a share of the experts; scope "model" or "layer"."""
    L, E = trace.spec.L, trace.spec.E
    residency = Residency(L, E, Pools(F=round(share * (E if scope == "layer" else L * E))), policy, scope)
    inputs = trace.router_inputs.float().numpy() if residency.sees else None
    sequence, found = trace.sequence.tolist(), np.zeros(trace.sequences, np.int64)
    for row, layer, tokens in steps(trace):
        if inputs is not None:
            residency.see(layer, inputs[row, layer][None])
        found[sequence[row]] += sum(r.state is State.MISSED for r in residency.begin(layer, tokens).requests)
    return found


def compare(fitted: NextToken, trace: RoutingTrace, share: float,
            arms: Sequence[tuple[str, str]] = ()) -> dict[tuple[str, str], np.ndarray]:
    """(policy, scope) → misses in each sequence of `trace`; of all policies unless `arms` says which."""
    future = [step[1:] for step in steps(trace)]
    made = {"next-token": lambda: NextTokenPolicy(fitted), "belady": lambda: Belady(future)}
    arms = arms or [(name, scope) for name in POLICIES for scope in SCOPES if scope == "model" or name in BY_LAYER]
    return {(name, scope): misses(trace, made.get(name, lambda name=name: name)(), scope, share)
            for name, scope in progress(arms, f"{share:.0%} of the experts", unit="policy")}


def missed(train: RoutingTrace, test: RoutingTrace, shares: str, arms: dict[str, tuple[str, str]]
           ) -> dict[float, dict[str, np.ndarray]]:
    """`compare` at each share of "0.25,0.5" on every other prompt, by the names of `arms`; "next-token" is fitted to
    `train`."""
    fitted, some = fit(train), test.select(test.sequence % 2 == 0)
    found = {share: compare(fitted, some, share, list(arms.values())) for share in map(float, shares.split(","))}
    return {share: {name: of[arm][::2] for name, arm in arms.items()} for share, of in found.items()}
