"""A conversion checked without a Mac: sizes, the linter, differences to torch, and the error of
fp16.

`fp16_error` runs one graph in double precision and with fp16 rounding after each operation;
`shaken` is its control: noise of that size on the unconverted model's experts, which shows how far
apart logits come by rounding alone. Whole prompts through the packages are in `moelab.ane.parity`.
Source: NPUMoE §A.4, Fig. 20. Times are CPU time, measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moelab.ane.coreml.convert import ConversionSettings, convert_model
from moelab.ane.coreml.converted import ConvertedModel
from moelab.ane.coreml.linter import Report, lint
from moelab.ane.plan import ANEPlan, attention_params
from moelab.models import discover, plugged


def on_first_layers(plan: ANEPlan, n: int) -> ANEPlan:
    """The plan of the first n MoE layers; all else stays on the CPU."""
    rest = [
        replace(
            layer,
            attention="cpu",
            groups=tuple(replace(group, unit="cpu") for group in layer.groups),
        )
        for layer in plan.layers[n:]
    ]
    return replace(plan, layers=(*plan.layers[:n], *rest))


class ConvertedPackage(NamedTuple):
    """ "attention" or "G×C"; largest difference to torch in double precision (None for attention);
    linter's report."""

    kind: str
    difference: float | None
    report: Report


@dataclass(frozen=True, eq=False)
class Conversion:
    """A model's packages; `seconds` of CPU time, and the bytes of weights that were to be
    expected."""

    model: ConvertedModel
    seconds: float
    expected_bytes: int
    packages: tuple[ConvertedPackage, ...]

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of weights in all packages."""
        return sum(entry["weight_bytes"] for entry in self.model.packages)

    @property
    def difference(self) -> float:
        """Largest of the expert graphs' differences to torch."""
        return max(one.difference for one in self.packages if one.difference is not None)

    @property
    def clean(self) -> bool:
        """Whether the linter finds nothing wrong with any package."""
        return all(one.report.clean for one in self.packages)

    def kinds(self) -> dict[str, list[ConvertedPackage]]:
        """Kind of graph → its packages."""
        return {
            kind: [one for one in self.packages if one.kind == kind]
            for kind in dict.fromkeys(one.kind for one in self.packages)
        }


def convert(model: str | None, folder: str | Path, plan: ANEPlan, context: int) -> Conversion:
    """Convert a checkpoint (None: the small model) for a KV cache of at least `context` positions,
    and lint it."""
    began = time.process_time()
    converted = convert_model(
        model, folder, plan, ConversionSettings(context=-(-context // 32) * 32)
    )
    seconds = time.process_time() - began
    attentions = sum(layer.attention == "ane" for layer in plan.layers)
    entries = [("attention", layer["attention"]) for layer in converted.layers]
    entries += [
        (f"{len(group['experts'])}×{group['capacity']}", group)
        for layer in converted.layers
        for group in layer["groups"]
        if "file" in group
    ]
    return Conversion(
        converted,
        seconds,
        plan.ane_bytes + 2 * attention_params(plan.spec) * attentions,
        tuple(
            ConvertedPackage(kind, entry["difference"], lint(converted.package(entry)))
            for kind, entry in entries
            if "file" in entry
        ),
    )


def fp16_error(converted: ConvertedModel, seed: int = 0) -> float:
    """Relative RMS difference of the first expert graph with fp16 rounding to itself in double
    precision."""
    layer, group = next(
        (l, g)
        for l, of in enumerate(converted.layers)
        for g, entry in enumerate(of["groups"])
        if "file" in entry
    )
    graph = {mode: converted.group(layer, group, mode) for mode in ("double", "fp16")}
    slots, H = len(graph["fp16"].experts) * graph["fp16"].capacity, converted.plan.spec.H
    x = torch.randn(slots, H, generator=torch.Generator().manual_seed(seed)).half().double()
    exact, rounded = (graph[mode](x).double() for mode in ("double", "fp16"))
    return float((rounded - exact).norm() / exact.norm())


def shaken(
    model: Any, prompts: Sequence[Sequence[int]], size: float, seed: int = 0
) -> list[torch.Tensor]:
    """Largest difference of a logit, [S] for each prompt, if what experts put out carries relative
    noise."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * (1 + size * torch.randn(out.shape, generator=generator))

    with torch.no_grad(), plugged(model):
        plain = [model(torch.tensor([list(ids)])).logits[0] for ids in prompts]
        hooks = [layer.experts.register_forward_hook(noisy) for layer in discover(model)]
        try:
            return [
                (model(torch.tensor([list(ids)])).logits[0] - was).abs().amax(-1)
                for ids, was in zip(prompts, plain)
            ]
        finally:
            for hook in hooks:
                hook.remove()
