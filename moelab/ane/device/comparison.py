"""Systems and settings of plans compared, as modelled (NPUMoE §5, §A), and how far that depends on
our choices.

The paper's routing traces are not public, so popularity is assumed (`skew`, "typical"). `figures`
are what the ledger's claims ask for; where a published figure does not say its prompt and chunk,
the least and the most of all ours answer. `READINGS` changes one choice at a time: what holds by
one of them only is not concluded (`moelab.claims`).

`settings` models all combinations of tiers, slack, group size and chunk (§4); its drops and padding
are exact for an assumed popularity, on chunks that the plan has not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from moelab.ane.device.device_model import DeviceModel, Prefill
from moelab.ane.device.published import ATTENTION_CPU, REFERENCE_BYTES, SAID, SLOTS, TABLE_5
from moelab.ane.plan import CHUNKS, MAX_GRAPH_BYTES, ANEPlan, count, make_plan
from moelab.ane.popularity import assumed_counts, assumed_loads
from moelab.ane.systems import ABLATION, SYSTEMS, TABLE_2
from moelab.cards import load_model
from moelab.progress import progress
from moelab.records import Numbers, Records

#: (prompt, chunk) of Figures 14–16
RUNS = ((1024, 256), (1024, 512), (4096, 256), (4096, 512), (4096, 1024))
#: what is compared → the figure of a prefill
METRICS = {
    "ttft": lambda p: p.ttft_s,
    "energy": lambda p: p.total.mj,
    "cpu cycles": lambda p: p.cpu_s,
}
#: a choice of ours, changed → options of `studies`
READINGS: Records = {
    "attention slower on the ANE": {
        "attention": 1 / ATTENTION_CPU
    },  # §5.3's 27.6 % the other way round
    "CPU and ANE in turn": {"overlap": False},
    "even popularity": {"skew": "even"},
    "launch without 1×32": {
        "samples": tuple(s for s in TABLE_5 if (s.G, s.C, s.mode) != (1, 32, "serial"))
    },
}
Study = dict[tuple[int, int], dict[str, Prefill]]


def study(
    model: str = "Phi-3.5-MoE",
    device: DeviceModel | None = None,
    runs: Iterable[tuple[int, int]] = RUNS,
    systems: Iterable[str] = tuple(SYSTEMS),
    skew: str = "typical",
    seed: int = 0,
) -> Study:
    """Every system's prefill for each (prompt, chunk), from a model card.

    Plans are made from assumed counts and costed under other chunks of the same popularity.
    """
    device, found = device or DeviceModel.of(), {}
    for prompt, chunk in runs:
        plans, unseen = _plans(model, chunk, skew, seed)
        found[prompt, chunk] = {
            system: device.prefill(plans[system], prompt, unseen) for system in systems
        }
    return found


@cache
def _plans(model: str, chunk: int, skew: str, seed: int) -> tuple[dict[str, ANEPlan], np.ndarray]:
    """(system → plan, loads of other chunks)."""
    spec = load_model(model)
    counted = assumed_counts(spec, chunk, skew=skew, seed=seed)
    return (
        {
            system: make_plan(spec, *counted, chunk, system=system, popularity=f"assumed: {skew}")
            for system in SYSTEMS
        },
        assumed_loads(spec, chunk, 80, skew, seed)[64:],
    )


def ratio(run: dict[str, Prefill], metric: str, system: str) -> float:
    """A system's figure over NPUMoE's, in one run."""
    return METRICS[metric](run[system]) / METRICS[metric](run["npumoe"])


#: models and the machines that the paper ran them on
MACHINES = {"Phi-3.5-MoE": "m2-ultra", "Phi-tiny-MoE": "m2-max", "Qwen3-30B-A3B": "m2-ultra"}
#: the paper's "baselines": its systems but itself
RIVALS = tuple(system for system in TABLE_2 if system != "npumoe")


def studies(seed: int = 0, skew: str = "typical", **how: Any) -> dict[str, Study]:
    """The study of each of `MACHINES`, all systems for PhiMoE, else those of Table 2; `how` are
    `DeviceModel`'s."""
    return {
        model: study(
            model,
            DeviceModel.of(device, **how),
            skew=skew,
            seed=seed,
            systems=tuple(SYSTEMS) if model == "Phi-3.5-MoE" else TABLE_2,
        )
        for model, device in MACHINES.items()
    }


def least_and_most(
    found: Study, figure: Callable[[dict[str, Prefill]], float]
) -> tuple[float, float]:
    """The range of a figure over a study's prompts and chunks."""
    values = [figure(run) for run in found.values()]
    return min(values), max(values)


def baselines(found: Study, metric: str, systems: Iterable[str] = RIVALS) -> tuple[float, float]:
    """Least and most of those systems' ratios to NPUMoE, over all runs."""
    ratios = [ratio(run, metric, system) for run in found.values() for system in systems]
    return min(ratios), max(ratios)


def claimed(run: tuple[int, int], metric: str) -> dict[str, tuple[float, float]]:
    """System → (low, high) of PhiMoE's published ratio to NPUMoE, equal ends where it is one
    number."""
    at = f"{metric.removeprefix('cpu ')}-{run[0]}-{run[1]}"
    ends = {
        system: [
            SAID[name] for name in (f"{at}-{system}", f"{at}-least", f"{at}-most") if name in SAID
        ]
        for system in RIVALS
    }
    return {system: (min(of), max(of)) for system, of in ends.items() if of}


def figures(found: dict[str, Study], device: DeviceModel) -> dict[str, tuple[float, str]]:
    """Name → (value, unit) of all that the ledger asks of `studies` and of the device model of
    PhiMoE's."""
    phi = found["Phi-3.5-MoE"]
    values = {
        f"slot_{G}x{C}": (device.rates.graph_ms(G, C) / (G * C), "ms a slot, serial")
        for G, C in SLOTS["serial"]
    }
    values |= _ratios(phi) | _single_figures(phi[RUNS[0]]["naive"], device)
    for name, (runs, figure, unit) in _ranges(phi, found["Qwen3-30B-A3B"]).items():
        for end, value in zip(("least", "most"), least_and_most(runs, figure)):
            values[f"{name}_{end}"] = value, unit
    for model in ("Phi-tiny-MoE", "Qwen3-30B-A3B"):
        for metric in ("ttft", "energy"):
            for end, value in zip(("least", "most"), baselines(found[model], metric)):
                values[f"{model}_{metric}_{end}"] = value, "× NPUMoE, any baseline"
    return values


def _ratios(phi: Study) -> dict[str, tuple[float, str]]:
    """Of PhiMoE: rivals and ablations against NPUMoE, run by run, and NPUMoE's energy."""
    values = {}
    for (P, B), run in phi.items():
        for metric in METRICS:
            for system in RIVALS:
                name = f"phi_{P}_{B}_{metric.replace(' ', '_')}_{system}"
                values[name] = ratio(run, metric, system), "× NPUMoE"
        values[f"phi_{P}_{B}_mj_per_token"] = run["npumoe"].mj_per_token, "mJ"
    first = phi[RUNS[0]]
    for system in ABLATION[:-1]:
        values[f"ablation_{system}"] = ratio(first, "ttft", system), "× Ours-all, TTFT"
        values[f"ablation_energy_{system}"] = ratio(first, "energy", system), "× Ours-all, energy"
    return values


def _single_figures(naive: Any, device: DeviceModel) -> dict[str, tuple[float, str]]:
    """Of Table 4, 4 chunks of 16 experts with 32 rows each, ours in groups of 8; the capacities of
    the run are not said, the slots are those of no dropping and no padding."""
    spec = load_model("Phi-3.5-MoE")
    attention = device.attention(spec, 512, 1024, "ane")
    on_cpu = device.cpu_experts(spec, np.full(16, 32.0), np.ones(16))
    dispatch = naive.dispatch_ms / (naive.experts.ms + naive.host.ms)
    return {
        "expert_ffn_ms": (4 * 2 * device.graph(spec, 8, 32).ms, "ms, taken as 8x32"),
        "expert_ffn_cpu_ms": (4 * on_cpu.ms, "ms"),
        "naive_dispatch_share": (dispatch, "of the naïve MoE block"),
        "attention_ms": (attention.ms, "ms, taken as P=1024, B=512"),
        "attention_mj": (attention.mj, "mJ, taken as P=1024, B=512"),
    }


def _ranges(phi: Study, qwen: Study) -> dict[str, tuple[Study, Callable[[Any], float], str]]:
    """Name → (runs, what of a run, unit) of figures that are told as least and most."""

    def ours(figure: Callable[[Any], float]) -> Callable[[Any], float]:
        return lambda run: figure(run["npumoe"])

    def padding_cycles(cost: Any) -> float:
        return cost.cpu_s / (cost.cpu_s - cost.padding.cpu_ms / 1e3)

    def padding_time(cost: Any) -> float:
        return cost.padding.ms / (cost.total - cost.padding).ms

    def experts_on_cpu(run: Any) -> float:
        return run["cpu"].experts.ms / run["npumoe"].experts.ms

    ranges = {
        "mj_per_token": (phi, ours(lambda p: p.mj_per_token), "mJ"),
        "watts": (phi, ours(lambda p: p.total.mj / p.total.ms), "W, mean of ours"),
        "experts_of_ttft": (phi, ours(lambda p: p.experts.ms / p.total.ms), "of our TTFT"),
        "padding_time": (phi, ours(padding_time), "of TTFT without padding"),
        "padding_cycles": (phi, ours(padding_cycles), "× without padding"),
        "qwen_experts_cpu": (qwen, experts_on_cpu, "× NPUMoE, experts' time"),
    }
    for metric in ("ttft", "energy"):
        for system in ("cpu", "anemll"):
            ranges[f"qwen_{metric}_{system}"] = (
                qwen,
                partial(ratio, metric=metric, system=system),
                "× NPUMoE",
            )
    return ranges


def modelled(
    found: dict[str, Study], seed: int = 0, **how: Any
) -> dict[str, tuple[float, str, str, Numbers]]:
    """Name → value, unit, "modelled" and what it is by each of `READINGS`, for `figures`; `how` are
    `studies`'."""

    def device(**how: Any) -> DeviceModel:
        return DeviceModel.of(**{name: value for name, value in how.items() if name != "skew"})

    by = {
        name: figures(studies(seed, **how | change), device(**how | change))
        for name, change in READINGS.items()
    }
    return {
        name: (*of, "modelled", {reading: values[name][0] for reading, values in by.items()})
        for name, of in figures(found, device(**how)).items()
    }


def slot_grid(device: DeviceModel) -> dict[tuple[int, int], float]:
    """(G, C) → ms an expert slot of PhiMoE, graphs one after the other."""
    return {
        (G, C): device.rates.graph_ms(G, C) / (G * C)
        for G in (1, 2, 4, 8, 16)
        for C in (16, 32, 64, 96, 128, 192, 256)
    }


def cheapest_slot(grid: dict[tuple[int, int], float]) -> tuple[int, int]:
    """The (G, C) of the least ms a slot whose weights fit one graph."""
    return min((at for at in grid if at[0] * REFERENCE_BYTES <= MAX_GRAPH_BYTES), key=grid.get)


def order(run: dict[str, Prefill], metric: str, systems: Iterable[str] = TABLE_2) -> list[str]:
    """Systems from the best to the worst."""
    return sorted(systems, key=lambda system: METRICS[metric](run[system]))


#: tokens of the prompt that settings are compared on
PROMPT = 1024
LEVELS, SLACKS, GROUPS = (1, 2, 3, 4), (0.75, 1.0, 1.25), (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Setting:
    """Tiers a layer, factor of the expected loads, experts a graph, tokens of a chunk."""

    levels: int = 3
    slack: float = 1.0
    group_size: int = 8
    chunk: int = 256

    def __str__(self) -> str:
        return (
            f"{self.levels} tier{'s' * (self.levels > 1)}, slack {self.slack:g}, G = "
            f"{self.group_size}"
        )


class Outcome(NamedTuple):
    """What a setting does; dropped and padded are shares."""

    plan: ANEPlan
    dropped: float
    padded: float
    ttft_s: float
    mj_per_token: float

    @property
    def point(self) -> tuple[float, float, float, float]:
        """(share dropped, share padded, TTFT in s, energy in mJ a token)."""
        return self.dropped, self.padded, self.ttft_s, self.mj_per_token


def settings(
    card: str,
    levels: Sequence[int] = LEVELS,
    slacks: Sequence[float] = SLACKS,
    groups: Sequence[int] = GROUPS,
    chunks: Sequence[int] = CHUNKS,
    seed: int = 0,
) -> dict[Setting, Outcome]:
    """Plan and cost every combination."""
    spec, device, found = load_model(card), DeviceModel.of(), {}
    for chunk in progress(chunks, "settings", unit="chunk size"):
        counts, tokens = assumed_counts(spec, chunk, seed=seed)
        unseen = assumed_loads(spec, chunk, 80, seed=seed)[64:]
        for t, slack, G in product(levels, slacks, groups):
            plan = make_plan(spec, counts, tokens, chunk, G, t, slack=slack, popularity="assumed")
            account, cost = count(plan, unseen), device.prefill(plan, PROMPT, unseen)
            found[Setting(t, slack, G, chunk)] = Outcome(
                plan, account.drop_rate, account.padded_fraction, cost.ttft_s, cost.mj_per_token
            )
    return found


def fastest(found: dict[Setting, Outcome], dropped: float) -> dict[int, Setting]:
    """Chunk → the setting of least TTFT that drops at most that share; a chunk where none does is
    left out."""
    allowed = {setting: of for setting, of in found.items() if of.dropped <= dropped}
    return {
        chunk: min((s for s in allowed if s.chunk == chunk), key=lambda s: allowed[s].ttft_s)
        for chunk in dict.fromkeys(setting.chunk for setting in allowed)
    }
