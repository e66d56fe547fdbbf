"""From a checkpoint or a store to one GGUF file, as llama.cpp's converter writes it.

Each tensor lies there as `gguf_names` says, rounded by gguf-py: matrices to the kind that is asked
for, or to BF16 where its blocks do not fit their rows; routers, norms and vectors are fp32. With a
calibration the experts' matrices are rounded by what they are given (`quantize`). Of the experts one at
a time is in memory. Left out: models that scale positions, and architectures whose
metadata say more than their config's fields."""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.base.arguments import described
from moelab.base.files import atomic, vacant
from moelab.base.progress import progress
from moelab.base.records import Record
from moelab.base.registry import require
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.experts import CheckpointExperts
from moelab.checkpoint.gguf_names import ARCHITECTURES, CHANGED, FIELDS, TOKENS, places
from moelab.checkpoint.opening import build
from moelab.checkpoint.quantize import Inputs, quantize_expert, read_inputs
from moelab.models import compat
from moelab.models.experts import seam_of
from moelab.store.ggml import FITTED
from moelab.store.headers import block_of, nbytes
from moelab.store.layout import ExpertStore

KINDS = (*FITTED, "BF16")
#: what stays fp32, by its name
PLAIN = re.compile(r".*(_norm|_inp\w*|conv\w*)\.weight|.*(?<!\.weight)")


def export(
    source: str | Path | ExpertStore | Checkpoint | None,
    destination: str | Path,
    kind: str,
    calibration: Any = None,
) -> Path:
    """Write a model as a GGUF file; returns its path.

    source : as of `Checkpoint.at`.
    kind : of matrices, one of `KINDS`.
    calibration : a `Calibration` with inputs, or its file, at which rounding of experts looks.

    A tokenizer that llama.cpp has no name for is left to moelab, with a warning. Raises FileExistsError:
    the destination exists. ValueError: a model that is not written; a calibration of another model, or
    for BF16; what `Checkpoint.at` and its plan raise."""
    from gguf import GGUFWriter, quants

    destination = vacant(destination)
    checkpoint = Checkpoint.at(source)
    arch, said = _metadata(checkpoint)
    inputs = None
    if calibration is not None:
        require("kind that is rounded by data", kind, FITTED)
        inputs = read_inputs(calibration, checkpoint.spec, checkpoint.identity)
    model = build(checkpoint, "auto", external=True)
    twin = checkpoint.plan.twin
    shapes = {}
    for name, part, expert in _lying(arch, twin, twin.state_dict()):
        shapes[name] = (*part.shape,) if expert is None else (expert + 1, *part.shape)
        if name.endswith("ffn_gate_shexp.weight"):
            said["expert_shared_feed_forward_length"] = part.shape[0]
    dense = {name: part for name, part, _ in _lying(arch, twin, model.state_dict())}
    with atomic(destination) as file:
        writer = GGUFWriter(file, arch)
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        for key, value in said.items():
            add[type(value)](f"{arch}.{key}", value)
        _add_tokenizer(writer, model.tokenizer, checkpoint.config.vocab_size)
        places = _add_tensors(writer, shapes, kind)
        to = writer.fout[0]
        parts = ((name, part, 0) for name, part in dense.items())
        for name, part, expert in chain(parts, _experts(arch, checkpoint, kind, inputs)):
            rows = (part if part.dtype == torch.uint8 else part.float()).contiguous().numpy()
            if part.dtype != torch.uint8:
                rows = quants.quantize(rows, writer.tensors[0][name].dtype)
            to.seek(places[name] + expert * rows.nbytes)
            to.write(rows)
        writer.close()
    return destination


def _lying(
    arch: str, twin: Any, tensors: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor, int | None]]:
    """(name in the file, values, number of the expert) of a model's tensors."""
    saved = compat.as_saved(twin, tensors)
    if twin.config.tie_word_embeddings:
        saved.pop("lm_head.weight", None)
    found = list(places(arch, twin.config, saved))
    if lost := saved.keys() - {key for key, *_ in found}:
        raise ValueError(
            f"llama.cpp's {arch} has no place for {min(lost)}: it is not written as GGUF"
        )
    for key, names, rule, expert in found:
        whole = saved[key].squeeze(1) if "conv" in key else saved[key]
        for name, part in zip(names, rule.parts(twin.config, whole), strict=True):
            yield name, CHANGED[rule.change][0](part), expert


def _experts(
    arch: str, checkpoint: Checkpoint, kind: str, inputs: Inputs | None
) -> Iterator[tuple[str, Tensor, int]]:
    """(name in the file, values, or uint8 rows that are rounded already, number) of experts, one after
    another."""
    experts = CheckpointExperts(checkpoint)
    for layer in progress(checkpoint.plan.layers, desc="exporting", unit="layer"):
        for expert in range(layer.E):
            own = experts(layer.index, expert)
            blobs = {}
            if inputs:
                seam = seam_of(layer.experts)
                quantize_expert(kind, own, blobs, seam, inputs.of(layer.index, expert))
            for key, (form, blob) in blobs.items():
                rows = torch.from_numpy(blob).view(*form.stored(own[key].shape)[:-1], -1)
                own[key] = rows.mT if form.transposed else rows
            own = {f"{layer.name}.experts.{key}": tensor[None] for key, tensor in own.items()}
            for name, part, _ in _lying(arch, checkpoint.plan.twin, own):
                yield name, part, expert


def _add_tensors(writer: Any, shapes: dict[str, tuple[int, ...]], kind: str) -> dict[str, int]:
    """Write what comes before the tensors, and leave place for these; where they begin."""
    from gguf import GGMLQuantizationType

    for name, shape in shapes.items():
        plain = len(shape) == 1 or PLAIN.fullmatch(name)
        found = "F32" if plain else "BF16" if shape[-1] % block_of(kind)[0] else kind
        form = GGMLQuantizationType[found]
        writer.add_tensor_info(name, shape, np.float32, nbytes(found, shape), form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    places = {}
    end = writer.ggml_pad(writer.fout[0].tell(), writer.data_alignment)
    for name, info in writer.tensors[0].items():
        places[name] = end
        end += writer.ggml_pad(info.nbytes, writer.data_alignment)
    writer.fout[0].truncate(end)
    return places


def _metadata(checkpoint: Checkpoint) -> tuple[str, Record]:
    """llama.cpp's name of a model's architecture, and what its config says by llama.cpp's keys."""
    config = checkpoint.config
    known = {of.type: of for of in ARCHITECTURES[::-1] if of.written}
    arch = known.get(config.model_type)
    rope = getattr(config, "rope_parameters", {})
    taken = arch.fixed | {"hidden_act": "silu"} if arch else {}
    wrong = [name for name, value in taken.items() if getattr(config, name, value) != value]
    if not arch or wrong or rope["rope_type"] != "default":
        raise ValueError(
            f"{checkpoint.folder} is {config.model_type}, and written as GGUF are "
            f"{', '.join(known)}, as llama.cpp runs them (here differs {wrong}), without scaled "
            f"positions"
        )
    said = {"block_count": config.num_hidden_layers, "vocab_size": config.vocab_size}
    for key, fields in FIELDS.items():
        values = (getattr(config, field, None) for field in fields.split())
        if (value := next((of for of in values if of is not None), None)) is not None:
            said[key] = value
    first = checkpoint.plan.layers[0].name
    size = said.setdefault("attention.key_length", config.hidden_size // config.num_attention_heads)
    said |= {
        "attention.value_length": size,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(size * rope.get("partial_rotary_factor", 1)),
        "expert_gating_func": arch.scores,
        "leading_dense_block_count": int(re.search(r"\.(\d+)\.", first)[1]),
    }
    return arch.name, said


def _add_tokenizer(writer: Any, tokenizer: Any, size: int) -> None:
    """Write a byte-level tokenizer; of another one tokenizer.json, which moelab reads, and a warning."""
    split = compat.pre_tokenizer(tokenizer)
    writer.add_tokenizer_model("gpt2" if split else "no_vocab")
    fast = tokenizer is not None and tokenizer.is_fast
    whole = tokenizer.backend_tokenizer.to_str() if fast else None
    if split:
        state = json.loads(whole)
        names = {number: token for token, number in tokenizer.get_vocab().items()}
        types = {of["id"]: 3 if of["special"] else 4 for of in state["added_tokens"]}
        writer.add_tokenizer_pre(split)
        writer.add_token_list([names.get(i, f"[PAD{i}]") for i in range(size)])
        writer.add_token_types([types.get(i, 1 if i in names else 5) for i in range(size)])
        writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    else:
        why = (
            "llama.cpp has no name for how the model's splits text"
            if whole
            else "the model has none"
        )
        warnings.warn(f"llama.cpp takes token ids only, no tokenizer: {why}", stacklevel=3)
        if whole:
            writer.add_string("tokenizer.huggingface.json", whole)
    for token, name in TOKENS.items() if tokenizer else ():
        if (number := getattr(tokenizer, f"{token}_token_id")) is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    if tokenizer and tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


add_arguments = described(__file__)


def main(args: argparse.Namespace) -> int:
    print(export(args.source, args.destination, args.kind, args.calibration))
    return 0
