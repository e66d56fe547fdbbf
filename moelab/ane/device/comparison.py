"""Systems and settings of plans compared, as modelled, and the device model beside what the paper reports (§5, §A).

The paper's routing traces are not public, so popularity is assumed (`skew`, "typical"); where a published figure does
not say its prompt and chunk, it is compared with all of ours, and the worst counts. More than 20 % away is a miss.

`settings` models all combinations of tiers, slack, group size and chunk (§4); its drops and padding are exact for an
assumed popularity, on chunks that the plan has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from moelab.ane.device.device_model import DeviceModel, Prefill
from moelab.ane.device.published import (
    CLAIMS, ENERGY_PER_TOKEN_MJ, REFERENCE_BYTES, TABLE_4, TABLE_6, TABLE_8, Claim)
from moelab.ane.plan import CHUNKS, MAX_GRAPH_BYTES, ANEPlan, count, make_plan
from moelab.ane.popularity import assumed_counts, assumed_loads
from moelab.ane.systems import SYSTEMS, TABLE_2
from moelab.cards import load_model
from moelab.progress import progress

#: (prompt, chunk) of Figures 14–16
RUNS = ((1024, 256), (1024, 512), (4096, 256), (4096, 512), (4096, 1024))
#: how far the worst of ours may be from the paper's range
TOLERANCE = 0.2
#: metric of a claim → the figure of a prefill
METRICS = {"ttft": lambda p: p.ttft_s, "energy": lambda p: p.total.mj, "cpu cycles": lambda p: p.cpu_s,
           "communication": lambda p: p.comm_mj}
Study = dict[tuple[int, int], dict[str, Prefill]]


@dataclass(frozen=True)
class Comparison:
    """A published figure, from low to high, beside the modelled one."""

    name: str
    source: str
    paper: tuple[float, float]
    modelled: tuple[float, float]

    @property
    def error(self) -> float:
        """Relative distance of our worst from the paper's range: 0 if all are inside, negative if below."""
        below, above = self.modelled[0] / self.paper[0] - 1, self.modelled[1] / self.paper[1] - 1
        return max((min(below, 0.0), max(above, 0.0)), key=abs)

    @property
    def miss(self) -> bool:
        return abs(self.error) > TOLERANCE


def study(model: str = "Phi-3.5-MoE", device: DeviceModel | None = None, runs: Iterable[tuple[int, int]] = RUNS,
          systems: Iterable[str] = tuple(SYSTEMS), skew: str = "typical", seed: int = 0, **options) -> Study:
    """Every system's prefill for each (prompt, chunk), from a model card; `options` are those of `make_plan`.

    Plans are made from assumed counts and costed under other chunks of the same popularity.
    """
    device, spec, found = device or DeviceModel.of(), load_model(model), {}
    for prompt, chunk in runs:
        counts, tokens = assumed_counts(spec, chunk, skew=skew, seed=seed)
        unseen = assumed_loads(spec, chunk, 80, skew, seed)[64:]
        found[prompt, chunk] = {
            system: device.prefill(make_plan(spec, counts, tokens, chunk, system=system, popularity=f"assumed: {skew}",
                                             **options), prompt, unseen) for system in systems}
    return found


def ratio(run: dict[str, Prefill], metric: str, system: str) -> float:
    """A system's figure over NPUMoE's, in one run."""
    return METRICS[metric](run[system]) / METRICS[metric](run["npumoe"])


def compare_with_paper(mode: str = "serial", skew: str = "typical", found: dict[str, Study] | None = None
                       ) -> list[Comparison]:
    """Everything in `published.JUDGED` beside the model; `found` are its studies, if they were made already."""
    found = found or studies(skew=skew, mode=mode)
    return [_compare(claim, found[claim.model]) for claim in CLAIMS] + _tables(DeviceModel.of(mode=mode), found)


#: models and the machines that the paper ran them on
MACHINES = {"Phi-3.5-MoE": "m2-ultra", "Phi-tiny-MoE": "m2-max", "Qwen3-30B-A3B": "m2-ultra"}
#: the paper's "baselines": its systems but itself
RIVALS = tuple(system for system in TABLE_2 if system != "npumoe")


def studies(seed: int = 0, skew: str = "typical", **how: Any) -> dict[str, Study]:
    """The study of each of `MACHINES`, all systems for PhiMoE, else those of Table 2; `how` are `DeviceModel`'s."""
    return {model: study(model, DeviceModel.of(device, **how), skew=skew, seed=seed,
                         systems=tuple(SYSTEMS) if model == "Phi-3.5-MoE" else TABLE_2)
            for model, device in MACHINES.items()}


def least_and_most(found: Study, figure: Callable[[dict[str, Prefill]], float]) -> tuple[float, float]:
    """The range of a figure over a study's prompts and chunks."""
    values = [figure(run) for run in found.values()]
    return min(values), max(values)


def baselines(found: Study, metric: str, systems: Iterable[str] = RIVALS) -> tuple[float, float]:
    """Least and most of those systems' ratios to NPUMoE, over all runs."""
    ratios = [ratio(run, metric, system) for run in found.values() for system in systems]
    return min(ratios), max(ratios)


def claimed(model: str, run: tuple[int, int], metric: str) -> dict[str, tuple[float, float]]:
    """System → (low, high) of a published ratio to NPUMoE, where there is one for this prompt and chunk."""
    return {claim.system: (claim.low, claim.high) for claim in CLAIMS
            if (claim.model, claim.prompt, claim.chunk, claim.metric) == (model, *run, metric)}


def slot_grid(device: DeviceModel) -> dict[tuple[int, int], float]:
    """(G, C) → ms an expert slot of PhiMoE, graphs one after the other."""
    return {(G, C): device.rates.graph_ms(G, C) / (G * C)
            for G in (1, 2, 4, 8, 16) for C in (16, 32, 64, 96, 128, 192, 256)}


def cheapest_slot(grid: dict[tuple[int, int], float]) -> tuple[int, int]:
    """The (G, C) of the least ms a slot whose weights fit one graph."""
    return min((at for at in grid if at[0] * REFERENCE_BYTES <= MAX_GRAPH_BYTES), key=grid.get)


def order(run: dict[str, Prefill], metric: str, systems: Iterable[str] = TABLE_2) -> list[str]:
    """Systems from the best to the worst."""
    return sorted(systems, key=lambda system: METRICS[metric](run[system]))


def _compare(claim: Claim, found: Study) -> Comparison:
    runs = {(prompt, chunk): run for (prompt, chunk), run in found.items()
            if claim.prompt in (None, prompt) and claim.chunk in (None, chunk)}
    systems = RIVALS if claim.system == "any baseline" else [claim.system]
    where = f"P={claim.prompt}, B={claim.chunk}" if claim.prompt else "all prompts and chunks"
    return Comparison(f"{claim.model}, {where}: {claim.metric} of {claim.system} ÷ ours", claim.source,
                      (claim.low, claim.high), baselines(runs, claim.metric, systems))


def _tables(device: DeviceModel, found: dict[str, Study]) -> list[Comparison]:
    """Tables 4, 6 and 8, and what the text says of shares and energies."""
    spec, phi, qwen = load_model("Phi-3.5-MoE"), found["Phi-3.5-MoE"], found["Qwen3-30B-A3B"]
    first = phi[RUNS[0]]["naive"]
    dispatch = first.dispatch_ms / (first.experts.ms + first.host.ms)
    # 4 chunks of 16 experts with 32 rows each, in groups of 8: the capacities of the run are not said, the slots are
    # those of no dropping and no padding
    ffn = 4 * 2 * device.graph(spec, 8, 32).ms
    attention = device.attention(spec, 512, 1024, "ane")
    experts = TABLE_6["cpu"][1] / TABLE_6["npumoe"][1]
    return [Comparison(*row) for row in (
        ("expert FFN of ours, ms, taken as 8x32", "Table 4", (TABLE_4["expert FFN"][3],) * 2, (ffn, ffn)),
        ("attention on the ANE, ms, taken as P=1024, B=512", "Table 8", (TABLE_8[0],) * 2, (attention.ms,) * 2),
        ("attention on the ANE, mJ, taken as P=1024, B=512", "Table 8", (TABLE_8[1],) * 2, (attention.mj,) * 2),
        ("Qwen3-30B: experts of cpu ÷ ours", "Table 6", (experts, experts),
         least_and_most(qwen, lambda run: run["cpu"].experts.ms / run["npumoe"].experts.ms)),
        ("Phi-3.5-MoE: our energy, mJ a prompt token", "§5.4", ENERGY_PER_TOKEN_MJ,
         least_and_most(phi, lambda run: run["npumoe"].mj_per_token)),
        ("Phi-3.5-MoE: experts' share of our TTFT", "Fig. 14: over 86 %", (0.86, 1.0),
         least_and_most(phi, lambda run: run["npumoe"].experts.ms / run["npumoe"].total.ms)),
        ("Phi-3.5-MoE: dispatch's share of the naïve MoE block, P=1024, B=256", "Figs. 8, 14: over 60 %", (0.6, 1.0),
         (dispatch, dispatch)))]


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
        return f"{self.levels} tier{'s' * (self.levels > 1)}, slack {self.slack:g}, G = {self.group_size}"


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a setting does; dropped and padded are shares."""

    plan: ANEPlan
    dropped: float
    padded: float
    ttft_s: float
    mj_per_token: float

    @property
    def point(self) -> tuple[float, float, float, float]:
        return self.dropped, self.padded, self.ttft_s, self.mj_per_token


def settings(card: str, levels: Sequence[int] = LEVELS, slacks: Sequence[float] = SLACKS,
             groups: Sequence[int] = GROUPS, chunks: Sequence[int] = CHUNKS, seed: int = 0) -> dict[Setting, Outcome]:
    """Plan and cost every combination."""
    spec, device, found = load_model(card), DeviceModel.of(), {}
    for chunk in progress(chunks, "settings", unit="chunk size"):
        counts, tokens = assumed_counts(spec, chunk, seed=seed)
        unseen = assumed_loads(spec, chunk, 80, seed=seed)[64:]
        for t, slack, G in product(levels, slacks, groups):
            plan = make_plan(spec, counts, tokens, chunk, G, t, slack=slack, popularity="assumed")
            account, cost = count(plan, unseen), device.prefill(plan, PROMPT, unseen)
            found[Setting(t, slack, G, chunk)] = Outcome(plan, account.drop_rate, account.padded_fraction, cost.ttft_s,
                                                         cost.mj_per_token)
    return found


def fastest(found: dict[Setting, Outcome], dropped: float) -> dict[int, Setting]:
    """Chunk → the setting of least TTFT that drops at most that share; a chunk where none does is left out."""
    allowed = {setting: of for setting, of in found.items() if of.dropped <= dropped}
    return {chunk: min((s for s in allowed if s.chunk == chunk), key=lambda s: allowed[s].ttft_s)
            for chunk in dict.fromkeys(setting.chunk for setting in allowed)}
