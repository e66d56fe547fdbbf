"""What a plan costs: latency, energy and CPU time of a prefill, modelled (NPUMoE §5, Tables 4–9).

Expert graphs on the ANE cost what `rates` fits to Table 5, and so does attention there, by its
weights and operations. A layer: attention, then the router on the CPU, then the groups on the ANE
one graph after the other, and at the same time the experts on the CPU. That these two overlap is an
assumption, without which placement could not make the ablation's last step faster, as Figure 17 has
it (`overlap=False`). Shared experts and dense layers are on the CPU in every system, because
conversion leaves them there. Attention has a fixed context, the prompt. Writing back costs what
gathering costs: Table 4's 1.2 s a layer for it contradicts Figure 14 (docs/papers/npumoe.md).

CPU time is that of the whole CPU kept busy; cycles are proportional to it. Left out: embedding,
output head, decoding."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from moelab.ane.plan import ANEPlan, LayerPlan, PlannedGroup, attention_params, check_loads
from moelab.ane.systems import ATTENTION_GRAPHS, SYSTEMS, Unit
from moelab.base.records import Records
from moelab.base.registry import require
from moelab.base.specs import MoESpec
from moelab.cards import load_device

from .ane_published import (
    ATTENTION_CPU,
    REFERENCE_BYTES,
    REFERENCE_H,
    REFERENCE_PARAMS,
    TABLE_5,
    Sample,
)
from .ane_rates import (
    MODES,
    CPURates,
    Rates,
    fit,
    fit_cpu,
    leave_one_out,
    relative_errors,
    rms,
)

#: those with multi-head latent attention (MLA), which is another cost
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


#: those whose attention is grouped-query attention by its weights and operations, so that
#: a device model can cost it
GROUPED_QUERY = (*ATTENTION_GRAPHS, "deepseek", "gpt_oss", "llama4_text")


def weight_bytes(plan: ANEPlan) -> int:
    """Bytes of weights that a machine needs at least: experts, the rest in fp16, the embedding once.
    Other attention than grouped-query attention is not counted."""
    spec = plan.spec
    attention = attention_params(spec) if spec.model_type in GROUPED_QUERY else 0
    dense = 3 * spec.H * (spec.L * spec.shared_I + (spec.num_layers - spec.L) * spec.dense_I)
    return sum(group.weight_bytes for layer in plan.layers for group in layer.groups) + 2 * (
        spec.num_layers * attention + dense + spec.vocab * spec.H
    )


@dataclass(frozen=True)
class Cost:
    """ms of wall time, mJ in all, ms of the whole CPU and of the ANE kept busy; added when one
    follows the other."""

    ms: float = 0.0
    mj: float = 0.0
    cpu_ms: float = 0.0
    ane_ms: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: Cost) -> Cost:
        return self + other * -1

    def __mul__(self, n: float) -> Cost:
        return Cost(*(n * value for value in vars(self).values()))


@dataclass(frozen=True)
class Prefill:
    """A modelled prefill: the whole prompt, all layers."""

    prompt: int
    device: str
    attention: Cost
    experts: Cost  # with their launches
    host: Cost  # the router, and moving tokens
    padding: Cost  # of the experts, what rows without a token take
    dispatch_ms: float  # of the time, launches and Core ML's placing of graphs

    @property
    def total(self) -> Cost:
        """Time and energy of attention, experts and what the host does between them."""
        return self.attention + self.experts + self.host

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.total.ms / 1e3

    @property
    def mj_per_token(self) -> float:
        """EPT (NPUMoE §5.1): mJ of compute and communication a prompt token."""
        return self.total.mj / self.prompt

    @property
    def cpu_s(self) -> float:
        """Seconds that the CPU is busy."""
        return self.total.cpu_ms / 1e3


@dataclass(frozen=True)
class DeviceModel:
    """A device's fitted parameters and the formulas that use them."""

    device: str
    rates: Rates
    cpu: CPURates
    samples: tuple[Sample, ...]  # what the rates were fitted to
    memory_bytes: float  # of the machine, which CPU and ANE share
    overlap: bool  # whether experts on the CPU run while the ANE runs its groups

    @classmethod
    def of(
        cls,
        device: str = "m2-ultra",
        samples: Sequence[Sample] = TABLE_5,
        attention: float = ATTENTION_CPU,
        overlap: bool = True,
    ) -> DeviceModel:
        """The model fitted to NPUMoE's figures. ValueError for another device.

        samples, attention : of Table 5, and of the CPU over the ANE, where they shall be other ones
        (`rates.fit_cpu`). "m2-max" is not fitted: it is one of the M2 Ultra's two dies, so it gets
        half the rates and half the powers, by the cards' `npu_tops`."""
        require("device with published figures", device, ("m2-ultra", "m2-max"))
        rates = fit(samples)
        slower = load_device("m2-ultra")["npu_tops"] / load_device(device)["npu_tops"]
        return cls(
            device,
            rates.scaled(slower, slower, power=1 / slower),
            fit_cpu(rates, attention).scaled(slower),
            tuple(samples),
            load_device(device)["memory_gb"] * 1e9,
            overlap,
        )

    def require(self, plan: ANEPlan) -> None:
        """ValueError if the plan's weights are more than the machine's memory, which CPU and ANE
        share."""
        needed = weight_bytes(plan)
        if needed > self.memory_bytes:
            raise ValueError(
                f"{plan.spec.name} has at least {needed / 1e9:,.0f} GB of weights, "
                f"{self.device} {self.memory_bytes / 1e9:,.0f} GB of memory, and what reading "
                "them from a disk takes is not modelled: plan experts of fewer bytes a "
                "weight, or a larger machine"
            )

    def fit_table(self) -> Records:
        """The fit's errors: for latency and energy in each mode, as fitted and leaving one out."""
        rates, table = fit(self.samples), {}
        for quantity, mode in product(("latency", "energy"), MODES):
            samples = [s for s in self.samples if s.mode == mode]
            fitted = relative_errors(rates, samples, quantity)
            left = leave_one_out(self.samples, quantity, mode)
            table[f"{quantity}, {mode}"] = {"RMS": rms(fitted), "worst": max(map(abs, fitted))} | {
                "leave-one-out RMS": rms(left)
            }
        return table

    def cpu_experts(self, spec: MoESpec, loads: Any, visited: Any = None) -> Cost:
        """Experts on the CPU, each with its tokens; `loads` are counts, or means of them.

        visited : share of chunks in which each expert gets any token; None estimates it as if
        tokens were independent."""
        loads = np.asarray(loads, dtype=float)
        visited = -np.expm1(-loads) if visited is None else np.asarray(visited, dtype=float)
        size = spec.expert_params / REFERENCE_PARAMS
        return self._on_cpu(
            size * float(self.cpu.expert * visited.sum() + self.cpu.row * loads.sum())
        )

    def attention(self, spec: MoESpec, chunk: int, context: int, unit: Unit) -> Cost:
        """One layer's attention of a chunk over a cache of `context` tokens; ValueError if it is
        not grouped-query."""
        if spec.model_type not in GROUPED_QUERY:
            kind = "multi-head latent attention (MLA)" * (spec.model_type in LATENT)
            raise ValueError(
                f"the attention of {spec.name} is {kind or f'that of {spec.model_type!r}'}, which "
                f"is not modelled, only grouped-query attention is ({', '.join(GROUPED_QUERY)}): "
                "its experts can be costed, a prefill cannot"
            )
        params = attention_params(spec)
        # multiply-adds a token, as params are an expert's
        work = params + 2 * spec.heads * spec.head_dim * context
        rates = self.rates.scaled(params / REFERENCE_PARAMS, work / REFERENCE_PARAMS)
        ane = self._on_ane(rates, 1, chunk)
        return ane if unit == "ane" else self._on_cpu(ane.ms * self.cpu.attention)

    def dense(self, spec: MoESpec, intermediate: int, chunk: int) -> Cost:
        """A dense FFN of that intermediate size, or shared experts, on all tokens of a chunk, on
        the CPU."""
        size = intermediate / spec.I * spec.expert_params / REFERENCE_PARAMS
        return self._on_cpu(size * (self.cpu.expert + self.cpu.row * chunk))

    def experts(
        self, plan: ANEPlan, layer: LayerPlan, loads: np.ndarray, visited: np.ndarray | None = None
    ) -> tuple[Cost, float]:
        """(cost, ms of it launches and placing) of one MoE layer's experts in a chunk; loads
        [E]."""
        spec, graphs = plan.spec, layer.on("ane")
        size = spec.expert_params / REFERENCE_PARAMS
        rates = self.rates.scaled(size, size)
        ane = sum((self._on_ane(rates, len(g.experts), g.capacity) for g in graphs), Cost())
        heavy = sum(group.weight_bytes for group in graphs) / REFERENCE_BYTES
        managed = SYSTEMS[plan.system].managed
        placing = self._on_cpu(0.0 if managed else self.cpu.dispatch * heavy)
        on_cpu = [e for group in layer.on("cpu") for e in group.experts]
        others = self.cpu_experts(spec, loads[on_cpu], None if visited is None else visited[on_cpu])
        others += self.dense(spec, spec.shared_I, plan.chunk)
        together = placing + ane + others
        if self.overlap:  # communication's power is drawn once, and a busy CPU does not also wait
            hidden = min(ane.ms, others.ms)
            together += Cost(-hidden, -hidden * self.cpu.comm_w, -hidden * self.cpu.waiting)
        return together, self.rates.launch * len(graphs) + placing.ms

    def prefill(self, plan: ANEPlan, prompt: int, loads: Any = None) -> Prefill:
        """A prompt of that many tokens through the plan, in static chunks, the last of them padded.

        loads : [n, L, E], the experts' tokens in real chunks of the plan's size, on which only
            experts on the CPU depend; None takes what the plan expects.

        Raises ValueError: attention that is not modelled, chunks that no graph takes, or weights
        beyond the memory."""
        if prompt < 1:
            raise ValueError(f"a prompt has at least one token, not {prompt}")
        if plan.chunk % 16:
            raise ValueError(
                f"chunks of {plan.chunk} tokens are not converted, only multiples of 16: plan anew"
            )
        self.require(plan)
        spec = plan.spec
        chunks = math.ceil(prompt / plan.chunk)
        if loads is None:
            loads = np.zeros((1, spec.L, spec.E))
            visited = None
            for l, layer in enumerate(plan.layers):
                for group in layer.groups:
                    loads[0, l, list(group.experts)] = group.expected / len(group.experts)
        else:
            loads = check_loads(plan, loads)
            visited = (loads > 0).mean(0)
        means = loads.mean(0)
        attention, experts, padding, dispatch = Cost(), Cost(), Cost(), 0.0
        once = {
            unit: self.attention(spec, plan.chunk, prompt, unit)
            for unit in {of.attention for of in plan.layers}
        }
        for l, layer in enumerate(plan.layers):
            attention += once[layer.attention]
            tokens = means[l], None if visited is None else visited[l]
            cost, launching = self.experts(plan, layer, *tokens)
            experts += cost
            dispatch += launching
            padding += cost - self.experts(plan, _unpadded(layer, loads[:, l]), *tokens)[0]
        for _ in range(spec.num_layers - spec.L):
            attention += once[plan.layers[0].attention]
            experts += self.dense(spec, spec.dense_I, plan.chunk)
        host = self._on_cpu(self.cpu.choice * plan.chunk * spec.K * spec.L * spec.H / REFERENCE_H)
        parts = [cost * chunks for cost in (attention, experts, host, padding)]
        return Prefill(prompt, self.device, *parts, dispatch * chunks)

    def error(self, quantity: str) -> float:
        """RMS relative error of graphs that were left out of the fit, of "latency" or "energy".

        The CPU's parameters are single figures, whose error nobody knows.
        """
        return rms(leave_one_out(self.samples, quantity, "serial"))

    def _on_ane(self, rates: Rates, G: int, C: int) -> Cost:
        ms = rates.graph_ms(G, C)
        return Cost(ms, rates.graph_mj(G, C), ms * self.cpu.waiting, ms)

    def _on_cpu(self, ms: float) -> Cost:
        return Cost(ms, ms * (self.cpu.cpu_w + self.cpu.comm_w), ms)


def _unpadded(layer: LayerPlan, loads: np.ndarray) -> LayerPlan:
    """The layer with graphs of as many rows as are executed on average; loads [n, E]. No graph is
    made so."""

    def executed(group: PlannedGroup) -> float:
        mine = np.minimum(loads[:, list(group.experts)], group.capacity)
        return max(float(mine.mean()), 1e-6)

    graphs = (replace(group, capacity=executed(group)) for group in layer.on("ane"))
    return replace(layer, groups=(*layer.on("cpu"), *graphs))
