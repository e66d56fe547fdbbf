"""Converts a whole model to Core ML packages, layer by layer, as a plan says; a run that was cut off goes on.

Source: NPUMoE §A.4 (the pipeline), §4 (which expert is in which graph, and where that runs). A checkpoint becomes a
folder with a package for each attention and each group of experts that the plan puts on the Neural Engine, and a
manifest that says what runs where. What stays on the CPU (norms, routers, embeddings, the head, shared experts, cold
groups) is not copied: the manifest names the checkpoint and its identity.

    manifest.json                     settings, plan, and for each layer what runs where, with sizes and checksums
    layers/003/attention.mlpackage    decoder layer 3's attention
    layers/003/group02.mlpackage      group 2 of decoder layer 3's experts

Only one group's weights are in memory at a time. Until everything is there, the folder is `DESTINATION.part` with a
journal of the packages that are whole; a package that the journal does not vouch for is made again. Left out: models
whose experts have no graphs (`operators.why_no_graph`, `ffn_graph`), which are refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moelab.configs import spec_from_config
from moelab.ane.coreml.attention_graph import attention_shape, save_attention
from moelab.ane.coreml.converted import FORMAT, ConvertedModel, attention_file, group_file
from moelab.ane.coreml.evaluator import Evaluator
from moelab.ane.coreml.ffn_graph import (
    LAYOUTS,
    WEIGHTS,
    Expert,
    activation_of,
    expert_of,
    pack,
    reference,
    save_ffn,
    unpack,
)
from moelab.ane.coreml.journal import Work
from moelab.ane.operators import why_no_graph
from moelab.ane.coreml.package import coremltools, read_package
from moelab.ane.plan import Plan, make_plan
from moelab.ane.device.synthetic_popularity import assumed_counts
from moelab.models import compat, opening, plug
from moelab.models.checkpoint import Checkpoint
from moelab.models.direct import CheckpointExperts
from moelab.models.identity import of_checkpoint
from moelab.progress import progress

COMPUTE_UNITS = ("cpuAndNeuralEngine", "cpuOnly", "cpuAndGPU", "all")
#: the largest difference between a saved fp16 graph, evaluated in fp64, and torch: rounding of sums in another order
TOLERANCE = 1e-12
#: the same between torch and the architecture's own code; GPT-OSS's 1.702 is rounded to fp16 in a graph
OWN_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Settings:
    """How a model is converted.

    Attributes
    ----------
    context : P, positions of the KV caches.
    layout : of the expert graphs, see `ffn_graph`.
    weights : a key of `ffn_graph.WEIGHTS`; int8 and palettes are for the experts, attention stays fp16.
    stateful : whether attention keeps its cache as the model's state instead of taking and returning it. The runtime
        does not run such packages: decoding on the CPU could not read that cache. They can be linted and evaluated.
    every_tier : each expert package has a function for each of its layer's capacities, sharing the weights; the
        runtime takes the smallest that has room for a chunk's fullest expert.
    compute_units : what a Mac is asked to load the packages for.
    """

    context: int = 2048
    layout: str = "bc1s"
    weights: str = "fp16"
    stateful: bool = False
    every_tier: bool = False
    compute_units: str = "cpuAndNeuralEngine"

    def __post_init__(self) -> None:
        for field, allowed in (("layout", LAYOUTS), ("weights", WEIGHTS), ("compute_units", COMPUTE_UNITS)):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} is {getattr(self, field)!r}; it must be one of {', '.join(allowed)}")
        if self.context < 32 or self.context % 32:
            raise ValueError(f"context is {self.context}; it must be a multiple of 32")


def convert_model(model: str | Path | None, destination: str | Path, plan: Plan | None = None,
                  settings: Settings = Settings(), *, validate: bool = True) -> ConvertedModel:
    """Convert a model, or go on with a conversion that was cut off.

    Parameters
    ----------
    model : a checkpoint folder or a hub id; None for the shipped small model.
    destination : the new folder; until it is whole, `destination.part`.
    plan : what runs where; None plans chunks of 256 with an assumed popularity of the experts.
    validate : evaluate each expert graph as saved and compare it with torch; the largest difference is recorded.

    Raises
    ------
    FileExistsError : the destination exists, another process converts into it, or an unfinished conversion with other
        settings lies beside it.
    FileNotFoundError, ValueError : as `open_checkpoint`; a plan of another model; experts that have no graphs; a
        chunk that is no multiple of 16 or longer than the context; a graph that does not compute what torch does.
    ImportError : coremltools is not installed.
    """
    coremltools()
    destination = Path(destination)
    if destination.exists():
        raise FileExistsError(f"{destination} exists and is not overwritten; give another destination")
    checkpoint = Checkpoint.at(opening.find(model))
    config = compat.dequantising(opening.load_config(checkpoint.folder))
    spec = spec_from_config(config, name=opening.model_name(model, checkpoint.folder))
    if plan is None:
        plan = make_plan(spec, *assumed_counts(spec), bytes_per_weight=WEIGHTS[settings.weights] / 8,
                         popularity="assumed")
    mine = of_checkpoint(checkpoint, config)
    plan.require(mine, spec)
    plan = _possible(plan, config, settings)
    source = _Source(checkpoint, config, plan, settings)
    about = {"format": FORMAT, "name": spec.name, "checkpoint": str(checkpoint.folder.resolve()),
             "fingerprint": mine, "settings": asdict(settings), "plan": plan.to_dict()}
    tasks = [task for layer in range(spec.num_layers) for task in source.tasks(layer)]
    with closing(Work(destination.with_name(destination.name + ".part"), about)) as work:
        with progress(total=len(tasks), desc="converting", unit="graph", initial=len(work.done)) as bar:
            for name, make, check in tasks:
                if name not in work.done:
                    work.add(name, make, check if validate else None)
                    bar.update()
        layers = [source.describe(layer, work.done) for layer in range(spec.num_layers)]
        manifest = about | {"layers": layers, "problems": list(plan.problems),
                            "on_cpu": "norms, routers, embeddings, the head, shared experts, dense layers and the "
                                      "groups of unit cpu, from the checkpoint"}
        return ConvertedModel(work.publish(manifest, destination))


def _possible(plan: Plan, config: Any, settings: Settings) -> Plan:
    """The plan, with attention on the CPU if no graph computes it; ValueError for what cannot be converted at all."""
    if reason := why_no_graph("experts", plan.spec.model_type):
        raise ValueError(f"{plan.spec.name} is not converted: {reason}; moelab.ane.backends.TorchBackend runs its plan")
    if plan.chunk % 16:
        raise ValueError(f"the plan's chunks have {plan.chunk} tokens; a graph's sizes are multiples of 16: plan anew")
    if settings.context < plan.chunk:
        raise ValueError(f"context is {settings.context}, less than a chunk of {plan.chunk}; give a longer one")
    if not any(layer.attention == "ane" for layer in plan.layers):
        return plan
    try:
        attention_shape(config, plan.chunk, settings.context, settings.stateful)
    except ValueError as reason:
        return replace(plan, layers=tuple(replace(layer, attention="cpu") for layer in plan.layers),
                       problems=(*plan.problems, f"attention stays on the CPU: {reason}"))
    return plan


#: (file, writes the package at a path, compares the package at a path with torch)
Task = tuple[str, Callable[[Path], None], Callable[[Path], float] | None]


class _Source:
    """A checkpoint and what the plan wants of it."""

    def __init__(self, checkpoint: Checkpoint, config: Any, plan: Plan, settings: Settings) -> None:
        self.checkpoint, self.config, self.plan, self.settings = checkpoint, config, plan, settings
        self.experts = CheckpointExperts(checkpoint, config)
        self.modules = [layer.experts for layer in plug(compat.meta_twin(config))]
        self.keys = dict(checkpoint.keys())
        self.moe_index = {layer: index for index, layer in enumerate(plan.spec.moe_layers)}
        self.activation = activation_of(self.modules[0]) if any(layer.on("ane") for layer in plan.layers) else None
        self.shape = None
        if any(layer.attention == "ane" for layer in plan.layers):
            self.shape = attention_shape(config, plan.chunk, settings.context, settings.stateful)

    def attention_unit(self, layer: int) -> str:
        """Where a decoder layer's attention runs; one without experts does as the first that has some."""
        return self.plan.layers[self.moe_index.get(layer, 0)].attention

    def groups(self, layer: int) -> tuple:
        return self.plan.layers[self.moe_index[layer]].groups if layer in self.moe_index else ()

    def tasks(self, layer: int) -> Iterator[Task]:
        if self.attention_unit(layer) == "ane":
            yield attention_file(layer), lambda path: self.save_attention(path, layer), None
        for index, group in enumerate(self.groups(layer)):
            if group.unit == "ane":
                yield (group_file(layer, index), lambda path, group=group: self.save_group(path, layer, group),
                       lambda path, group=group: self.difference(path, layer, group))

    def save_attention(self, path: Path, layer: int) -> None:
        from safetensors import safe_open
        prefix, tensors = f"model.layers.{layer}.self_attn.", {}
        for key in (key for key in self.keys if key.startswith(prefix)):
            with safe_open(self.keys[key], "pt") as file:
                tensors[key[len(prefix):]] = file.get_tensor(key)
        if "q_proj.weight" not in tensors:
            raise ValueError(f"{self.checkpoint.folder} has no {prefix}q_proj.weight: its attention is stored in a way "
                             f"that is not read here; plan attention for the CPU")
        save_attention(path, self.shape, tensors)

    def experts_of(self, layer: int, group: Any) -> list[Expert]:
        moe = self.moe_index[layer]
        return [expert_of(self.modules[moe], self.experts(moe, e)) for e in group.experts]

    def capacities(self, layer: int, group: Any) -> list[int]:
        tiers = self.plan.layers[self.moe_index[layer]].tiers
        return sorted({group.capacity, *tiers.levels}) if self.settings.every_tier else [group.capacity]

    def save_group(self, path: Path, layer: int, group: Any) -> None:
        capacities = self.capacities(layer, group)
        save_ffn(path, self.experts_of(layer, group), capacities if self.settings.every_tier else capacities[0],
                 self.activation, self.settings.layout, self.settings.weights)

    def difference(self, path: Path, layer: int, group: Any) -> float:
        """Largest difference between a saved graph in fp64 and torch, relative to the largest output.

        Torch is `ffn_graph.reference`, which must itself agree with the architecture's own code.
        """
        experts, package = self.experts_of(layer, group), read_package(path)
        name = f"c{group.capacity}" if self.settings.every_tier else None
        x = torch.randn(len(experts) * group.capacity, experts[0].up.shape[1],
                        generator=torch.Generator().manual_seed(layer), dtype=torch.float64)
        y = unpack(Evaluator(package, name)({"x": pack(x, self.settings.layout)})["y"], self.settings.layout)
        expected = torch.cat([reference(expert, rows, self.activation)
                              for expert, rows in zip(experts, x.split(group.capacity))])
        difference, unlike = _relative(y, expected), _relative(expected, self.own(layer, group, x))
        if self.settings.weights == "fp16" and not difference <= TOLERANCE or not unlike <= OWN_TOLERANCE:
            raise ValueError(f"{path} does not compute what torch does: they differ by {difference:.3g} of the largest "
                             f"output, torch and the model's own code by {unlike:.3g}. This is a mistake in moelab or "
                             f"coremltools; please report it")
        return difference

    def own(self, layer: int, group: Any, x: torch.Tensor) -> torch.Tensor:
        """What the architecture's own code makes of the slots x [G·C, H], in fp64 with weights rounded to fp16."""
        moe = self.moe_index[layer]
        return torch.cat([self.modules[moe].ffn(rows, {name: tensor.half().double() for name, tensor in
                                                       self.experts(moe, e).items()})
                          for e, rows in zip(group.experts, x.split(group.capacity))])

    def describe(self, layer: int, done: dict[str, dict]) -> dict[str, Any]:
        """A layer's entry of the manifest."""
        unit = self.attention_unit(layer)
        attention = {"unit": unit} | (done[attention_file(layer)] if unit == "ane" else {})
        groups = []
        for index, group in enumerate(self.groups(layer)):
            entry = {"experts": list(group.experts), "capacity": group.capacity, "unit": group.unit}
            if group.unit == "ane":
                entry |= {"capacities": self.capacities(layer, group)} | done[group_file(layer, index)]
            groups.append(entry)
        return {"layer": layer, "moe": self.moe_index.get(layer), "attention": attention, "groups": groups,
                "attention_shape": asdict(self.shape) if unit == "ane" else None}


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
