"""The balance conditions (`moelab.ndp.balance`) on the paper's machine and models: sides,
solutions, E_g of every cell.

All times are seconds; experts are those on the GPU.
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
Sides = dict[str, tuple[np.ndarray, np.ndarray]]  # side → (experts, seconds); nan breaks the line
Solutions = dict[str, tuple[float, float]]  # what → (experts, seconds)


def times(
    model: str, N: int, assumptions: Assumptions = Assumptions(), tokens: float = 1.0
) -> Times:
    """`Costs.balance_terms` of a model on N modules, for experts of so many tokens."""
    return Costs(load_model(model), assumptions.hardware(N)).balance_terms(tokens)


def stay(E_g: float, t: Times) -> float:
    """The right side."""
    return (t["N"] + 1) * t["T_a"] + t["T_n"] * (t["K"] - E_g)


def _points(t: Times, points: int = 12) -> np.ndarray:
    return np.linspace(0, t["K"], points * int(t["K"]) + 1)


def _solved(E_g: float, t: Times) -> Solutions:
    return {BALANCED: (E_g, stay(E_g, t)), WHOLE: (int(E_g), stay(int(E_g), t))}


def sides(t: Times, S: int = 1, points: int = 12) -> Sides:
    """Both sides of Eq. 2 (Eq. 1 at S = 1), with so many points an expert; the saw is broken at
    whole numbers."""
    x = _points(t, points)
    saw = [stay(E, t) + residual(float(E), **t, S=S) if E % 1 else np.nan for E in x]
    return {GPU: (x, np.array(saw)), STAY: (x, stay(x, t))}


def solutions(t: Times, S: int = 1) -> Solutions:
    """Where Eq. 2 holds, and the whole experts that the paper takes."""
    return _solved(balance(**t, S=S), t)


def prefetched(t: Times) -> tuple[Sides, Solutions]:
    """Eq. 3: sides and solutions for experts that are on the GPU already."""
    x = _points(t)
    most = most_on_gpu(**{name: value for name, value in t.items() if name != "T_w"})
    return {GPU: (x, t["T_g"] * x), STAY: (x, stay(x, t))}, _solved(most, t)


def answers(
    assumptions: Assumptions = Assumptions(), units: Sequence[int] = UNITS
) -> dict[tuple[str, int], float]:
    """(model, N) → E_g of Eq. 1, where N modules hold the model; below 1, whole-expert balancing
    does nothing."""
    return {
        (model, N): balance(**times(model, N, assumptions))
        for model in MODELS
        for N in units
        if modules_needed(model, assumptions) <= N
    }


def crossing(model: str, machine: Hardware) -> float:
    """S*, the prompt length in tokens at which the link brings an expert as fast as the modules
    compute it."""
    spec = load_model(model)
    return spec.E / spec.K * 2 * machine.units * machine.unit_macs / machine.link
