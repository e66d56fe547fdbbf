"""From a hub checkpoint to an expert store, from the store back to a checkpoint, and from the store to a live model.

Source: ZipMoE §3.1, offline initialization. `moelab.models` gives every expert of every architecture in the layout
that the model computes with (MXFP4 dequantised by transformers), one after another; `moelab.store` compresses and
writes it. All that is not an expert is copied as it stands, byte for byte under its own keys, so tied weights stay
as tied as the checkpoint had them.

A restored checkpoint has the experts as transformers holds them in memory ([E, …] for most architectures), not
always as the hub laid them out; every tensor that a model loads from it is bit-identical.

Left out: quantisations other than MXFP4, whose remaining weights would need their quantiser to be loaded at all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moelab.arguments import whole
from moelab.models import opening, plug
from moelab.models.checkpoint import Checkpoint, CheckpointExperts
from moelab.models.seam import discover
from moelab.progress import progress
from moelab.specs import MoESpec
from moelab.store import codecs
from moelab.store.layout import WEIGHT_MAP, WEIGHTS, ExpertStore, StoreError, source_identity
from moelab.store.reader import Reader, StoreExperts, decode, empty_tensors
from moelab.store.verify import check_weights, verify
from moelab.store.writer import StoreWriter

#: files of a checkpoint that go into the store beside the weights
SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")


def identity_of(source: str | Path) -> str:
    """What `ExpertStore.require` asks for: the identity of a checkpoint, see `moelab.store.layout.source_identity`."""
    checkpoint = Checkpoint.at(opening.find(source))
    return source_identity(checkpoint.folder / "config.json", checkpoint.files)


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
    FileNotFoundError, ValueError : as `open_model`; an unknown codec; a quantisation other than MXFP4; an unfinished
        store of another source or codec.
    OSError : a disk is full or fails; what is written is kept, and the same call goes on from there.
    """
    checkpoint = Checkpoint.at(opening.find(source))
    config = opening.load_config(checkpoint.folder)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        if getattr(method, "value", method) != "mxfp4":
            raise ValueError(f"{checkpoint.folder} is quantised with {getattr(method, 'value', method)!r}; only MXFP4 "
                             f"is converted. Take the bf16 checkpoint of the model, or dequantise it first")
    spec = MoESpec.from_config(config, name=opening.model_name(source, checkpoint.folder))
    experts = CheckpointExperts(checkpoint, config)
    modules = {layer.name + ".experts": layer.experts for layer in experts.plan.layers}
    layers = [(name, module.num_experts, not isinstance(module, torch.nn.ModuleDict))
              for name, module in modules.items()]
    identity = source_identity(checkpoint.folder / "config.json", checkpoint.files)
    writer = StoreWriter(destination, spec, identity, layers, codec, K)
    try:
        each = spec.expert_params * (4 if spec.dtype == "float32" else 2)
        with progress(total=sum(E for _, E, _ in layers) * each, desc="converting", unit="B",
                      initial=len(writer.records) * each) as bar:
            for layer, expert in writer.missing():
                tensors = experts(layer, expert)
                size = sum(t.nbytes for t in tensors.values())
                writer.add(layer, expert, tensors)
                bar.update(size)
        writer.finish(other_weights(checkpoint, experts.plan.expert_keys), list(_small_files(checkpoint.folder)))
        verify(writer.folder)
        return ExpertStore(writer.publish())
    finally:
        writer.close()


def other_weights(checkpoint: Checkpoint, used: set[str]) -> dict[str, tuple[Path, int, str, list[int], int]]:
    """key → (file, offset, dtype, shape, bytes) of every tensor that is no expert's."""
    return {key: (t.file, t.begin, t.dtype, list(t.shape), t.nbytes) for key, t in sorted(checkpoint.tensors.items())
            if key not in used}


def _small_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of config, tokenizer and the like; the config of a dequantised model no longer says quantised."""
    for path in sorted({path for pattern in SMALL_FILES for path in folder.glob(pattern)}):
        if path.name in (WEIGHT_MAP, "index.json") or not path.is_file():
            continue
        content = path.read_bytes()
        if path.name == "config.json" and "quantization_config" in (fields := json.loads(content)):
            del fields["quantization_config"]
            content = json.dumps(fields, indent=2).encode()
        yield path.name, content


# ------------------------------------------------------------------------------------------------------- and back

def restore(store: ExpertStore | str | Path, destination: str | Path) -> Path:
    """Write a checkpoint whose loaded tensors are bit-identical to the source's; returns its folder.

    The experts are laid out as transformers holds them ([E, …] a tensor where the architecture stacks them), one
    file a MoE layer; all other weights are as in the source. Everything is checked while it is read.

    Raises
    ------
    FileExistsError : the destination exists.
    StoreError : the store is damaged.
    """
    store, destination = store if isinstance(store, ExpertStore) else ExpertStore(store), Path(destination)
    if destination.exists():
        raise FileExistsError(f"{destination} exists and is not overwritten; give another destination")
    check_weights(store)
    folder = destination.with_name(destination.name + ".part")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    n, weight_map = 1 + len(store.layers), {}
    first = f"model-00001-of-{n:05d}.safetensors"
    for name in store.files:
        if name not in (WEIGHT_MAP, *(layer.file for layer in store.layers)):
            shutil.copyfile(store.folder / name, folder / (first if name == WEIGHTS else name))
    weight_map.update(dict.fromkeys(store.weights, first))
    with Reader(store) as reader, progress(total=sum(len(layer.experts) for layer in store.layers), desc="restoring",
                                           unit="expert") as bar:
        buffer = reader.buffer()
        for i, layer in enumerate(store.layers):
            file = f"model-{i + 2:05d}-of-{n:05d}.safetensors"
            header, places = _restored_header(layer)
            out = empty_tensors(layer.experts[0])
            with open(folder / file, "wb") as f:
                f.write(len(header).to_bytes(8, "little") + header)
                for expert in range(len(layer.experts)):
                    chunks = reader.read(i, expert, "both", buffer)
                    for name, tensor in decode(chunks, chunks, out).items():
                        f.seek(8 + len(header) + places[expert, name])
                        f.write(tensor.reshape(-1).view(torch.uint8).numpy())
                    bar.update()
            weight_map.update(dict.fromkeys(json.loads(header), file))
    weight_map.pop("__metadata__", None)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    (folder / WEIGHT_MAP).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=1))
    os.rename(folder, destination)
    return destination


def _restored_header(layer: Any) -> tuple[bytes, dict[tuple[int, str], int]]:
    """The safetensors header of a restored layer and where in the data each expert's tensors go."""
    entries, places, at = {"__metadata__": {"format": "pt"}}, {}, 0
    E = len(layer.experts)
    for name, entry in layer.experts[0].items():
        for expert in range(1 if layer.stacked else E):
            key = f"{layer.module}.{name}" if layer.stacked else f"{layer.module}.expert_{expert}.{name}"
            count = E if layer.stacked else 1
            shape = [E, *entry.shape] if layer.stacked else list(entry.shape)
            entries[key] = {"dtype": entry.dtype, "shape": shape, "data_offsets": [at, at + count * entry.nbytes]}
            for j in range(count):
                places[expert + j, name] = at + j * entry.nbytes
            at += count * entry.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), places


def open_store(store: ExpertStore | str | Path, **options: Any) -> Any:
    """Open the model of a store, its experts read from there one by one: `open_model` for stores.

    options : of `moelab.store.reader.Reader`. Raises what `ExpertStore` and `open_model` raise.
    """
    store = store if isinstance(store, ExpertStore) else ExpertStore(store)
    model = opening.open_model(store.folder, experts="external")
    plug(model, source=StoreExperts(store, model.dtype, **options))
    return model


def require_model(store: ExpertStore, model: torch.nn.Module) -> None:
    """Raise StoreError unless a live model is the one that the store was made from, whatever it was opened from.

    Geometry and routers are compared: the bits of every router's weights must be among the store's other weights.
    """
    spec, known = opening.spec_of(model), {check for *_, checks in store.weights.values() for check in checks}
    same = spec.fingerprint() == store.spec.fingerprint()
    for weight in [p.detach().cpu() for layer in discover(model) for p in layer.router.parameters()] if same else ():
        dtypes = (weight.dtype, torch.bfloat16, torch.float16, torch.float32)       # some models widen their routers
        same = same and any(store.checksum(weight.to(dtype).contiguous()) in known for dtype in dtypes)
    if not same:
        raise StoreError(f"{store.folder} holds the experts of {store.spec.name}, and this model ({spec.name}) is not "
                         f"the one they were taken from: its geometry or its routers differ. Convert its checkpoint")


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
