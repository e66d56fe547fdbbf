"""What to keep, and how to store it, so that tokens come fastest within a budget: chosen by
simulation.

Source: ZipMoE §3.4 and appendix C, whose planner takes popularity by rank, independent steps and a
formula for a layer's time. Here the best of its divisions only become candidates, beside the caches
that keep one state only; each is played by the simulator on the same tokens, from a warm cache, and
the fastest wins: in simulation no plan is slower than the best single state.

Tokens are those of a trace, or drawn from a calibration's counts, each layer by itself, as the
planner sees them: a real token repeats more of the one before. Only TPOT is compared; of the prompts nothing counts, neither
their time nor what they leave in the cache. Left out: prefetching, and what `simulator` leaves out.

Shapes: shares [L, E] of tokens that need each expert, their sum in a layer K.
"""

from __future__ import annotations

from copy import deepcopy
from statistics import fmean
from typing import Any

import numpy as np

from moelab.base.progress import progress
from moelab.cache.policies import DEFAULT_POLICY
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.calibration import Calibration, calibrate
from moelab.models.identity import identity
from moelab.offloading.offload import Memory
from moelab.offloading.slots import Sizes
from moelab.simulation.costs import Delays, Machine
from moelab.simulation.simulator import Steps, flat, simulate
from moelab.simulation.traced import forwards_of
from moelab.trace import DECODE, RoutingTrace
from moelab.zipmoe.planning import CachePlan, plans
from moelab.zipmoe.selection import sample, selection_probabilities

#: tokens that are played to fill the cache, and then to be timed
WARM = 64
TIMED = 16


def drawn(shares: np.ndarray, tokens: int, seed: int = 0) -> list[list[tuple[int, dict[int, int]]]]:
    """Decode steps of so many tokens, each expert of a layer as often as `shares` [L, E] says,
    independently."""
    layers = [
        sample(*selection_probabilities(f), tokens, seed + layer) for layer, f in enumerate(shares)
    ]
    return [
        [
            (layer, dict.fromkeys(np.flatnonzero(chosen).tolist(), 1))
            for layer, chosen in enumerate(token)
        ]
        for token in zip(*layers)
    ]


def shares_of(calibration: Calibration) -> np.ndarray:
    """Share of decoded tokens that need each expert: [L, E]; ValueError without decoded tokens."""
    if not calibration.tokens[DECODE]:
        raise ValueError(
            "this calibration has seen no decoded tokens, whose popularity a plan is for; calibrate with "
            "--new-tokens 2 or more"
        )
    return calibration.counts(DECODE).double().numpy() / calibration.tokens[DECODE]


def own_steps(trace: RoutingTrace, most: int = WARM + TIMED) -> Steps:
    """The first decode steps of a trace. ValueError without two."""
    passes = zip(*forwards_of(trace))
    steps = [step for step, forward in passes if forward.phase == "decode"][:most]
    if len(steps) < 2:
        raise ValueError(
            f"the trace of {trace.spec.name} has {len(steps)} tokens in decode, which a plan is for; "
            "give one of at least 2, or trace.in_phase(DECODE, 2)"
        )
    return steps


def auto_pools(
    calibration: Calibration | RoutingTrace | None, model: Any, memory: Memory, delays: Delays
) -> Pools:
    """What plan="auto" keeps, once a model is open: the fastest of `best_pools` on a trace's own
    steps, or on those drawn from a calibration. ValueError without either, or for another
    model's."""
    if calibration is None:
        raise ValueError(
            "plan='auto' divides the memory by how popular experts are: give calibration=, which "
            "`moelab calibrate MODEL FILE` makes, or a moelab.RoutingTrace"
        )
    how, trace = memory.how, calibration
    if traced := isinstance(trace, RoutingTrace):
        calibration = calibrate(trace)
    shares = shares_of(calibration.require(identity(model), memory.store.spec))
    steps = own_steps(trace) if traced else drawn(shares, WARM + TIMED)
    return best_pools(
        shares,
        steps,
        memory.kept,
        memory.sizes,
        Machine(delays, how.workers),
        staging=memory.staging,
        policy=how.cache,
        scope=how.scope,
        warm=len(steps) * WARM // (WARM + TIMED),
    )[0].pools


def best_pools(
    shares: np.ndarray,
    steps: Steps,
    room: int,
    sizes: Sizes,
    machine: Machine,
    *,
    staging: int,
    policy: Any = DEFAULT_POLICY,
    scope: str = "model",
    warm: int = WARM,
    most: int = 10,
) -> list[CachePlan]:
    """The `most` best plans and the caches of one state on the same tokens, fastest first, with the
    mean seconds of a decode step.

    shares : [L, E].    steps : tokens one by one, of which the first `warm` only fill the cache.
    room : bytes for the pools.    policy, scope : of the `Residency`.

    Few bits that are decoded once a load are kept FULL or COMPRESSED, as they lie. What is read in place,
    or beside a GPU into memory of the CPU that nothing FULL could have, is all FULL.
    """
    L, E = shares.shape
    pools = _candidates(shares, room, sizes, machine, scope, most)

    def tried(one: Pools) -> CachePlan:
        residency = Residency(L, E, one, deepcopy(policy), scope)
        for step in flat(steps[:warm]):
            residency.begin(*step)
        run = simulate(
            steps[warm:],
            [(1, "decode")] * len(steps[warm:]),
            residency,
            machine,
            staging=staging,
            scheduler="default",
        )
        return CachePlan(one, fmean(one.seconds for one in run.forwards))

    shown = progress(pools, "choosing pools") if len(pools) > 1 else pools
    return sorted(map(tried, shown), key=lambda one: one.seconds)


def _candidates(
    shares: np.ndarray, room: int, sizes: Sizes, machine: Machine, scope: str, most: int
) -> list[Pools]:
    """Pools of one state, and the best plans."""
    L, E = shares.shape
    copies, layers = (L, 1) if scope == "layer" else (1, L)
    each = room // copies
    full, sm, e = sizes.full, sizes.sm, sizes.e
    of = {"F": full, "C": sm + e, "S": sm, "E": e}
    states = "F" if sizes.far or not e else "FCSE" if sm else "FC"
    pools = [Pools(**{state: min(E * layers, each // of[state])}) for state in states]
    f = np.sort(shares, 1)[:, ::-1].mean(0)
    found = plans(f, each, (full, sm, e), machine.delays, machine.workers, states, layers)
    return list(dict.fromkeys([*pools, *(one.pools for one in found[:most])]))
