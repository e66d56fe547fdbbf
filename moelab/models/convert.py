"""From a hub checkpoint to an expert store, from the store back to a checkpoint, and from the store to a live model.

Source: ZipMoE §3.1, offline initialization. `moelab.models` gives every expert of every architecture in the layout
that the model computes with (MXFP4 dequantised by transformers), one after another; `moelab.store` compresses and
writes it. All that is not an expert is copied as it stands, byte for byte under its own keys, so tied weights stay
as tied as the checkpoint had them.

What the source's own files looked like is noted beside, so that `moelab.models.restore` gives them back.

Left out: quantisations other than MXFP4, whose remaining weights would need their quantiser to be loaded at all.
"""

from __future__ import annotations

import argparse
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from moelab.configs import spec_from_config
from moelab.arguments import whole
from moelab.models import opening, plug
from moelab.models.checkpoint import Checkpoint, CheckpointExperts
from moelab.models.identity import identity, of_checkpoint
from moelab.models.guard import check_spec
from moelab.progress import progress
from moelab.models.restore import places, restore, small_files, source_files
from moelab.store import codecs
from moelab.store.layout import WEIGHT_MAP, ExpertStore
from moelab.store.reader import StoreExperts
from moelab.store.verify import check_weights, verify
from moelab.store.writer import StoreWriter

__all__ = ["convert", "identity_of", "open_store", "other_weights", "require_model", "restore"]


def identity_of(source: str | Path) -> str:
    """What `ExpertStore.require` asks for: the identity of a checkpoint, see `moelab.models.identity`."""
    checkpoint = Checkpoint.at(opening.find(source))
    return of_checkpoint(checkpoint, opening.load_config(checkpoint.folder))


def convert(source: str | Path | None, destination: str | Path, codec: str = codecs.DEFAULT, *,
            K: int = 4) -> ExpertStore:
    """Convert a checkpoint to an expert store, or go on with a conversion that was cut off.

    Parameters
    ----------
    source : a checkpoint folder or a hub id; None for the shipped small model.
    destination : the store's folder; until it is whole and verified, `destination.part`.
    codec, K : how exponents are compressed and into how many shards; see `moelab.store.codecs`.

    Raises
    ------
    FileExistsError : the destination exists, or another process is writing it.
    FileNotFoundError, ValueError : as `open_checkpoint`; an unknown codec; a quantisation other than MXFP4; an
        unfinished store of another source or codec.
    OSError : a disk is full or fails; what is written is kept, and the same call goes on from there.
    """
    checkpoint = _Noted.at(opening.find(source))
    config = opening.load_config(checkpoint.folder)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        if getattr(method, "value", method) != "mxfp4":
            raise ValueError(f"{checkpoint.folder} is quantised with {getattr(method, 'value', method)!r}; only MXFP4 "
                             f"is converted. Take the bf16 checkpoint of the model, or dequantise it first")
    spec = spec_from_config(config, name=opening.model_name(source, checkpoint.folder))
    experts = CheckpointExperts(checkpoint, config)
    check_spec(spec, experts.plan.layers)
    for layer in experts.plan.layers:
        for name, bank in layer.experts.named_parameters(recurse=False):
            if len(bank) != layer.E:
                raise ValueError(f"{layer.name}.experts.{name} has {len(bank)} rows for {layer.E} experts, and a store "
                                 f"has no place for the others: {spec.model_type} cannot be converted")
    layers = [(layer.name + ".experts", layer.E, not isinstance(layer.experts, torch.nn.ModuleDict))
              for layer in experts.plan.layers]
    writer = StoreWriter(destination, spec, of_checkpoint(checkpoint, config), layers, codec, K)
    try:
        each = spec.expert_params * (4 if spec.dtype == "float32" else 2)
        with progress(total=sum(E for _, E, _ in layers) * each, desc="converting", unit="B",
                      initial=len(writer.records) * each) as bar:
            for layer, expert in writer.missing():
                tensors = experts(layer, expert)
                size = sum(t.nbytes for t in tensors.values())
                found = places(checkpoint.noted, tensors, writer.checksum)
                checkpoint.noted.clear()                            # one expert at a time is in memory
                writer.add(layer, expert, tensors, found)
                bar.update(size)
        writer.finish(other_weights(checkpoint, experts.plan.expert_keys), *_beside(checkpoint, writer))
        verify(writer.folder)
        return ExpertStore(writer.publish())
    finally:
        writer.close()


class _Noted(Checkpoint):
    """A checkpoint that remembers what is read of it: (key, first weight of it, tensor)."""

    def read(self, key: str, part: int | None = None) -> torch.Tensor:
        tensor = super().read(key, part)
        self.noted.append((key, (part or 0) * tensor.numel(), tensor))
        return tensor

    @cached_property
    def noted(self) -> list[tuple[str, int, torch.Tensor]]:
        return []


def _beside(checkpoint: Checkpoint, writer: StoreWriter) -> tuple[list[tuple[str, bytes]], dict[str, Any] | None]:
    """What `StoreWriter.finish` is given: the small files, and the source's own; a store hands on what it has."""
    if checkpoint.store is None:
        return list(small_files(checkpoint)), source_files(checkpoint) | {"checksum": writer.head["checksum"]}
    return [(name, (checkpoint.folder / name).read_bytes()) for name in checkpoint.store.files
            if name != WEIGHT_MAP], None


def other_weights(checkpoint: Checkpoint, used: set[str]) -> dict[str, tuple[Path, int, str, list[int], int]]:
    """key → (file, offset, dtype, shape, bytes) of every tensor that is no expert's."""
    return {key: (t.file, t.begin, t.dtype, list(t.shape), t.nbytes) for key, t in sorted(checkpoint.tensors.items())
            if key not in used}


def open_store(store: ExpertStore | str | Path, **options: Any) -> Any:
    """Open the model of a store, its experts read from there one by one: `open_checkpoint` for stores.

    options : of `moelab.store.reader.Reader`. Raises what `ExpertStore` and `open_checkpoint` raise.
    """
    store = store if isinstance(store, ExpertStore) else ExpertStore(store)
    model = opening.open_checkpoint(store.folder, experts="external")
    plug(model, source=StoreExperts(store, model.dtype, **options))
    return model


def require_model(store: ExpertStore, model: torch.nn.Module) -> None:
    """Raise StoreError unless a live model is the one that the store was made from, whatever it was opened from."""
    store.require(identity(model))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a checkpoint folder or a hub id")
    parser.add_argument("destination", help="the store's folder, which must not exist")
    parser.add_argument("--codec", default=codecs.DEFAULT, choices=sorted(codecs.CODECS), help="(default: %(default)s)")
    parser.add_argument("--shards", type=whole(1), default=4, metavar="K", help="exponent shards a tensor (default: 4)")


def main(args: argparse.Namespace) -> int:
    store = convert(args.source, args.destination, args.codec, K=args.shards)
    everything = store.table()[-1]
    print(f"{store.folder}: {everything['bytes'] / 1e9:,.2f} GB of experts in {everything['fraction']:.2%} of that, "
          f"verified")
    return 0
