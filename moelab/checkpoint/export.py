"""From a checkpoint or a store to one GGUF file, as llama.cpp's converter writes it.

Each tensor lies there as `gguf_names` says, rounded by gguf-py: matrices to the kind that is asked
for, or to BF16 where its blocks do not fit their rows; routers, norms and vectors are fp32. Of the
experts one at a time is in memory. Left out: models that scale positions, and architectures whose
metadata say more than their config's fields."""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from moelab.base.files import atomic, vacant
from moelab.base.progress import progress
from moelab.base.records import Record
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.experts import CheckpointExperts
from moelab.checkpoint.gguf_names import ARCHITECTURES, FIELDS, OTHERS, TOKENS, places
from moelab.checkpoint.opening import build
from moelab.models import compat
from moelab.store.layout import ExpertStore

KINDS = ("Q8_0", "Q4_0", "BF16")
#: what stays fp32, by its name
PLAIN = re.compile(r".*(_norm|_inp\w*|conv\w*)\.weight|.*(?<!\.weight)")


def export(
    source: str | Path | ExpertStore | Checkpoint | None, destination: str | Path, kind: str
) -> Path:
    """Write a model as a GGUF file; returns its path.

    source : as of `Checkpoint.at`.    kind : of matrices, one of `KINDS`.

    A tokenizer that llama.cpp has no name for is left out, with a warning. Raises FileExistsError:
    the destination exists. ValueError: a model that is not written; what `Checkpoint.at` and its
    plan raise."""
    from gguf import GGUFWriter, quants

    destination = vacant(destination)
    checkpoint = Checkpoint.at(source)
    arch, said = _metadata(checkpoint)
    model = build(checkpoint, "auto", external=True)
    twin = checkpoint.plan.twin
    shapes: dict[str, tuple[int, ...]] = {}
    for name, part, expert in _lying(arch, twin, twin.state_dict()):
        shapes[name] = (*part.shape,) if expert is None else (expert + 1, *part.shape)
    dense = {name: part for name, part, _ in _lying(arch, twin, model.state_dict())}
    with atomic(destination) as file:
        writer = GGUFWriter(file, arch)
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        for key, value in said.items():
            add[type(value)](f"{arch}.{key}", value)
        _add_tokenizer(writer, model.tokenizer, checkpoint.config.vocab_size)
        types = _add_tensors(writer, shapes, kind)
        for name in progress(shapes, desc="exporting", unit="tensor"):
            pieces = [dense[name]] if name in dense else _experts(arch, checkpoint, name)
            for piece in pieces:
                rows = piece.float().contiguous().numpy()
                writer.fout[0].write(quants.quantize(rows, types[name]))
            writer.write_padding(writer.fout[0], writer.fout[0].tell())
        writer.close()
    return destination


def _lying(
    arch: str, twin: Any, tensors: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor, int | None]]:
    """(name in the file, values, number of the expert) of a model's tensors."""
    saved = compat.as_saved(twin, tensors)
    if twin.config.tie_word_embeddings:
        saved.pop("lm_head.weight", None)
    for key, names, rule, expert in places(arch, twin.config, saved):
        whole = saved[key].mT if rule.transposed else saved[key]
        whole = whole.squeeze(1) if "conv" in key else whole
        for name, part in zip(names, rule.split(twin.config, whole), strict=True):
            yield name, rule.change[0](part) if rule.change else part, expert


def _experts(arch: str, checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    """The tensors of one name of a layer's experts, one after another."""
    experts = CheckpointExperts(checkpoint)
    block = f".{name.split('.')[1]}."
    layer = next(of for of in checkpoint.plan.layers if block in f"{of.name}.")
    for expert in range(layer.E):
        own = experts(layer.index, expert).items()
        own = {f"{layer.name}.experts.{key}": tensor[None] for key, tensor in own}
        lying = _lying(arch, checkpoint.plan.twin, own)
        yield next(part for found, part, _ in lying if found == name)


def _add_tensors(writer: Any, shapes: dict[str, tuple[int, ...]], kind: str) -> Record:
    """Write what comes before the tensors; their types."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    types = {}
    for name, shape in shapes.items():
        fits = shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] == 0
        plain = len(shape) == 1 or PLAIN.fullmatch(name)
        found = GGMLQuantizationType["F32" if plain else kind if fits else "BF16"]
        block, size = GGML_QUANT_SIZES[found]
        writer.add_tensor_info(name, shape, np.float32, prod(shape) // block * size, found)
        types[name] = found
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.write_padding(writer.fout[0], writer.fout[0].tell())
    return types


def _metadata(checkpoint: Checkpoint) -> tuple[str, Record]:
    """llama.cpp's name of a model's architecture, and what its config says by llama.cpp's keys."""
    config = checkpoint.config
    kinds = {of: arch for arch, (of, _, more) in ARCHITECTURES.items() if not callable(more)}
    kinds |= {
        of: arch for arch, (_, of, _) in OTHERS.items() if not callable(ARCHITECTURES[arch][2])
    }
    arch = kinds.get(config.model_type)
    rope = getattr(config, "rope_parameters", {})
    if arch is None or rope["rope_type"] != "default":
        raise ValueError(
            f"{checkpoint.folder} is {config.model_type}, and those written as GGUF are "
            f"{', '.join(kinds)}, unless positions are scaled; convert_hf_to_gguf.py of llama.cpp may "
            f"know it"
        )
    said = {"block_count": config.num_hidden_layers, "vocab_size": config.vocab_size}
    for key, fields in FIELDS.items():
        values = [getattr(config, field, None) for field in fields.split()]
        said |= {key: value for value in values[::-1] if value is not None}
    size = said.setdefault("attention.key_length", config.hidden_size // config.num_attention_heads)
    said |= {
        "attention.value_length": size,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(size * rope.get("partial_rotary_factor", 1)),
        "expert_gating_func": ARCHITECTURES[arch][1],
        "leading_dense_block_count": checkpoint.plan.layers[0].index,
    }
    return arch, said


def _add_tokenizer(writer: Any, tokenizer: Any, size: int) -> None:
    """Write a byte-level tokenizer; of another one, a warning."""
    split = compat.pre_tokenizer(tokenizer)
    writer.add_tokenizer_model("gpt2" if split else "no_vocab")
    if not split:
        warnings.warn(
            "the file has no tokenizer: llama.cpp has no name for the way in which the model's splits "
            "text",
            stacklevel=3,
        )
        return
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    types = {of["id"]: 3 if of["special"] else 4 for of in state["added_tokens"]}
    writer.add_tokenizer_pre(split)
    writer.add_token_list([names.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types([types.get(i, 1 if i in names else 5) for i in range(size)])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    for token, name in TOKENS.items():
        if (number := getattr(tokenizer, f"{token}_token_id")) is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a checkpoint folder, a store, a hub id or a GGUF file")
    parser.add_argument("destination", help="the GGUF file, which must not exist")
    parser.add_argument("--kind", choices=KINDS, default="Q8_0", help="type of matrices")


def main(args: argparse.Namespace) -> int:
    print(export(args.source, args.destination, args.kind))
    return 0
