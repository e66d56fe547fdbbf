"""A routing trace as a run: what an engine would be asked for, of a model that need not be here.

Sequences run one after another without clearing the cache; tokens in prefill that follow each other
are one forward pass, each token in decode is one. A trace has no times, so whatever is to take time
needs a device. Left out: batches of several sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from moelab.base.specs import MoESpec
from moelab.cache.policies import DEFAULT_POLICY
from moelab.cache.pools import Pools
from moelab.cache.residency import SPARE, Residency
from moelab.cards import other_bytes
from moelab.offloading.budget import parse_budget
from moelab.offloading.hybrid import Rates
from moelab.offloading.metrics import Forward
from moelab.offloading.run import EngineRun, EngineSettings
from moelab.trace import DECODE, PREFILL, RoutingTrace

#: experts that are in flight beside what is kept, as of an engine with one thread
STAGING = 3
#: a pass: (layer, {expert: tokens}) of its layers
Step = list[tuple[int, dict[int, int]]]


def in_passes(trace: RoutingTrace) -> tuple[torch.Tensor, list[tuple[int, int, str]]]:
    """`ids`, one sequence after the other; and where each forward pass begins and ends in it, and
    its phase."""
    order = trace.sequence.long().argsort(stable=True)
    phase = trace.phase[order]
    sequence = trace.sequence[order]
    new = torch.ones(len(order), dtype=torch.bool)
    new[1:] = (phase[1:] == DECODE) | (phase[1:] != phase[:-1]) | (sequence[1:] != sequence[:-1])
    borders = pairwise([*torch.nonzero(new).flatten().tolist(), len(order)])
    names = {PREFILL: "prefill", DECODE: "decode"}
    return trace.ids[order], [(a, b, names[int(phase[a])]) for a, b in borders]


def forwards_of(trace: RoutingTrace) -> tuple[list[Step], list[Forward]]:
    """What each forward pass routes, experts in the order in which they are first chosen; and its
    tokens and phase."""
    ids, passes = in_passes(trace)
    steps = []
    for a, b, _ in passes:
        step = []
        for layer, chosen in enumerate(ids[a:b].movedim(1, 0).flatten(1).tolist()):
            tokens = Counter(chosen)
            del tokens[trace.spec.E]
            if tokens:
                step.append((layer, dict(tokens)))
        steps.append(step)
    return steps, [Forward(0.0, 0.0, b - a, phase) for a, b, phase in passes]


def run_of(
    trace: RoutingTrace,
    memory: str | float | None = None,
    cache: Any = DEFAULT_POLICY,
    pools: Pools | None = None,
    alone: bool = False,
    hybrid: bool = False,
) -> EngineRun:
    """The run of an engine that keeps experts in so much memory: without times, with all else that
    `moelab.simulate` and the views take.

    memory : of the experts that are kept, "25%", "8GB" or bytes; loads in flight lie beside it.
        None: all of them. A share needs no sizes.
    pools : in place of it.
    alone : whether it is a GPU that runs each decoded token without asking the host.
    hybrid : whether some experts are computed where they lie, at rates that a device says.

    Raises ValueError: a trace without routing; a budget that is none; one in bytes where the
    experts' sizes are not known."""
    spec = trace.spec
    steps, forwards = forwards_of(trace)
    if not any(steps):
        raise ValueError(f"the trace of {spec.name} has no routing: no expert ran in it")
    each = spec.expert_bytes if spec.H else 0
    pools = pools or Pools(F=kept(spec, memory))
    alone = alone and pools.F == pools.capacity > 0
    settings = EngineSettings(
        spec,
        pools,
        cache,
        "model",
        1,
        STAGING,
        0,
        (((each, 0),) * spec.E,) * spec.L,
        other_bytes(spec) if spec.H else 0,
        spare=-(-pools.F // SPARE) if alone else 0,
    )
    run = EngineRun(settings, as_opened(settings))
    run.steps = steps
    run.predictions = [[] for _ in steps]
    paths = {"decode": "token"} if alone else {}
    run.forwards = [one._replace(path=paths.get(one.phase, "none")) for one in forwards]
    run.rates = [Rates() if hybrid else None for _ in steps]
    return run


def previous(ids: np.ndarray, E: int, ahead: int) -> Iterator[dict[int, list[int]]]:
    """What the token before chose at a layer."""
    yield {}
    for before in ids[:-1].tolist():
        yield {layer: [e for e in before[layer] if e < E] for layer in range(ahead, len(before))}


def followers(ids: np.ndarray, E: int, ahead: int) -> Iterator[dict[int, list[int]]]:
    """The K experts that came most often with what this token has chosen `ahead` layers before, in
    all tokens until now."""
    _, L, K = ids.shape
    seen = np.zeros((L, E + 1, E + 1), np.int32)  # layer, expert there, expert of the later layer
    layers = np.arange(ahead, L)
    for chosen in ids:
        here = chosen[: L - ahead]
        there = chosen[ahead:]
        scores = seen[layers[:, None], here].sum(1)[:, :E]
        best = np.argsort(-scores, axis=1, kind="stable")[:, :K]
        yield {
            int(layer): [int(e) for e in of if score[e] > 0]
            for layer, of, score in zip(layers, best, scores)
        }
        seen[layers[:, None, None], here[:, :, None], there[:, None]] += 1


#: predictors that need nothing but ids [T, L, K]: of each token, {layer: experts}
GUESSES = {"followers": followers, "previous": previous}


def guesses(trace: RoutingTrace, name: str, ahead: int = 1) -> list[dict[int, list[int]]]:
    """What a predictor of `GUESSES` says in each pass of `forwards_of`, asked `ahead` layers before
    the one that it is about; nothing in prefill."""
    ids, passes = in_passes(trace)
    told = [*GUESSES[name](ids.long().numpy(), trace.spec.E, ahead)]
    return [
        {layer: of for layer, of in told[a].items() if of} if phase == "decode" else {}
        for a, _, phase in passes
    ]


def as_opened(settings: EngineSettings) -> Residency:
    """The cache of an engine before its first token: with what it was opened with."""
    spec = settings.spec
    policy = deepcopy(settings.policy)
    how = {"scope": settings.scope, "spare": settings.spare}
    residency = Residency(spec.L, spec.E, settings.pools, policy, **how)
    residency.fill(settings.first)
    return residency


def kept(spec: MoESpec, memory: str | float | None) -> int:
    """How many experts fit into a budget; ValueError if none does, or their sizes are needed and
    not known."""
    every = spec.L * spec.E
    if memory is None:
        return every
    of_bytes = parse_budget(memory, 0, 0) > 0  # a share of nothing is nothing
    found = parse_budget(memory, every, 0)
    found = min(every, found // spec.expert_bytes if of_bytes else found)
    if not found:
        raise ValueError(f"no expert of {spec.name} fits into {memory}; give more memory")
    return found
