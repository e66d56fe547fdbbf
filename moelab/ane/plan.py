"""Plans of MoE prefill on the Neural Engine: tiers, groups and placement, layer by layer (NPUMoE
§3, §4).

`make_plan` turns counts into static graphs: capacities in tiers, experts of equal tier in groups
whose weights one graph can hold, each group, and attention, on the ANE or on the CPU. `count` says
what a plan executes, drops and pads.

    counts [L, E]   tokens counted   B tokens of a chunk   G experts a group   C capacity
    loads [n, L, E]

A graph on the ANE costs its launch and all of its G·C rows, however few are used; on the CPU shapes
are free, so an expert costs what its tokens cost, nothing is padded or dropped, and a capacity does
not apply (Table 4: padding 0)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import add
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moelab.ane.systems import SYSTEMS, ANESystem, Unit, why_no_graph
from moelab.base.files import absolute, write_text
from moelab.base.records import Record
from moelab.base.registry import require
from moelab.base.schema import Amount, Count, Size, naming, parse_json, typed
from moelab.base.specs import MoESpec
from moelab.base.table import head_and_rows, text_table
from moelab.experts.executor import Tally
from moelab.offloading.budget import kv_bytes
from moelab.static.tiers import Tiers, capacity_tiers, form_groups, round_up

FORMAT = "moelab.ane.plan/2"
#: weights that one graph on the ANE can hold: NPUMoE §4.2's "1.2 GB", in whose unit an expert of
#: PhiMoE is 150 MB. That is MiB, and eight such experts, Table 5's largest groups, are these bytes
#: exactly
MAX_GRAPH_MB = 1200 * 2**20 / 1e6
#: a matrix with more input channels is refused by the ANE and its graph runs on the CPU
MAX_CHANNELS = 16384


@dataclass(frozen=True)
class PlannedGroup:
    """Experts of one graph, in this order; on the ANE each has `capacity` rows in it."""

    experts: tuple[int, ...]
    capacity: Size
    unit: Unit
    weight_bytes: Count
    expected: Amount = 0.0  # tokens of a chunk that come to the group on average

    @property
    def slots(self) -> int:
        """Rows that the graph computes, G·C."""
        return len(self.experts) * self.capacity


@dataclass(frozen=True)
class LayerPlan:
    """One MoE layer: its tiers, its groups (each expert in one), and where its attention runs."""

    tiers: Tiers
    groups: tuple[PlannedGroup, ...]
    attention: Unit

    def on(self, unit: Unit) -> tuple[PlannedGroup, ...]:
        """The layer's groups that run on a unit."""
        return tuple(group for group in self.groups if group.unit == unit)

    @property
    def cold(self) -> list[int]:
        """The experts on the CPU."""
        return [e for group in self.on("cpu") for e in group.experts]


@dataclass(frozen=True)
class ANEPlan:
    """Static graphs of every MoE layer of a model, for one chunk size.

    chunk, system : B, and a key of `SYSTEMS`. problems : what does not fit and why, in words.
    popularity : where the counts came from, in words; "assumed" if nothing was calibrated.
    model_id : identity of the model whose calibration it was made from; "" where the popularity was
    assumed."""

    spec: MoESpec
    chunk: Size
    system: Literal[*SYSTEMS]
    layers: tuple[LayerPlan, ...]
    popularity: str = "calibrated"
    problems: tuple[str, ...] = ()
    model_id: str = ""

    def require(self, model_id: str, spec: MoESpec) -> None:
        """ValueError unless this is a plan of the model with this identity and geometry."""
        planned, given = self.spec.fingerprint(), spec.fingerprint()
        if planned != given or self.model_id not in ("", model_id):
            raise ValueError(
                f"the plan is for {self.spec.name} (geometry {planned}, identity "
                f"{self.model_id or 'of any'}), and {spec.name} is another model (geometry {given}, "
                f"identity {model_id}): calibrate and plan this one"
            )

    @property
    def graphs(self) -> list[PlannedGroup]:
        """The groups on the ANE, over all layers; a chunk launches each."""
        return [group for layer in self.layers for group in layer.on("ane")]

    @property
    def launches(self) -> int:
        """Expert graphs that a chunk launches on the ANE."""
        return len(self.graphs)

    @property
    def slots(self) -> int:
        """Rows that these graphs compute in a chunk, used or not."""
        return sum(group.slots for group in self.graphs)

    def memory(self, context: int = 2048, experts: int | None = None) -> dict[str, int]:
        """Bytes that a run through this plan takes, by what they are for (§2: all weights stay in
        memory).

        context : tokens of the KV cache.
        experts : of the budget for experts on the CPU (`open_model(memory=…)`); by default those
            that the plan leaves there, without which a prompt would read from the disk. Decoding
            reads none where the budget holds all, `spec.experts_bytes`."""
        spec, moe = self.spec, {layer: at for at, layer in enumerate(self.spec.moe_layers)}
        # attention of a layer without experts is as of the first that has some
        attention = [self.layers[moe.get(layer, 0)].attention for layer in range(spec.num_layers)]
        cold = sum(len(layer.cold) for layer in self.layers)
        return {
            "packages": sum(group.weight_bytes for group in self.graphs)
            + 2 * attention_params(spec) * attention.count("ane"),
            "experts on the CPU": cold * spec.expert_bytes if experts is None else experts,
            "other weights": round(spec.dense_bytes),
            "KV cache": kv_bytes(spec, context),
        }

    def to_dict(self) -> Record:
        """The plan as JSON has it, with its format."""
        return {"format": FORMAT} | asdict(self)

    @classmethod
    def from_dict(cls, fields: Record) -> ANEPlan:
        """The plan of `to_dict`, also after JSON; ValueError if it is incomplete, damaged or of
        another version."""
        found = fields.get("format") if isinstance(fields, dict) else type(fields).__name__
        if found != FORMAT:
            raise ValueError(
                f"this is not a plan of format {FORMAT}, but {found!r}; make it again with make_plan"
            )
        plan = typed({name: of for name, of in fields.items() if name != "format"}, cls, "the plan")
        every = list(range(plan.spec.E))
        if len(plan.layers) != plan.spec.L or any(
            sorted(e for group in layer.groups for e in group.experts) != every
            or len(layer.tiers.capacity) != plan.spec.E
            or not {*layer.tiers.capacity} <= {*layer.tiers.levels}
            for layer in plan.layers
        ):
            raise ValueError(
                "the plan is damaged: its layers, groups or tiers are not those of its model; make it "
                "again with make_plan"
            )
        return plan

    def save(self, path: str | Path) -> Path:
        """Write as JSON, atomically; returns the path."""
        return write_text(path, json.dumps(self.to_dict()))

    @classmethod
    def load(cls, path: str | Path) -> ANEPlan:
        """Read a saved plan; FileNotFoundError, or ValueError if it is none."""
        with naming(path, "plan", "`moelab ane plan`"):
            return cls.from_dict(parse_json(absolute(path).read_bytes()))

    def describe(self) -> str:
        """A table of the MoE layers, a summary and the problems, as text."""
        rows = []
        for number, layer in enumerate(self.layers):
            graphs, capacity = layer.on("ane"), layer.tiers.capacity
            tiers = (f"{capacity.count(level)}×{level}" for level in layer.tiers.levels)
            rows.append(
                {
                    "layer": str(number),
                    "attention": layer.attention,
                    "experts × tier": " ".join(tiers),
                    "ANE graphs (G×C)": " ".join(f"{len(g.experts)}×{g.capacity}" for g in graphs)
                    or "–",
                    "CPU experts": len(layer.cold),
                    "ANE rows": sum(g.slots for g in graphs),
                    "largest graph, MB": max((g.weight_bytes for g in graphs), default=0) / 1e6,
                }
            )
        memory = self.memory()
        least, cold = sum(memory.values()), memory["experts on the CPU"]
        most = least - cold + self.spec.experts_bytes
        lines = [
            f"{self.spec.name}, {SYSTEMS[self.system].title}, chunks of {self.chunk}; "
            f"popularity {self.popularity}",
            text_table(*head_and_rows(rows)),
            f"A chunk launches {self.launches} expert graphs of {self.slots:,} rows on the ANE.",
            "Memory, with 2048 tokens of context: "
            + ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in memory.items())
            + f"; in all {least / 1e9:.1f} GB, or {most / 1e9:.1f} GB with all experts on the CPU, "
            "so that decoding reads none from the disk.",
        ]
        return "\n".join(lines + [f"Does not fit: {problem}" for problem in self.problems])


def make_plan(
    spec: MoESpec,
    counts: Any,
    tokens: int,
    chunk: int = 256,
    group_size: int = 8,
    *,
    max_graph_mb: float = MAX_GRAPH_MB,
    system: str = "npumoe",
    cold_share: float = 0.1,
    min_rows: float = 32,
    max_graphs: int | None = None,
    bytes_per_weight: float = 2.0,
    popularity: str = "calibrated",
    model_id: str = "",
    **tiering: Any,
) -> ANEPlan:
    """Plan a model's prefill (NPUMoE §4).

    counts, tokens : [L, E] routings to each expert of so many tokens, of a `Calibration` or drawn.
    chunk, group_size : B, and G for systems that group.
    max_graph_mb : of one graph's weights; groups shrink to it, a larger expert is the CPU's.
    cold_share, min_rows : the rarest experts, which together get at most this share of the routings, are
        the CPU's, and groups that expect fewer tokens of a chunk (NPUMoE §4.3; thresholds are ours).
    max_graphs : on the ANE, those that expect most tokens (too many make Core ML fall back to the CPU,
        §1, §4.3, §5.7); None for all.
    bytes_per_weight : of the experts; 2 for fp16, 1 for int8. Attention stays fp16.
    popularity, model_id : as in `ANEPlan`. tiering : of `capacity_tiers`.
    """
    require("system", system, SYSTEMS)
    how, counts = SYSTEMS[system], np.asarray(counts, dtype=float)
    positive = group_size > 0 and 0 < bytes_per_weight < np.inf
    if counts.shape != (spec.L, spec.E) or not positive:
        raise ValueError(
            f"counts are {list(counts.shape)}, bytes_per_weight {bytes_per_weight}, group_size "
            f"{group_size}; the counts must be of the {spec.L} MoE layers of {spec.E} experts of "
            f"{spec.name}, the others positive"
        )
    tiers = _tiers(how, chunk, capacity_tiers(counts, tokens, chunk, **tiering))
    expert_bytes = round(spec.expert_params * bytes_per_weight)
    size = group_size if how.grouped else 1
    fit = max(int(1e6 * max_graph_mb // expert_bytes), 1)
    experts, attention, problems = _units(spec, how, size, expert_bytes, 1e6 * max_graph_mb)
    least = np.inf if experts == "cpu" else min_rows if how.placement else 0.0

    def planned(of: Tiers, row: np.ndarray) -> LayerPlan:
        """A layer: groups of hot experts first, those of cold ones (always on the CPU) last."""
        cold = cold_experts(row, cold_share) if how.placement else frozenset()
        hot = frozenset(range(spec.E)) - cold
        groups = []
        for members in (hot, cold):
            for group in form_groups(of, row, min(size, fit), members):
                expected = float(row[list(group.experts)].sum() * chunk / tokens)
                unit: Unit = "ane" if members is hot and expected >= least else "cpu"
                weights = expert_bytes * len(group.experts)
                groups.append(PlannedGroup(group.experts, group.capacity, unit, weights, expected))
        return LayerPlan(of, tuple(groups), attention)

    layers = _resident(list(map(planned, tiers, counts)), max_graphs)
    return ANEPlan(spec, chunk, system, layers, popularity, tuple(problems), model_id)


def _resident(layers: Sequence[LayerPlan], most: int | None) -> tuple[LayerPlan, ...]:
    """The layers with at most so many groups on the ANE, None for all; the others are the CPU's."""
    graphs = [(l, group) for l, layer in enumerate(layers) for group in layer.on("ane")]
    stay = set(sorted(graphs, key=lambda one: -one[1].expected)[:most])

    def placed(l: int, group: PlannedGroup) -> PlannedGroup:
        return group if (l, group) in stay else replace(group, unit="cpu")

    return tuple(
        replace(layer, groups=tuple(placed(l, group) for group in layer.groups))
        for l, layer in enumerate(layers)
    )


def _tiers(how: ANESystem, chunk: int, tiers: list[Tiers]) -> list[Tiers]:
    """As they are or, for a system without tiers, the largest for all experts; on the CPU, where
    any may get all tokens, the chunk."""
    if how.tiers:
        return tiers
    largest = max(layer.levels[0] for layer in tiers)
    capacity = largest if how.experts == "ane" else round_up(chunk, 16)
    return [Tiers((capacity,), (capacity,) * len(of.capacity)) for of in tiers]


def _units(
    spec: MoESpec, how: ANESystem, size: int, expert_bytes: int, limit: float
) -> tuple[Unit, Unit, list[str]]:
    """(where experts may run, where attention runs, what does not fit and why)."""
    problems, attention = [], 2 * attention_params(spec)
    channels = max(spec.H, spec.I), max(spec.H, spec.heads * spec.head_dim)

    def placed(wanted: Unit, block: str, weight_bytes: int, widest: int) -> Unit:
        if wanted == "cpu":
            return wanted
        reason = why_no_graph(block, spec.model_type)
        if not reason and weight_bytes > limit:
            reason = f"{weight_bytes / 1e6:,.0f} MB of weights, a graph holds {limit / 1e6:,.0f} MB"
        elif not reason and widest > MAX_CHANNELS:
            reason = f"a matrix of {widest:,} input channels, the ANE takes {MAX_CHANNELS:,}"
        if reason:
            problems.append(f"{block} on the CPU: {reason}")
        return "cpu" if reason else "ane"

    experts = placed(how.experts, "experts", expert_bytes, channels[0])
    if experts == "ane" and (fit := int(limit // expert_bytes)) < size:
        problems.append(
            f"groups of {fit} instead of {size} experts: one graph holds {limit / 1e6:,.0f} MB, an "
            f"expert has {expert_bytes / 1e6:,.1f} MB"
        )
    return experts, placed(how.attention, "attention", attention, channels[1]), problems


def cold_experts(counts: Sequence[float], cold_share: float) -> frozenset[int]:
    """The least popular experts that together get at most `cold_share` of the routings; never the
    most popular one."""
    counts = np.asarray(counts, dtype=float)
    order = np.argsort(-counts, kind="stable")[::-1]  # rarest first, of equals the later
    cumulative = np.cumsum(counts[order])
    within = int((cumulative <= cold_share * cumulative[-1] * (1 + 1e-12)).sum())
    return frozenset(order[: min(within, len(order) - 1)].tolist())


def attention_params(spec: MoESpec) -> int:
    """Weights of one layer's Q, K, V and output projection, of plain grouped-query attention (MLA
    has others)."""
    return spec.H * spec.head_dim * 2 * (spec.heads + spec.kv_heads)


# ---- what a plan does


@dataclass
class Account(Tally):
    """Exact counts of a layer over all chunks, or sums of such; its drop rate and padded fraction
    are Table 3's "token drop rate" and "padded tokens"."""

    chunks: int = 0
    launches: int = 0  # expert graphs run on the ANE

    def __add__(self, other: Account) -> Account:
        return Account(*map(add, vars(self).values(), vars(other).values()))
