"""From a store back to the checkpoint that it was converted from: the same files, names and bytes.

A store keeps an expert's tensors as the model computes with them; the source may have kept them
apart, transposed, interleaved, in shards. So when a checkpoint is converted, each of its tensors
that goes into an expert is searched for in the expert's tensors, bit for bit, and its place is
recorded as a strided view of one of them. `layout.json` in the store holds these places and the
source's file headers; with them `restore` writes the source's own safetensors files, and what it
has written must have the source's identity.

A tensor that is stored in a few-bit format counts as two, its codes and its scales:
`down_proj.codes` …

A store has no `layout.json` if its source's bytes are not in it (fp8 in blocks of another size is
dequantised) or if it was synthesized. It is then restored to other files of the same model. Files
in subfolders and weights in other formats are not kept, and of weights that were rounded nothing is
restored."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from moelab.checkpoint.checkpoint import BESIDE, Checkpoint
from moelab.checkpoint.config import blamed
from moelab.files import atomic, vacant
from moelab.store.codec import Codec
from moelab.store.headers import (
    DTYPES,
    WEIGHT_MAP,
    header_bytes,
    nbytes,
    read_header,
)
from moelab.store.layout import (
    PIECE,
    SOURCE_LAYOUT,
    WEIGHTS,
    ExpertStore,
    StoreError,
    checksum,
    plain_name,
)
from moelab.store.reader import Chunks
from moelab.store.verify import check_weights, checked_experts

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# -------------------------------------------------------------------------------------- recorded
# when converting


def places(
    read: Iterable[tuple[str, int, torch.Tensor]],
    tensors: dict[str, torch.Tensor],
) -> list[list] | None:
    """Where each tensor that was read of the source is in an expert's tensors; None if one cannot
    be found there.

    read : (key, first weight of it that was read, what was read).

    Returns for each [key, first weight, tensor, shape, offset, strides, checksum]; shape, offset
    and strides, in weights, are those of a view of the expert's tensor that is the source's."""
    words, found = {name: (_bits(t), t.dtype) for name, t in tensors.items()}, []
    for key, start, source in read:
        bits = _bits(source)
        place = next(
            (
                [key, start, name, list(view.shape), view.storage_offset(), list(view.stride())]
                for name, (t, dtype) in words.items()
                if dtype == source.dtype
                for view in _views(t, bits.numel())
                if _same(view, bits)
            ),
            None,
        )
        if place is None:
            return None
        found.append([*place, checksum(bits)])
    return found


def blobs_of(chunks: Chunks) -> dict[str, tuple[Codec, Any]]:
    """name → (codec, blob) of an expert's tensors that are stored in few bits."""
    return {
        name: (plane.codec, plane.shards[0])
        for name in chunks.entries
        if (plane := chunks.plane(name, 0)).codec.few_bits
    }


def pieces(
    tensors: dict[str, torch.Tensor], blobs: dict[str, tuple[Codec, Any]]
) -> dict[str, torch.Tensor]:
    """An expert's tensors, and of those stored in few bits the codes and the scales."""
    return tensors | {
        f"{name}.{part}": piece
        for name, (codec, blob) in blobs.items()
        for part, piece in codec.split(blob, tensors[name].shape).items()
    }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its weights as integers, contiguous and at the beginning of their storage; NaN and −0 are
    compared, too."""
    tensor = tensor.contiguous().view(_WORDS[tensor.element_size()])
    return tensor if tensor.storage_offset() == 0 else tensor.clone()


def _views(t: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
    """The views of `n` weights that conversions make of a tensor: parts and every k-th, transposed,
    interleaved."""
    k = t.numel() // max(n, 1)
    if n * k != t.numel() or not n:
        if t.numel() == n == 0:
            yield t
        return
    parts = (
        [t]
        if k == 1
        else (
            part
            for dim in range(t.dim())
            if t.shape[dim] % k == 0
            for i, chunk in enumerate(t.chunk(k, dim))
            for part in (chunk, t[(slice(None),) * dim + (slice(i, None, k),)])
        )
    )
    for part in parts:
        yield part
        if part.dim() > 1:
            yield part.transpose(-1, -2)
    for dim in range(t.dim()) if k == 1 else ():
        if t.shape[dim] % 2 == 0:
            yield t.unflatten(dim, (2, -1)).transpose(dim, dim + 1)
            yield t.unflatten(dim, (-1, 2)).transpose(dim, dim + 1)


def _same(view: torch.Tensor, bits: torch.Tensor) -> bool:
    bits = bits.reshape(view.shape)
    return torch.equal(view[:1], bits[:1]) and torch.equal(view, bits)


# -------------------------------------------------------------------------------------------------------
# and back


def restore(source: ExpertStore | str | Path, destination: str | Path) -> Path:
    """Write the checkpoint that a store was made from; returns its folder.

    All its files are the source's, byte for byte; of a store without `layout.json` the tensors are
    those that transformers computes with, one file a MoE layer. What is read is checked; one expert
    at a time is in memory.

    Raises FileExistsError: the destination exists. StoreError: the store is damaged, or does not
    give what it says that it was made from; its weights were rounded."""
    store = source if isinstance(source, ExpertStore) else ExpertStore(source)
    destination = vacant(destination)
    if store.quantized:
        raise StoreError(
            f"{store.folder} was quantised to {store.quantized}, so the checkpoint that it was made from "
            f"is not in it; convert it without quantize= for a store that can be restored"
        )
    with atomic(destination) as folder:
        folder.mkdir()
        check_weights(store)
        for name in store.files:
            if name not in (SOURCE_LAYOUT, WEIGHT_MAP):
                shutil.copyfile(store.folder / name, folder / plain_name(name.removeprefix(BESIDE)))
        if SOURCE_LAYOUT not in store.files:
            where = _write(store, folder, _model_layout(store))
            index = {"metadata": {}, "weight_map": where}
            (folder / WEIGHT_MAP).write_text(json.dumps(index, indent=1))
            return destination
        layout, wrong = store.folder / SOURCE_LAYOUT, "it does not describe what is in this store"
        with blamed(layout, wrong, passing=StoreError, raising=StoreError):
            _write(store, folder, json.loads(layout.read_bytes()))
            made = Checkpoint.at(folder).identity
        if made != store.identity:
            raise StoreError(
                f"{store.folder} says that it was made from the model {store.identity}, and what it "
                f"holds is {made}; convert the model again"
            )
    return destination


def _write(store: ExpertStore, folder: Path, layout: dict[str, Any]) -> dict[str, str]:
    """Write the safetensors files of a layout into a folder; returns key → file. ValueError and the
    like if impossible."""
    headers = {
        plain_name(name): (size, header.encode())
        for name, (size, header) in layout["files"].items()
    }
    expected = store.weights_bytes + sum(
        entry.nbytes
        for layer in store.layers
        for entries in layer.experts
        for entry in entries.values()
    )
    if sum(size - 8 - len(header) for size, header in headers.values()) > expected:
        raise ValueError(f"its files have more than the {expected:,} bytes of tensors in the store")
    targets = {}
    for name, (size, header) in headers.items():
        with open(folder / name, "xb") as f:
            f.write(len(header).to_bytes(8, "little") + header)
            f.truncate(size)
        targets |= read_header(folder / name)
    _check_layout(store, layout["experts"], targets)

    def write(key: str, at: int, data: Any) -> None:
        with open(
            targets[key].file, "r+b"
        ) as file:  # opened each time: there may be more than may be open
            file.seek(targets[key].begin + at)
            file.write(data)

    with open(store.folder / WEIGHTS, "rb") as weights:
        for key, (_, _, offset, size, _) in store.weights.items():
            weights.seek(offset)
            for i in range(0, size, PIECE):
                write(key, i, weights.read(min(PIECE, size - i)))
    for i, (chunks, tensors) in enumerate(checked_experts(store, "restoring")):
        bits = {name: _bits(tensor) for name, tensor in pieces(tensors, blobs_of(chunks)).items()}
        for key, start, name, shape, offset, strides, check in layout["experts"][i]:
            data = bits[name].as_strided(shape, strides, offset).contiguous()
            if check is not None and checksum(data) != check:
                raise StoreError(
                    f"{name} of expert {chunks.expert} of MoE layer {chunks.layer} in {store.folder} "
                    f"does not give {key} of the source; convert the model again"
                )
            if (dtype := DTYPES[targets[key].dtype]).itemsize != data.element_size():
                data = data.view(torch.float32).to(dtype)  # scales, which had been widened
            write(key, start * data.element_size(), data.view(-1).view(torch.uint8).numpy())
    return {key: target.file.name for key, target in targets.items()}


def _check_layout(store: ExpertStore, experts: list[list[list]], targets: dict[str, Any]) -> None:
    """Every tensor of the source's files is one of the store's, or made of pieces of experts'
    without a gap; of which types and shapes they are, and where in an expert the pieces lie, shows
    when they are written and identified."""
    filled = {key: [(0, math.prod(shape))] for key, (_, shape, *_) in store.weights.items()}
    for records in experts:
        for key, start, _, shape, *_ in records:
            filled.setdefault(key, []).append((start, start + math.prod(shape)))
    for key, pieces in filled.items():
        begins, ends = zip(*sorted(pieces))
        if begins != (0, *ends[:-1]) or ends[-1] != math.prod(targets[key].shape):
            raise ValueError(f"{key} is not whole")
    if odd := targets.keys() ^ filled.keys():
        raise ValueError(f"{min(odd)} is not in both")


def _model_layout(store: ExpertStore) -> dict[str, Any]:
    """The layout of a checkpoint as transformers would hold it: the other weights, and a file for
    each MoE layer."""
    groups, experts = [{key: entry[:2] for key, entry in store.weights.items()}], []
    for layer in store.layers:
        tensors: dict[str, tuple[str, list[int]]] = {}
        E = len(layer.experts)
        for expert, entries in enumerate(layer.experts):
            places = []
            for name, entry in entries.items():
                if layer.stacked:
                    key, shape, start = (
                        f"{layer.module}.{name}",
                        [E, *entry.shape],
                        expert * entry.n,
                    )
                else:
                    key = f"{layer.module}.expert_{expert}.{name}"
                    shape, start = [*entry.shape], 0
                tensors[key] = entry.dtype, shape
                places.append([key, start, name, [entry.n], 0, [1], None])
            experts.append(places)
        groups.append(tensors)
    files = {}
    for i, tensors in enumerate(groups):
        header = header_bytes(tensors)
        size = len(header) + sum(nbytes(*tensor) for tensor in tensors.values())
        name = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        files[name] = [size, header[8:].decode()]
    return {"files": files, "experts": experts}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="the store's folder")
    parser.add_argument("destination", help="the checkpoint's folder, which must not exist")


def main(args: argparse.Namespace) -> int:
    print(
        f"{restore(args.store, args.destination)} is the checkpoint that {args.store} was made from"
    )
    return 0
