"""GPU-NDP's evaluation (§IV) as a sweep: models × units × systems × seeds, and the numbers of
Figs. 8 to 11 from it.

Routing depends on model and seed alone, and MoE-OnDemand and Fiddler not on N, so both are computed
once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import mean

from moelab.base.progress import progress
from moelab.base.specs import MoESpec
from moelab.cards import load_model
from moelab.ndp.costs import Costs, NotSupported
from moelab.ndp.simulation import Result, simulate
from moelab.ndp.systems import PAPER, System

from .ndp_readings import Readings

MODELS = ("DeepSeek-MoE-16B", "Qwen3-30B-A3B", "Phi-3.5-MoE", "Mixtral-8x7B")
#: their names in figures and tables
SHORT = dict(zip(MODELS, ("DeepSeek-MoE", "Qwen3-30B-A3B", "Phi-3.5-MoE", "Mixtral-8x7B")))
UNITS = (1, 2, 3, 4, 5, 6)
SEEDS = (0, 1, 2)
CHOSEN = Readings()
Spread = tuple[float, float, float]  # mean, least, most


@dataclass(frozen=True, eq=False)
class Sweep:
    """(model, units, system, seed) → result, None where it is not supported."""

    assumptions: Readings
    cells: dict[tuple[str, int, str, int], Result | None] = field(default_factory=dict)

    def result(self, model: str, units: int, system: str, seed: int = 0) -> Result | None:
        """What was simulated of a cell; None if the machine does not support it."""
        return self.cells[model, units, system, seed]

    @property
    def seeds(self) -> list[int]:
        """The seeds of the routing, ascending."""
        return sorted({seed for *_, seed in self.cells})

    @property
    def models(self) -> list[str]:
        """The models, in the order in which they were simulated."""
        return list(dict.fromkeys(model for model, *_ in self.cells))

    @property
    def units(self) -> list[int]:
        """The numbers of units, ascending."""
        return sorted({N for _, N, *_ in self.cells})

    def speedups(
        self, system: str, over: str, what: str, seed: int, units: Sequence[int] = ()
    ) -> dict[tuple[str, int], float]:
        """(model, units) → how much faster `system` is, in `what`: a property of `Result` such as
        "moe_decode".

        Only where both are supported, and for these numbers of units, or those that the assumptions
        average over.
        """
        units = units or self.assumptions.averaged
        pairs = {
            (model, N): (own, self.cells[model, N, over, seed])
            for (model, N, name, s), own in self.cells.items()
            if (name, s) == (system, seed) and N in units
        }
        return {
            cell: getattr(other, what) / getattr(own, what)
            for cell, (own, other) in pairs.items()
            if own and other
        }

    def gain(self, model: str, units: int, system: str, over: str, what: str) -> Spread | None:
        """How much faster `system` is, in `what`: (mean, least, most) over the seeds; None where
        not supported."""
        pairs = [
            (self.result(model, units, system, s), self.result(model, units, over, s))
            for s in self.seeds
        ]
        return spread(
            [getattr(other, what) / getattr(own, what) for own, other in pairs if own and other]
        )


def paper_sweep(
    assumptions: Readings = CHOSEN,
    models: Sequence[str | MoESpec] = MODELS,
    units: Sequence[int] = UNITS,
    systems: Sequence[str] | Mapping[str, System] = PAPER,
    seeds: Iterable[int] = SEEDS,
    prompt: int = 512,
    answer: int = 512,
) -> Sweep:
    """Simulate every combination by the closed form; shows progress.

    models : names of cards, or specs, which the sweep then has by their names. systems : names, or
    name → your own."""
    sweep = Sweep(assumptions)
    by_host = {}
    seeds = list(seeds)
    systems = (
        systems
        if isinstance(systems, Mapping)
        else {name: assumptions.system(name) for name in systems}
    )
    jobs = [
        (model, seed, N, name)
        for model in models
        for seed in seeds
        for N in units
        for name in systems
    ]
    for model, seed, N, name in progress(jobs, "GPU-NDP sweep", unit="run"):
        routing = assumptions.routing(model, seed, prompt, answer)
        system = systems[name]
        model = model if isinstance(model, str) else model.name
        if (result := by_host.get((model, seed, name))) is None:
            with suppress(NotSupported):
                result = simulate(assumptions.hardware(N), system, routing)
            if system.home == "host":
                by_host[model, seed, name] = result
        sweep.cells[model, N, name, seed] = result
    return sweep


def spread(values: Sequence[float]) -> Spread | None:
    """(mean, least, most) of values; None of none."""
    return (mean(values), min(values), max(values)) if values else None


def over_seeds(sweep: Sweep) -> dict[str, Spread]:
    """The published quantities: name → (mean, least, most) over the sweep's seeds."""
    found = [quantities(sweep, seed) for seed in sweep.seeds]
    return {name: spread([one[name] for one in found]) for name in found[0]}


def quantities(sweep: Sweep, seed: int) -> dict[str, float]:
    """The published quantities for one seed of the routing, by the names of the ledger's metrics."""
    found = {}
    for phase, shown in (("prefill", PAPER[3:5]), ("decode", PAPER[3:])):
        for name in shown:
            found[f"{phase} {name}"] = mean(
                sweep.speedups(name, "MoNDE", f"moe_{phase}", seed).values()
            )
        qwen = sweep.speedups(PAPER[-1], "MoNDE", f"moe_{phase}", seed).items()
        found[f"Qwen3 {phase}"] = mean(
            value for (model, _), value in qwen if model == "Qwen3-30B-A3B"
        )
    for other in PAPER[:3]:
        found[f"end to end ÷ {other}"] = max(
            sweep.speedups(PAPER[-1], other, "end_to_end", seed).values()
        )
    alone = sweep.speedups("NDP+TP", "MoNDE", "moe_decode", seed)
    ends = sweep.speedups(PAPER[-1], "MoNDE", "end_to_end", seed)
    hybrid = sweep.speedups(PAPER[-1], "NDP+TP", "moe_decode", seed, sweep.units)
    for model in sweep.models:
        own = {N: gain for (of, N), gain in hybrid.items() if of == model}
        found[f"end_to_end_{model}"] = mean(x for (of, _), x in ends.items() if of == model)
        found[f"hybrid_fewest_{model}"] = own[min(own)]
        found[f"hybrid_six_{model}"] = own[max(own)]
    beside = sweep.speedups(PAPER[-1], "NDP+TP+LB", "moe_decode", seed, sweep.units)
    return found | {
        "DeepSeek, N=2, decode NDP+TP": alone["DeepSeek-MoE-16B", 2],
        "Qwen3, N=2, decode NDP+TP": alone["Qwen3-30B-A3B", 2],
        "end_to_end_mean_over_monde": mean(ends.values()),
        "prefetching_beside_balancing_least": min(beside.values()),
    }


def modules_needed(model: str | MoESpec, assumptions: Readings = CHOSEN) -> int:
    """The smallest number of units that hold the model's experts (exact): the end of the N.S.
    cells."""
    for N in range(1, 1000):
        with suppress(NotSupported):
            spec = load_model(model) if isinstance(model, str) else model
            Costs(spec, assumptions.hardware(N)).check(0, "units")
            return N
    raise NotSupported(f"{model} fits no machine of this kind")
