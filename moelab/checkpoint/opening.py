"""Opening a model: from the hub, from a folder, or the small one that is shipped; with its experts
or without."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from moelab import registry
from moelab.cards import load_card
from moelab.checkpoint.checkpoint import Checkpoint, blamed, read_by_name, require_file
from moelab.checkpoint.completeness import Examined, LoadingPlan, complete
from moelab.checkpoint.direct import CheckpointExperts
from moelab.configs import spec_from_config
from moelab.files import absolute, from_hub, small_model
from moelab.models import compat
from moelab.models.guard import check_spec
from moelab.models.identity import vouch
from moelab.models.seam import banks, discover, leave_out, plug
from moelab.specs import MoESpec
from moelab.store.headers import read_json
from moelab.store.verify import check_weights

#: files of which one at least makes a tokenizer, and the package that reads it if transformers
#: alone does not
TOKENIZERS = {
    "tokenizer.json": "",
    "tokenizer_config.json": "",
    "vocab.json": "",
    "tokenizer.model": "sentencepiece",
    "spiece.model": "sentencepiece",
    "tiktoken.model": "tiktoken",
    "tekken.json": "mistral_common",
}


def examine(name_or_path: str | Path | None) -> Examined:
    """Find a model and check that it is complete, as `open_model` does; reads headers only. Raises
    what that raises."""
    checkpoint = Checkpoint.at(find(name_or_path))
    config = checkpoint.config()
    with blamed(checkpoint.folder / "config.json", "its values make no sense", passing=ValueError):
        spec = spec_from_config(config, name=model_name(name_or_path, checkpoint.folder))
    plan = complete(checkpoint, config)
    check_spec(spec, plan.layers)
    return Examined(checkpoint, config, spec, plan)


def open_checkpoint(
    name_or_path: str | Path | Examined | None = None,
    *,
    experts: str = "resident",
    dtype: torch.dtype | str = "auto",
    device: str | torch.device | None = None,
) -> Any:
    """A transformers MoE model for inference; `moelab.open_model` is this and offloading.

    name_or_path : a hub id, the folder of a checkpoint or of an expert store, or None for the small
        model shipped in `data/small`; or what `examine` has found of one of these.
    experts : "resident" loads everything, with transformers' `eager` experts, the reference for
        everything else; "external" neither reads nor allocates the experts' weights and supplies
        them one by one from the checkpoint, slowly, until another source is plugged in
        (`moelab.models.plug`).
    dtype : of the weights; "auto" takes what config.json says, or else the checkpoint's.

    Returns a transformers model in eval mode, with `.tokenizer` (None if it has none that can be
    read) and `.spec`.

    Raises FileNotFoundError: no such folder, or a hub id that can be had neither from the cache nor
    the network. Raises ValueError: a dense model, an unknown architecture, a damaged or hostile
    file, an unknown `experts`; a tensor that is missing, unexpected, of another shape or type than
    the model's (see `moelab.checkpoint.completeness`)."""
    if experts not in ("resident", "external"):
        raise ValueError(f"experts is {experts!r}; it must be 'resident' or 'external'")
    found = name_or_path if isinstance(name_or_path, Examined) else examine(name_or_path)
    checkpoint, config, plan = found.checkpoint, found.config, found.plan
    try:
        tokenizer = load_tokenizer(checkpoint.folder)
    except (ValueError, OSError) as error:  # token ids will do
        tokenizer = None
        warnings.warn(f"the model is opened without a tokenizer: {error}", stacklevel=2)
    if checkpoint.store is not None:
        check_weights(checkpoint.store)
    if dtype == "auto" and plan.narrowed:
        more = f" and {len(plan.narrowed) - 1:,} tensors more" if len(plan.narrowed) > 1 else ""
        warnings.warn(
            f"{checkpoint.folder} stores {plan.narrowed[0]}{more} more precisely than transformers computes "
            f"with it, in the {config.dtype} that config.json asks for",
            stacklevel=2,
        )
    dtype = found.dtype(dtype)
    outside = experts == "external" or checkpoint.store is not None
    left_out = plan.ignored | (plan.expert_keys if outside else set())
    with blamed(
        checkpoint.folder / "config.json",
        f"no {config.model_type} model can be made of its checkpoint",
    ):
        model = _load(
            checkpoint, config, dtype, left_out, leave_out if outside else lambda model: None
        )
    from transformers import GenerationConfig

    own = checkpoint.folder / "generation_config.json"
    options = (
        {} if own.is_file() else {"config_file_name": "config.json", "_from_model_config": True}
    )
    with blamed(own, "no generation config can be read of it"):
        model.generation_config = GenerationConfig.from_pretrained(
            checkpoint.folder, local_files_only=True, **options
        )
    if plan.quantizer is not None:
        compat.cast_as_computed(model, plan.twin, dtype)
    if outside:
        source = CheckpointExperts(checkpoint, config, model.dtype, device or "cpu", plan)
        if experts == "external":
            plug(model, source=source)
        else:
            _take_in(model, plan, source)
    _align(model)
    vouch(model, checkpoint)
    model.spec = found.spec
    model.tokenizer = tokenizer
    return model.to(device).eval() if device is not None else model.eval()


def _load(
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype,
    left_out: set[str],
    finish: Callable[[Any], object],
) -> Any:
    """The model with the checkpoint's tensors but those left out; `finish` as of `compat.load`."""
    from safetensors import safe_open
    from transformers.utils import logging

    files = {file: safe_open(file, "pt") for file in checkpoint.files}
    tensors = {
        key: files[entry.file].get_slice(key)
        for key, entry in checkpoint.tensors.items()
        if key not in left_out
    }
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, report = compat.load(config, tensors, dtype, finish)
    finally:
        if bars:
            logging.enable_progress_bar()
    if wrong := [
        f"{kind.replace('_', ' ')}: {sorted(map(str, found))[:3]}"
        for kind, found in report.items()
        if found
    ]:
        raise ValueError(f"transformers reports {'; '.join(wrong)}")
    model.name_or_path = model.config._name_or_path = str(checkpoint.folder)
    return model


def _take_in(model: Any, plan: LoadingPlan, source: CheckpointExperts) -> None:
    """Give a model that was built without its experts resident ones, read one by one."""
    for layer, stock in zip(discover(model), plan.layers):
        experts = stock.experts
        tensors = {
            name: torch.empty(p.shape, dtype=model.dtype) for name, p in banks(experts).items()
        }
        for expert in range(stock.E):
            for name, tensor in source(layer.index, expert).items():
                into = (
                    tensors[name][expert] if name in tensors else tensors[f"expert_{expert}.{name}"]
                )
                into.copy_(tensor)
        experts.load_state_dict(tensors | dict(layer.experts.named_parameters()), assign=True)
        if hasattr(experts, "config"):
            experts.config = layer.experts.config
        layer.block.experts = experts


def _align(model: torch.nn.Module) -> None:
    """Move fp32 weights to multiples of 64 bytes, not wherever a file's header ends: on some
    processors the last bits of a product with one row depend on that, and a store's file is another
    than its checkpoint's."""
    for weight in model.parameters():
        if weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.data_ptr() % 64:
            weight.data = weight.data.clone()


def find(name_or_path: str | Path | None) -> Path:
    """The local folder of a model; a hub id is downloaded (config, tokenizer, safetensors) or found
    in the cache."""
    if name_or_path is None:
        return small_model()
    path = absolute(name_or_path)
    if path.exists():
        return path
    if path.with_name(path.name + ".part").is_dir():
        raise FileNotFoundError(
            f"there is nothing at {path} yet: its conversion was cut off; run the same convert "
            f"command again and it goes on"
        )
    text = str(name_or_path)
    if card := registry.like("model", text):
        hub = load_card(card).get("hub")
        raise ValueError(
            f"{card} is a card, the geometry of a model without its weights: give "
            + f"its hub id, {hub}, or " * bool(hub)
            + f"a folder; `moelab synthesize FOLDER --model {card}` writes one with random weights"
        )
    if text.count("/") > 1 or text.startswith((".", "/", "~")) or os.sep * 2 in text:
        raise FileNotFoundError(f"there is no checkpoint folder at {path}")
    return from_hub(text, ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])


def spec_of(model: torch.nn.Module) -> MoESpec:
    """The spec that `open_checkpoint` left on the model, or one from its config."""
    return getattr(model, "spec", None) or spec_from_config(model.config)


def require_tokenizer(name_or_path: str | Path | None) -> None:
    """Refuse a model whose prompts nothing here can read, before its weights are. Raises
    ValueError; as `examine`."""
    folder = Checkpoint.at(find(name_or_path)).folder
    if load_tokenizer(folder) is None:
        raise ValueError(
            f"{name_or_path} has no tokenizer, so no prompt can be given to it: put tokenizer.json and "
            f"tokenizer_config.json into {folder}"
        )


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint, None if it has none. Raises ValueError, saying why, if it
    cannot be read."""
    from transformers import AutoTokenizer

    if not (files := [name for name in TOKENIZERS if os.path.lexists(folder / name)]):
        return None
    for path in read_by_name(folder):
        require_file(path)
    settings = folder / "tokenizer_config.json"
    said = read_json(settings) if settings.is_file() else {}
    named = str(said.get("fast_tokenizer_files", ""))
    if "/" in named or "\\" in named:
        raise ValueError(
            f"{settings} names {named[:80]}, outside the folder; nothing of the kind is read. Remove "
            f"fast_tokenizer_files"
        )
    why = "its tokenizer cannot be read, so the model takes token ids only"
    if "tokenizer.json" not in files:
        if "auto_map" in said:
            raise ValueError(
                f"{folder}: {why}: it is code of its own (auto_map), which is never run here; put a "
                f"tokenizer.json there"
            )
        if absent := [name for name in map(TOKENIZERS.get, files) if name and not find_spec(name)]:
            why += f"; install {absent[0]}"
    with blamed(folder, why):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise ValueError("it has no vocabulary")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.padding_side = "left"  # what batched generation with a decoder needs
        return tokenizer


def model_name(name_or_path: str | Path | None, folder: Path) -> str:
    """What to call a model in print: "small", the folder's name, or the hub id."""
    if name_or_path is None:
        return "small"
    text = str(name_or_path)
    return folder.name if absolute(text).exists() else text
