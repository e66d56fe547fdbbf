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
from zlib import crc32

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards

from moelab.base import configs
from moelab.base.arguments import described
from moelab.base.configs import spec_from_config
from moelab.base.files import folder_bytes, small_model, vacant
from moelab.base.progress import progress
from moelab.base.specs import MoESpec
from moelab.bench.implant import TOKENS_FILE, Routing, implant
from moelab.cards import load_model
from moelab.checkpoint.experts import store_layers
from moelab.checkpoint.quantize import quantize_expert
from moelab.models import (
    compat,
    deepseek,  # noqa: F401  (makes transformers know it)
)
from moelab.models.experts import seam_of, shapes
from moelab.models.seam import discover
from moelab.store import codecs, fewbit
from moelab.store.headers import NAMES, WEIGHT_MAP, header_bytes, read_folder
from moelab.store.verify import verify
from moelab.store.writer import StoreWriter

SHARD = 4 * 10**9  # bytes of a file, or one tensor
POOL, COLUMNS = 1 << 25, 2048  # weights in the pool at most, and a row of it
#: the small model's tokenizer, the number of its ids; its id 0 ends a text and pads
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
VOCABULARY = 1024
EMBEDDING = 64  # embeddings are so many times larger: else random routers route every token alike


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
    if spec.model_type == "qwen3_moe":
        wanted["norm_topk_prob"] = True  # as published, and what llama.cpp always does
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
    routing: Routing | None = None,
    seed: int = 0,
) -> Path:
    """Write a synthetic checkpoint, or store, with the geometry of a model card.

    destination : a folder that does not exist.
    model : a model card's name, see `moelab.cards.MODELS`, or a spec.
    scale : part of the model's layers.
    codec : write an expert store with this codec instead of a checkpoint, without writing a
        checkpoint first.
    quantize : write a store whose experts are rounded to this format, as `convert` does.
    routing : implants routing, see `moelab.bench.implant`: a model card's name for routing as that
        model's, fitted; a trace or its path; or ids [T, L, K]. The folder then has the tokens that
        are routed so, in tokens.json. Without, it is that of random routers.
    seed : of the pool and of the places in it, and of routing that is drawn.

    Raises FileExistsError: the destination exists. ValueError: no such card, codec or format, a
    geometry that cannot be had, or routing that is not this model's or cannot be implanted."""
    destination = vacant(destination)
    if quantize is not None:
        fewbit.find_format(quantize)
        codec = codec or codecs.DEFAULT
    spec = scaled(load_model(model) if isinstance(model, str) else model, scale)
    config = config_of(spec)
    twin = compat.meta_twin(config)
    weights = Weights(twin, seed)
    routed = routing is not None
    texts = {TOKENS_FILE: implant(routing, spec, config, weights)} if routed else {}
    destination.parent.mkdir(parents=True, exist_ok=True)
    near = destination.parent, f"{destination.name}."
    with tempfile.TemporaryDirectory(dir=near[0], prefix=near[1]) as temporary:
        folder = Path(temporary) / "model"
        config.save_pretrained(folder)
        small = ["config.json", *texts]
        for file, text in texts.items():
            (folder / file).write_text(text)
        if spec.vocab >= VOCABULARY:
            small += TOKENIZER
            for file in TOKENIZER:
                copyfile(small_model() / file, folder / file)
        if codec is None:
            _write_checkpoint(folder, twin.state_dict(), weights)
            os.rename(folder, destination)
            return destination
        _write_checkpoint(folder, weights.others, weights)
        about = f"synthetic {config.to_json_string()} {seed}{''.join(texts.values())}"
        name = sha256(about.encode()).hexdigest()[:16]
        layers = store_layers(weights.layers)
        writer = StoreWriter(destination, spec, name, layers, codec, quantized=quantize)
        with closing(writer):
            _write_experts(writer, quantize, weights)
            return _published(writer, folder, small)


def _published(writer: StoreWriter, folder: Path, small: list[str]) -> Path:
    """The store whose experts are written, with a folder's other weights and its small files."""
    small_files = [(file, (folder / file).read_bytes()) for file in small]
    writer.finish(dict(sorted(read_folder(folder)[1].items())), small_files)
    verify(writer.folder)
    return writer.publish()


class Weights:
    """The values of a synthetic model's tensors: each is drawn by its name, or `given`.

    twin : the model on the meta device.
    layers : its MoE layers. others : its tensors but for the experts'. stacked : names of the
        experts' that have all experts of a layer → weights an expert.
    factors : ends of names of drawn matrices, without ".weight" → what they are multiplied by."""

    def __init__(self, twin: torch.nn.Module, seed: int) -> None:
        tensors = twin.state_dict()
        self.seed = seed
        self.pool = draw(min(POOL, 4 * sum(tensor.numel() for tensor in tensors.values())), seed)
        self.layers = discover(twin)
        experts = tuple(f"{layer.name}.experts." for layer in self.layers)
        self.others = {key: t for key, t in tensors.items() if not key.startswith(experts)}
        self.stacked = {
            f"{layer.name}.experts.{name}": math.prod(shape)
            for layer in self.layers
            if not isinstance(layer.experts, torch.nn.ModuleDict)
            for name, shape in shapes(layer.experts).items()
        }
        self.given: dict[str, torch.Tensor] = {}
        self.factors = {"embed_tokens": EMBEDDING, "shared": EMBEDDING}

    def pieces(self, key: str, t: torch.Tensor) -> Iterator[torch.Tensor]:
        """The values of a tensor in pieces: ones for norms, zeros for biases and corrections."""
        if key in self.given:
            yield self.given[key]
        elif key in self.stacked:
            size = self.stacked[key]
            for expert in range(t.numel() // size):
                yield from self._drawn(size, key, expert)
        elif t.dtype != torch.bfloat16 or t.dim() < 2:
            yield torch.ones(t.shape, dtype=t.dtype) * ("bias" not in key)
        else:
            named = key.removesuffix(".weight")
            factor = next((by for end, by in self.factors.items() if named.endswith(end)), 1)
            for piece in self._drawn(t.numel(), key):
                yield piece if factor == 1 else piece * factor

    def whole(self, key: str) -> torch.Tensor:
        """A tensor that is not an expert's."""
        t = self.others[key]
        return torch.cat([piece.reshape(-1) for piece in self.pieces(key, t)]).view(t.shape)

    def expert(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        """An expert's tensors: a source for the seam."""
        of = self.layers[layer]
        return {
            name: torch.cat(
                [*self._drawn(math.prod(shape), f"{of.name}.experts.{name}", expert)]
            ).view(shape)
            for name, shape in shapes(of.experts).items()
        }

    def _drawn(self, n: int, key: str, *number: int) -> Iterator[torch.Tensor]:
        """Pieces of the pool, each from a random place on (a multiple of 64 bytes), that have `n`
        weights together."""
        rng = np.random.default_rng([self.seed, crc32(key.encode()), *number])
        while n:
            begin = 32 * int(rng.integers(len(self.pool) // 64))  # in the first half: long pieces
            piece = self.pool[begin : begin + n]
            yield piece
            n -= len(piece)


def _write_experts(writer: StoreWriter, quantize: str | None, weights: Weights) -> None:
    missing = list(writer.missing())
    for layer, expert in progress(missing, desc="synthesizing", unit="experts"):
        tensors = weights.expert(layer, expert)
        blobs: dict[str, tuple[str, Any]] = {}
        if quantize:
            quantize_expert(quantize, tensors, blobs, seam_of(weights.layers[layer].experts))
        writer.add(layer, expert, tensors, None, blobs)


def _write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], weights: Weights) -> None:
    """Safetensors files of at most `SHARD` bytes or one tensor, and their index, for tensors on the meta
    device."""
    for key, tensor in tensors.items():
        if tensor.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{key} is {tensor.dtype}; only bf16 and fp32 weights are synthesized")
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=SHARD)
    for file, names in split.filename_to_tensors.items():
        with open(folder / file, "wb") as f:
            stored = {key: (NAMES[tensors[key].dtype], tensors[key].shape) for key in names}
            f.write(header_bytes(stored))
            for key in progress(names, desc=file, unit="tensors"):
                for piece in weights.pieces(key, tensors[key]):
                    f.write(piece.reshape(-1).view(torch.uint8).numpy())
    about = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (folder / WEIGHT_MAP).write_text(json.dumps(about))


add_arguments = described(__file__)


def main(args: argparse.Namespace) -> int:
    folder = synthesize(
        args.destination,
        args.model,
        args.scale,
        codec=args.codec,
        quantize=args.quantize,
        routing=args.routing,
        seed=args.seed,
    )
    print(f"{folder}: {folder_bytes(folder) / 1e9:,.2f} GB")
    return 0
