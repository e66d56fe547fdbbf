"""The device model as fitted here rather than read from a card: with choices of ours changed, its
errors, what of a prefill is padding and dispatch, and end to end with decoding.

That CPU and ANE work at once is what `moelab.ane.runtime` does; the paper does not say so, and
without it placement could not make the ablation's last step faster, as Figure 17 has it
(`overlap=False`). Writing back costs what gathering costs: Table 4's 1.2 s a layer for it
contradicts Figure 14 (docs/papers/npumoe.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from moelab.ane.plan import ANEPlan, LayerPlan, PlannedGroup
from moelab.ane.predict import Cost, DeviceModel, Prefill
from moelab.base.records import Records
from moelab.base.registry import require
from moelab.cards import load_device

from .ane_counts import check_loads
from .ane_published import ATTENTION_CPU, TABLE_5, Sample
from .ane_rates import MODES, fit, fit_cpu, leave_one_out, relative_errors, rms, slowed


def fitted(
    device: str = "m2-ultra",
    samples: Sequence[Sample] = TABLE_5,
    attention: float = ATTENTION_CPU,
    overlap: bool = True,
) -> DeviceModel:
    """The model fitted to NPUMoE's figures. ValueError for another device.

    samples, attention : of Table 5, and of the CPU over the ANE, where they shall be other ones
    (`ane_rates.fit_cpu`). "m2-max" is not fitted: it is one of the M2 Ultra's two dies."""
    require("device with published figures", device, ("m2-ultra", "m2-max"))
    card, rates = load_device(device), fit(samples)["serial"]
    slower = load_device("m2-ultra")["npu_tops"] / card["npu_tops"]
    both = (slowed(of, slower) for of in (rates, fit_cpu(rates, attention)))
    return DeviceModel(card.name, *both, card["memory_gb"] * 1e9, overlap)


def fit_table(samples: tuple[Sample, ...] = TABLE_5) -> Records:
    """The fit's errors: for latency and energy in each mode, as fitted and leaving one out."""
    rates, table = fit(samples), {}
    for quantity, mode in product(("latency", "energy"), MODES):
        of_mode = [s for s in samples if s.mode == mode]
        errors = relative_errors(rates, of_mode, quantity)
        left = leave_one_out(samples, quantity, mode)
        table[f"{quantity}, {mode}"] = {"RMS": rms(errors), "worst": max(map(abs, errors))} | {
            "leave-one-out RMS": rms(left)
        }
    return table


def error(quantity: str) -> float:
    """RMS relative error of graphs that were left out of the fit, of "latency" or "energy".

    The CPU's parameters are single figures, whose error nobody knows.
    """
    return rms(leave_one_out(TABLE_5, quantity, "serial"))


#: tokens that the paper's workloads decode on average (§5.1)
DECODED = 8


@dataclass(frozen=True)
class Modelled(Prefill):
    """A prefill with what of it is padding and dispatch, and what decoding adds."""

    padding: Cost  # of the experts, what rows without a token take
    dispatch_ms: float  # of the time, launches of expert graphs and Core ML's placing of them
    decoding: Cost  # of `DECODED` tokens, on the CPU in every system

    @property
    def mj_per_token(self) -> float:
        """EPT (NPUMoE §5.1): mJ of compute and communication a prompt token."""
        return self.total.mj / self.prompt

    @property
    def end_to_end(self) -> Cost:
        """Prefill and decoding."""
        return self.total + self.decoding


def prefill_of(
    device: DeviceModel, plan: ANEPlan, prompt: int, loads: np.ndarray, bare: ANEPlan | None = None
) -> Modelled:
    """A prompt of that many tokens through the plan, under loads [n, L, E], then `DECODED` tokens.
    ValueError: weights beyond the memory, and what `DeviceModel.prefill` refuses.

    bare : the plan `unpadded` under these loads, where there is one already."""
    device.require(plan)
    loads = check_loads(plan, loads)
    whole = device.prefill(plan, prompt, loads)
    bare = unpadded(plan, loads) if bare is None else bare
    filled = device.prefill(bare, prompt, loads)
    placing = sum(device.placing(plan, layer).ms for layer in plan.layers)
    launching = plan.launches * device.rates.launch_ms + placing
    return Modelled(
        **vars(whole),
        padding=whole.experts + filled.experts * -1,
        dispatch_ms=math.ceil(prompt / plan.chunk) * launching,
        decoding=device.decode(plan.spec, prompt) * DECODED,
    )


def unpadded(plan: ANEPlan, loads: np.ndarray) -> ANEPlan:
    """The plan with graphs of as many rows as are executed on average under loads [n, L, E]; they
    depend on neither the device nor the prompt."""
    layers = (_unpadded(layer, loads[:, l]) for l, layer in enumerate(plan.layers))
    return replace(plan, layers=tuple(layers))


def _unpadded(layer: LayerPlan, loads: np.ndarray) -> LayerPlan:
    """The layer with graphs of as many rows as are executed on average; loads [n, E]. No graph is
    made so."""

    def executed(group: PlannedGroup) -> float:
        mine = np.minimum(loads[:, list(group.experts)], group.capacity)
        return max(float(mine.mean()), 1e-6)

    graphs = (replace(group, capacity=executed(group)) for group in layer.on("ane"))
    return replace(layer, groups=(*layer.on("cpu"), *graphs))
