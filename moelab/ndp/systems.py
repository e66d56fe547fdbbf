"""The schedules that GPU-NDP compares: MoE-OnDemand, Fiddler, MoNDE, and tensor parallelism,
balancing, prefetching.

A system turns the `LayerStep` of a layer into a `Plan`. Where the paper is ambiguous `GPUNDP` has
two versions:

    literal   E_g and E_max in whole experts, E_g rounded down; it is at most K in prefill too, because
              E_n + E_g = TopK;
              after a prefetch hit the misses stay on the units; K experts a layer are prefetched
              (§IV-D).
    improved  shares of an expert may move ("partial expert parameters", §I), misses after a hit are
              balanced too, as many experts move in prefill as pay, and of those that fit what
              pays is prefetched (`simulation.NDPRun.pays`). The split ends both sides at once, by
              bisection on the closed form.

What else the text leaves open are a system's fields; `moelab.ndp.assumptions.CHOICES` has the other
readings of each.

`cached`: a system may hold the most popular experts, as other prompts know them, in GPU memory all
along, as many as fit; it computes them there. The paper's text gives that to none, Fiddler's own
paper to Fiddler; equal means to all."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from moelab.base.registry import require
from moelab.ndp.balance import balance, most_on_gpu
from moelab.ndp.closed_form import far_side, gpu_side, layer_seconds, link_seconds
from moelab.ndp.costs import Costs
from moelab.ndp.plans import LayerStep, Plan, make_plan
from moelab.ndp.prefetch import most_used


class System(ABC):
    """A schedule: of your own with `plan` alone; what else it decides has defaults. Each run has a
    copy of its own, so a system may keep state.

    cached : whether popular experts stay in GPU memory, see above. home : where all experts are,
        "host" or "units".
    whole : each is on one unit; otherwise a part of each on all units.
    alike : it makes no difference which experts a decode step needs, see `situations`.
    `run` is the `moelab.ndp.simulation.NDPRun` that a system plans; its `routing`, `costs`, `most`
    and `cached` are what it may ask for.
    prefetches : how many of a layer: "none", at most "K", as many as fit the "memory", or of those
    what will "pay"."""

    cached = False
    home = "units"
    whole = True
    alike = False
    prefetches = "none"

    @abstractmethod
    def plan(self, step: LayerStep, costs: Costs) -> Plan:
        """Who computes which share of each expert that a layer's step needs."""

    def place(self, history: np.ndarray, N: int) -> np.ndarray:
        """The unit of each expert where units hold whole experts, int [L, E], by their popularity on
        other prompts, [L, E]; here round-robin by id."""
        L, E = history.shape
        return np.tile(np.arange(E) % N, (L, 1))

    def resident(self, run: Any) -> np.ndarray:
        """Which experts GPU memory has from the start, bool [L, E]; here, if `cached`, the most
        popular ones."""
        return most_used(run.routing.history, run.most * self.cached)

    def prefetched(self, run: Any) -> np.ndarray:
        """Which it has when decoding begins, bool [L, E]; what it had not is loaded before. Here,
        if the system `prefetches`, the ones that the prompt used most, and else those that it
        has."""
        if self.prefetches == "none":
            return run.cached
        counts = run.routing.counts()
        if self.prefetches == "K":
            return most_used(counts, min(run.most, run.costs.spec.K))
        fit = most_used(counts, run.most)
        return fit & run.pays(counts) if self.prefetches == "pay" else fit

    def after(self, plan: Plan, costs: Costs) -> np.ndarray | None:
        """Which experts of the layer stay in GPU memory after this plan, bool [E]; None: those that
        it had. One that this plan did not send there as a whole is loaded then, while everything
        waits."""
        return None

    def held(self, step: LayerStep, N: int) -> tuple[np.ndarray | float, float]:
        """The share of each expert's columns that each of N units ([A, N] or one for all) and the
        host has."""
        if self.home == "host":
            return 0.0, 1.0
        return step.home[:, None] == np.arange(N) if self.whole else 1 / N, 0.0

    def situations(
        self, homes: np.ndarray, resident: np.ndarray, costs: Costs
    ) -> np.ndarray | None:
        """Steps of one decoded token as integers [n, c]: equal rows take equally long, whenever
        they come; here, if experts are `alike`, how many there are and how many in GPU memory. Where
        a system does not say so (None), every step is planned at its time, some thousand times more
        slowly; what has `after`, always is.

        homes : int [n, K], units of the chosen experts, most popular first; −1 where none ran.
        resident : bool [n, K]."""
        return np.column_stack([(homes >= 0).sum(1), resident.sum(1)]) if self.alike else None


@dataclass(frozen=True)
class OnDemand(System):
    """MoE-OnDemand: activated experts that are not on the GPU cross the link to it, transfers
    hiding computation."""

    cached: bool = False
    home = "host"
    alike = True

    def plan(self, step: LayerStep, costs: Costs) -> Plan:
        return make_plan(step, costs.hardware.units, resident=step.resident, moved=~step.resident)


class Fiddler(OnDemand):
    """Fiddler: an expert is computed by the CPU unless the GPU has it, or sending it there is
    faster (its §3)."""

    def plan(self, step: LayerStep, costs: Costs) -> Plan:
        on_cpu = ~step.resident & (
            costs.cpu(step.tokens) <= costs.transfer() + costs.gpu(step.tokens)
        )
        return make_plan(
            step,
            costs.hardware.units,
            resident=step.resident,
            host=on_cpu,
            moved=~on_cpu & ~step.resident,
        )


#: what corrects MoNDE's share
FACTORS = (1.0, 0.0, 0.5, 0.75, 1.5, 2.0, 4.0)
#: of a share of experts, which is no whole number
ROUND = {"floor": np.floor, "round": np.rint, "ceil": np.ceil, "none": np.positive}


@dataclass(unsafe_hash=True)  # a run sets `factor`
class MoNDE(System):
    """MoNDE: whole experts on their units. While decoding, of the active experts as many as the
    link's share of all bandwidth go to the GPU (its §3); of a prompt none, as units are then short
    of multipliers, which the ratio does not know.

    placement : of experts on units, round-robin by "id" or "popularity".
    correction : of the share by history, which §III-C tells of and neither text explains: "none", or
        the one of `FACTORS` that would have been fastest on the "prompt"."""

    cached: bool = False
    placement: str = "id"
    correction: str = "none"
    rounding = "round"  # of the share
    factor = 1.0

    def __post_init__(self) -> None:
        require("placement", self.placement, ("id", "popularity"))
        require("correction", self.correction, ("none", "prompt"))

    def place(self, history: np.ndarray, N: int) -> np.ndarray:
        if self.placement == "id":
            return super().place(history, N)
        order = np.argsort(-history, axis=1, kind="stable")
        return np.argsort(order, axis=1) % N

    def prefetched(self, run: Any) -> np.ndarray:
        """What it has; before decoding begins the prompt corrects the share."""

        def seconds(factor: float) -> float:
            self.factor = factor
            return run.decode_seconds(run.routing.prefill, run.cached).sum()

        if self.correction == "prompt":
            self.factor = min(FACTORS, key=seconds)
        return super().prefetched(run)

    def share(self, active: int, costs: Costs) -> int:
        """How many of the active experts go to the GPU: in the ratio of the link's bandwidth to
        all."""
        h = costs.hardware
        share = self.factor * active * h.link / (h.link + h.units * h.unit_bandwidth)
        return int(ROUND[self.rounding](min(active, share)))

    def plan(self, step: LayerStep, costs: Costs) -> Plan:
        return self.first(self.share(len(step), costs) if step.decode else 0, step, costs)

    def first(self, count: int, step: LayerStep, costs: Costs) -> Plan:
        """The first `count` experts of a step on the GPU, those included that it has."""
        place = (~step.resident).cumsum() + step.resident.sum()  # of what must be sent
        moved = ~step.resident & (place <= count)
        return make_plan(step, costs.hardware.units, resident=step.resident, moved=moved)

    def situations(self, homes: np.ndarray, resident: np.ndarray, costs: Costs) -> np.ndarray:
        active, here = (homes >= 0).sum(1), resident.sum(1)
        stay = (homes >= 0) & ~resident
        shares = np.array([self.share(n, costs) for n in range(homes.shape[1] + 1)])
        stay &= stay.cumsum(1) > (shares[active] - here)[:, None]
        on = (homes[:, :, None] == np.arange(costs.hardware.units)) & stay[:, :, None]
        return np.column_stack([active, here, np.sort(on.sum(1), axis=1)])  # units are alike


@dataclass(frozen=True)
class GPUNDP(System):
    """The paper's framework: every expert cut into all units, the other techniques on or off.

    load_balance, prefetch : +LB, +PRE, beside +TP. version : "literal" or "improved", see
        above.
    Of the literal version are limit : prefetch at most "K" experts of a layer (§IV-D), or what fits
        the "memory" (§III-D). rounding : of E_g. eq2_tokens : of an expert in T_n and T_g: the layer's
        "mean", or the whole "prompt", as E_n + E_g = TopK reads if all tokens choose alike."""

    load_balance: bool = True
    prefetch: bool = True
    version: str = "literal"
    limit: str = "K"
    cached: bool = False
    rounding: str = "floor"
    eq2_tokens: str = "mean"
    whole = False
    alike = True

    def __post_init__(self) -> None:
        require("version", self.version, ("literal", "improved"))
        require("limit", self.limit, ("K", "memory"))
        require("rounding", self.rounding, ROUND)
        require("eq2_tokens", self.eq2_tokens, ("mean", "prompt"))

    @property
    def looks(self) -> bool:
        """Whether it asks what is on the GPU."""
        return self.prefetch or self.cached

    @property
    def prefetches(self) -> str:
        """By which rule experts are brought to the GPU before the answer; "none" without
        prefetching, what pays by the improved version, what fits if it was full already."""
        limit = "memory" if self.cached else self.limit
        return ("pay" if self.version == "improved" else limit) if self.prefetch else "none"

    def plan(self, step: LayerStep, costs: Costs) -> Plan:
        step = step.take(np.argsort(~(step.resident & self.looks), kind="stable"))
        here = step.resident & self.looks
        literal = self._literal(step, here, costs)
        if self.version == "literal" or not (self.load_balance or self.looks):
            return literal
        return min(
            literal, *self._improved(step, here, costs), key=lambda plan: layer_seconds(plan, costs)
        )

    def _first(self, u: float, step: LayerStep, here: np.ndarray, costs: Costs) -> Plan:
        """The first u experts on the GPU, where u need not be whole; the others on the units."""
        N = costs.hardware.units
        share = np.clip(u - np.arange(len(step)), 0, 1)
        return make_plan(
            step,
            N,
            resident=share * here,
            moved=share * ~here,
            split=True,
            pieces=N,
        )

    def _literal(self, step: LayerStep, here: np.ndarray, costs: Costs) -> Plan:
        n = step.S if self.eq2_tokens == "prompt" else step.tokens.sum() / max(1, len(step))
        terms = costs.balance_terms(n, costs.hardware.units) | {"K": min(costs.spec.K, len(step))}
        E_g = 0.0
        if here.any():  # §III-D, step 3, Eq. 3
            del terms["T_w"]
            E_g = min(int(here.sum()), math.floor(most_on_gpu(**terms)))
        elif self.load_balance and len(step):  # Eqs. 1 and 2
            E_g = ROUND[self.rounding](balance(**terms, S=step.S))
        return self._first(E_g, step, here, costs)

    def _improved(self, step: LayerStep, here: np.ndarray, costs: Costs) -> list[Plan]:
        """Plans around the u where both sides end at once, by bisection: the units' falls with u,
        the GPU's rises. The nearest whole u is tried, too, which bisection only comes near."""
        most = len(step) if self.load_balance else int(here.sum())
        low = 0.0
        high = float(most)
        while high - low > 1e-7 * most:
            u = (low + high) / 2
            plan = self._first(u, step, here, costs)
            near = max(gpu_side(plan, costs), link_seconds(plan, costs))
            low, high = (u, high) if near < far_side(plan, costs) else (low, u)
        return [
            self._first(u, step, here, costs)
            for u in (0, most, low, high, math.floor(low), round(low))
        ]


#: name → system; the literal ones as in the paper's figures
SYSTEMS: dict[str, System] = {
    "MoE-OnDemand": OnDemand(),
    "Fiddler": Fiddler(),
    "MoNDE": MoNDE(),
    **{
        "NDP+TP" + "+LB" * lb + "+PRE" * pre + ", improved" * better: GPUNDP(
            lb, pre, "improved" if better else "literal"
        )
        for lb in (False, True)
        for pre in (False, True)
        for better in (False, True)
        if lb or pre or not better
    },
}
#: the seven systems of Figs. 9 to 11
PAPER = ("MoE-OnDemand", "Fiddler", "MoNDE", "NDP+TP", "NDP+TP+LB", "NDP+TP+PRE", "NDP+TP+LB+PRE")
