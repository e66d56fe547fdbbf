"""What a plan costs on a Mac: time, energy and CPU time of a prefill and of decoding, modelled
(NPUMoE §5, Tables 4–9).

A graph of G experts of capacity C on the ANE takes a + b·G + c·G·C + s·max(0, G·C − 1024) ms: a
the launch, b to bring an expert's weights, c a row, s what a row more costs once activations exceed
1024 rows. Attention is such a graph, by its weights and operations. An expert on the CPU costs its
weights once a chunk and then each of its tokens. A layer: attention, then the router on the CPU,
then the groups on the ANE one after the other, and at the same time, as `moelab.ane.runtime` runs
them, the experts on the CPU (`overlap`); then shared experts, which the CPU has in every system,
like dense layers. A decode step takes the CPU alone, in every system.

The rates are figures of a device card, in ms and W for PhiMoE's experts (157.3 million weights, H =
4096), to be scaled; notebook 06 fits those of the M2 Ultra to the paper's tables and says how well,
`moelab bench ane_mac` writes a card of another Mac. CPU time is that of the whole CPU kept busy;
cycles are proportional to it. Left out: embedding, output head, loading."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from moelab.ane.plan import ANEPlan, LayerPlan, attention_params
from moelab.ane.systems import ATTENTION_GRAPHS, SYSTEMS, Unit
from moelab.base.records import Record
from moelab.base.specs import MoESpec
from moelab.cards import load_device

#: the expert that rates are stated for, PhiMoE's in fp16: H, weights and bytes
REFERENCE_H = 4096
REFERENCE_PARAMS = 3 * REFERENCE_H * 6400
REFERENCE_BYTES = 2 * REFERENCE_PARAMS
SPILL_ROWS = 1024
#: those whose attention is grouped-query attention by its weights and operations
GROUPED_QUERY = (*ATTENTION_GRAPHS, "deepseek", "gpt_oss", "llama4_text")


@dataclass(frozen=True)
class Rates:
    """The ANE's parameters, for experts of the size they are stated for; a card's figures with
    "ane_" before them."""

    launch_ms: float  # a
    expert_ms: float  # b
    row_ms: float  # c
    spill_ms: float  # s
    power_w: float  # while a graph runs
    work_mj: float  # a row

    def graph_ms(self, G: float, C: float) -> float:
        """Milliseconds of one launch of G experts of capacity C."""
        rows = G * C
        spilled = self.spill_ms * max(0, rows - SPILL_ROWS)
        return self.launch_ms + self.expert_ms * G + self.row_ms * rows + spilled

    def graph_mj(self, G: float, C: float) -> float:
        """Millijoules of one launch."""
        return self.power_w * self.graph_ms(G, C) + self.work_mj * G * C

    def scaled(self, weights: float, work: float) -> Rates:
        """For graphs whose weights (b) and operations (c, s) take that many times as long."""
        return replace(
            self,
            expert_ms=self.expert_ms * weights,
            row_ms=self.row_ms * work,
            spill_ms=self.spill_ms * work,
            work_mj=self.work_mj * work,
        )


@dataclass(frozen=True)
class CPURates:
    """The CPU's parameters; a card's figures with "cpu_" before them.

    `dispatch_ms` is taken to grow with the graph's weights: were it the same for each graph,
    Qwen3-30B's naïve system would take 48 times as long as ours, not 3.9 (§5.2)."""

    expert_ms: float  # to bring an expert's weights
    row_ms: float  # a token of it
    choice_ms: float  # router, gather (twice) and padding of one choice of an expert
    dispatch_ms: float  # what a graph of one expert takes more if Core ML places it
    attention_ratio: float  # CPU attention over ANE attention
    busy_w: float
    wait_w: float  # while the ANE works
    comm_w: float  # communication, at all times

    @property
    def waiting(self) -> float:
        """Share of the whole CPU that is busy while the ANE works, by its power."""
        return self.wait_w / self.busy_w


@dataclass(frozen=True)
class Cost:
    """ms of wall time, mJ in all, ms of the whole CPU kept busy; added when one follows the
    other."""

    ms: float = 0.0
    mj: float = 0.0
    cpu_ms: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.ms + other.ms, self.mj + other.mj, self.cpu_ms + other.cpu_ms)

    def __mul__(self, n: float) -> Cost:
        return Cost(n * self.ms, n * self.mj, n * self.cpu_ms)


@dataclass(frozen=True)
class Prefill:
    """A modelled prefill: the whole prompt, all layers."""

    prompt: int
    attention: Cost
    experts: Cost  # with their launches
    host: Cost  # the router, and moving tokens

    @property
    def total(self) -> Cost:
        """Time and energy of attention, experts and what the host does between them."""
        return self.attention + self.experts + self.host

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.total.ms / 1e3


@dataclass(frozen=True)
class DeviceModel:
    """A device's fitted parameters and the formulas that use them."""

    device: str
    rates: Rates
    cpu: CPURates
    memory_bytes: float  # of the machine, which CPU and ANE share
    overlap: bool = True  # whether experts on the CPU run while the ANE runs its groups

    @classmethod
    def of(cls, device: str | Path = "m2-ultra", overlap: bool = True) -> DeviceModel:
        """By the figures of a device card, or of your own (.toml). ValueError: it has none."""
        card = load_device(device)

        def rates(of: type, unit: str) -> Any:
            return of(**{field.name: card[f"{unit}_{field.name}"] for field in fields(of)})

        try:
            both = rates(Rates, "ane"), rates(CPURates, "cpu")
        except KeyError as error:
            raise ValueError(
                f"what a plan costs is not known of this device: {error.args[0]}. `moelab bench "
                "ane_mac` on a Mac writes a card of it"
            ) from None
        return cls(card.name, *both, card["memory_gb"] * 1e9, overlap)

    def require(self, plan: ANEPlan, context: int = 2048) -> None:
        """ValueError if a run through the plan takes more than the machine's memory, which CPU and
        ANE share."""
        needed = sum(plan.memory(context).values())
        if needed > self.memory_bytes:
            raise ValueError(
                f"{plan.spec.name} needs at least {needed / 1e9:,.0f} GB, and {self.device} has "
                f"{self.memory_bytes / 1e9:,.0f} GB of memory: plan experts of fewer bytes a "
                "weight (--weights), or a larger machine (--device)"
            )

    def cpu_experts(self, spec: MoESpec, loads: np.ndarray, visited: np.ndarray) -> Cost:
        """Experts on the CPU, each with its tokens; `loads` are counts, or means of them.

        visited : share of chunks in which each expert gets any token."""
        size = spec.expert_params / REFERENCE_PARAMS
        return self.on_cpu(
            size * float(self.cpu.expert_ms * visited.sum() + self.cpu.row_ms * loads.sum())
        )

    def attention(self, spec: MoESpec, chunk: int, context: int, unit: Unit) -> Cost:
        """One layer's attention of a chunk over a cache of `context` tokens; ValueError if it is
        not grouped-query."""
        if spec.model_type not in GROUPED_QUERY:
            raise ValueError(
                f"the attention of {spec.name} ({spec.model_type}) is not modelled, only "
                f"grouped-query attention is ({', '.join(GROUPED_QUERY)})"
            )
        params = attention_params(spec)
        # multiply-adds a token, as params are an expert's
        work = params + 2 * spec.heads * spec.head_dim * context
        rates = self.rates.scaled(params / REFERENCE_PARAMS, work / REFERENCE_PARAMS)
        ane = self.on_ane(rates, 1, chunk)
        return ane if unit == "ane" else self.on_cpu(ane.ms * self.cpu.attention_ratio)

    def dense(self, spec: MoESpec, intermediate: int, chunk: int) -> Cost:
        """A dense FFN of that intermediate size, or shared experts, on all tokens of a chunk, on
        the CPU."""
        size = intermediate / spec.I * spec.expert_params / REFERENCE_PARAMS
        return self.on_cpu(size * (self.cpu.expert_ms + self.cpu.row_ms * chunk))

    def placing(self, plan: ANEPlan, layer: LayerPlan) -> Cost:
        """What Core ML's own placement of a layer's graphs takes; nothing where the plan places
        them."""
        if SYSTEMS[plan.system].managed:
            return Cost()
        heavy = sum(group.weight_bytes for group in layer.on("ane")) / REFERENCE_BYTES
        return self.on_cpu(self.cpu.dispatch_ms * heavy)

    def experts(
        self, plan: ANEPlan, layer: LayerPlan, loads: np.ndarray, visited: np.ndarray
    ) -> Cost:
        """One MoE layer's experts in a chunk; loads and visited [E], as of `cpu_experts`."""
        spec = plan.spec
        size = spec.expert_params / REFERENCE_PARAMS
        rates = self.rates.scaled(size, size)
        graphs = (self.on_ane(rates, len(g.experts), g.capacity) for g in layer.on("ane"))
        ane = sum(graphs, Cost())
        cold = layer.cold
        cpu = self.cpu_experts(spec, loads[cold], visited[cold])
        together = (
            self.placing(plan, layer) + ane + cpu + self.dense(spec, spec.shared_I, plan.chunk)
        )
        if self.overlap:  # communication's power is drawn once, and a busy CPU does not also wait
            hidden = min(ane.ms, cpu.ms)
            together += Cost(-hidden, -hidden * self.cpu.comm_w, -hidden * self.cpu.waiting)
        return together

    def prefill(self, plan: ANEPlan, prompt: int, loads: Any = None) -> Prefill:
        """A prompt of that many tokens through the plan, in static chunks, the last of them padded.

        loads : [n, L, E], the experts' tokens in real chunks of the plan's size, on which only
            experts on the CPU depend; None takes what the plan expects.

        Raises ValueError: attention that is not modelled, or chunks that no graph takes."""
        if plan.chunk % 16:
            raise ValueError(
                f"chunks of {plan.chunk} tokens are not converted, only multiples of 16: plan anew"
            )
        spec = plan.spec
        means = np.zeros((spec.L, spec.E))
        for of_layer, layer in zip(means, plan.layers):
            for group in layer.groups:
                of_layer[list(group.experts)] = group.expected / len(group.experts)
        visited = -np.expm1(-means)  # as if tokens were independent
        if loads is not None:
            means, visited = loads.mean(0), (loads > 0).mean(0)
        attention, experts = Cost(), Cost()
        for layer, mean, often in zip(plan.layers, means, visited):
            attention += self.attention(spec, plan.chunk, prompt, layer.attention)
            experts += self.experts(plan, layer, mean, often)
        dense = spec.num_layers - spec.L
        attention += self.attention(spec, plan.chunk, prompt, plan.layers[0].attention) * dense
        experts += self.dense(spec, spec.dense_I, plan.chunk) * dense
        chunks = math.ceil(prompt / plan.chunk)
        parts = (attention, experts, self._host(spec, plan.chunk))
        return Prefill(prompt, *(cost * chunks for cost in parts))

    def decode(self, spec: MoESpec, context: int) -> Cost:
        """One token after `context` others, by the CPU alone: a chunk of one token, which reads the
        weights of K experts a layer (§5.3–5.5, end to end)."""
        chosen = self.cpu_experts(spec, np.ones(spec.K), np.ones(spec.K))
        dense = self.dense(spec, spec.dense_I, 1) * (spec.num_layers - spec.L)
        layer = chosen + self.dense(spec, spec.shared_I, 1)
        attention = self.attention(spec, 1, context, "cpu") * spec.num_layers
        return layer * spec.L + dense + attention + self._host(spec, 1)

    def _host(self, spec: MoESpec, tokens: int) -> Cost:
        """Routers, and moving the tokens of a chunk, in all layers."""
        return self.on_cpu(self.cpu.choice_ms * tokens * spec.K * spec.L * spec.H / REFERENCE_H)

    def on_ane(self, rates: Rates, G: int, C: int) -> Cost:
        """One launch."""
        ms = rates.graph_ms(G, C)
        return Cost(ms, rates.graph_mj(G, C), ms * self.cpu.waiting)

    def on_cpu(self, ms: float) -> Cost:
        """So many ms of the whole CPU."""
        return Cost(ms, ms * (self.cpu.busy_w + self.cpu.comm_w), ms)


def beside(
    device: DeviceModel, plans: Mapping[str, ANEPlan], prompt: int, new_tokens: int
) -> dict[str, Record]:
    """System → what a prompt and the tokens decoded after it take through its plan, as a row of a
    table; ValueError as of `DeviceModel.prefill`."""
    rows = {}
    for system, plan in plans.items():
        prefill = device.prefill(plan, prompt)
        whole = prefill.total + device.decode(plan.spec, prompt) * new_tokens
        rows[system] = {
            "system": system,
            "": SYSTEMS[system].title,
            "graphs a chunk": plan.launches,
            "TTFT, s": prefill.ttft_s,
            f"with {new_tokens} tokens, s": whole.ms / 1e3,
            "J": whole.mj / 1e3,
            "CPU, s": whole.cpu_ms / 1e3,
            "memory, GB": sum(plan.memory(prompt).values()) / 1e9,
        }
    return rows
