"""GPU-NDP's published figures as data, and the assumptions fitted to half of them and judged by the others.

Only figures that the text states are here; its bar charts give no numbers. "Slightly worse" is a range that we chose,
"not supported" the number of 32 GB modules that Table II's parameter counts need (our division).

`fit` chooses what the paper leaves open by `FIT` alone and never sees `JUDGED`. It starts at its own last answer, and
the first one started at a prototype that had been tuned with more of the numbers in view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moelab.claims import ledger
from moelab.ndp.sweep import Assumptions, paper_sweep, quantities
from moelab.progress import progress


@dataclass(frozen=True)
class NDPClaim:
    """One published figure; `value` is a number, or the range (low, high) that words allow."""

    where: str
    text: str
    value: float | tuple[float, float]
    tolerance: float = 0.10

    def agrees(self, found: float) -> bool:
        """Within the tolerance of the value, or inside the range."""
        return abs(self.error(found)) <= (0 if isinstance(self.value, tuple) else self.tolerance)

    @property
    def said(self) -> str:
        return f"{self.value[0]}–{self.value[1]}" if isinstance(self.value, tuple) else f"{self.value}"

    def error(self, found: float) -> float:
        """Relative distance from the value, or from the nearer end of the range; 0 inside it."""
        if not isinstance(self.value, tuple):
            return found / self.value - 1
        low, high = self.value
        return min(0.0, found / low - 1) + max(0.0, found / high - 1)


LEDGER = [of for of in ledger() if of.source == "gpu-ndp" and of.unit in ("×", "modules") and len(of.metric) == 2
          and of.value is not None and not of.contradicted]
#: those of the ledger that the sweep answers, by the names of `sweep.quantities`, and the modules that models need
CLAIMS = {of.metric[1].replace("modules_needed_", "modules needed, "): NDPClaim(
    of.where, of.text, tuple(of.value) if isinstance(of.value, list) else of.value, of.tolerance)
    for of in LEDGER}

#: what a technique adds to another system → its two claims, after and before
INCREMENTS = {
    "prefill: +LB on +TP": ("prefill NDP+TP+LB", "prefill NDP+TP"),
    "decode: +LB on +TP": ("decode NDP+TP+LB", "decode NDP+TP"),
    "decode: +PRE on +TP": ("decode NDP+TP+PRE", "decode NDP+TP"),
    "decode: +LB on +TP+PRE": ("decode NDP+TP+LB+PRE", "decode NDP+TP+PRE"),
    "decode: +PRE on +TP+LB": ("decode NDP+TP+LB+PRE", "decode NDP+TP+LB"),
}

#: half of the numbers that depend on assumptions; the other half only judges
FIT = tuple(of.metric[1] for of in LEDGER if of.fitted)
JUDGED = tuple(name for name in CLAIMS if name not in FIT and not name.startswith("modules"))

HALVES = {"fit": FIT, "judge": JUDGED}

#: inconsistencies of the paper's text
ODDITIES = (
    "The abstract calls 2.41× the average end-to-end speedup over MoNDE; §IV-D gives the same number for the experts' "
    "decode alone, and end to end cannot gain as much on average as its experts do.",
    "§III-D prefetches as many experts as fit, §IV-D TopK of them (one for Mixtral).",
    "§III-C balances whole numbers of experts (E_g is 'the number of experts assigned to the GPU'), §I moves 'partial "
    "expert parameters'.",
    "E_g' gives a whole number that N does not divide no unhidden GPU work at all.",
    "Table II swaps Phi's hidden and intermediate size, counts DeepSeek's shared experts among its parameters, and "
    "gives Mixtral's in units of 2^30.",
    "The host's 89.6 GB/s needs DDR5-5600; Table I's modules are DDR4-3200, two channels of which give 51.2 GB/s, less "
    "than PCIe 5.0 x16 takes, and six modules are more than such a board has slots for.",
)

#: figures that the fitted assumptions miss, and why
MISSES = {of.metric[1]: of.reason for of in LEDGER if of.reason}

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
    sweep = paper_sweep(assumptions, units=sorted({2, *assumptions.averaged}), seeds=(seed,), answer=answer)
    return quantities(sweep, seed)


def fit(start: Assumptions = Assumptions(), measure: Callable[[Assumptions], dict[str, float]] = evaluate
        ) -> tuple[Assumptions, list[dict[str, Any]]]:
    """Coordinate descent from `start`, at most four rounds; returns the best assumptions and every trial."""
    best, least = start, error(measure(start))
    trials = [{"assumption": "start", "choice": "", "error": least}]
    for _ in range(4):
        before = best
        for name, options in progress(list(CHOICES.items()), "fitting assumptions", unit="assumption"):
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
