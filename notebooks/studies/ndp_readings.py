"""Readings of GPU-NDP's text that its own numbers speak against, other machines, and the numbers of
modules that its averages run over, for notebook 07."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from moelab.base.registry import require
from moelab.ndp.assumptions import CHOICES, Assumptions
from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import Costs
from moelab.ndp.hardware import Hardware
from moelab.ndp.plans import LayerStep, Plan
from moelab.ndp.systems import ROUND, MoNDE, System

#: what the text leaves open → what it could be
OPEN = CHOICES | {
    "monde_prefill": ("share", "tuned"),  # how much of a prompt MoNDE sends to the GPU
    "monde_relieves": ("busiest",),  # which module loses the experts that the GPU gets
    "monde_rounding": ("floor", "ceil"),  # MoNDE's share, experts being whole
    "rounding": ("round", "ceil", "none"),  # of E_g (§III-C says whole, §I partial experts)
    "limit": ("memory",),  # experts prefetched: TopK (§IV-D) or what fits (§III-D)
    "averaged": ((2, 4, 6),),  # modules that the averages run over
}
#: name → arguments of `hardware`, for drop-downs and sweeps; each is tried with 1 to 16 units
VARIANTS = {
    "paper (DDR4 modules, PCIe 5)": {},
    "PCIe 4": {"link_gbs": 31.5},
    "PCIe 6": {"link_gbs": 121.0},
    "two DDR4 channels": {"host_channels": 2},
    "faster address mapping": {"mapping": "MOP4CLXOR"},
    "LPDDR-NDP": {"unit": "lpddr-ndp"},
    "HBM-PIM": {"unit": "hbm-pim"},
}


@dataclass(unsafe_hash=True)
class ReadMoNDE(MoNDE):
    """MoNDE by a reading.

    rounding : of the share by bandwidths, A · link ÷ (link + units' bandwidth).
    relieves : which leave while decoding: the most "popular", or the popular ones of the "busiest"
        unit, one by one.
    prefill : how many leave for a prompt, the ones with most tokens: "none", the "share"; or
        "tuned", as many as make the layer fastest.
    """

    rounding: str = "round"
    relieves: str = "popular"
    prefill: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (
            ("rounding", ROUND),
            ("relieves", ("popular", "busiest")),
            ("prefill", ("none", "share", "tuned")),
        ):
            require(name, getattr(self, name), known)

    def plan(self, step: LayerStep, costs: Costs) -> Plan:
        if step.decode:
            if self.relieves == "busiest":
                step = step.take(_busiest_first(step))
            return super().plan(step, costs)
        least, most = {
            "none": (0, 0),
            "share": (self.share(len(step), costs),) * 2,
            "tuned": (int(step.resident.sum()), len(step)),
        }[self.prefill]
        plans = (self.first(count, step, costs) for count in range(least, most + 1))
        return min(plans, key=lambda plan: layer_seconds(plan, costs))

    def situations(self, homes: np.ndarray, resident: np.ndarray, costs: Costs) -> np.ndarray:
        if self.relieves == "popular":
            return super().situations(homes, resident, costs)
        stay = (homes >= 0) & ~resident
        on = (homes[:, :, None] == np.arange(costs.hardware.units)) & stay[:, :, None]
        loads = np.sort(on.sum(1), axis=1)  # units are alike
        return np.column_stack([(homes >= 0).sum(1), resident.sum(1), loads])


def _busiest_first(step: LayerStep) -> np.ndarray:
    """The order in which experts of a decode step leave: those in GPU memory, then one by one the
    hottest of the unit that has most left."""
    stays = ~step.resident
    mates = (step.home[:, None] == step.home) & stays
    return np.lexsort((-np.triu(mates).sum(1), stays))


@dataclass(frozen=True)
class Readings(Assumptions):
    """`Assumptions`, readings of MoNDE (see `ReadMoNDE`), and over which numbers of modules the paper's
    averages run."""

    monde_prefill: str = "none"
    monde_relieves: str = "popular"
    monde_rounding: str = "round"
    averaged: tuple[int, ...] = (2, 3, 4, 5, 6)

    def variant(self, name: str, N: int) -> Hardware:
        """Another machine, of `VARIANTS`; its units have their own clock."""
        require("machine", name, VARIANTS)
        return self.hardware(N, **({"clock_ghz": None} | VARIANTS[name]))

    def system(self, name: str) -> System:
        system = super().system(name)
        if not isinstance(system, MoNDE):
            return system
        own = self.monde_rounding, self.monde_relieves, self.monde_prefill
        return ReadMoNDE(**asdict(system), **dict(zip(("rounding", "relieves", "prefill"), own)))
