"""What GPU-NDP says came out, as data, and whether a simulated value agrees.

Only figures that the text states are here; its bar charts give no numbers to compare with. "Slightly worse" and "not
supported" are made checkable: a range that we chose, and the number of 32 GB modules that Table II's own parameter
counts need, which is our division: the text names no cell. `FIT` are the numbers that free assumptions may be chosen
by; all others only judge them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """One published figure; `value` is a number, or the range (low, high) that words allow."""

    where: str
    text: str
    value: float | tuple[float, float]
    tolerance: float = 0.10

    def agrees(self, found: float) -> bool:
        """Within the tolerance of the value, or inside the range."""
        if isinstance(self.value, tuple):
            return self.value[0] <= found <= self.value[1]
        return abs(found - self.value) <= self.tolerance * self.value

    @property
    def said(self) -> str:
        """The value as text."""
        return f"{self.value[0]}–{self.value[1]}" if isinstance(self.value, tuple) else f"{self.value}"

    def error(self, found: float) -> float:
        """Relative distance from the value, or from the nearer end of the range; 0 inside it."""
        if not isinstance(self.value, tuple):
            return found / self.value - 1
        low, high = self.value
        return min(0.0, found / low - 1) + max(0.0, found / high - 1)


SLIGHTLY_WORSE = (0.85, 1.0)

CLAIMS = {
    "prefill NDP+TP": Claim("§IV-D, Fig. 10", "MoE prefill, mean speedup of NDP+TP over MoNDE", 1.26),
    "prefill NDP+TP+LB": Claim("§IV-D, Fig. 10", "MoE prefill, mean speedup of NDP+TP+LB over MoNDE", 1.46),
    "decode NDP+TP": Claim("§IV-D, Fig. 11", "MoE decode, mean speedup of NDP+TP over MoNDE", 1.99),
    "decode NDP+TP+LB": Claim("§IV-D, Fig. 11", "MoE decode, mean speedup of NDP+TP+LB over MoNDE", 2.19),
    "decode NDP+TP+PRE": Claim("§IV-D, Fig. 11", "MoE decode, mean speedup of NDP+TP+PRE over MoNDE", 2.23),
    "decode NDP+TP+LB+PRE": Claim("§IV-D, Fig. 11", "MoE decode, mean speedup of NDP+TP+LB+PRE over MoNDE", 2.41),
    "Qwen3 prefill": Claim("§IV-B, Fig. 8", "Qwen3, MoE prefill, mean speedup of the framework over MoNDE", 1.36),
    "Qwen3 decode": Claim("§IV-B, Fig. 8", "Qwen3, MoE decode, mean speedup of the framework over MoNDE", 1.69),
    "end to end ÷ MoE-OnDemand": Claim("§IV-C, Fig. 9", "largest end-to-end speedup over MoE-OnDemand", 5.49),
    "end to end ÷ Fiddler": Claim("§IV-C, Fig. 9", "largest end-to-end speedup over Fiddler", 4.05),
    "end to end ÷ MoNDE": Claim("§IV-C, Fig. 9", "largest end-to-end speedup over MoNDE", 2.56),
    "DeepSeek, N=2, decode NDP+TP": Claim("§IV-D, Fig. 11", "slightly worse than MoNDE", SLIGHTLY_WORSE),
    "Qwen3, N=2, decode NDP+TP": Claim("§IV-D, Fig. 11", "slightly worse than MoNDE", SLIGHTLY_WORSE),
    "modules needed, DeepSeek-MoE-16B": Claim("Table II, Figs. 9–11", "15.4B parameters in 32 GB modules", 1, 0.0),
    "modules needed, Qwen3-30B-A3B": Claim("Table II, Figs. 9–11", "29.0B parameters in 32 GB modules", 2, 0.0),
    "modules needed, Phi-3.5-MoE": Claim("Table II, Figs. 9–11", "40.3B parameters in 32 GB modules", 3, 0.0),
    "modules needed, Mixtral-8x7B": Claim("Table II, Figs. 9–11", "42.0B parameters in 32 GB modules", 3, 0.0),
}

#: what a technique adds to another system → its two claims, after and before
INCREMENTS = {
    "prefill: +LB on +TP": ("prefill NDP+TP+LB", "prefill NDP+TP"),
    "decode: +LB on +TP": ("decode NDP+TP+LB", "decode NDP+TP"),
    "decode: +PRE on +TP": ("decode NDP+TP+PRE", "decode NDP+TP"),
    "decode: +LB on +TP+PRE": ("decode NDP+TP+LB+PRE", "decode NDP+TP+PRE"),
    "decode: +PRE on +TP+LB": ("decode NDP+TP+LB+PRE", "decode NDP+TP+LB"),
}

#: half of the numbers that depend on assumptions; the other half only judges
FIT = ("prefill NDP+TP", "decode NDP+TP", "decode NDP+TP+LB", "decode NDP+TP+PRE", "end to end ÷ MoE-OnDemand",
       "Qwen3, N=2, decode NDP+TP")
JUDGED = tuple(name for name in CLAIMS if name not in FIT and not name.startswith("modules"))

#: what a figure was used to → its names
HALVES = {"fit": FIT, "judge": JUDGED}

#: what the paper's text contradicts itself in, or what cannot be as it says
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
MISSES = {
    "Qwen3 prefill": "With 128 experts a prompt of 512 tokens loads the units almost evenly, so tensor parallelism "
                     "gains little, and E_g ≤ TopK moves at most 8 of 128 experts. More skewed routing would come "
                     "close, but prefetching would then hit more often than §IV-D's 2.23 allows.",
    "end to end ÷ MoNDE": "Averages of 2.41 over all models and 1.69 for Qwen3 leave about 2.7 for the others, and the "
                          "two large models, whose time is nearly all experts, must lie above that at six units. Of "
                          "the other choices that `moelab.ndp.fit` has, one at a time, only rounding E_g up brings it "
                          "below 2.9, and that ruins balancing (`python -m moelab bench ndp --sensitivity`).",
}
