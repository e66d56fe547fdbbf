"""Choosing what the paper leaves open: a search over assumptions, by half of the published numbers, judged by the rest.

Every assumption has a handful of choices, each with a reason to be among them. Coordinate descent tries the choices of
one assumption after the other, keeps the best by the error on `claims.FIT`, and stops when a round changes nothing; it
never sees `claims.JUDGED`. `sensitivity` then changes one assumption at a time and reports all numbers.

The search starts at its own last answer, and the first one started at what a prototype had been tuned to with more of
the numbers in view; "never sees" holds for the search, not for where it began.

The error is the root mean square of log(found ÷ published), of words the distance from the range they allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from moelab.ndp.claims import CLAIMS, FIT
from moelab.ndp.sweep import Assumptions, paper_sweep, quantities
from moelab.progress import progress

#: assumption → its choices
CHOICES: dict[str, tuple[Any, ...]] = {
    "mapping": ("RoBaRaCoCh", "MOP4CLXOR", "ChRaBaRoCo"),                   # the three that were measured
    "clock_ghz": (0.5, 0.64, 0.8, 1.0, 1.25, 1.6),                          # 0.8 matches 102.4 GB/s exactly
    "efficiency": ((1.0, 1.0), (0.9, 0.8), (0.85, 0.8)),                    # peaks; in between; AttAcc's
    "zipf": (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0),
    "bias": (0.0, 0.15, 0.3, 0.45, 0.6),
    "monde_rounding": ("floor", "round", "ceil"),
    "placement": ("id", "popularity"),
    "rounding": ("floor", "round", "ceil"),
    "eq2_tokens": ("mean", "prompt"),
    "limit": ("K", "memory"),                                               # §IV-D; §III-D
    "averaged": ((2, 3, 4, 5, 6), (2, 4, 6), (1, 2, 3, 4, 5, 6)),           # which bars the figures show
}


def error(found: dict[str, float], names: Sequence[str] = FIT) -> float:
    """Root mean square of the logarithmic errors on those claims; inside a range is no error."""
    return math.sqrt(sum(math.log1p(CLAIMS[name].error(found[name])) ** 2 for name in names) / len(names))


def evaluate(assumptions: Assumptions, seed: int = 0, answer: int = 512) -> dict[str, float]:
    """All quantities under these assumptions, by the closed form."""
    units = sorted({2, *assumptions.averaged})
    return quantities(paper_sweep(assumptions, units=units, seeds=(seed,), answer=answer), seed)


def fit(start: Assumptions = Assumptions(), choices: dict[str, tuple[Any, ...]] = CHOICES, rounds: int = 4,
        measure: Callable[[Assumptions], dict[str, float]] = evaluate) -> tuple[Assumptions, list[dict[str, Any]]]:
    """Coordinate descent from `start`; returns the best assumptions and every trial, best so far last among equals."""
    best, least = start, error(measure(start))
    trials = [{"assumption": "start", "choice": "", "error": least}]
    for _ in range(rounds):
        before = best
        for name, options in progress(list(choices.items()), "fitting assumptions", unit="assumption"):
            for option in options:
                if option != getattr(best, name):
                    trial = replace(best, **{name: option})
                    value = error(measure(trial))
                    trials.append({"assumption": name, "choice": option, "error": value})
                    if value < least - 1e-6:
                        best, least = trial, value
        if best == before:
            break
    return best, trials


def sensitivity(base: Assumptions = Assumptions(), choices: dict[str, tuple[Any, ...]] = CHOICES,
                measure: Callable[[Assumptions], dict[str, float]] = evaluate) -> dict[str, dict[str, float]]:
    """"assumption = choice" → every quantity with only that assumption changed; "as fitted" first."""
    table = {"as fitted": measure(base)}
    for name, options in progress(list(choices.items()), "sensitivity", unit="assumption"):
        for option in options:
            if option != getattr(base, name):
                table[f"{name} = {option}"] = measure(replace(base, **{name: option}))
    return table
