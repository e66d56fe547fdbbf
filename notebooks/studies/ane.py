"""The four systems that NPUMoE compares, as modelled: what notebook 06 measures its claims by.

The paper's routing traces are not public, so popularity is assumed. Where a published figure does
not say its prompt and chunk, the least and the most of all of `RUNS` answer. `READINGS` changes one
choice of ours at a time: what holds by one of them only is not concluded (`moelab.claims`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import numpy as np
from plotly.graph_objects import Figure

from moelab.ane.plan import ANEPlan, make_plan
from moelab.ane.predict import DeviceModel
from moelab.ane.systems import SYSTEMS
from moelab.cards import load_model
from moelab.viz import theme

from .ane_device import Modelled, fitted, prefill_of, unpadded
from .ane_popularity import assumed_counts, assumed_loads
from .ane_published import ABLATION, ATTENTION_CPU, TABLE_2, TABLE_5

#: (prompt, chunk) of Figures 14 to 16
RUNS = ((1024, 256), (1024, 512), (4096, 256), (4096, 512), (4096, 1024))
#: what is compared → the figure of a prefill
METRICS: dict[str, Callable[[Modelled], float]] = {
    "ttft": lambda p: p.ttft_s,
    "energy": lambda p: p.total.mj,
    "cpu_cycles": lambda p: p.total.cpu_ms,
}
#: a choice of ours, changed → options of `studies`
READINGS: dict[str, dict[str, Any]] = {
    "attention slower on the ANE": {"attention": 1 / ATTENTION_CPU},  # §5.3 can be read both ways
    "CPU and ANE in turn": {"overlap": False},
    "even popularity": {"skew": "even"},
    "launch without 1×32": {
        "samples": tuple(s for s in TABLE_5 if (s.G, s.C, s.mode) != (1, 32, "serial"))
    },
}
#: models and the machines that the paper ran them on
MACHINES = {"Phi-3.5-MoE": "m2-ultra", "Phi-tiny-MoE": "m2-max", "Qwen3-30B-A3B": "m2-ultra"}
RIVALS = tuple(system for system in TABLE_2 if system != "npumoe")
Run = dict[str, Modelled]  # system → its prefill
Study = dict[tuple[int, int], Run]  # (prompt, chunk) → systems
Values = dict[str, tuple[float, str]]  # name → (value, unit)


@cache
def _plans(
    model: str, chunk: int, skew: str, seed: int
) -> tuple[dict[str, tuple[ANEPlan, ANEPlan]], np.ndarray]:
    """(system → plan and the same unpadded, loads of other chunks of the same popularity)."""
    spec = load_model(model)
    counted, popularity = assumed_counts(spec, chunk, skew=skew, seed=seed), f"assumed: {skew}"
    plans = {
        system: make_plan(spec, *counted, chunk, system=system, popularity=popularity)
        for system in SYSTEMS
    }
    unseen = assumed_loads(spec, chunk, 80, skew, seed)[64:]
    return {system: (of, unpadded(of, unseen)) for system, of in plans.items()}, unseen


def study(
    model: str,
    device: DeviceModel,
    runs: Iterable[tuple[int, int]] = RUNS,
    skew: str = "typical",
    seed: int = 0,
) -> Study:
    """Every system's prefill of a model card for each (prompt, chunk)."""
    found = {}
    for prompt, chunk in runs:
        plans, unseen = _plans(model, chunk, skew, seed)
        found[prompt, chunk] = {
            s: prefill_of(device, plan, prompt, unseen, bare) for s, (plan, bare) in plans.items()
        }
    return found


def studies(seed: int = 0, skew: str = "typical", runs: Any = RUNS, **how: Any) -> dict[str, Study]:
    """The study of each of `MACHINES`; `how` are `ane_device.fitted`'s."""
    return {
        model: study(model, fitted(device, **how), runs, skew, seed)
        for model, device in MACHINES.items()
    }


def cpu_share(plan: ANEPlan) -> float:
    """Share of all experts that are placed on the CPU."""
    placed = sum(len(g.experts) for layer in plan.layers for g in layer.on("cpu"))
    return placed / (plan.spec.L * plan.spec.E)


def ratio(run: Run, metric: str, system: str) -> float:
    """A system's figure over NPUMoE's, in one run."""
    return METRICS[metric](run[system]) / METRICS[metric](run["npumoe"])


def figures(found: dict[str, Study]) -> Values:
    """All that the ledger asks of `studies`."""
    phi, tiny, qwen = found.values()
    device = fitted()
    values = {
        f"slot_{G}x{C}": (device.rates.graph_ms(G, C) / (G * C), "ms a row, serial")
        for G, C in ((1, 32), (1, 128), (8, 32), (8, 96), (8, 128), (8, 256))
    }
    for (P, B), run in phi.items():
        for metric in METRICS:
            for system in RIVALS:
                values[f"phi_{P}_{B}_{metric}_{system}"] = ratio(run, metric, system), "× NPUMoE"
        values[f"phi_{P}_{B}_mj_per_token"] = run["npumoe"].mj_per_token, "mJ"
    for metric, cost in (("ttft", "ms"), ("energy", "mj"), ("cpu_cycles", "cpu_ms")):
        for system in RIVALS:
            gains = [
                getattr(run[system].end_to_end, cost) / getattr(run["npumoe"].end_to_end, cost)
                for run in phi.values()
            ]
            values[f"end_to_end_{metric}_{system}_least"] = min(gains), "× NPUMoE, with decoding"
            values[f"end_to_end_{metric}_{system}_most"] = max(gains), "× NPUMoE, with decoding"
    first = next(iter(phi.values()))
    for cost, what in (("ms", "time"), ("cpu_ms", "cpu")):
        share = getattr(first["cpu"].total, cost) / getattr(first["cpu"].end_to_end, cost)
        values[f"prefill_share_{what}"] = share, "of end to end, Core ML (CPU only)"
    for system in ABLATION[:-1]:
        values[f"ablation_{system}"] = ratio(first, "ttft", system), "× all, TTFT"
        values[f"ablation_energy_{system}"] = ratio(first, "energy", system), "× all, energy"
    naive = first["naive"]
    share = naive.dispatch_ms / (naive.experts.ms + naive.host.ms)
    values["naive_dispatch_share"] = share, "of the naïve MoE block"
    for name, (runs, figure, unit) in _ranges(phi, tiny, qwen).items():
        of = [figure(run) for run in runs.values()]
        values |= {f"{name}_least": (min(of), unit), f"{name}_most": (max(of), unit)}
    return values | _over_any(tiny)


def _over_any(tiny: Study) -> Values:
    """Least and most over all runs and rivals of Phi-tiny-MoE."""
    values = {}
    for metric in ("ttft", "energy"):
        of = [ratio(run, metric, system) for run in tiny.values() for system in RIVALS]
        for end, value in (("least", min(of)), ("most", max(of))):
            values[f"Phi-tiny-MoE_{metric}_{end}"] = value, "× NPUMoE, any baseline"
    return values


def _ranges(phi: Study, tiny: Study, qwen: Study) -> dict[str, tuple[Study, Any, str]]:
    """Name → (runs, what of a run, unit) of figures that are told as least and most."""

    def padding_cycles(run: Run) -> float:
        ours = run["npumoe"]
        return ours.total.cpu_ms / (ours.total.cpu_ms - ours.padding.cpu_ms)

    def padding_time(run: Run) -> float:
        return run["npumoe"].padding.ms / (run["npumoe"].total.ms - run["npumoe"].padding.ms)

    def experts_share(run: Run) -> float:
        return run["npumoe"].experts.ms / run["npumoe"].total.ms

    def experts_on_cpu(run: Run) -> float:
        return run["cpu"].experts.ms / run["npumoe"].experts.ms

    return {
        "experts_of_ttft": (phi, experts_share, "of our TTFT"),
        "padding_time": (phi, padding_time, "of TTFT without padding"),
        "padding_cycles": (phi, padding_cycles, "× without padding"),
        "qwen_experts_cpu": (qwen, experts_on_cpu, "× NPUMoE, experts' time"),
    } | {
        f"qwen_{metric}_{system}": (qwen, partial(ratio, metric=metric, system=system), "× NPUMoE")
        for metric in ("ttft", "energy")
        for system in ("cpu", "anemll")
    }


def modelled(found: dict[str, Study], seed: int = 0) -> dict[str, tuple[float, str, str, Any]]:
    """Name → (value, unit, "modelled", {reading: value}) of `figures`, as `run.metric` takes it:
    each reading in the runs of `found`."""
    runs = tuple(next(iter(found.values())))
    by = {name: figures(studies(seed, runs=runs, **change)) for name, change in READINGS.items()}
    return {
        name: (*of, "modelled", {reading: values[name][0] for reading, values in by.items()})
        for name, of in figures(found).items()
    }


def add_paper(figure: Figure, *panels: dict[str, dict[str, float]]) -> Figure:
    """Published values, open diamonds on the bars of a figure; panels: {series: {group: value}}."""
    look = {"size": 10, "color": theme.BLACK, "line": {"width": 2}}
    for col, of in enumerate(panels, 1):
        for n, (name, said) in enumerate(of.items()):
            figure.add_scatter(
                x=[*said],
                y=[*said.values()],
                mode="markers",
                name="the paper",
                legendgroup="the paper",
                showlegend=(col, n) == (1, 0),
                offsetgroup=str(n),
                marker=look | {"symbol": "diamond-open"},
                hovertemplate=f"%{{x}}: %{{y:.3g}}<extra>{name}, paper</extra>",
                row=1,
                col=col,
            )
    return figure
