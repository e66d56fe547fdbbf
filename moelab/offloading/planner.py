"""What to keep, and how to store it, so that tokens come fastest within a budget: chosen by simulation.

Source: ZipMoE §3.4 and appendix C, whose planner takes popularity by rank, independent steps and a formula for a
layer's time. Here the best of its divisions only become candidates, beside the caches that keep one state only; each
is played by the simulator on the same tokens, from a warm cache, and the fastest wins: in simulation no plan is slower
than the best single state. `rank_stored` does so for every way of storing experts on a machine that only its figures
describe, so a Huffman code's pools compete with bf12 and few bits in pool F alone.

Tokens are drawn from a calibration's counts, each layer by itself, as the planner sees them: a real token repeats
more of the one before. Only TPOT is compared; of the prompts nothing counts, neither their time nor what they leave in
the cache. Left out: prefetching, and what `simulator` leaves out.

Shapes: shares [L, E] of tokens that need each expert, their sum in a layer K.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from moelab.cache import selection
from moelab.cache.planning import plan
from moelab.cache.policies import DEFAULT_POLICY
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.calibration import Calibration
from moelab.offloading.budget import parse_budget
from moelab.offloading.limits import MachineRates
from moelab.offloading.simulator import Linear, Steps, delays_of, flat, simulate
from moelab.offloading.slots import Sizes, divide
from moelab.progress import progress
from moelab.schedule.requests import Delays
from moelab.specs import DeviceSpec, MoESpec
from moelab.store import fewbit
from moelab.trace import DECODE

#: tokens that are played to fill the cache, and then to be timed
WARM, TIMED = 64, 16
#: compressed over raw size of bf16 exponents: 2.65 of 8 bits, the entropy that ZipMoE found (Fig. 2)
RHO = 2.65 / 8
#: bytes of a bf16 weight in twelve bits, over its two
BF12 = 0.75


class Tried(NamedTuple):
    """A division of the budget, mean seconds of a decode step with it, and share of experts found in any state."""

    pools: Pools
    tpot: float
    hit_rate: float


class Stored(NamedTuple):
    """A way of storing experts: a codec or few-bit format, whether it is lossless, bytes of all experts on disk, and
    what the simulator found for the best pools."""

    name: str
    lossless: bool
    disk_bytes: int
    pools: Pools
    tpot: float
    hit_rate: float
    kind: str = "simulated"


def drawn(shares: np.ndarray, tokens: int, seed: int = 0) -> list[list[tuple[int, dict[int, int]]]]:
    """Decode steps of so many tokens, each expert of a layer as often as `shares` [L, E] says, independently."""
    layers = []
    for layer, f in enumerate(shares):
        f, k = selection.whole(f)
        layers.append(selection.sample(selection.selection_probabilities(f, k), k, tokens, seed + layer))
    return [[(layer, dict.fromkeys(np.flatnonzero(found[token]).tolist(), 1)) for layer, found in enumerate(layers)]
            for token in range(tokens)]


def shares_of(calibration: Calibration) -> np.ndarray:
    """Share of decoded tokens that need each expert: [L, E]; ValueError without decoded tokens."""
    if not calibration.tokens[DECODE]:
        raise ValueError("this calibration has seen no decoded tokens, whose popularity a plan is for; calibrate with "
                         "--new-tokens 2 or more")
    return calibration.counts(DECODE).double().numpy() / calibration.tokens[DECODE]


def best_pools(shares: np.ndarray, steps: Steps, room: int, sizes: Sizes, delays: Delays, *, workers: int, staging: int,
               policy: Any = DEFAULT_POLICY, scope: str = "model", margin: float | None = None, warm: int = WARM,
               other: Linear = (0.0, 0.0)) -> list[Tried]:
    """The ten best plans and the caches of one state on the same tokens, fastest first.

    shares : [L, E].    steps : tokens one by one, of which the first `warm` only fill the cache.
    room : bytes for the pools.    policy, scope, margin : of the `Residency`.    other : as of `simulate`.

    Where chunks are not kept apart (raw, bf12, few bits) there is only one: all FULL.
    """
    L, E = shares.shape
    f, k = selection.whole(np.sort(shares, 1)[:, ::-1].mean(0))
    copies, layers = (L, 1) if scope == "layer" else (1, L)
    each = room // copies
    full, sm, e = sizes.full, sizes.sm, sizes.e
    bytes_of = {"F": full} | ({"C": sm + e, "S": sm, "E": e} if sm and e else {})
    pools = [Pools(**{state: min(E * layers, each // size)}) for state, size in bytes_of.items()]
    if len(pools) > 1 and each >= layers * min(sm, e):
        pools += [found.pools for found in plan(f, each, (full, sm, e), k, delays, workers, layers=layers).best(10)]
    tried = []
    for one in progress(list(dict.fromkeys(pools)), "choosing pools") if len(pools) > 1 else pools:
        residency = Residency(L, E, one, deepcopy(policy), scope, margin)
        for step in flat(steps[:warm]):
            residency.begin(*step)
        timed = steps[warm:]
        run = simulate(timed, [(1, "decode")] * len(timed), residency, delays, workers=workers, staging=staging,
                       other=other, quiet=True)
        tried.append(Tried(one, fmean(end - start for start, end, *_ in run.forwards), run.counters.hit_rate()))
    return sorted(tried, key=lambda one: one.tpot)


def rank_stored(spec: MoESpec, device: DeviceSpec, memory: str | float | int, shares: np.ndarray | None = None, *,
                workers: int = 1, rho: float = RHO, decompress_gbs: float | None = None, dense_bytes: float = 0.0,
                policy: Any = DEFAULT_POLICY, tokens: int = TIMED, seed: int = 0) -> list[Stored]:
    """Raw, bf12, Huffman and few-bit experts on a machine, by simulated TPOT, fastest first.

    device : a card, or `Profile.to_device()`. Kernels multiply bf12 and few bits as they lie, at the rate of memory.
    memory : for experts, see `parse_budget`; a share is one of the experts in bf16, "auto" what this machine has left.
    rho, decompress_gbs : as of `delays_of`; where nobody says how fast a thread decompresses, Huffman is left out.
    shares : [L, E]; by default all experts are equally popular, a cache's worst case.
    dense_bytes : of the weights that every token needs.

    What has no room for one expert beside one that is loaded is left out.

    Raises ValueError: a card without the figures, or no room for any.
    """
    spec, rates = spec.with_dtype("bfloat16"), MachineRates.of(device)
    shares = np.full((spec.L, spec.E), spec.K / spec.E) if shares is None else shares
    steps, budget = drawn(shares, WARM + tokens, seed), parse_budget(memory, spec.experts_bytes, round(dense_bytes))
    decodes, found = decompress_gbs or "decompress_gbs" in device.figures, []
    for name, full, e, sm in ways(spec, rho if decodes else None):
        sizes = Sizes(full, e, sm, not sm)
        delays, other = delays_of(device, spec, *((rho, dense_bytes, decompress_gbs) if sm else
                                                  (1.0, dense_bytes, math.inf)))
        if not sm:
            delays = replace(delays, e_read=full / rates.read, sm_read=0.0, recover=0.0, e_bytes=full, sm_bytes=0,
                             expert_base=full / rates.memory)
        if budget < sizes.in_flight + full:
            continue
        _, staging = divide(budget, sizes, spec.L, spec.E, None, "model", workers, None)
        best = best_pools(shares, steps, budget - staging * sizes.in_flight, sizes, delays, workers=workers,
                          staging=staging, policy=policy, other=other)[0]
        found.append(Stored(name, not fewbit.is_format(name), spec.L * spec.E * (e + sm or full), *best))
    if not found:
        raise ValueError(f"{budget:,} bytes hold no expert beside one that is loaded, however it is stored: in bf16 "
                         f"one has {spec.expert_bytes:,}; give more memory")
    return sorted(found, key=lambda one: one.tpot)


def ways(spec: MoESpec, rho: float | None) -> Iterable[tuple[str, int, int, int]]:
    """(name, bytes of an expert as it is computed, of its E-chunks, of its SM-chunks), the last two only if it is kept
    apart: raw, bf12, Huffman (if `rho` is known), and each format that its matrices fit."""
    full = spec.expert_bytes
    yield from (("raw", full, 0, 0), ("bf12", round(BF12 * full), 0, 0))
    if rho is not None:
        yield "huffman", full, round(rho * full / 2), full // 2
    if spec.H % fewbit.GROUP == spec.I % fewbit.GROUP == 0:
        for name in fewbit.FORMATS:
            wide, back = fewbit.nbytes(name, (spec.I, spec.H)), fewbit.nbytes(name, (spec.H, spec.I))
            yield name, (1 + spec.gated) * wide + back, 0, 0
