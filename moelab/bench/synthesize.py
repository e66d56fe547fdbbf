"""Synthetic checkpoints and stores of a card's geometry, written at disk speed, for benchmarks.

The weights have the statistics that compression depends on: Gaussian with σ 0.02, every row scaled
by a lognormal of 0.25 and every column by one of 0.10, a tenth of them Student-t with 4 degrees of
freedom; their exponents have 2.64 bits of entropy, trained ones 2.55–2.65 (ZipMoE Fig. 2). A pool
of 64 MB, or four times a smaller model's size, is drawn once, and every tensor is a piece of it
from a random place on, so a codec that matches far back would gain. Norms are ones; what the model
computes is noise. Experts are stacked as in transformers ([E, …]), in bf16 whatever the card's
type.

`scale` removes layers and leaves the others as they are. The tokenizer is the small model's, whose
ids are the first 1,024; others decode to nothing, and a smaller vocabulary has no tokenizer."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
import torch

from moelab.base import configs, registry
from moelab.base.arguments import number, whole
from moelab.base.configs import spec_from_config
from moelab.base.files import folder_bytes, small_model, vacant
from moelab.base.progress import progress
from moelab.base.specs import MoESpec
from moelab.cards import load_model
from moelab.checkpoint.convert import quantize_expert
from moelab.checkpoint.experts import store_layers
from moelab.models import (
    compat,
    deepseek,  # noqa: F401  (makes transformers know it)
)
from moelab.models.experts import shapes
from moelab.models.seam import MoELayer, discover
from moelab.store import codecs, fewbit
from moelab.store.headers import NAMES, WEIGHT_MAP, header_bytes, read_folder
from moelab.store.verify import verify
from moelab.store.writer import StoreWriter

POOL, COLUMNS = 1 << 25, 2048  # weights in the pool at most, and a row of it
#: the small model's tokenizer, the number of its ids; its id 0 ends a text and pads
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
VOCABULARY = 1024
EMBEDDING = 64  # embeddings are so many times larger: else every token is routed alike


def draw(n: int, seed: int = 0) -> torch.Tensor:
    """`n` weights with the statistics of trained ones, in rows of 2048: bf16 [n]."""
    rng = np.random.default_rng(seed)
    rows = -(-n // COLUMNS)
    columns = np.exp(0.10 * rng.standard_normal(COLUMNS, np.float32))
    out = np.empty((rows, COLUMNS), np.float32)
    for i in range(0, rows, 256):
        block = out[i : i + 256]
        rng.standard_normal(block.shape, np.float32, out=block)
        heavy = rng.random(block.shape, np.float32) < 0.10
        block[heavy] = rng.standard_t(4, int(heavy.sum()))
        block *= (
            columns
            * np.exp(0.25 * rng.standard_normal((len(block), 1), np.float32))
            * np.float32(0.02)
        )
    return torch.from_numpy(out.reshape(-1)[:n]).bfloat16()


def synthetic_expert(nbytes: int, seed: int = 0) -> torch.Tensor:
    """A matrix of about so many bytes of such weights, bf16 [rows, 2048]."""
    rows = max(1, nbytes // (2 * COLUMNS))
    return draw(rows * COLUMNS, seed).view(rows, COLUMNS)


def scaled(spec: MoESpec, scale: float) -> MoESpec:
    """The spec with `scale` times its layers, at least up to the first MoE layer; the layers stay
    as they are."""
    if not 0 < scale <= 1:
        raise ValueError(
            f"scale is {scale}; it is the part of the model's layers that is written, above 0 and at "
            f"most 1"
        )
    layers = max(round(scale * spec.num_layers), spec.moe_layers[0] + 1)
    return replace(
        spec,
        num_layers=layers,
        moe_layers=tuple(i for i in spec.moe_layers if i < layers),
        dtype="bfloat16",
    )


def config_of(spec: MoESpec) -> Any:
    """A transformers config of the spec's architecture and geometry; ValueError where the two
    cannot be matched."""
    from transformers import AutoConfig

    known = AutoConfig.for_model(spec.model_type)
    dense = set(range(spec.num_layers))
    dense -= set(spec.moe_layers)
    facts = {name: getattr(spec, name) for name in configs.NAMES if name != "shared_count"}
    facts |= {"dense_I": spec.dense_I or spec.I, "shared_count": spec.shared_I // spec.I or None}
    wanted = {name: value for fact, value in facts.items() for name in configs.NAMES[fact]}
    wanted |= {
        "first_k_dense_replace": spec.moe_layers[0],
        "mlp_only_layers": sorted(dense),
        "decoder_sparse_step": 1,
        "moe_layers": list(spec.moe_layers),
        "mlp_layer_types": ["dense" if i in dense else "sparse" for i in range(spec.num_layers)],
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if not hasattr(known, "moe_intermediate_size") or spec.model_type == "llama4_text":
        wanted["intermediate_size"] = spec.I  # the experts' own name for it
    if hasattr(known, "v_head_dim"):
        wanted.pop("head_dim")  # of multi-head latent attention, the rotary part
    wanted = {key: value for key, value in wanted.items() if hasattr(known, key) or key == "dtype"}
    config = AutoConfig.for_model(spec.model_type, **wanted)
    made = spec_from_config(config, spec.name)
    for field in ("num_layers", "moe_layers", "E", "K", "H", "I", "gated", "bias", "shared_I"):
        if getattr(made, field) != getattr(spec, field):
            raise ValueError(
                f"{spec.name}: a {spec.model_type} config of this geometry says {field} = "
                f"{getattr(made, field)} instead of {getattr(spec, field)}; synthesize another model"
            )
    config.architectures = [compat.model_class(config).__name__]
    return config


def synthesize(
    destination: str | Path,
    model: str | MoESpec,
    scale: float = 1.0,
    *,
    codec: str | None = None,
    quantize: str | None = None,
    seed: int = 0,
) -> Path:
    """Write a synthetic checkpoint, or store, with the geometry of a model card.

    destination : a folder that does not exist.
    model : a model card's name, see `moelab.cards.MODELS`, or a spec.
    scale : part of the model's layers.
    codec : write an expert store with this codec instead of a checkpoint, without writing a
        checkpoint first.
    quantize : write a store whose experts are rounded to this format, as `convert` does.
    seed : of the pool and of the places in it.

    Raises FileExistsError: the destination exists. ValueError: no such card, codec or format, or a
    geometry that cannot be had."""
    destination = vacant(destination)
    if quantize is not None:
        fewbit.find_format(quantize)
        codec = codec or codecs.DEFAULT
    spec = scaled(load_model(model) if isinstance(model, str) else model, scale)
    config = config_of(spec)
    twin = compat.meta_twin(config)
    rng = np.random.default_rng(seed)
    tensors = twin.state_dict()
    pool = draw(min(POOL, 4 * sum(tensor.numel() for tensor in tensors.values())), seed)
    destination.parent.mkdir(parents=True, exist_ok=True)
    near = destination.parent, f"{destination.name}."
    with tempfile.TemporaryDirectory(dir=near[0], prefix=near[1]) as temporary:
        folder = Path(temporary) / "model"
        config.save_pretrained(folder)
        small = ["config.json"]
        if spec.vocab >= VOCABULARY:
            small += TOKENIZER
            for file in TOKENIZER:
                copyfile(small_model() / file, folder / file)
        if codec is None:
            _write_checkpoint(folder, tensors, pool, rng)
            os.rename(folder, destination)
            return destination
        layers = discover(twin)
        experts = tuple(layer.name + ".experts." for layer in layers)
        others = {key: t for key, t in tensors.items() if not key.startswith(experts)}
        _write_checkpoint(folder, others, pool, rng)
        name = sha256(f"synthetic {config.to_json_string()} {seed}".encode()).hexdigest()[:16]
        writer = StoreWriter(
            destination, spec, name, store_layers(layers), codec, quantized=quantize
        )
        with closing(writer):
            _write_experts(writer, layers, quantize, pool, rng)
            small_files = [(file, (folder / file).read_bytes()) for file in small]
            writer.finish(dict(sorted(read_folder(folder)[1].items())), small_files)
            verify(writer.folder)
            return writer.publish()


def _write_experts(
    writer: StoreWriter,
    layers: list[MoELayer],
    quantize: str | None,
    pool: torch.Tensor,
    rng: np.random.Generator,
) -> None:
    missing = list(writer.missing())
    for layer, expert in progress(missing, desc="synthesizing", unit="experts"):
        tensors = {
            name: torch.cat([*_pieces(math.prod(shape), pool, rng)]).view(shape)
            for name, shape in shapes(layers[layer].experts).items()
        }
        blobs: dict[str, tuple[str, Any]] = {}
        if quantize:
            quantize_expert(quantize, tensors, blobs, layers[layer])
        writer.add(layer, expert, tensors, None, blobs)


def _pieces(n: int, pool: torch.Tensor, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    """Pieces of the pool, each from a random place on (a multiple of 64 bytes), that have `n`
    weights together."""
    while n:
        begin = 32 * int(rng.integers(len(pool) // 64))  # in the first half: long pieces
        piece = pool[begin : begin + n]
        yield piece
        n -= len(piece)


def _write_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor], pool: torch.Tensor, rng: np.random.Generator
) -> None:
    """Safetensors files of at most 4 GB or one tensor, and their index, for tensors on the meta
    device."""
    for key, tensor in tensors.items():
        if tensor.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{key} is {tensor.dtype}; only bf16 and fp32 weights are synthesized")
    shards: list[dict[str, torch.Tensor]] = [{}]
    for key, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > 4e9:
            shards.append({})
        shards[-1][key] = tensor
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update(dict.fromkeys(shard, file))
        with open(folder / file, "wb") as f:
            f.write(header_bytes({key: (NAMES[t.dtype], t.shape) for key, t in shard.items()}))
            for key, t in progress(shard.items(), desc=file, unit="tensors"):
                for piece in _weights(key, t, pool, rng):
                    f.write(piece.reshape(-1).view(torch.uint8).numpy())
    total = {"total_size": sum(t.nbytes for t in tensors.values())}
    (folder / WEIGHT_MAP).write_text(json.dumps({"metadata": total, "weight_map": weight_map}))


def _weights(
    key: str, t: torch.Tensor, pool: torch.Tensor, rng: np.random.Generator
) -> Iterator[torch.Tensor]:
    """The values of a tensor in pieces: ones for norms, zeros for biases and corrections."""
    if t.dtype != torch.bfloat16 or t.dim() < 2:
        yield torch.ones(t.shape, dtype=t.dtype) * ("bias" not in key)
        return
    loud = EMBEDDING if "embed" in key or key == "shared.weight" else 1
    for piece in _pieces(t.numel(), pool, rng):
        yield piece * loud if loud > 1 else piece


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("destination", help="a folder that does not exist")
    parser.add_argument(
        "--model", required=True, metavar="CARD", help="a model card's name, e.g. Qwen3-30B-A3B"
    )
    parser.add_argument(
        "--scale",
        type=number(above=0, most=1),
        default=1.0,
        help="part of the model's layers (default: 1, all)",
    )
    parser.add_argument(
        "--codec", choices=sorted(codecs.CODECS), help="write an expert store with this codec"
    )
    parser.add_argument(
        "--quantize",
        choices=registry.names("format"),
        help="write a store of experts in this format",
    )
    parser.add_argument("--seed", type=whole(), default=0)


def main(args: argparse.Namespace) -> int:
    folder = synthesize(
        args.destination,
        args.model,
        args.scale,
        codec=args.codec,
        quantize=args.quantize,
        seed=args.seed,
    )
    print(f"{folder}: {folder_bytes(folder) / 1e9:,.2f} GB")
    return 0
