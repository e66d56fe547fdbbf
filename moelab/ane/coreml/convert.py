"""Converts a whole model to Core ML packages, layer by layer, as a plan says; an interrupted run is
resumed.

Source: NPUMoE §A.4, §4. A checkpoint becomes a folder with a package for each attention and each
group of experts that the plan puts on the Neural Engine, and a manifest. What stays on the CPU is
not copied: the manifest names the checkpoint and its identity.

    manifest.json                     settings, plan, and for each layer what runs where, with sizes
                                      and checksums
    layers/003/attention.mlpackage    decoder layer 3's attention
    layers/003/group02.mlpackage      group 2 of decoder layer 3's experts

Only one group's weights are in memory at a time. Until all packages are there, the folder is
`DESTINATION.part` with a journal of the packages that are complete; any other is made again. Models
whose experts have no graphs (`systems.why_no_graph`, `ffn_graph`) are refused before anything is
written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moelab.ane.coreml.attention_graph import AttentionShape, attention_program, attention_shape
from moelab.ane.coreml.converted import FORMAT, MANIFEST, ConvertedModel, checksum, sealed
from moelab.ane.coreml.evaluator import Evaluator
from moelab.ane.coreml.ffn_graph import (
    WEIGHTS,
    activation_of,
    expert_of,
    pack,
    save_ffn,
    save_program,
    unpack,
)
from moelab.ane.coreml.package import coremltools
from moelab.ane.plan import ANEPlan
from moelab.ane.systems import why_no_graph
from moelab.base.files import vacant, write_json
from moelab.base.journal import Journal
from moelab.base.progress import progress
from moelab.base.records import Record
from moelab.base.registry import require
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.experts import CheckpointExperts
from moelab.models import compat, plug

#: the largest difference between a saved graph, evaluated in fp64, and the architecture's own code
#: with weights rounded to fp16: sums in another order; GPT-OSS's 1.702, rounded to fp16; what other
#: formats round
TOLERANCE, CLAMPED_TOLERANCE, COMPRESSED_TOLERANCE = 1e-12, 1e-3, 0.5


def convert_model(
    model: str | Path | Checkpoint | None,
    destination: str | Path,
    plan: ANEPlan,
    *,
    context: int = 2048,
    weights: str = "fp16",
) -> ConvertedModel:
    """Convert a model, or resume an interrupted conversion. Each expert graph is evaluated as saved
    and compared with torch; the largest difference is recorded.

    model : a checkpoint folder or a hub id; None for the shipped small model.
    context : P, positions of the KV caches.
    weights : of the experts, a key of `ffn_graph.WEIGHTS`; attention stays fp16.

    Raises FileExistsError where the destination exists, another process converts into it, or an
    unfinished conversion with other settings is there; FileNotFoundError and ValueError as
    `open_checkpoint`, for a plan of another model, experts that have no graphs, a bad chunk or
    context, and a graph that does not compute what torch does."""
    coremltools()
    require("weights", weights, WEIGHTS)
    destination = vacant(destination)
    checkpoint = Checkpoint.at(model)
    spec = checkpoint.spec
    plan.require(checkpoint.identity, spec)
    plan, shape = possible(plan, checkpoint.config, context)
    source = _Source(checkpoint, plan, shape, weights)
    about = {
        "format": FORMAT,
        "name": spec.name,
        "checkpoint": str(checkpoint.folder.resolve()),
        "fingerprint": checkpoint.identity,
        "settings": {"context": context, "weights": weights},
        "plan": plan.to_dict(),
    }
    layers, tasks = [], []
    for layer in range(spec.num_layers):
        entry, of_layer = source.layer(layer)
        layers.append(entry)
        tasks += of_layer
    began = about | {"content": checkpoint.content}
    with closing(Work(destination.with_name(destination.name + ".part"), began)) as work:
        with progress(
            total=len(tasks), desc="converting", unit="graph", initial=len(work.done)
        ) as bar:
            for part, name, make, check in tasks:
                if name not in work.done:
                    work.add(name, make, check)
                    bar.update()
                part |= work.done[name]
        return ConvertedModel(work.publish(about | {"layers": layers}, destination))


def possible(plan: ANEPlan, config: Any, context: int) -> tuple[ANEPlan, AttentionShape | None]:
    """The plan and its attention graphs' shape, with attention on the CPU if no graph computes it;
    ValueError for what cannot be converted at all."""
    if reason := why_no_graph("experts", plan.spec.model_type):
        raise ValueError(
            f"{plan.spec.name} is not converted: {reason}; moelab.ane.backends.TorchBackend "
            "runs its plan"
        )
    if plan.chunk % 16 or context % 32 or context < plan.chunk:
        raise ValueError(
            f"chunks of {plan.chunk} tokens and a context of {context}: a chunk must be a multiple "
            "of 16, and the context one of 32 and no shorter than it"
        )
    if not any(layer.attention == "ane" for layer in plan.layers):
        return plan, None
    try:
        return plan, attention_shape(config, plan.chunk, context)
    except ValueError as reason:
        layers = tuple(replace(layer, attention="cpu") for layer in plan.layers)
        problems = (*plan.problems, f"attention stays on the CPU: {reason}")
        return replace(plan, layers=layers, problems=problems), None


#: (entry of the manifest to complete, file, writes the package at a path, compares the package at a
#: path with torch)
Task = tuple[Record, str, Callable[[Path], None], Callable[[Path], float] | None]


@dataclass(eq=False)
class _Source:
    """A checkpoint and what the plan wants of it."""

    checkpoint: Checkpoint
    plan: ANEPlan
    shape: AttentionShape | None
    weights: str

    def __post_init__(self) -> None:
        self.tensors = CheckpointExperts(self.checkpoint)
        self.modules = [layer.seam for layer in plug(compat.meta_twin(self.checkpoint.config))]
        self.activation = activation_of(self.modules[0]) if self.plan.graphs else None

    def layer(self, layer: int) -> tuple[Record, list[Task]]:
        """A decoder layer's entry of the manifest, and the tasks that complete it."""
        moe = dict(zip(self.plan.spec.moe_layers, range(self.plan.spec.L))).get(layer)
        # attention of a layer without experts is as of the first that has some
        planned = self.plan.layers[moe or 0]
        entry = {
            "layer": layer,
            "moe": moe,
            "attention": {"unit": planned.attention},
            "groups": [],
            "attention_shape": asdict(self.shape) if planned.attention == "ane" else None,
        }
        tasks: list[Task] = []
        if planned.attention == "ane":
            name = f"layers/{layer:03d}/attention.mlpackage"
            tasks.append((entry["attention"], name, partial(self.save_attention, layer), None))
        for index, group in enumerate(() if moe is None else planned.groups):
            part = {"experts": list(group.experts), "capacity": group.capacity, "unit": group.unit}
            entry["groups"].append(part)
            if group.unit == "ane":
                name = f"layers/{layer:03d}/group{index:02d}.mlpackage"
                of = moe, part["experts"], group.capacity
                tasks.append((part, name, partial(self.save_group, *of), partial(self.off, *of)))
        return entry, tasks

    def save_attention(self, layer: int, path: Path) -> None:
        prefix = f"model.layers.{layer}.self_attn."
        tensors = {
            key.removeprefix(prefix): self.checkpoint.weights(tensor)
            for key, tensor in self.checkpoint.tensors.items()
            if key.startswith(prefix)
        }
        if "q_proj.weight" not in tensors:
            raise ValueError(
                f"{self.checkpoint.folder} has no {prefix}q_proj.weight: its attention is "
                "stored in a way that is not read here; plan attention for the CPU"
            )
        save_program(path, attention_program(self.shape, tensors))

    def save_group(self, moe: int, members: list[int], C: int, path: Path) -> None:
        experts = [expert_of(self.modules[moe], self.tensors(moe, e)) for e in members]
        save_ffn(path, experts, C, self.activation, weights=self.weights)

    def off(self, moe: int, members: list[int], C: int, path: Path) -> float:
        """Largest difference between a saved graph in fp64 and the architecture's own code, its
        weights rounded to fp16, relative to the largest output. ValueError: it is too large."""
        rng = torch.Generator().manual_seed(moe)
        x = torch.randn(len(members), C, self.plan.spec.H, generator=rng, dtype=torch.float64)
        y = unpack(Evaluator(path)({"x": pack(x.flatten(0, 1))})["y"])
        own = [
            self.modules[moe].ffn(
                rows, {name: t.half().double() for name, t in self.tensors(moe, e).items()}
            )
            for e, rows in zip(members, x)
        ]
        expected = torch.cat(own)
        difference = float((y - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
        limit = CLAMPED_TOLERANCE if self.activation == "clamped" else TOLERANCE
        if not difference <= (limit if self.weights == "fp16" else COMPRESSED_TOLERANCE):
            raise ValueError(
                f"{path} does not compute what torch does: they differ by {difference:.3g} of the "
                "largest output. This is a mistake in moelab or coremltools; please report it"
            )
        return difference


class Work:
    """The folder of an unfinished conversion, and its journal, which is locked until `close` or
    `publish`: what is converted, then the packages that are complete.

    done : file → its entry of the journal, for each package that is complete.

    Raises FileExistsError: another process works there, or the folder is another conversion's.
    """

    def __init__(self, folder: Path, about: Record) -> None:
        about = json.loads(json.dumps(about))
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.building = folder, folder / "building"
        self.journal = Journal(folder / "journal.jsonl")
        began, *packages = self.journal.lines or [about]
        if began != about:
            self.close()
            raise FileExistsError(
                f"{folder} holds an unfinished conversion of another model, plan or settings; "
                f"delete it to start over"
            )
        if not self.journal.lines:
            self.journal.append([about])
        self.done = {
            entry["file"]: entry
            for entry in packages
            if (folder / entry["file"]).is_dir()
            and checksum(folder / entry["file"]) == entry["checksum"]
        }

    def close(self) -> None:
        self.journal.close()

    def add(
        self, name: str, make: Callable[[Path], None], check: Callable[[Path], float] | None
    ) -> None:
        """Make a package in `building`, check it, move it to its place, and only then enter it in
        the journal."""
        place = self.folder / name
        building = self.building / Path(name).name
        shutil.rmtree(self.building, ignore_errors=True)
        shutil.rmtree(place, ignore_errors=True)
        for path in (building, place):
            path.parent.mkdir(parents=True, exist_ok=True)
        make(building)
        entry = {
            "file": name,
            "weight_bytes": sum(path.stat().st_size for path in building.rglob("weights/*")),
            "checksum": checksum(building),
            "difference": check and check(building),
        }
        os.rename(building, place)
        self.journal.append([entry])
        self.done[name] = entry

    def publish(self, manifest: Record, destination: Path) -> Path:
        """Write the manifest and give the folder its name."""
        write_json(self.folder / MANIFEST, sealed(manifest))
        shutil.rmtree(self.building, ignore_errors=True)
        self.journal.remove()
        os.rename(self.folder, destination)
        return destination
