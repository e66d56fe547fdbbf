"""From a hub checkpoint to an expert store, and from the store to a live model.

Source: ZipMoE §3.1, offline initialization. Experts are converted one after another to the layout that the model
computes with (MXFP4 dequantised by transformers; other quantisations are refused) and compressed. All other weights are
copied byte for byte under their own keys. What the source's files looked like is recorded for `moelab.models.restore`.
"""

from __future__ import annotations

import argparse
from functools import cached_property
from pathlib import Path

import torch

from moelab.configs import spec_from_config
from moelab.arguments import whole
from moelab.models import compat, opening
from moelab.models.checkpoint import Checkpoint, load_config
from moelab.models.direct import CheckpointExperts, store_layers
from moelab.models.identity import of_checkpoint
from moelab.models.guard import check_spec
from moelab.progress import progress
from moelab.models.restore import places, small_files, source_files
from moelab.store import codecs
from moelab.store.headers import WEIGHT_MAP
from moelab.store.layout import ExpertStore
from moelab.store.verify import verify
from moelab.store.writer import StoreWriter


def convert(source: str | Path | None, destination: str | Path, codec: str = codecs.DEFAULT, *,
            shards: int = 4) -> ExpertStore:
    """Convert a checkpoint to an expert store, or resume a conversion that was interrupted.

    source : a checkpoint folder or a hub id; None for the shipped small model.
    destination : the store's folder; until it is whole and verified, `destination.part`.
    codec, shards : how exponents are compressed and into how many shards; see `moelab.store.codecs`.

    Raises FileExistsError: the destination exists, or another process is writing it.
    FileNotFoundError, ValueError: as `open_checkpoint`; an unknown codec; a quantisation other than MXFP4; an
        unfinished store of another source or codec.
    OSError: a disk is full or fails; what is written is kept, and the same call goes on from there.
    """
    checkpoint = _RecordedCheckpoint.at(opening.find(source))
    config = load_config(checkpoint.folder)
    if (method := compat.quantisation(config)) not in (None, "mxfp4"):
        raise ValueError(f"{checkpoint.folder} is quantised with {method!r}; only MXFP4 is converted. Take the bf16 "
                         f"checkpoint of the model, or dequantise it first")
    spec = spec_from_config(config, name=opening.model_name(source, checkpoint.folder))
    experts = CheckpointExperts(checkpoint, config)
    check_spec(spec, experts.plan.layers)
    for layer in experts.plan.layers:
        for name, bank in layer.experts.named_parameters(recurse=False):
            if len(bank) != layer.E:
                raise ValueError(f"{layer.name}.experts.{name} has {len(bank)} rows for {layer.E} experts, and a store "
                                 f"has no place for the others: {spec.model_type} cannot be converted")
    layers = store_layers(experts.plan.layers)
    writer = StoreWriter(destination, spec, of_checkpoint(checkpoint, config), layers, codec, shards)
    try:
        each = spec.expert_params * (4 if spec.dtype == "float32" else 2)
        with progress(total=sum(E for _, E, _ in layers) * each, desc="converting", unit="B",
                      initial=len(writer.records) * each) as bar:
            for layer, expert in writer.missing():
                tensors = experts(layer, expert)
                size = sum(t.nbytes for t in tensors.values())
                found = places(checkpoint.recorded, tensors, writer.checksum)
                checkpoint.recorded.clear()                         # one expert at a time is in memory
                writer.add(layer, expert, tensors, found)
                bar.update(size)
        others = {key: tensor for key, tensor in sorted(checkpoint.tensors.items())
                  if key not in experts.plan.expert_keys}
        if checkpoint.store is None:
            files, source = list(small_files(checkpoint)), source_files(checkpoint, writer.head["checksum"])
        else:
            source, files = None, [(name, (checkpoint.folder / name).read_bytes()) for name in checkpoint.store.files
                                   if name != WEIGHT_MAP]
        writer.finish(others, files, source)
        verify(writer.folder)
        return ExpertStore(writer.publish())
    finally:
        writer.close()


class _RecordedCheckpoint(Checkpoint):
    """A checkpoint that records what is read of it: (key, first weight of it, tensor)."""

    def read(self, key: str, part: int | None = None) -> torch.Tensor:
        tensor = super().read(key, part)
        self.recorded.append((key, (part or 0) * tensor.numel(), tensor))
        return tensor

    @cached_property
    def recorded(self) -> list[tuple[str, int, torch.Tensor]]:
        return []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a checkpoint folder or a hub id")
    parser.add_argument("destination", help="the store's folder, which must not exist")
    parser.add_argument("--codec", default=codecs.DEFAULT, choices=sorted(codecs.CODECS), help="(default: %(default)s)")
    parser.add_argument("--shards", type=whole(1), default=4, metavar="N", help="exponent shards a tensor (default: 4)")


def main(args: argparse.Namespace) -> int:
    store = convert(args.source, args.destination, args.codec, shards=args.shards)
    everything = store.table()[-1]
    print(f"{store.folder}: {everything['bytes'] / 1e9:,.2f} GB of experts in {everything['fraction']:.2%} of that, "
          f"verified")
    return 0
