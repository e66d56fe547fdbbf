"""Converts a whole model to Core ML packages, layer by layer, as a plan says; a run that was cut off goes on.

Source: NPUMoE §A.4 (the pipeline), §4 (which expert is in which graph, and where that runs). A checkpoint becomes a
folder with a package for each attention and each group of experts that the plan puts on the Neural Engine, and a
manifest that says what runs where. What stays on the CPU (norms, routers, embeddings, the head, shared experts, cold
groups) is not copied: the manifest names the checkpoint and its fingerprint.

    manifest.json                     settings, plan, and for each layer what runs where, with sizes and checksums
    layers/003/attention.mlpackage    decoder layer 3's attention
    layers/003/group02.mlpackage      group 2 of decoder layer 3's experts

Only one group's weights are in memory at a time. Until everything is there, the folder is `DESTINATION.part` with a
journal of the packages that are whole; a package that the journal does not vouch for is made again. Left out: models
whose experts the graphs do not know (`ffn_graph`), which are refused before anything is written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moelab.ane.attention_graph import attention_shape, save_attention
from moelab.ane.converted import FORMAT, MANIFEST, ConvertedModel, checksum, fingerprint
from moelab.ane.evaluator import Evaluator
from moelab.ane.ffn_graph import (
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
from moelab.ane.package import coremltools, read_package
from moelab.ane.plan import Plan, make_plan
from moelab.ane.skew import assumed_counts
from moelab.models import compat, opening, plug
from moelab.models.checkpoint import Checkpoint, CheckpointExperts
from moelab.progress import progress
from moelab.specs import MoESpec

COMPUTE_UNITS = ("cpuAndNeuralEngine", "cpuOnly", "cpuAndGPU", "all")
#: the largest difference between a saved fp16 graph, evaluated in fp64, and torch: rounding of sums in another order
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Settings:
    """How a model is converted.

    Attributes
    ----------
    context : P, positions of the KV caches.
    layout : of the expert graphs, see `ffn_graph`.
    weights : a key of `ffn_graph.WEIGHTS`; int8 and palettes are for the experts, attention stays fp16.
    stateful : whether attention keeps its cache as the model's state instead of taking and returning it.
    every_tier : each expert package has a function for each of its layer's capacities, sharing the weights, so that
        the runtime may take the smallest that fits.
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
    FileExistsError : the destination exists, or an unfinished conversion with other settings lies beside it.
    FileNotFoundError, ValueError : as `open_model`; a plan of another model; an architecture that has no graphs; a
        graph that does not compute what torch does.
    ImportError : coremltools is not installed.
    """
    coremltools()
    destination = Path(destination)
    if destination.exists():
        raise FileExistsError(f"{destination} exists and is not overwritten; give another destination")
    checkpoint = Checkpoint.at(opening.find(model))
    config = compat.dequantising(opening.load_config(checkpoint.folder))
    spec = MoESpec.from_config(config, name=opening.model_name(model, checkpoint.folder))
    if plan is None:
        plan = make_plan(spec, *assumed_counts(spec), popularity="assumed")
    if plan.spec.fingerprint() != spec.fingerprint():
        raise ValueError(f"this plan is of {plan.spec.name}, and {spec.name} has another geometry; plan it anew")
    source = _Source(checkpoint, config, plan, settings)
    about = {"format": FORMAT, "name": spec.name, "checkpoint": str(checkpoint.folder.resolve()),
             "fingerprint": fingerprint(checkpoint), "settings": asdict(settings), "plan": plan.to_dict()}
    work = Work(destination.with_name(destination.name + ".part"), about)
    tasks = [task for layer in range(spec.num_layers) for task in source.tasks(layer)]
    with progress(total=len(tasks), desc="converting", unit="graph", initial=len(work.done)) as bar:
        for name, make, check in tasks:
            if name not in work.done:
                work.add(name, make, check if validate else None)
                bar.update()
    layers = [source.describe(layer, work.done) for layer in range(spec.num_layers)]
    manifest = about | {"layers": layers, "problems": source.problems,
                        "on_cpu": "norms, routers, embeddings, the head, shared experts, dense layers and the groups "
                                  "of unit cpu, from the checkpoint"}
    return ConvertedModel(work.publish(manifest, destination))


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
        self.shape, self.problems = None, list(plan.problems)
        if any(layer.attention == "ane" for layer in plan.layers):
            try:
                self.shape = attention_shape(config, plan.chunk, settings.context, settings.stateful)
            except ValueError as reason:
                self.problems.append(f"attention stays on the CPU: {reason}")

    def attention_unit(self, layer: int) -> str:
        """Where a decoder layer's attention runs; one without experts does as the first that has some."""
        return self.plan.layers[self.moe_index.get(layer, 0)].attention if self.shape else "cpu"

    def groups(self, layer: int) -> tuple:
        return self.plan.layers[self.moe_index[layer]].groups if layer in self.moe_index else ()

    def tasks(self, layer: int) -> Iterator[Task]:
        if self.attention_unit(layer) == "ane":
            yield _attention_file(layer), lambda path: self.save_attention(path, layer), None
        for index, group in enumerate(self.groups(layer)):
            if group.unit == "ane":
                yield (_group_file(layer, index), lambda path, group=group: self.save_group(path, layer, group),
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
        """Largest difference between a saved graph in fp64 and torch, relative to the largest output."""
        experts, package = self.experts_of(layer, group), read_package(path)
        name = f"c{group.capacity}" if self.settings.every_tier else None
        x = torch.randn(len(experts) * group.capacity, experts[0].up.shape[1],
                        generator=torch.Generator().manual_seed(layer), dtype=torch.float64)
        y = unpack(Evaluator(package, name)({"x": pack(x, self.settings.layout)})["y"], self.settings.layout)
        expected = torch.cat([reference(expert, rows, self.activation)
                              for expert, rows in zip(experts, x.split(group.capacity))])
        difference = float((y - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
        if self.settings.weights == "fp16" and not difference <= TOLERANCE:
            raise ValueError(f"{path} does not compute what torch does: they differ by {difference:.3g} of the largest "
                             f"output. This is a mistake in moelab or coremltools; please report it")
        return difference

    def describe(self, layer: int, done: dict[str, dict]) -> dict[str, Any]:
        """A layer's entry of the manifest."""
        unit = self.attention_unit(layer)
        attention = {"unit": unit} | (done[_attention_file(layer)] if unit == "ane" else {})
        groups = []
        for index, group in enumerate(self.groups(layer)):
            entry = {"experts": list(group.experts), "capacity": group.capacity, "unit": group.unit}
            if group.unit == "ane":
                entry |= {"capacities": self.capacities(layer, group)} | done[_group_file(layer, index)]
            groups.append(entry)
        return {"layer": layer, "moe": self.moe_index.get(layer), "attention": attention, "groups": groups,
                "attention_shape": asdict(self.shape) if unit == "ane" else None}


def _attention_file(layer: int) -> str:
    return f"layers/{layer:03d}/attention.mlpackage"


def _group_file(layer: int, index: int) -> str:
    return f"layers/{layer:03d}/group{index:02d}.mlpackage"


class Work:
    """The folder of a conversion that is not finished, and its journal.

    done : file → {"file", "weight_bytes", "checksum", "difference"} of each package that is whole.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.journal = folder, folder / "journal.jsonl"
        wanted, written = json.dumps(about, sort_keys=True), folder / "settings.json"
        folder.mkdir(parents=True, exist_ok=True)
        if written.exists() and written.read_text(encoding="utf-8") != wanted:
            raise FileExistsError(f"{folder} holds an unfinished conversion of another model, plan or settings; "
                                  f"delete it to start over")
        part = folder / "settings.json.part"
        part.write_text(wanted, encoding="utf-8")
        os.replace(part, written)
        self.done = {entry["file"]: entry for entry in self._entries()
                     if (folder / entry["file"]).is_dir() and checksum(folder / entry["file"]) == entry["checksum"]}

    def _entries(self) -> Iterator[dict[str, Any]]:
        if self.journal.exists():
            for line in self.journal.read_text(encoding="utf-8").splitlines():
                try:
                    yield json.loads(line)
                except ValueError:          # the run was killed while it wrote this line
                    return

    def add(self, name: str, make: Callable[[Path], None], check: Callable[[Path], float] | None) -> None:
        """Make a package beside its place, check it, move it there, and only then enter it in the journal."""
        place = self.folder / name
        building = self.folder / "building" / place.name
        for path in (building, place):
            shutil.rmtree(path, ignore_errors=True)
            path.parent.mkdir(parents=True, exist_ok=True)
        make(building)
        difference = check(building) if check else None
        weights = sum(path.stat().st_size for path in building.rglob("weights/*"))
        entry = {"file": name, "weight_bytes": weights, "checksum": checksum(building), "difference": difference}
        os.rename(building, place)
        self._forget_torn_line()
        with open(self.journal, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.done[name] = entry

    def _forget_torn_line(self) -> None:
        """Cut off a last line without its end, or what is written after it could not be read."""
        if self.journal.exists():
            text = self.journal.read_bytes()
            if not text.endswith(b"\n"):
                with open(self.journal, "r+b") as file:
                    file.truncate(text.rfind(b"\n") + 1)

    def publish(self, manifest: dict[str, Any], destination: Path) -> Path:
        """Write the manifest and give the folder its name."""
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        shutil.rmtree(self.folder / "building", ignore_errors=True)
        for name in ("journal.jsonl", "settings.json"):
            (self.folder / name).unlink(missing_ok=True)
        os.rename(self.folder, destination)
        return destination
