"""From a hub checkpoint to an expert store, and from the store to a live model.

Source: ZipMoE §3.1, offline initialization. Experts are converted one after another to the layout
that the model computes with and compressed, or rounded to a few-bit format (`moelab.store.fewbit`).
What a checkpoint has in few bits itself, MXFP4, FP8 in blocks of 128 × 128, or the int4, int8 and
FP8 of compressed-tensors, GPTQ and AWQ (`moelab.store.packings`), is kept as it is, once it was
found to unpack to what transformers makes of it; and so are GGML's types. All other weights are
copied byte for byte under their own keys, those of GGML's types decoded. What the source's files looked like is recorded for `moelab.checkpoint.restore`."""

from __future__ import annotations

import argparse
import math
import shutil
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from moelab.base import registry
from moelab.base.arguments import checked, described
from moelab.base.files import cache_folder, cache_root, vacant
from moelab.base.forks import in_children
from moelab.base.progress import progress
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.experts import CheckpointExperts, Piece, few_bits, store_layers
from moelab.checkpoint.quantize import Inputs, plan_bits, quantize_expert, read_inputs
from moelab.checkpoint.restore import blobs_of, pieces, places
from moelab.models.experts import Weights, seam_of
from moelab.store import codecs, fewbit
from moelab.store.codec import Blobs
from moelab.store.headers import WEIGHT_MAP, raw_header
from moelab.store.layout import CHECKSUM, SOURCE_LAYOUT, ExpertStore, StoreError
from moelab.store.reader import decode
from moelab.store.verify import verify
from moelab.store.writer import StoreWriter


def convert(
    source: str | Path | ExpertStore | Checkpoint | None,
    destination: str | Path,
    codec: str = codecs.DEFAULT,
    *,
    quantize: str | None = None,
    calibration: Any = None,
    seconds: float = math.inf,
) -> ExpertStore:
    """Convert a checkpoint to an expert store, or resume a conversion that was interrupted.

    source : as of `Checkpoint.at`: a checkpoint folder or a hub id; None for the shipped small
        model.
    destination : the store's folder; until it is whole and verified, `destination.part`.
    codec : how exponents are compressed; see `moelab.store.codecs`.
    quantize : a name of `moelab.names("format")`, to which the experts' matrices are rounded, or
        "auto:4.5", which gives each a format within so many bits a weight (`checkpoint.quantize`); what
        does not fit keeps its bits. The store's model is then another one than the source, which
        cannot be restored.
    calibration : a `Calibration` with inputs, or its file: what rounding then looks at.
    seconds : after which it stops, with TimeoutError.

    Of a conversion that was interrupted it goes on with what is missing or damaged, or begins anew
    if the source was changed since. Raises FileExistsError: the destination exists, or another
    process is writing it. FileNotFoundError, ValueError: as `open_checkpoint`; an unknown codec or
    format; a quantisation that is not read, by its name; a store that was quantised before; an
    unfinished store of another model or codec; a source that is changed meanwhile. OSError: a disk
    is full or fails, or time is over; what is written is kept, and the same call goes on from
    there."""
    vacant(destination)
    checkpoint = Checkpoint.at(source)
    end = time.monotonic() + seconds
    _require_convertible(checkpoint)
    plan = checkpoint.plan
    inputs = _inputs(checkpoint, quantize, calibration)
    experts = CheckpointExperts(checkpoint)
    files, looked = _other_files(checkpoint, quantize)
    others = sorted(checkpoint.tensors.keys() - plan.expert_keys)
    writer = StoreWriter(
        destination,
        checkpoint.spec,
        checkpoint.identity,
        store_layers(plan.layers),
        codec,
        rounding_of(quantize, inputs),
        checkpoint.content,
    )
    with closing(writer):
        _write_experts(experts, writer, quantize, inputs, end)
        writer.finish({key: checkpoint.plain(key) for key in others}, files, looked)
        checkpoint.require_unchanged()
        verify(writer.folder)
        return ExpertStore(writer.publish())


def _inputs(checkpoint: Checkpoint, quantize: str | None, calibration: Any) -> Inputs | None:
    """What rounding looks at; ValueError for another model's, or for none where there must be some."""
    if quantize:
        fewbit.require_rounding(quantize)
        if calibration is not None or quantize.startswith("auto"):
            return read_inputs(calibration, checkpoint.spec, checkpoint.identity)
    return None


def rounding_of(quantize: str | None, inputs: Inputs | None) -> str | None:
    """What a store says of how it was rounded."""
    return quantize if inputs is None else f"{quantize}@{inputs.digest}"


def _require_convertible(checkpoint: Checkpoint) -> None:
    store = checkpoint.store
    if store and store.quantized:
        raise ValueError(
            f"{store.folder} was quantised to {store.quantized}; convert the checkpoint that it was "
            f"made from"
        )
    for layer in checkpoint.plan.layers:
        for name, bank in layer.experts.named_parameters(recurse=False):
            if len(bank) != layer.E:
                raise ValueError(
                    f"{layer.name}.experts.{name} has {len(bank)} rows for {layer.E} experts, and a store "
                    f"has no place for the others: {checkpoint.spec.model_type} cannot be converted"
                )


def _other_files(
    checkpoint: Checkpoint, quantize: str | None
) -> tuple[list[tuple[str, bytes]], dict[str, Any] | None]:
    """(small files, what the source's files looked like) for `StoreWriter.finish`."""
    if checkpoint.store:
        left_out = (WEIGHT_MAP, SOURCE_LAYOUT) if quantize else (WEIGHT_MAP,)
        names = [name for name in checkpoint.store.files if name not in left_out]
        return [(name, (checkpoint.folder / name).read_bytes()) for name in names], None
    looked = None
    if not checkpoint.gguf:
        said = {of.name: [of.stat().st_size, raw_header(of).decode()] for of in checkpoint.files}
        looked = {"files": said, "checksum": CHECKSUM}
    return [*checkpoint.small_files()], looked


def _write_experts(
    experts: CheckpointExperts,
    writer: StoreWriter,
    quantize: str | None,
    inputs: Inputs | None,
    end: float,
) -> None:
    """Read and write what is still missing, one expert at a time."""
    layers = experts.checkpoint.plan.layers
    forms = [quantize] * len(layers)
    if quantize and quantize.startswith("auto"):
        bits = float(quantize.partition(":")[2])
        forms = plan_bits(bits, lambda *key: read_expert(experts, *key)[0], layers, inputs)
    counts = {"total": sum(layer.E for layer in layers), "initial": len(writer.records)}
    with progress(desc="converting", unit="expert", **counts) as bar:
        for layer, expert in writer.missing():
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{experts.checkpoint.folder} is half converted, and time is over; the same call "
                    f"goes on"
                )
            tensors, blobs, read = read_expert(experts, layer, expert)
            found = None
            if quantize:
                given = inputs and inputs.of(layer, expert)
                quantize_expert(forms[layer], tensors, blobs, seam_of(layers[layer].experts), given)
            elif read:
                found = places(read, pieces(tensors, blobs))
            del read  # one expert at a time is in memory
            writer.add(layer, expert, tensors, found, blobs)
            bar.update()


def read_expert(
    experts: CheckpointExperts, layer: int, expert: int
) -> tuple[Weights, Blobs, list[Piece]]:
    """An expert's tensors, the blobs of those that the source has in few bits, and what was read of
    a checkpoint, see `places`."""
    if experts.stored:
        chunks = experts.stored.reader.read(layer, expert)
        return decode(chunks, chunks), blobs_of(chunks), []
    tensors = {}
    blobs = {}
    read = []
    for name, made, sources in experts.made(layer, expert):
        tensors[name] = made.detach().contiguous()
        if few := few_bits(experts.checkpoint.plan, sources, made):
            blobs[name] = few
        read += sources
    return tensors, blobs, read


_converting = threading.Lock()  # another thread waits for the store, and takes it
in_children(_converting._at_fork_reinit)


def kept_store(
    source: str | Path | ExpertStore | Checkpoint | None,
    codec: str = codecs.DEFAULT,
    quantize: str | None = None,
    seconds: float = math.inf,
    calibration: Any = None,
) -> ExpertStore:
    """The store of a model in the cache (`cache_root`), to which it is converted when it is first
    asked for, and again when any byte of it was changed.

    codec, quantize, seconds, calibration : as of `convert`; a store that is of that form is taken as it is.
    Raises what `convert` raises."""
    checkpoint = Checkpoint.at(source)
    form = rounding_of(quantize, _inputs(checkpoint, quantize, calibration)) or codec
    store = checkpoint.store
    if store and form == (store.quantized or store.codec):
        return store
    name = f"{checkpoint.name}-{checkpoint.content}.{form}".replace("/", "--")
    destination = cache_root() / name
    with _converting:
        if destination.is_dir():
            with suppress(StoreError):  # one that is damaged is made again
                return ExpertStore(destination)
            shutil.rmtree(destination)
        place = cache_folder(".") / name
        how = {"quantize": quantize, "calibration": calibration, "seconds": seconds}
        return convert(checkpoint, place, codec, **how)


#: reads what to round to
QUANTIZE = checked(fewbit.require_rounding)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    told = (f"{name}: {purpose}" for name, (purpose, _) in registry.describe("codec").items())
    described(__file__)(parser)
    parser.add_argument(
        "--codec",
        default=codecs.DEFAULT,
        choices=sorted(codecs.CODECS),
        metavar="NAME",
        help="; ".join(told) + " (default: %(default)s)",
    )


def main(args: argparse.Namespace) -> int:
    how = {"quantize": args.quantize, "calibration": args.calibration}
    store = convert(args.source, args.destination, args.codec, **how)
    if (args.quantize or "").startswith("auto"):
        for layer in store.layers:
            print(layer.module, *(f"{name} {e.codec.name}" for name, e in layer.experts[0].items()))
    everything = store.table()[-1]
    rounded = f", rounded to {store.quantized}" if store.quantized else ""
    print(
        f"{store.folder}: {everything['bytes'] / 1e9:,.2f} GB of experts in {everything['fraction']:.2%} of that"
        f"{rounded}, verified"
    )
    return 0
