"""Opening a model from what was found of it: with its experts, or without."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from moelab.base.configs import spec_from_config
from moelab.base.schema import blamed
from moelab.base.specs import MoESpec
from moelab.checkpoint.checkpoint import Checkpoint, read_by_name, require_file
from moelab.checkpoint.experts import CheckpointExperts
from moelab.checkpoint.gguf import codec_of
from moelab.models import compat
from moelab.models.experts import banks
from moelab.models.identity import vouch
from moelab.models.seam import leave_out, plug
from moelab.store.headers import NAMES, read_json
from moelab.store.layout import ExpertStore
from moelab.store.packed import Packed
from moelab.store.verify import check_weights

#: files of which one at least makes a tokenizer
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
    "tekken.json",
)


def open_checkpoint(
    source: str | Path | ExpertStore | Checkpoint | None = None,
    *,
    experts: str = "resident",
    dtype: torch.dtype | str = "auto",
    device: str | torch.device | None = None,
) -> Any:
    """A transformers MoE model for inference; `moelab.open_model` is this and offloading.

    source : as of `Checkpoint.at`.
    experts : "resident" loads everything, with transformers' `eager` experts, the reference for
        everything else; "external" neither reads nor allocates the experts' weights and supplies
        them one by one from the checkpoint, slowly, until another source is plugged in
        (`moelab.models.plug`).
    dtype : of the weights; "auto" takes what config.json says, or else the checkpoint's.

    Returns a transformers model in eval mode, with `.tokenizer` (None if it has none that can be
    read) and `.spec`.

    Raises what `Checkpoint.at`, its config and its plan raise; ValueError: an unknown `experts`, a
    damaged generation_config.json."""
    if experts not in ("resident", "external"):
        raise ValueError(f"experts is {experts!r}; it must be 'resident' or 'external'")
    checkpoint = Checkpoint.at(source)
    model = build(checkpoint, dtype, external=experts == "external")
    if experts == "external":
        plug(model, source=CheckpointExperts(checkpoint, model.dtype, device or "cpu"))
    return model if device is None else model.to(device)


def build(
    checkpoint: Checkpoint, dtype: torch.dtype | str, external: bool, packed: bool = False
) -> Any:
    """The model of a checkpoint on the CPU. Its fp32 weights lie at multiples of 64 bytes.

    external : without its experts' weights.
    packed : with matrices of GGML types as they lie, where kernels multiply them; not bit for bit as
        transformers multiplies by the decoded ones."""
    stored = checkpoint.store is not None
    wanted = checkpoint.dtype(dtype)
    try:
        tokenizer = load_tokenizer(checkpoint)
    except (ValueError, OSError) as error:  # token ids will do
        warnings.warn(f"the model is opened without a tokenizer: {error}", stacklevel=3)
        tokenizer = None
    if stored:
        check_weights(checkpoint.store)
    model = _filled(checkpoint, wanted, external or stored, packed)
    if stored and not external:
        _take_in(model, checkpoint)
    for weight in model.parameters():
        # on some processors the last bits of a product with one row depend on where fp32 weights
        # begin, and a store's file is another than its checkpoint's
        if weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.data_ptr() % 64:
            weight.data = weight.data.clone()
    vouch(model, checkpoint)
    model.spec = checkpoint.spec
    model.tokenizer = tokenizer
    return model.eval()


def _filled(checkpoint: Checkpoint, dtype: torch.dtype, without_experts: bool, packed: bool) -> Any:
    """The model with the checkpoint's tensors, or all but its experts'."""
    plan = checkpoint.plan
    folder = checkpoint.folder
    left_out = plan.ignored | (plan.expert_keys if without_experts else set())
    keys = checkpoint.tensors.keys() - left_out
    kept = _packed(checkpoint, keys, dtype) if packed and checkpoint.gguf else {}
    tensors = _read(checkpoint, keys - kept.keys())
    for key, weight in kept.items():  # in its place
        tensors[key] = torch.zeros((), dtype=dtype).expand(weight.shape)
    same = plan.twin.config.dtype == dtype
    with blamed(folder, "no model can be made of its files"):
        model = deepcopy(plan.twin) if same else compat.meta_twin(plan.twin.config, dtype)
        if without_experts:
            leave_out(model)
        report = compat.fill(model, plan.config, tensors)
        if wrong := {kind: sorted(map(str, keys))[:3] for kind, keys in report.items() if keys}:
            raise ValueError(f"transformers reports {wrong}")
        if plan.quantizer:
            live = model.state_dict(keep_vars=True)
            for name, stock in plan.twin.state_dict().items():
                # what transformers' FP8 quantiser passes on as it was stored cannot be computed with
                if name in live and stock.is_floating_point():
                    wide = compat.kept_in_fp32(plan.twin, name, stock, dtype)
                    live[name].data = live[name].data.to(torch.float32 if wide else dtype)
        compat.describe(model, folder)
    if kept:
        _replace(model, {plan.same[key]: weight for key, weight in kept.items()})
    return model


def _read(checkpoint: Checkpoint, keys: Iterable[str]) -> dict[str, Any]:
    """Tensors, or slices of safetensors files, which transformers reads."""
    from safetensors import safe_open

    if checkpoint.gguf:
        return {key: checkpoint.weights(checkpoint.tensors[key]) for key in keys}
    files = {file: safe_open(file, "pt") for file in checkpoint.files}
    return {key: files[checkpoint.tensors[key].file].get_slice(key) for key in keys}


def _packed(
    checkpoint: Checkpoint, keys: Iterable[str], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The matrices of GGML types that kernels multiply as they lie, and that are parameters so."""
    found = {}
    for key in keys & checkpoint.plan.same.keys():
        entry = checkpoint.tensors[key]
        codec = codec_of([entry])
        if len(entry.shape) == 2 and codec.kernel(NAMES[dtype], entry.shape) and codec.few_bits:
            rows = entry.join([checkpoint.read(part) for part in entry.parts])
            found[key] = Packed(codec, rows.view(-1), entry.shape, dtype)
    return found


def _replace(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Put weights in the places of parameters by name, wherever the model has these."""
    new = {
        model.get_parameter(name): torch.nn.Parameter(weight, requires_grad=False)
        for name, weight in weights.items()
    }
    for module in model.modules():
        own = compat.parameters_of(module)
        own.update({name: new[of] for name, of in own.items() if of in new})


def _take_in(model: Any, checkpoint: Checkpoint) -> None:
    """Give a model that was built without its experts resident ones, read one by one from its
    store."""
    source = CheckpointExperts(checkpoint, model.dtype)
    for stock in checkpoint.plan.layers:
        block = model.get_submodule(stock.name)
        experts = deepcopy(stock.experts).to(model.dtype).to_empty(device="cpu")
        own = banks(experts)
        for expert in range(stock.E):
            for name, tensor in source(stock.index, expert).items():
                bank = own[name][expert] if name in own else own[f"expert_{expert}.{name}"]
                bank.data.copy_(tensor)
        experts.load_state_dict(block.experts.state_dict(), strict=False)  # what all share
        if hasattr(experts, "config"):
            experts.config = block.experts.config
        block.experts = experts


def spec_of(model: torch.nn.Module) -> MoESpec:
    """The spec that `open_checkpoint` left on the model, or one from its config."""
    return getattr(model, "spec", None) or spec_from_config(model.config)


# --------------------------------------------------------------------------------------- tokenizer


def require_tokenizer(source: str | Path | Checkpoint | None) -> None:
    """Refuse a model whose prompts nothing here can read, before its weights are. Raises
    ValueError; as `Checkpoint.at`."""
    checkpoint = Checkpoint.at(source)
    if load_tokenizer(checkpoint) is None:
        raise ValueError(
            f"{checkpoint.folder} has no tokenizer, so no prompt can be given to it: put tokenizer.json and "
            f"tokenizer_config.json there"
        )


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The tokenizer of a checkpoint, None if it has none. Raises ValueError, saying why, if it
    cannot be read."""
    with blamed(
        checkpoint.folder, "its tokenizer cannot be read, so the model takes token ids only"
    ):
        tokenizer = (
            checkpoint.gguf.tokenizer() if checkpoint.gguf else _of_folder(checkpoint.folder)
        )
        if tokenizer is not None and len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise ValueError("it has no vocabulary, or a package that reads it is not installed")
    if tokenizer is None:
        return None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"  # what batched generation with a decoder needs
    return tokenizer


def _of_folder(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not any(os.path.lexists(folder / name) for name in TOKENIZERS):
        return None
    for path in read_by_name(folder):
        require_file(path)
    settings = folder / "tokenizer_config.json"
    said = read_json(settings) if settings.is_file() else {}
    if re.search(r"[/\\]", str(said.get("fast_tokenizer_files", ""))):
        raise ValueError(f"{settings} names files outside the folder: remove fast_tokenizer_files")
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
