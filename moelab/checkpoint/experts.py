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

Experts of a GGUF file stay in the bits of the file, where a parameter is rows of one GGML type.

A checkpoint has no checksums, so what is read is not verified, but of GGUF (`gguf.Sums`); its
headers and that it is complete were checked before. A file that changes while it is open is noticed.
A store adds compression."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.gguf import codec_of, weights_of
from moelab.checkpoint.gguf_names import Made
from moelab.checkpoint.plan import FLOATS, LoadingPlan
from moelab.models import compat
from moelab.models.experts import shapes
from moelab.models.seam import MoELayer
from moelab.store import fewbit, packings
from moelab.store.bits import as_bytes
from moelab.store.codec import RAW, Codec
from moelab.store.headers import NAMES, Shape, Stored, Tensors
from moelab.store.layout import Chunk, Entries, ExpertFiles, Extent, TensorEntry, aligned
from moelab.store.reader import BLOCK, Chunks, StoreExperts

#: bytes from which on a parameter is placed so that it can be read without a copy
LARGE = 1 << 18
#: (key, first weight of it that was read, what was read) of a tensor in the checkpoint
Piece = tuple[str, int, torch.Tensor]
#: how an expert is read: its files, what is read to which bytes as it is, what is converted
Reads = tuple[list[Path], list[tuple[Stored, slice]], list["ParameterSource"]]


@dataclass(frozen=True)
class ParameterSource:
    """One parameter of one expert: how it is made, and by pattern the tensors, or parts of them, that
    it is made of."""

    name: str
    plan: compat.ParameterPlan
    stored: dict[str, Stored | Made]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.stored.values())

    @property
    def kind(self) -> tuple:
        """What it is made of: its name, and patterns, types and shapes of its tensors."""
        return (self.name, *((p, of.dtype, of.shape) for p, of in self.stored.items()))

    def read(self, checkpoint: Checkpoint) -> tuple[torch.Tensor, list[Piece]]:
        """The parameter, and what was read for it."""
        read = {pattern: checkpoint.weights(entry) for pattern, entry in self.stored.items()}
        return self.make(checkpoint.plan, read), self.pieces(read)

    def pieces(self, read: Tensors) -> list[Piece]:
        return [(of.key, of.first, read[pattern]) for pattern, of in self.stored.items()]

    def make(self, plan: LoadingPlan, read: Tensors) -> torch.Tensor:
        """The parameter from its tensors by pattern, by transformers' own conversion; what is
        dequantised has the model's type."""
        one = copy(plan.twin)  # some look how a parameter lies: `Transpose(check_dims=True)`
        one.get_parameter = lambda name: plan.twin.get_parameter(name)[:1]
        made = compat.converted(self.plan, read, one, plan.quantizer)[self.plan.target]
        if plan.quantizer and any(of.dtype not in FLOATS for of in self.stored.values()):
            made = made.to(plan.twin.get_parameter(self.plan.target).dtype)
        return made if self.plan.single or self.plan.rows else made[0]


def expert_sources(checkpoint: Checkpoint, layer: int, expert: int) -> Iterator[ParameterSource]:
    """What each parameter of one expert is made of."""
    for name, plan in checkpoint.plan.experts[layer][expert].items():
        stored = {}
        for pattern, keys in plan.sources.items():
            of = checkpoint.tensors[keys[expert if plan.apart else 0]]
            stored[pattern] = of if plan.apart or plan.single else of.slice(expert, plan.rows or 1)
        yield ParameterSource(name, plan, stored)


class CheckpointExperts:
    """Source of one expert after another, straight from a checkpoint: `source(layer, expert) →
    tensors`.

    Nothing is cached: a slow and simple source, with which others are compared.

    dtype : what the tensors are cast to, as loading the whole model would cast them; None keeps the
        stored one."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        store = checkpoint.store
        if checkpoint.gguf is not None:
            store = CheckpointStore(checkpoint, dtype or checkpoint.dtype())
        self.stored = None if store is None else StoreExperts(store, mode="buffered")

    def __call__(self, layer: int, expert: int) -> Tensors:
        """The tensors of one expert, each at a multiple of 64 bytes."""
        if self.stored is not None:
            tensors = self.stored(layer, expert)
        else:
            tensors = {name: made for name, made, _ in self.made(layer, expert)}
        return {name: self._ready(tensor) for name, tensor in tensors.items()}

    def made(self, layer: int, expert: int) -> Iterator[tuple[str, torch.Tensor, list[Piece]]]:
        """(name, tensor, what it was made of) of an expert's parameters."""
        for source in expert_sources(self.checkpoint, layer, expert):
            yield source.name, *source.read(self.checkpoint)

    def _ready(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)
        return tensor.contiguous() if tensor.data_ptr() % 64 == 0 else tensor.clone()


def store_layers(layers: list[MoELayer]) -> list[tuple[str, int, bool]]:
    """For each MoE layer its experts module's name, its number of experts, and whether the model
    stacks them."""
    return [
        (f"{layer.name}.experts", layer.E, not isinstance(layer.experts, torch.nn.ModuleDict))
        for layer in layers
    ]


def few_bits(
    plan: LoadingPlan, sources: list[Piece], made: torch.Tensor
) -> tuple[Codec, np.ndarray] | None:
    """(codec, blob) of what a parameter is made of; None unless it is in few bits and the blob
    unpacks to what was made of it, bit for bit."""
    for codec, blob in _blobs(plan, sources):
        unpacked = torch.empty_like(made)
        with suppress(ValueError):  # other sizes: no blob of this codec
            codec.decompress(blob, unpacked)
            if fewbit.same_bits(unpacked, made):
                return codec, blob
    return None


def _blobs(plan: LoadingPlan, sources: list[Piece]) -> Iterator[tuple[Codec, np.ndarray]]:
    """The codecs that a parameter may be in, and its blobs in them."""
    if found := fewbit.gathered([tensor for *_, tensor in sources]):
        form, blob = found
        yield form, blob
        yield form.T, blob
    if scheme := getattr(plan.quantizer, "scheme", None):
        with suppress(LookupError, ValueError):  # not quantised, or matrices of several sizes
            yield packings.gathered(*scheme, sources)


@dataclass(frozen=True)
class CheckpointLayer:
    """One MoE layer, attributes as of `moelab.store.layout.Layer`; offsets are those in memory."""

    tensors: dict[str, tuple[str, Shape]]
    experts: list[Entries]


class CheckpointStore(ExpertFiles):
    """A checkpoint as the store of codec "raw" that it was never converted to; not one for `verify`
    and `restore`.

    dtype : that experts are given in, that of the model.
    packed : whether what is in GGML's types stays so; otherwise it is decoded when it is read.
    verify : whether what has been read before is compared with what it was, of GGUF.
    `scratch` is the memory in bytes that converting one expert takes for a moment.

    Reading raises StoreError if a file was changed since the checkpoint was found."""

    aligned = False
    codec = "raw"
    checksum = None

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        packed: bool = True,
        verify: bool = True,
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.verify = verify
        self.spec = checkpoint.spec
        self.folder = checkpoint.folder
        plan = checkpoint.plan
        self._reads: dict[tuple[int, int], Reads] = {}  # of experts that were read
        self._forms: dict[tuple, Codec] = {}  # what a parameter is made of → its codec
        self.layers: list[CheckpointLayer] = []
        for index, layer in enumerate(plan.layers):
            few = packed if checkpoint.gguf else plan.quantizer is not None
            forms = self._few_bits(index) if few else {}
            first = {source.name: source for source in expert_sources(checkpoint, index, 0)}
            entries = {}
            at = 0
            for name, shape in shapes(layer.experts).items():
                codec = forms.get(name, RAW)
                length = codec.nbytes(shape, NAMES[dtype])
                at += self._skip(first[name], codec) if length >= LARGE else 0
                planes = ((codec, (Chunk(at, length, ""),)),)
                entries[name] = TensorEntry(NAMES[dtype], shape, "", planes)
                at = aligned(at + length)
            tensors = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
            self.layers.append(CheckpointLayer(tensors, [entries] * layer.E))
        decoded = 6 if checkpoint.gguf else 2  # fp32 before and after it is put together
        self.scratch = max(
            (
                source.nbytes + decoded * entry.codec.nbytes(entry.shape, NAMES[dtype])
                for i, layer in enumerate(self.layers)
                for source in expert_sources(self.checkpoint, i, 0)
                if (entry := layer.experts[0][source.name])
                and not self._straight(source, entry.codec)
            ),
            default=0,
        )

    def _few_bits(self, index: int) -> dict[str, Codec]:
        """Name → codec of the parameters that can stay in few bits, by the layer's first expert,
        from which others do not differ in what they are made of."""
        experts = range(self.checkpoint.plan.layers[index].E)
        sources = [list(expert_sources(self.checkpoint, index, expert)) for expert in experts]
        alike = len({tuple(of.kind for of in own) for own in sources}) == 1
        forms = {}
        for source in sources[0] if alike else ():
            if source.kind not in self._forms:
                self._forms[source.kind] = self._form(source)
            forms[source.name] = self._forms[source.kind]
        return forms

    def _form(self, source: ParameterSource) -> Codec:
        """The few-bit codec of a parameter; RAW for none, or for a symmetric matrix, since W and Wᵀ
        look alike."""
        plan = self.checkpoint.plan
        if self.checkpoint.gguf is not None:
            whole = compat.is_concatenation(source.plan, plan.quantizer)
            return codec_of(source.stored.values()) if whole else RAW
        made, read = source.read(self.checkpoint)
        made = made.to(self.dtype)
        few = few_bits(plan, read, made)
        return few[0] if few and not (made.dim() == 2 and torch.equal(made, made.mT)) else RAW

    def _straight(self, source: ParameterSource, codec: Codec) -> bool:
        """Whether a parameter, as it is kept, is just the bytes of its tensors, one after another."""
        entries = source.stored.values()
        if codec.few_bits:
            return self.checkpoint.gguf is not None and all(entry.rows is None for entry in entries)
        same = all(isinstance(of, Stored) and of.dtype == NAMES[self.dtype] for of in entries)
        return same and compat.is_concatenation(source.plan, self.checkpoint.plan.quantizer)

    def _skip(self, source: ParameterSource, codec: Codec) -> int:
        """How far into its block of memory a parameter begins: as far as in the file, so that it is read
        without a copy; 0 where kernels want a multiple of 64."""
        if not self._straight(source, codec):
            return 0
        (part, *_), *_ = (of.parts for of in source.stored.values())
        skip = part.begin % BLOCK
        return skip if codec.few_bits or skip % 64 == 0 else 0

    def stored_bytes(self, layer: int, expert: int, part: str) -> int:
        sources = expert_sources(self.checkpoint, layer, expert) if part != "SM" else ()
        return sum(source.nbytes for source in sources)

    def extents(self, parts: list[Chunks]) -> Iterator[Extent]:
        """As of `ExpertStore`: of each tensor; what is not as it is kept is converted after the last
        of it has been read. What is read for the first time is checked."""
        chunks = parts[0]
        key = chunks.layer, chunks.expert
        files, straight, others = reads = self._reads.get(key) or self._find_reads(*key)
        check = self.verify and key not in self._reads

        def extent(stored: Stored, memory: np.ndarray) -> Iterator[Extent]:
            yield stored.file, stored.begin, [memoryview(memory)]
            if check:
                self.checkpoint.check(stored, memory)

        self.checkpoint.require_unchanged(*files)
        for stored, at in straight:
            yield from extent(stored, chunks.data[at])
        for source in others:
            codec, (target,) = chunks.plane(source.name, 0)
            read = {of: [part.empty() for part in it.parts] for of, it in source.stored.items()}
            for pattern, entry in source.stored.items():
                for stored, into in zip(entry.parts, read[pattern]):
                    yield from extent(stored, as_bytes(into, writable=True))
            if codec.few_bits and self.checkpoint.gguf is not None:
                rows = [entry.join(read[pattern]) for pattern, entry in source.stored.items()]
                target[:] = fewbit.joined(*rows)
                continue
            found = {of: weights_of(entry, read[of]) for of, entry in source.stored.items()}
            if codec.few_bits:
                blobs = _blobs(self.checkpoint.plan, source.pieces(found))
                target[:] = next(blob for kind, blob in blobs if isinstance(kind, type(codec)))
            else:
                shape = chunks.entries[source.name].shape
                into = torch.from_numpy(target).view(self.dtype).view(shape)
                into.copy_(source.make(self.checkpoint.plan, found))
        self._reads[key] = reads

    def _find_reads(self, layer: int, expert: int) -> Reads:
        """How an expert is read."""
        files, straight, others = {}, [], []
        for source in expert_sources(self.checkpoint, layer, expert):
            (codec, (chunk,)), *_ = self.entries(layer, expert)[source.name].planes
            at = chunk.offset if self._straight(source, codec) else None
            for part in (part for entry in source.stored.values() for part in entry.parts):
                files[part.file] = None
                if at is not None:
                    straight.append((part, slice(at, at := at + part.nbytes)))
            if at is None:
                others.append(source)
        return [*files], straight, others

    @property
    def identity(self) -> str:
        return self.checkpoint.identity

    @property
    def weights_bytes(self) -> int:
        tensors = self.checkpoint.tensors
        plan = self.checkpoint.plan
        others = tensors.keys() - plan.expert_keys - plan.ignored
        return sum(tensors[key].nbytes for key in others)
