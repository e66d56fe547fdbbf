"""From a hub checkpoint to an expert store, and from the store to a live model.

Source: ZipMoE §3.1, offline initialization. Experts are converted one after another to the layout
that the model computes with and compressed, or rounded to a few-bit format (`moelab.store.fewbit`).
What a checkpoint has in few bits itself, MXFP4, FP8 in blocks of 128 × 128, or the int4, int8 and
FP8 of compressed-tensors, GPTQ and AWQ (`moelab.store.packings`), is kept as it is, once it was
found to unpack to what transformers makes of it. All other weights are copied byte for byte under
their own keys. What the source's files looked like is recorded for `moelab.checkpoint.restore`."""

from __future__ import annotations

import argparse
import math
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import xxhash

from moelab import registry
from moelab.arguments import whole
from moelab.checkpoint import opening
from moelab.checkpoint.checkpoint import SUFFIXES, Checkpoint
from moelab.checkpoint.direct import CheckpointExperts, few_bits, store_layers
from moelab.checkpoint.restore import blobs_of, pieces, places, small_files, source_files
from moelab.configs import spec_from_config
from moelab.files import cache_root, vacant
from moelab.forks import in_children
from moelab.models.experts import Weights, seam_of
from moelab.models.guard import check_spec
from moelab.models.identity import digest, of_checkpoint
from moelab.models.seam import MoELayer
from moelab.progress import progress
from moelab.store import codecs, fewbit
from moelab.store.codec import Codec
from moelab.store.headers import WEIGHT_MAP
from moelab.store.layout import INDEX, SOURCE_LAYOUT, ExpertStore, StoreError
from moelab.store.reader import decode
from moelab.store.verify import verify
from moelab.store.writer import StoreWriter


def convert(
    source: str | Path | None,
    destination: str | Path,
    codec: str = codecs.DEFAULT,
    *,
    shards: int = codecs.SHARDS,
    quantize: str | None = None,
    seconds: float = math.inf,
) -> ExpertStore:
    """Convert a checkpoint to an expert store, or resume a conversion that was interrupted.

    source : a checkpoint folder or a hub id; None for the shipped small model.
    destination : the store's folder; until it is whole and verified, `destination.part`.
    codec, shards : how exponents are compressed and into how many shards; see
        `moelab.store.codecs`.
    quantize : a name of `moelab.names("format")`, to which the experts' matrices are rounded; what
        does not fit keeps its bits. The store's model is then another one than the source, which
        cannot be restored.

    seconds : after which it stops, with TimeoutError.

    Of a conversion that was interrupted it goes on with what is missing or damaged, or begins anew
    if the source was changed since. Raises FileExistsError: the destination exists, or another
    process is writing it. FileNotFoundError, ValueError: as `open_checkpoint`; an unknown codec or
    format; a quantisation that is not read, by
        its name; a store that was quantised before; an unfinished store of another model or codec;
        a source that is changed meanwhile.
    OSError: a disk is full or fails, or time is over; what is written is kept, and the same call
    goes on from there."""
    vacant(destination)
    if quantize is not None:
        fewbit.find_format(quantize)
    checkpoint = Checkpoint.at(opening.find(source))
    config = checkpoint.config()
    if checkpoint.store is not None and checkpoint.store.quantized:
        raise ValueError(
            f"{checkpoint.folder} was quantised to {checkpoint.store.quantized}; convert the checkpoint "
            f"that it was made from"
        )
    spec, end = (
        spec_from_config(config, name=opening.model_name(source, checkpoint.folder)),
        time.monotonic() + seconds,
    )
    experts = CheckpointExperts(checkpoint, config)
    check_spec(spec, experts.plan.layers)
    for layer in experts.plan.layers:
        for name, bank in layer.experts.named_parameters(recurse=False):
            if len(bank) != layer.E:
                raise ValueError(
                    f"{layer.name}.experts.{name} has {len(bank)} rows for {layer.E} experts, and a store "
                    f"has no place for the others: {spec.model_type} cannot be converted"
                )
    layers = store_layers(experts.plan.layers)
    writer = StoreWriter(
        destination,
        spec,
        of_checkpoint(checkpoint, config),
        layers,
        codec,
        shards,
        quantize,
        content_of(checkpoint),
    )
    try:
        each = spec.expert_params * (4 if spec.dtype == "float32" else 2)
        with progress(
            total=sum(E for _, E, _ in layers) * each,
            desc="converting",
            unit="B",
            initial=len(writer.records) * each,
        ) as bar:
            for layer, expert in writer.missing():
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"{destination} is half converted after {seconds:.0f} s; the same call goes on"
                    )
                tensors, blobs, read = read_expert(experts, layer, expert)
                size = sum(t.nbytes for t in tensors.values())
                found = (
                    None
                    if quantize or not read
                    else places(read, pieces(tensors, blobs), writer.checksum)
                )
                del read  # one expert at a time is in memory
                if quantize:
                    quantize_expert(quantize, tensors, blobs, experts.plan.layers[layer])
                writer.add(layer, expert, tensors, found, blobs)
                bar.update(size)
        others = {
            key: tensor
            for key, tensor in sorted(checkpoint.tensors.items())
            if key not in experts.plan.expert_keys
        }
        if checkpoint.store is None:
            files, source = (
                list(small_files(checkpoint)),
                source_files(checkpoint, writer.head["checksum"]),
            )
        else:
            source, files = (
                None,
                [
                    (name, (checkpoint.folder / name).read_bytes())
                    for name in checkpoint.store.files
                    if name not in (WEIGHT_MAP, SOURCE_LAYOUT if quantize else WEIGHT_MAP)
                ],
            )
        writer.finish(others, files, source)
        checkpoint.require_unchanged()
        verify(writer.folder)
        return ExpertStore(writer.publish())
    finally:
        writer.close()


def read_expert(
    experts: CheckpointExperts, layer: int, expert: int
) -> tuple[Weights, dict[str, tuple[Codec, Any]], list[tuple[str, int, torch.Tensor]]]:
    """An expert's tensors, the blobs of those that the source has in few bits, and what was read of
    a checkpoint, see `places`; scales as they are in the blobs."""
    if experts.stored is not None:
        chunks = experts.stored.reader.read(layer, expert)
        return decode(chunks, chunks), blobs_of(chunks), []
    tensors, blobs, read = {}, {}, []
    for name, made, sources in experts.made(layer, expert):
        tensors[name] = made.detach().contiguous()
        if few := few_bits(experts.plan, sources, made):
            form, blob, sources = few
            blobs[name] = form, blob
        read += sources
    return tensors, blobs, read


def quantize_expert(
    quantize: str, tensors: Weights, blobs: dict[str, tuple[Codec, Any]], layer: MoELayer
) -> None:
    """Round the matrices of an expert to a format, in place; those that it does not fit keep their
    bits."""
    if seam_of(layer.experts).is_transposed:
        quantize += ".T"
    form = fewbit.find_format(quantize)
    for name, tensor in tensors.items():
        if name in blobs and blobs[name][0] == form:
            continue
        blobs.pop(name, None)
        if (blob := form.compress(tensor)) is not None:
            blobs[name] = form, blob
            form.decompress(blob, tensor)


def content_of(checkpoint: Checkpoint) -> str:
    """32 hex digits of all files that a conversion reads, every byte, unlike those of
    `moelab.models.identity`; of a store, its index, which has the checksums of the others."""
    if checkpoint.store is not None:
        return digest(checkpoint.folder / INDEX)
    small = {
        name: xxhash.xxh3_128_hexdigest(content)
        for name, content in small_files(checkpoint)
        if Path(name).suffix in SUFFIXES
    }
    large = {
        file.name: digest(file)
        for file in progress(checkpoint.files, "looking for changes", unit="file")
    }
    return xxhash.xxh3_128_hexdigest(repr(sorted((small | large).items())).encode())


_converting = threading.Lock()  # another thread waits for the store, and takes it
in_children(_converting._at_fork_reinit)


def kept_store(
    source: str | Path | None,
    codec: str = codecs.DEFAULT,
    quantize: str | None = None,
    seconds: float = math.inf,
) -> ExpertStore:
    """The store of a model in the cache (`cache_root`), to which it is converted when it is first
    asked for, and again when any byte of it was changed.

    codec, quantize, seconds : as of `convert`; a store that is of that form is taken as it is.
    Raises what `convert` raises."""
    folder = opening.find(source)
    checkpoint, form = Checkpoint.at(folder), quantize or codec
    if checkpoint.store is not None and form == (
        checkpoint.store.quantized or checkpoint.store.codec
    ):
        return checkpoint.store
    destination = (
        cache_root()
        / f"{opening.model_name(source, folder)}-{content_of(checkpoint)}.{form}".replace("/", "--")
    )
    try:
        with _converting:
            if destination.is_dir():
                with suppress(StoreError):  # one that is damaged is made again
                    return ExpertStore(destination)
                shutil.rmtree(destination)
            return convert(source, destination, codec, quantize=quantize, seconds=seconds)
    except OSError as error:
        if error.errno is None:  # not the disk's
            raise
        raise OSError(
            f"{error}. The store of {folder} in {form} is kept in {destination.parent}: set MOELAB_CACHE to "
            f"another folder, or `moelab convert` it to where there is room, and open that"
        ) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        help="a checkpoint folder or a hub id, in bf16, fp16, fp32, MXFP4, FP8 or quantised "
        "by compressed-tensors, GPTQ or AWQ",
    )
    parser.add_argument("destination", help="the store's folder, which must not exist")
    parser.add_argument(
        "--codec",
        default=codecs.DEFAULT,
        choices=sorted(codecs.CODECS),
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--quantize",
        choices=registry.names("format"),
        metavar="FORMAT",
        help="round the experts to "
        + ", ".join(
            f"{name} ({purpose})" for name, (purpose, _) in registry.describe("format").items()
        ),
    )
    parser.add_argument(
        "--shards",
        type=whole(1),
        default=codecs.SHARDS,
        metavar="N",
        help="exponent shards a tensor (default: %(default)s)",
    )


def main(args: argparse.Namespace) -> int:
    store = convert(
        args.source, args.destination, args.codec, shards=args.shards, quantize=args.quantize
    )
    everything = store.table()[-1]
    rounded = f", rounded to {store.quantized}" if store.quantized else ""
    print(
        f"{store.folder}: {everything['bytes'] / 1e9:,.2f} GB of experts in {everything['fraction']:.2%} of that"
        f"{rounded}, verified"
    )
    return 0
