"""The balance conditions on the paper's machine and models: both sides of Eqs. 1 to 3, and what they ask for.

`times` are the four that decide (§III-C), of a model on N modules; `sides` and `solutions` are Eq. 1 (S = 1) and Eq. 2
over the experts on the GPU, `prefetched` Eq. 3. `answers` has E_g of Eq. 1 for every model and number of modules that
holds it: below 1 balancing in whole experts does nothing. The equations are solved in `moelab.ndp.balance`; seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moelab.cards import load_model
from moelab.ndp.balance import balance, most_on_gpu, residual
from moelab.ndp.costs import Costs
from moelab.ndp.hardware import Hardware
from moelab.ndp.sweep import MODELS, UNITS, Assumptions, modules_needed

GPU, STAY = "GPU: transfer and unhidden work", "modules: the experts that stay"
BALANCED, WHOLE = "balanced", "whole experts (the paper)"
Times = dict[str, float]
Sides = dict[str, tuple[np.ndarray, np.ndarray]]            # side → (experts, seconds); nan breaks the line
Solutions = dict[str, tuple[float, float]]                  # what → (experts, seconds)


def times(model: str, N: int, assumptions: Assumptions = Assumptions(), tokens: float = 1.0) -> Times:
    """T_w, T_g, T_n, T_a in seconds, K and N, for experts of so many tokens: the arguments of `balance`."""
    costs = Costs(load_model(model), assumptions.hardware(N))
    return {"T_w": costs.transfer(), "T_g": float(costs.gpu(tokens)), "T_n": float(costs.unit(tokens)) / N,
            "T_a": costs.activation, "K": costs.spec.K, "N": N}


def stay(E_g: float, t: Times) -> float:
    """The right side, seconds of the modules."""
    return (t["N"] + 1) * t["T_a"] + t["T_n"] * (t["K"] - E_g)


def sides(t: Times, S: int = 1, points: int = 100) -> Sides:
    """Both sides of Eq. 2; the saw of E_g' is broken at whole numbers. points : for each expert."""
    x = np.linspace(0, t["K"], points * int(t["K"]) + 1)
    saw = [stay(E, t) + residual(float(E), **t, S=S) if E % 1 else np.nan for E in x]
    return {GPU: (x, np.array(saw)), STAY: (x, stay(x, t))}


def solutions(t: Times, S: int = 1) -> Solutions:
    """Where Eq. 2 holds, and the whole experts that the paper takes."""
    E_g = balance(**t, S=S)
    return {BALANCED: (E_g, stay(E_g, t)), WHOLE: (int(E_g), stay(int(E_g), t))}


def prefetched(t: Times, points: int = 100) -> tuple[Sides, Solutions]:
    """Eq. 3: sides and solutions for experts that are on the GPU already."""
    x = np.linspace(0, t["K"], points * int(t["K"]) + 1)
    most = most_on_gpu(**{name: value for name, value in t.items() if name != "T_w"})
    return ({GPU: (x, t["T_g"] * x), STAY: (x, stay(x, t))},
            {BALANCED: (most, stay(most, t)), WHOLE: (int(most), stay(int(most), t))})


def answers(assumptions: Assumptions = Assumptions(), units: Sequence[int] = UNITS) -> dict[tuple[str, int], float]:
    """(model, N) → E_g of Eq. 1, where N modules hold the model."""
    return {(model, N): balance(**times(model, N, assumptions)) for model in MODELS
            for N in units if N >= modules_needed(model, assumptions)}


def largest_residual(found: dict[tuple[str, int], float], assumptions: Assumptions = Assumptions()) -> float:
    """How far apart the two sides are at most where the answer is no whole number, relative to one of them."""
    return max(abs(residual(E, **(t := times(*key, assumptions))) / stay(E, t)) for key, E in found.items() if E % 1)


def crossing(model: str, machine: Hardware) -> float:
    """S*, the prompt length at which the link brings an expert as fast as the modules compute it, tokens; on paper."""
    spec = load_model(model)
    return spec.E / spec.K * 2 * machine.units * machine.unit_macs / machine.link
