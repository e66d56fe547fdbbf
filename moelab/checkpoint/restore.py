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
dequantised) or if it was synthesized; it is not restored, nor is one whose weights were rounded.
Files in subfolders and weights in other formats are not kept."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from moelab.base.arguments import described
from moelab.base.files import atomic, vacant
from moelab.base.schema import blamed
from moelab.checkpoint.checkpoint import BESIDE, Checkpoint
from moelab.store.codec import Blobs
from moelab.store.headers import DTYPES, WEIGHT_MAP, Header, Stored, Tensors, read_header
from moelab.store.layout import (
    SOURCE_LAYOUT,
    ExpertStore,
    StoreError,
    checksum,
    plain_name,
)
from moelab.store.reader import Chunks
from moelab.store.verify import checked_experts, checked_weights

# -------------------------------------------------------------------------------------- recorded
# when converting


def places(
    read: Iterable[tuple[str, int, torch.Tensor]],
    tensors: Tensors,
) -> list[list] | None:
    """Where each tensor that was read of the source is in an expert's tensors; None if one cannot
    be found there.

    read : (key, first weight of it that was read, what was read).

    Returns for each [key, first weight, tensor, shape, offset, strides, checksum]; shape, offset
    and strides, in weights, are those of a view of the expert's tensor that is the source's."""
    words = {name: (_bits(t), t.dtype) for name, t in tensors.items()}
    found = []
    for key, start, source in read:
        place = _place(source, words) or _place(source.float(), words)  # scales were widened
        if place is None:
            return None
        found.append([key, start, *place])
    return found


def _place(source: torch.Tensor, words: dict[str, tuple[torch.Tensor, torch.dtype]]) -> list | None:
    """[tensor, shape, offset, strides, checksum] of a view that is the source; None for none."""
    bits = _bits(source)
    for name, (t, dtype) in words.items():
        for view in _views(t, bits.numel()) if dtype == source.dtype else ():
            own = bits.view(view.shape)
            if torch.equal(view[:1], own[:1]) and torch.equal(view, own):
                place = [name, list(view.shape), view.storage_offset(), list(view.stride())]
                return [*place, checksum(bits)]
    return None


def blobs_of(chunks: Chunks) -> Blobs:
    """name → (codec, blob) of an expert's tensors that are stored in few bits."""
    return {
        name: (plane.codec, plane.shards[0])
        for name in chunks.entries
        if (plane := chunks.plane(name, 0)).codec.few_bits
    }


def pieces(tensors: Tensors, blobs: Blobs) -> Tensors:
    """An expert's tensors, and of those stored in few bits the codes and the scales."""
    return tensors | {
        f"{name}.{part}": piece
        for name, (codec, blob) in blobs.items()
        for part, piece in codec.split(blob, tensors[name].shape).items()
    }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its weights as integers, contiguous and at the beginning of their storage; NaN and −0 are
    compared, too."""
    tensor = tensor.contiguous().view(getattr(torch, f"int{8 * tensor.element_size()}"))
    return tensor if tensor.storage_offset() == 0 else tensor.clone()


def _views(t: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
    """The views of `n` weights that conversions make of a tensor: parts and every k-th, transposed,
    interleaved."""
    k = t.numel() // max(n, 1)
    if n * k != t.numel() or not n:
        return
    for part in [t] if k == 1 else _parts(t, k):
        yield part
        if part.dim() > 1:
            yield part.transpose(-1, -2)
    for dim in range(t.dim()) if k == 1 else ():
        for halves in ((2, -1), (-1, 2)) if t.shape[dim] % 2 == 0 else ():
            yield t.unflatten(dim, halves).transpose(dim, dim + 1)


def _parts(t: torch.Tensor, k: int) -> Iterator[torch.Tensor]:
    """The k equal parts of a tensor along each axis, and of each axis every k-th."""
    for dim in range(t.dim()):
        if t.shape[dim] % k == 0:
            for i, chunk in enumerate(t.chunk(k, dim)):
                yield chunk
                yield t[(slice(None),) * dim + (slice(i, None, k),)]


# -------------------------------------------------------------------------------------------------------
# and back


def restore(source: ExpertStore | str | Path, destination: str | Path) -> Path:
    """Write the checkpoint that a store was made from, all files byte for byte; returns its folder.

    What is read is checked; one expert at a time is in memory.

    Raises FileExistsError: the destination exists. StoreError: the store is damaged, or does not
    hold what it says that it was made from; its weights were dequantised or rounded."""
    store = source if isinstance(source, ExpertStore) else ExpertStore(source)
    destination = vacant(destination)
    if store.quantized or SOURCE_LAYOUT not in store.files:
        raise StoreError(
            f"{store.folder} does not hold the bytes of the checkpoint that it was made from "
            f"({f'it was quantised to {store.quantized}' if store.quantized else 'no ' + SOURCE_LAYOUT}), "
            f"so that cannot be restored; convert the checkpoint without quantize=, and of a GGUF file keep "
            f"the file, or write one with `moelab export`"
        )
    with atomic(destination) as folder:
        folder.mkdir()
        for name in store.files:
            if name not in (SOURCE_LAYOUT, WEIGHT_MAP):
                shutil.copyfile(store.folder / name, folder / plain_name(name.removeprefix(BESIDE)))
        layout = store.folder / SOURCE_LAYOUT
        wrong = "it does not describe what is in this store"
        with blamed(layout, wrong, passing=StoreError, raising=StoreError):
            said = json.loads(layout.read_bytes())
            targets = _empty_files(folder, said["files"])
            for key, at, data in checked_weights(store):
                _write(targets[key], at, data)
            _write_experts(store, said["experts"], targets)
            made = Checkpoint.at(folder).identity
        if made != store.identity:
            raise StoreError(
                f"{store.folder} says that it was made from the model {store.identity}, and what it "
                f"holds is {made}; convert the model again"
            )
    return destination


def _empty_files(folder: Path, files: dict[str, list]) -> Header:
    """Make the source's safetensors files, headers and no weights; returns their tensors by key."""
    targets = {}
    for name, (size, header) in files.items():
        file = folder / plain_name(name)
        raw = header.encode()
        with open(file, "xb") as f:
            f.write(len(raw).to_bytes(8, "little") + raw)
            f.truncate(size)
        targets |= read_header(file)
    return targets


def _write(target: Stored, at: int, data: Any) -> None:
    """Write bytes of a tensor; its file is opened each time, as there may be more than may be
    open."""
    with open(target.file, "r+b") as file:
        file.seek(target.begin + at)
        file.write(data)


def _write_experts(store: ExpertStore, experts: list[list[list]], targets: Header) -> None:
    """Write what `places` has recorded of each expert."""
    for records, (chunks, tensors) in zip(
        experts, checked_experts(store, "restoring"), strict=True
    ):
        bits = {name: _bits(tensor) for name, tensor in pieces(tensors, blobs_of(chunks)).items()}
        for key, start, name, shape, offset, strides, check in records:
            data = bits[name].as_strided(shape, strides, offset).contiguous()
            if checksum(data) != check:
                raise StoreError(
                    f"{name} of expert {chunks.expert} of MoE layer {chunks.layer} in {store.folder} "
                    f"does not give {key} of the source; convert the model again"
                )
            if (dtype := DTYPES[targets[key].dtype]).itemsize != data.element_size():
                data = data.view(torch.float32).to(dtype)  # scales, which had been widened
            at = start * data.element_size()
            _write(targets[key], at, data.view(-1).view(torch.uint8).numpy())


add_arguments = described(__file__)


def main(args: argparse.Namespace) -> int:
    print(
        f"{restore(args.store, args.destination)} is the checkpoint that {args.store} was made from"
    )
    return 0
