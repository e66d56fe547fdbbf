"""Eviction policies on recorded routing: misses of each beside the default's, Belady's, and prediction across tokens.

Prompts of the test split are decoded token by token, one after another, with a cache for a share of the experts that is
never emptied; every policy of the registry decides about the same steps, those of `BY_LAYER` with a pool for each
layer, too. "next-token" is fitted to prompts of the train split (`moelab.speculate.next_token`). Misses are exact
counts; ratios to the default's have 95 % intervals over prompts. Two models: the small one, and an untrained one of
another shape, in which neighbouring tokens choose nearly alike: the recent past says almost all there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from moelab import open_model
from moelab.arguments import number, several, whole
from moelab.cache.next_token import NextTokenPolicy
from moelab.cache.policies import DEFAULT_POLICY, POLICIES, Belady
from moelab.cache.pools import Pools
from moelab.cache.residency import SCOPES, Residency
from moelab.datasets import prompts, token_count
from moelab.intervals import ratio
from moelab.models.opening import spec_of
from moelab.progress import progress
from moelab.recording import record
from moelab.speculate.next_token import NextToken, fit
from moelab.specs import State
from moelab.trace import RoutingTrace

SOURCES = ("code", "prose", "needle_multikey", "lookup")
BUDGETS = (0.25, 0.5, 0.75)
#: of the untrained model, beside what is the small one's
OTHER = {"num_hidden_layers": 10, "num_local_experts": 64, "num_experts": 64, "num_experts_per_tok": 6}
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


def table(found: dict[tuple[str, str], np.ndarray], requests: int) -> dict[str, dict[str, float]]:
    """Rows of a comparison: hit rate, and misses over the default's with their interval."""
    rows = {}
    for (name, scope), missed in sorted(found.items(), key=lambda item: -item[1].sum()):
        over, low, high = ratio(missed, found[DEFAULT])
        rows[f"{name}, {'layer by layer' if scope == 'layer' else 'whole model'}"] = {
            "hit rate": 1 - missed.sum() / requests, f"misses ÷ {DEFAULT_POLICY}": over, "95 % from": low, "to": high}
    return rows


def untrained(model: Any, seed: int, **changes: Any) -> Any:
    """A model of the same shape, but for `changes` of its config, with random weights and the same tokenizer."""
    config = copy.deepcopy(model.config)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    made = type(model)(config).to(model.dtype).eval()
    made.tokenizer = model.tokenizer
    return made


def traces(model: Any, n: int, calibrated: int, tokens: int, seed: int) -> tuple[RoutingTrace, RoutingTrace]:
    """(calibration, test) of a model, with router inputs: prompts of each source of the train and the test split."""
    how = {"tokens": tokens, "seed": seed, "count": token_count(model.tokenizer)}
    return tuple(record(model, [p.text for source in SOURCES for p in prompts(source, of, split=split, **how)],
                        hidden=True, batch_size=16) for split, of in (("train", calibrated), ("test", n)))


def run(prompts_each: int = 4, calibrated: int = 16, tokens: int = 256, budgets: Sequence[float] = BUDGETS,
        seed: int = 0) -> dict[str, dict[str, Any]]:
    small, sections = open_model(), {}
    for name, model in (("small model", small), ("untrained model of another shape", untrained(small, seed, **OTHER))):
        calibration, test = traces(model, prompts_each, calibrated, tokens, seed)
        spec, fitted, requests = spec_of(model), fit(calibration), int((test.ids != test.spec.E).sum())
        for share in budgets:
            found = compare(fitted, test, share)
            sections[f"{name} (L {spec.L}, E {spec.E}, K {spec.K}), {share:.0%} of the experts (exact counts)"] = \
                table(found, requests)
    return sections


OPTIONS = {"prompts_each": (whole(2), "test prompts of each source"), "calibrated": (whole(2), "train prompts of each"),
           "tokens": (whole(64), "of a prompt, about"), "budgets": (several(number(above=0)), "shares of the experts"),
           "seed": (whole(), "picks the prompts, and the untrained model's weights")}
