"""Experts read from a checkpoint's own safetensors files, without conversion to a store.

An expert's tensors may be apart (Mixtral's w1, w3, w2), fused (GPT-OSS, Llama 4) or quantised
(MXFP4) in a checkpoint; transformers' own renaming and conversion tables say what becomes of them.
`CheckpointExperts` gives one expert after another as a source for the seam, and keeps nothing.
`CheckpointStore` takes the place of an `ExpertStore` in the offloading engine (ZipMoE §4: experts
are read into preallocated memory). Where a parameter is its tensors in the checkpoint one after
another, in the dtype that the model computes in, their bytes are read to where they are computed
from, a request for each tensor. Otherwise they are read into new memory and converted in the thread
that reads. What is in few bits and unpacks bit for bit to what transformers makes of it, as one
expert shows, stays in few bits, in the blob that a store would hold (`moelab.store.fewbit`).

A checkpoint has no checksums, so what is read is not verified; its headers and that it is complete
were checked before. A file that changes while it is open is noticed. A store adds compression and
reads past the page cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.completeness import Examined, LoadingPlan, complete
from moelab.models import compat
from moelab.models.experts import Weights
from moelab.models.identity import of_checkpoint
from moelab.models.seam import MoELayer, banks
from moelab.store import fewbit, packings
from moelab.store.codec import RAW, Codec
from moelab.store.codecs import Plane
from moelab.store.headers import NAMES, Stored
from moelab.store.layout import Chunk, ExpertFiles, Extent, TensorEntry, aligned
from moelab.store.reader import Chunks, StoreExperts


class CheckpointExperts:
    """Source of one expert after another, straight from a checkpoint: `source(layer, expert) →
    tensors`.

    Nothing is cached: a slow and simple source, with which others are compared.

    dtype : what the tensors are cast to, as loading the whole model would cast them; None keeps the
        stored one.
    plan : what `moelab.checkpoint.completeness.complete` returns for the checkpoint; by default that is
    called."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        plan: LoadingPlan | None = None,
    ) -> None:
        self.checkpoint, self.config, self.dtype, self.device = checkpoint, config, dtype, device
        self.plan = plan or complete(checkpoint, config)
        self.stored = (
            StoreExperts(checkpoint.store, mode="buffered")
            if checkpoint.store is not None
            else None
        )

    def __call__(self, layer: int, expert: int) -> Weights:
        """The tensors of one expert."""
        if self.stored is not None:
            return {
                name: self._ready(tensor) for name, tensor in self.stored(layer, expert).items()
            }
        return {name: self._ready(tensor) for name, tensor, _ in self.made(layer, expert)}

    def made(
        self, layer: int, expert: int
    ) -> Iterator[tuple[str, torch.Tensor, list[tuple[str, int, torch.Tensor]]]]:
        """(name, tensor, what it was made of) of an expert's parameters; that is (key, first weight
        of it that was read, what was read) of each of its tensors in the checkpoint."""
        for name, parameter, sources in expert_sources(self.plan, layer, expert):
            read = {pattern: self.checkpoint.read(*where) for pattern, where in sources.items()}
            made = converted(self.plan, parameter, read).to(self.plan.stored[layer][name])
            yield name, made, located(sources, read)

    def _ready(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the model's dtype, on its device and at a 64-byte boundary."""
        tensor = tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)
        return tensor.contiguous() if tensor.data_ptr() % 64 == 0 else tensor.clone()


def store_layers(layers: list[MoELayer]) -> list[tuple[str, int, bool]]:
    """For each MoE layer its experts module's name, its number of experts, and whether the model
    stacks them."""
    return [
        (f"{layer.name}.experts", layer.E, not isinstance(layer.experts, torch.nn.ModuleDict))
        for layer in layers
    ]


def expert_parameters(layer: MoELayer) -> dict[str, torch.Tensor]:
    """Name → one expert's parameter of a stock model, without the axis E."""
    if isinstance(layer.experts, torch.nn.ModuleDict):
        return dict(layer.experts["expert_0"].named_parameters())
    return {name: parameter[0] for name, parameter in banks(layer.experts).items()}


def expert_sources(
    plan: LoadingPlan, layer: int, expert: int
) -> Iterator[tuple[str, compat.ParameterPlan, dict[str, tuple[str, int | None]]]]:
    """(name, plan, {pattern: (key, part of it)}) of each parameter of one expert: what it is made
    of, in that order."""
    for name, parameter in plan.experts[layer].items():
        numbered, order = (
            compat.numbered_expert(name),
            getattr(parameter.converter, "source_patterns", ()),
        )
        found = {
            pattern: parameter.sources[pattern]
            for pattern in (*order, *parameter.sources)
            if pattern in parameter.sources
        }
        if numbered is None:
            yield (
                name,
                parameter,
                {
                    pattern: (keys[expert], None) if parameter.apart else (keys[0], expert)
                    for pattern, keys in found.items()
                },
            )
        elif numbered[0] == expert:
            yield (
                numbered[1],
                parameter,
                {pattern: (keys[0], None) for pattern, keys in found.items()},
            )


def located(
    sources: dict[str, tuple[str, int | None]], read: dict[str, torch.Tensor]
) -> list[tuple[str, int, torch.Tensor]]:
    """(key, first weight of it that was read, what was read) of what a parameter is made of, by
    pattern."""
    return [
        (key, (part or 0) * read[pattern].numel(), read[pattern])
        for pattern, (key, part) in sources.items()
    ]


def few_bits(
    plan: LoadingPlan, sources: list[tuple[str, int, torch.Tensor]], made: torch.Tensor
) -> tuple[Codec, np.ndarray, list[tuple[str, int, torch.Tensor]]] | None:
    """(codec, blob, sources as they are in it) of what a parameter is made of; None unless it is
    in few bits and the blob unpacks to what was made of it, bit for bit."""
    if found := fewbit.published([tensor for *_, tensor in sources], made):
        form, blob, wide = found
        return form, blob, [(key, start, tensor) for (key, start, _), tensor in zip(sources, wide)]
    scheme = getattr(plan.quantizer, "scheme", None)
    found = packings.keep(*scheme, sources, made) if scheme else None
    return found and (*found, sources)


def blob_of(
    plan: LoadingPlan, codec: Codec, sources: list[tuple[str, int, torch.Tensor]]
) -> np.ndarray:
    """The blob of a parameter of which `few_bits` has found the codec."""
    return (
        packings.gathered(*plan.quantizer.scheme, sources)[1]
        if isinstance(codec, packings.Packing)
        else fewbit.gathered([tensor for *_, tensor in sources])[1]
    )


def converted(
    plan: LoadingPlan, parameter: compat.ParameterPlan, tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    """One expert's parameter from its source tensors by pattern."""
    made = compat.convert_expert(parameter, tensors, plan.twin, plan.quantizer)
    return made if compat.numbered_expert(parameter.target.rpartition(".experts.")[2]) else made[0]


@dataclass(frozen=True)
class CheckpointLayer:
    """One MoE layer, attributes as of `moelab.store.layout.Layer`; offsets are those in memory."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    experts: list[dict[str, TensorEntry]]


@dataclass(frozen=True)
class ParameterSource:
    """One parameter of one expert: the tensors that it is made of, where they are in the
    checkpoint, and whether it is just their bytes (`plain`)."""

    name: str
    plan: compat.ParameterPlan
    stored: dict[str, Stored]
    places: dict[str, tuple[str, int | None]]
    plain: bool

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.stored.values())


class CheckpointStore(ExpertFiles):
    """A checkpoint as the store of codec "raw" that it was never converted to; not one for `verify`
    and `restore`.

    dtype : that experts are given in, that of the model.
    `scratch` is the memory in bytes that converting one expert takes for a moment.

    Reading raises StoreError if a file was changed since the checkpoint was examined.
    """

    aligned, codec, shards, checksum = False, "raw", 1, None

    def __init__(self, model: Examined, dtype: torch.dtype) -> None:
        self.model, self.dtype, self.spec, self.folder = (
            model,
            dtype,
            model.spec,
            model.checkpoint.folder,
        )
        self._forms: dict[tuple, Codec] = {}  # what a parameter is made of → its codec
        self.layers: list[CheckpointLayer] = []
        for index in range(len(model.plan.layers)):
            self.layers.append(self._layer(index, {}))
            if model.plan.quantizer is not None and (forms := self._few_bits(index)):
                self.layers[index] = self._layer(index, forms)
        self.scratch = max(
            (
                source.nbytes + 2 * layer.experts[0][source.name].stored()
                for i, layer in enumerate(self.layers)
                for source in self.sources(i, 0)
                if not source.plain
            ),
            default=0,
        )

    def _layer(self, index: int, forms: dict[str, Codec]) -> CheckpointLayer:
        """A layer whose experts' parameters are in few bits, by name, or as the model computes with
        them."""
        layer, entries, at = self.model.plan.layers[index], {}, 0
        for name, parameter in expert_parameters(layer).items():
            dtype, shape = (
                self.dtype if parameter.is_floating_point() else parameter.dtype,
                tuple(parameter.shape),
            )
            codec = forms.get(name, RAW)
            chunk = Chunk(at, codec.nbytes(shape, NAMES[dtype]), "")
            entries[name] = TensorEntry(NAMES[dtype], shape, "", ((codec, (chunk,)),))
            at += aligned(chunk.length)
        return CheckpointLayer(
            {name: (entry.dtype, entry.shape) for name, entry in entries.items()},
            [entries] * layer.E,
        )

    def _few_bits(self, index: int) -> dict[str, Codec]:
        """Name → codec of the parameters that can stay in few bits, by the layer's first expert,
        from which others do not differ in what they are made of; what equals its transpose does not
        say how it lies."""
        made_of: dict[str, set[tuple]] = {}
        for expert in range(len(self.layers[index].experts)):
            for source in self.sources(index, expert):
                made_of.setdefault(source.name, set()).add(
                    (
                        source.name,
                        *(
                            (pattern, stored.dtype, stored.shape)
                            for pattern, stored in source.stored.items()
                        ),
                    )
                )
        found = {}
        for source in self.sources(index, 0):
            if source.plain or len(made_of[source.name]) > 1:
                continue
            (what,) = made_of[source.name]
            if what not in self._forms:
                read = {
                    pattern: self.model.checkpoint.read(*where)
                    for pattern, where in source.places.items()
                }
                made = converted(self.model.plan, source.plan, read).to(self.dtype)
                few = few_bits(self.model.plan, located(source.places, read), made)
                symmetric = (
                    made.dim() == 2 and made.shape == made.mT.shape and torch.equal(made, made.mT)
                )
                self._forms[what] = few[0] if few and not symmetric else RAW
            if self._forms[what] is not RAW:
                found[source.name] = self._forms[what]
        return found

    def sources(self, layer: int, expert: int) -> Iterator[ParameterSource]:
        """Where in the checkpoint each parameter of an expert is."""
        entries, plan, tensors = (
            self.entries(layer, expert),
            self.model.plan,
            self.model.checkpoint.tensors,
        )
        for name, parameter, found in expert_sources(plan, layer, expert):
            patterns = compat.concatenation(parameter, plan.quantizer)
            stored = {
                pattern: tensors[key] if part is None else tensors[key].slice(part)
                for pattern in patterns or found
                for key, part in [found[pattern]]
            }
            same = all(one.dtype == entries[name].dtype for one in stored.values())
            yield ParameterSource(
                name, parameter, stored, found, plain=same and patterns is not None
            )

    def stored_bytes(self, layer: int, expert: int, part: str) -> int:
        return 0 if part == "SM" else sum(source.nbytes for source in self.sources(layer, expert))

    def paths(self, layer: int) -> list[Path]:
        return sorted(
            {
                stored.file
                for expert in range(len(self.layers[layer].experts))
                for source in self.sources(layer, expert)
                for stored in source.stored.values()
            }
        )

    def extents(self, parts: list[Chunks]) -> Iterator[Extent]:
        """As of `ExpertStore`: of each tensor; what is not plain is converted after the last of it
        has been read."""
        chunks = parts[0]
        for source in self.sources(chunks.layer, chunks.expert):
            yield from self._extents(source, chunks.plane(source.name, 0))

    def _extents(self, source: ParameterSource, plane: Plane) -> Iterator[Extent]:
        target, at, read = plane.shards[0], 0, {}
        for pattern, stored in source.stored.items():
            self.model.checkpoint.require_unchanged(stored.file)
            if source.plain:
                memory, at = target[at : at + stored.nbytes], at + stored.nbytes
            else:
                read[pattern] = stored.empty()
                memory = read[pattern].reshape(-1).view(torch.uint8).numpy()
            yield stored.file, stored.begin, [memoryview(memory)]
        if read and plane.codec.few_bits:
            target[:] = blob_of(self.model.plan, plane.codec, located(source.places, read))
        elif read:
            made = converted(self.model.plan, source.plan, read)
            dtype = self.dtype if made.is_floating_point() else made.dtype
            torch.from_numpy(target).view(dtype).view(made.shape).copy_(made)

    @cached_property
    def identity(self) -> str:
        return of_checkpoint(self.model.checkpoint, self.model.config)

    @property
    def weights_bytes(self) -> int:
        plan = self.model.plan
        return sum(
            stored.nbytes
            for key, stored in self.model.checkpoint.tensors.items()
            if key not in plan.expert_keys and key not in plan.ignored
        )
