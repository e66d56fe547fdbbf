"""From a checkpoint or a store to one GGUF file, as llama.cpp's converter writes it.

Each tensor of the checkpoint is laid as `gguf_names` says, and rounded by gguf-py: matrices to the
kind that is asked for, or to BF16 where its blocks do not fit their rows; routers, norms and vectors
are fp32. One expert at a time is in memory, and everything else."""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections import Counter
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
from moelab.checkpoint.gguf_names import ARCHITECTURES, FIELDS, TOKENS, places
from moelab.checkpoint.opening import build
from moelab.models import compat
from moelab.store.layout import ExpertStore

KINDS = ("Q8_0", "Q4_0", "BF16")


def export(
    source: str | Path | ExpertStore | Checkpoint | None,
    destination: str | Path,
    kind: str = "Q8_0",
) -> Path:
    """Write a model as a GGUF file; returns its path.

    source : as of `Checkpoint.at`.    kind : of matrices, one of `KINDS`.

    What llama.cpp has no name for is left out with a warning: a tokenizer that splits text in a way
    of its own. Raises FileExistsError: the destination exists. ValueError: an architecture that is
    not written; what `Checkpoint.at` and its plan raise."""
    from gguf import GGML_QUANT_VERSION, GGUFWriter

    destination = vacant(destination)
    checkpoint = Checkpoint.at(source)
    arch = _architecture(checkpoint)
    model = build(checkpoint, "auto", external=True)
    config = checkpoint.config
    saved = compat.as_saved(checkpoint.plan.twin, checkpoint.plan.twin.state_dict())
    shapes: dict[str, tuple[int, ...]] = {}
    stacked: Counter[str] = Counter()
    for name, single, part in _lying(arch, config, saved):
        stacked[name] += 1
        shapes[name] = (stacked[name],) * single + tuple(part.shape)
    if config.tie_word_embeddings:
        shapes.pop("output.weight", None)
    with atomic(destination) as file:
        writer = GGUFWriter(file, arch)
        for key, value in _metadata(arch, config).items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            add.get(type(value), writer.add_string)(f"{arch}.{key}", value)
        writer.add_quantization_version(GGML_QUANT_VERSION)
        _add_tokenizer(writer, model.tokenizer, config.vocab_size)
        begins = _write_head(writer, shapes, kind)
        for expert, tensors in _tensors(checkpoint, model):
            for name, _, part in _lying(arch, config, tensors):
                if name in begins:
                    data = _rounded(name, part, kind)
                    writer.fout[0].seek(begins[name] + expert * len(data))
                    writer.fout[0].write(data)
        writer.close()
    return destination


def _architecture(checkpoint: Checkpoint) -> str:
    model_type = checkpoint.config.model_type
    for arch, known in ARCHITECTURES.items():
        if known.model_type == model_type and not callable(known.fields):
            return arch
    raise ValueError(
        f"{checkpoint.folder} is {model_type}, which is not written as GGUF; llama.cpp's "
        f"convert_hf_to_gguf.py may know it"
    )


def _lying(
    arch: str, config: Any, tensors: dict[str, Tensor]
) -> Iterator[tuple[str, bool, Tensor]]:
    """(name in the file, whether it is one expert's of a stack, values) of a checkpoint's tensors."""
    for key, (names, rule, expert) in places(arch, config, tensors):
        whole = tensors[key].mT if rule.transposed else tensors[key]
        if vectors := key.endswith("_bias") and whole.dim() == 2:
            whole = whole[..., None]
        for name, part in zip(names, rule.split(config, whole), strict=True):
            part = part[..., 0] if vectors else part
            yield name, expert is not None, rule.change[0](part) if rule.change else part


def _tensors(checkpoint: Checkpoint, model: Any) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """(number of the expert, its tensors by the keys of a checkpoint); all others with number 0."""
    twin = checkpoint.plan.twin
    yield 0, compat.as_saved(twin, model.state_dict())
    experts = CheckpointExperts(checkpoint)
    layers = checkpoint.plan.layers
    with progress(total=sum(of.E for of in layers), desc="exporting", unit="expert") as bar:
        for layer in layers:
            for expert in range(layer.E):
                own = experts(layer.index, expert).items()
                own = {f"{layer.name}.experts.{name}": tensor[None] for name, tensor in own}
                yield expert, compat.as_saved(twin, own)
                bar.update()


def _rounded(name: str, part: Tensor, kind: str) -> bytes:
    """The bytes of a tensor in the file."""
    from gguf import quants

    return quants.quantize(part.float().contiguous().numpy(), _type(name, part.shape, kind))


def _type(name: str, shape: Any, kind: str) -> Any:
    """GGML's type of a tensor in the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len(shape) < 2 or not re.search(r"(?<!_norm|_inp|onv|v1d)\.weight", name):
        return GGMLQuantizationType.F32
    found = GGMLQuantizationType[kind]
    return found if shape[-1] % GGML_QUANT_SIZES[found][0] == 0 else GGMLQuantizationType.BF16


def _write_head(writer: Any, shapes: dict[str, tuple[int, ...]], kind: str) -> dict[str, int]:
    """Write all but the tensors; where each tensor begins."""
    from gguf import GGML_QUANT_SIZES

    begins, at = {}, 0
    for name, shape in shapes.items():
        block, size = GGML_QUANT_SIZES[_type(name, shape, kind)]
        begins[name], nbytes = at, prod(shape) // block * size
        writer.add_tensor_info(name, shape, np.float32, nbytes, _type(name, shape, kind))
        at += writer.ggml_pad(nbytes, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    base = writer.ggml_pad(writer.fout[0].tell(), writer.data_alignment)
    writer.fout[0].truncate(base + at)
    return {name: base + begin for name, begin in begins.items()}


def _metadata(arch: str, config: Any) -> Record:
    """What a config says, by llama.cpp's keys."""
    said = {"block_count": config.num_hidden_layers, "vocab_size": config.vocab_size}
    for key, fields in FIELDS.items():
        values = (getattr(config, name, None) for name in fields.split())
        said[key] = next((value for value in values if value is not None), None)
    size = said["attention.key_length"] or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    said |= {
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(size * rope.get("partial_rotary_factor", 1)),
        "expert_gating_func": ARCHITECTURES[arch].gating,
    }
    if (leading := getattr(config, "first_k_dense_replace", None)) is not None:
        said["leading_dense_block_count"] = leading
    if rope["rope_type"] == "yarn":
        of = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
        of |= {name: f"yarn_{name}" for name in ("beta_fast", "beta_slow")}
        said["rope.scaling.type"] = "yarn"
        said |= {f"rope.scaling.{name}": rope[key] for key, name in of.items() if key in rope}
    elif rope["rope_type"] != "default":
        raise ValueError(f"positions of type {rope['rope_type']!r} are not written as GGUF")
    return {key: value for key, value in said.items() if value is not None}


def _add_tokenizer(writer: Any, tokenizer: Any, size: int) -> None:
    """Write a byte-level tokenizer; of another one, a warning."""
    split = compat.pre_tokenizer(tokenizer)
    if split is None:
        writer.add_tokenizer_model("no_vocab")
        warnings.warn(
            "the file has no tokenizer: llama.cpp has no name for the way in which the model's splits "
            "text, so token ids alone can be given to it",
            stacklevel=3,
        )
        return
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    types = {of["id"]: 3 if of["special"] else 4 for of in state["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
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
    parser.add_argument(
        "--kind", choices=KINDS, default="Q8_0", help="type of matrices (default: %(default)s)"
    )


def main(args: argparse.Namespace) -> int:
    file = export(args.source, args.destination, args.kind)
    print(f"{file}: {file.stat().st_size / 1e9:,.2f} GB")
    return 0
