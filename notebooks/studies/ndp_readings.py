"""Other readings of GPU-NDP's text, and other machines, for notebook 07.

`Readings` are the `Assumptions` with all else that the text leaves open: its `system` has the
schedules by each reading."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from moelab.base.registry import require
from moelab.ndp.assumptions import Assumptions
from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import Costs
from moelab.ndp.hardware import Hardware
from moelab.ndp.plans import LayerStep, Plan
from moelab.ndp.systems import GPUNDP, MoNDE, System, unit_loads

ROUND = {"floor": np.floor, "round": np.rint, "ceil": np.ceil}
SHARES = ROUND | {"none": np.positive}  # of an expert
#: name → arguments of `hardware`, for drop-downs and sweeps; each is tried with 1 to 16 units
VARIANTS = {
    "paper (DDR4 modules, PCIe 5)": {},
    "PCIe 4": {"pcie": 4},
    "PCIe 6": {"pcie": 6},
    "two DDR4 channels": {"host_channels": 2},
    "faster address mapping": {"mapping": "MOP4CLXOR"},
    "LPDDR-NDP": {"unit": "lpddr-ndp"},
    "HBM-PIM": {"unit": "hbm-pim"},
}


@dataclass(frozen=True)
class ReadMoNDE(MoNDE):
    """MoNDE by a reading.

    rounding : of the share by bandwidths, A · link ÷ (link + units' bandwidth).
    relieves : which leave while decoding: the most "popular", or the popular ones of the "busiest"
        unit, one by one.
    prefill : how many leave for a prompt, the ones with most tokens: "none", the "share"; or
        "tuned", as many as make the layer fastest.
    placement : which unit has which expert: round-robin by "id" or "popularity".
    """

    rounding: str = "round"
    relieves: str = "popular"
    prefill: str = "none"
    placement: str = "id"

    def __post_init__(self) -> None:
        for name, known in (
            ("rounding", ROUND),
            ("relieves", ("popular", "busiest")),
            ("prefill", ("none", "share", "tuned")),
            ("placement", ("id", "popularity")),
        ):
            require(name, getattr(self, name), known)

    def place(self, history: np.ndarray, N: int) -> np.ndarray:
        if self.placement == "id":
            return super().place(history, N)
        order = np.argsort(-history, axis=1, kind="stable")
        return np.argsort(order, axis=1, kind="stable") % N

    def share(self, active: int, costs: Costs) -> int:
        h = costs.hardware
        return int(ROUND[self.rounding](active * h.link / (h.link + h.units * h.unit_bandwidth)))

    def plan(self, step: LayerStep, costs: Costs) -> Plan:
        if step.decode:
            if self.relieves == "busiest":
                step = step.take(_busiest_first(step, step.resident))
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
        there = homes >= 0
        loads = unit_loads(homes, there & ~resident, costs)
        return np.column_stack([there.sum(1), resident.sum(1), loads])


def _busiest_first(step: LayerStep, here: np.ndarray) -> np.ndarray:
    """The order in which experts leave: those in `here` before others, the hottest of the busiest
    unit first.

    Of equally busy units the one with more work that is not `here`, so that the order is
    independent of unit numbers."""
    units = range(int(step.home.max(initial=-1)) + 1)
    load = [
        [int(step.tokens[mine].sum()), int(step.tokens[mine & ~here].sum())]
        for mine in (step.home == u for u in units)
    ]
    order = []
    for stage in (here, ~here):
        left = [list(np.flatnonzero((step.home == u) & stage)) for u in units]
        while any(left):
            u = max((u for u in units if left[u]), key=load.__getitem__)
            order.append(left[u].pop(0))
            load[u][0] -= int(step.tokens[order[-1]])
    return np.array(order, int)


@dataclass(frozen=True)
class ReadGPUNDP(GPUNDP):
    """The paper's framework by a reading.

    rounding : of E_g in the literal version: "floor", "round", "ceil" or "none".
    eq2_tokens : of an expert in Eq. 2's T_n and T_g: the layer's "mean", or the whole "prompt", as
        E_n + E_g = TopK reads if all tokens chose the same experts.
    """

    rounding: str = "floor"
    eq2_tokens: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        require("rounding", self.rounding, SHARES)
        require("eq2_tokens", self.eq2_tokens, ("mean", "prompt"))

    def expert_tokens(self, step: LayerStep) -> float:
        return step.S if self.eq2_tokens == "prompt" else super().expert_tokens(step)

    def rounded(self, E_g: float) -> float:
        return SHARES[self.rounding](E_g)


@dataclass(frozen=True)
class Readings(Assumptions):
    """What the paper leaves open; notebook 07 says where each is, and what else it could be.

    monde_…, placement : of MoNDE, see `ReadMoNDE`. rounding, eq2_tokens, limit : of the literal
    versions, see `ReadGPUNDP`.
    cached : who keeps popular experts in GPU memory: "none", "Fiddler", or "all": equal means,
        everyone fills it.
    averaged : numbers of units that the paper's averages run over."""

    placement: str = "id"
    monde_prefill: str = "none"
    monde_relieves: str = "popular"
    monde_rounding: str = "round"
    rounding: str = "floor"
    eq2_tokens: str = "mean"
    limit: str = "K"
    cached: str = "none"
    averaged: tuple[int, ...] = (2, 3, 4, 5, 6)

    def variant(self, name: str, N: int) -> Hardware:
        """Another machine, of `VARIANTS`; its units have their own clock."""
        require("machine", name, VARIANTS)
        return self.hardware(N, **({"clock_ghz": None} | VARIANTS[name]))

    def system(self, name: str) -> System:
        """The system of that name (of `SYSTEMS`) by these readings."""
        system = super().system(name)
        if self.cached in ("all", name):
            system = replace(system, cached=True)
        own = {field.name: getattr(system, field.name) for field in fields(system)}
        if isinstance(system, MoNDE):
            return ReadMoNDE(
                **own,
                rounding=self.monde_rounding,
                relieves=self.monde_relieves,
                prefill=self.monde_prefill,
                placement=self.placement,
            )
        if isinstance(system, GPUNDP):
            if system.version == "literal":
                own["limit"] = "memory" if system.cached else self.limit
            return ReadGPUNDP(**own, rounding=self.rounding, eq2_tokens=self.eq2_tokens)
        return system
