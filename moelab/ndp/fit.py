"""GPU-NDP's published figures, and what the paper leaves open: its readings, half of the figures to
choose by, half to judge.

Only figures that the text states are here; its bar charts give no numbers. "Slightly worse" is a
range that we chose, "not supported" the number of 32 GB modules that Table II's parameter counts
need (our division). `FIT` chooses among `CHOICES` (`moelab.ndp.readings`), `JUDGED` never does.
Each judged figure has a predictor without a simulator in the ledger (`Claim.null`): what that gets,
too, follows from the fitted ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moelab.claims import ledger

LEDGER = [
    of
    for of in ledger()
    if of.source == "gpu-ndp"
    and of.unit in ("×", "modules")
    and len(of.metric) == 2
    and of.value is not None
    and not of.contradicted
]
#: those of the ledger that the sweep answers, by the names of `sweep.quantities`, and the modules
#: that models need
CLAIMS = {of.metric[1].replace("modules_needed_", "modules needed, "): of for of in LEDGER}

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
    "The abstract calls 2.41× the average end-to-end speedup over MoNDE; §IV-D gives the "
    "same number for the experts' decode alone, and end to end cannot gain as much on "
    "average as its experts do.",
    "§III-D prefetches as many experts as fit, §IV-D TopK of them (one for Mixtral).",
    "§III-C balances whole numbers of experts (E_g is 'the number of experts assigned to the "
    "GPU'), §I moves 'partial expert parameters'.",
    "E_g' gives a whole number that N does not divide no unhidden GPU work at all.",
    "Table II swaps Phi's hidden and intermediate size, counts DeepSeek's shared experts "
    "among its parameters, and gives Mixtral's in units of 2^30.",
    "The host's 89.6 GB/s needs DDR5-5600; Table I's modules are DDR4-3200, two channels of "
    "which give 51.2 GB/s, less than PCIe 5.0 x16 takes, and six modules are more than such "
    "a board has slots for.",
)

#: figures that the fitted assumptions miss, and why
MISSES = {of.metric[1]: of.reason for of in LEDGER if of.reason}

#: assumption → its choices
CHOICES: dict[str, tuple[Any, ...]] = {
    "zipf": (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0),
    "bias": (0.0, 0.3, 0.6),
    "mapping": ("RoBaRaCoCh", "MOP4CLXOR", "ChRaBaRoCo", "stated"),
    "clock_ghz": (0.5, 0.64, 0.8, 1.0, 1.25, 1.6),
    "efficiency": ((1.0, 1.0), (0.9, 0.8), (0.85, 0.8)),
    "gpu_gb": (16.0, 16 * 2**30 / 1e9),
    "placement": ("id", "popularity"),
    "monde_prefill": ("none", "share", "tuned"),
    "monde_relieves": ("popular", "busiest"),
    "monde_rounding": ("floor", "round", "ceil"),
    "rounding": ("floor", "round", "ceil", "none"),
    "eq2_tokens": ("mean", "prompt"),
    "limit": ("K", "memory"),
    "cached": ("none", "Fiddler"),
    "averaged": ((2, 3, 4, 5, 6), (2, 4, 6), (1, 2, 3, 4, 5, 6)),
}
#: assumption → where its choices come from
SOURCES = {
    "zipf": "skew of the experts' popularity; §II-A says highly uneven, gives no figure",
    "bias": "how much a prompt has its own favourites; §III-D and Fig. 6 say so, the text gives no "
    "figure",
    "mapping": "a module's streaming rate: §IV-A states 102.4 GB/s inside; the others are what "
    "ramulator2, which the paper modified, gives by address mapping",
    "clock_ghz": "of a module's multipliers: Table I counts 64 and gives no clock; 0.8 matches "
    "102.4 GB/s",
    "efficiency": "of GPU, link and CPU: peaks (§IV-A), AttAcc's simulator (0.85, 0.8), in between",
    "gpu_gb": "Table I's 16GB in 10^9 bytes, or as memory is sold, 2^30",
    "placement": "§III-B: MoNDE puts entire experts on distinct modules, no rule is given",
    "monde_prefill": "§IV-B: MoNDE distributes by arithmetic intensity; §III-B: part of the work "
    "goes to the GPU; how much of a prompt is not said: nothing, the bandwidths' "
    "share, the best of each layer",
    "monde_relieves": "§III-B, Fig. 3a: which module loses the experts that the GPU gets is not "
    "said",
    "monde_rounding": "MoNDE §3 gives a ratio, experts are whole",
    "rounding": "§III-C: E_g is 'the number of experts', and has a fractional part; §I moves "
    "partial experts",
    "eq2_tokens": "§III-C: E_n + E_g = TopK also for a prompt, whose tokens choose different "
    "experts",
    "limit": "experts of a layer that are prefetched: TopK (§IV-D), or what fits (§III-D)",
    "cached": "popular experts in GPU memory all along: Fiddler's own paper has them, GPU-NDP does "
    "not mention it",
    "averaged": "numbers of modules that the averages run over: which bars Figs. 8 to 11 show is "
    "not in the text",
}


def off(name: str, found: Any) -> Any:
    """Relative distance of a number, or of an array's, from a claim's value or the nearer end of
    its range, else 0."""
    low, high = CLAIMS[name].ends
    return np.minimum(0.0, found / low - 1) + np.maximum(0.0, found / high - 1)


def error(found: Mapping[str, Any], names: Sequence[str] = FIT) -> Any:
    """Root mean square of the logarithmic errors on those claims; inside a range is no error."""
    return np.sqrt(sum(np.log1p(off(name, found[name])) ** 2 for name in names) / len(names))


def nulls(names: Sequence[str] = JUDGED) -> dict[str, float]:
    """What ratios of published numbers predict of those claims, without a simulator."""
    return {name: CLAIMS[name].predictor for name in names if CLAIMS[name].null}
