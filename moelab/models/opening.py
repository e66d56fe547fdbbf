"""Opening a model: from the hub, from a folder, or the small one that is shipped; with its experts or without.

`experts="external"` constructs the model around experts modules that own no parameters, so the bytes of the
experts, nine tenths of a checkpoint, are neither read nor allocated. They are then supplied one by one, by
default straight from the checkpoint.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from moelab.models import compat
from moelab.models.checkpoint import Checkpoint, CheckpointExperts
from moelab.models.seam import discover, external_class, plug
from moelab.models.small import SMALL
from moelab.specs import MoESpec

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json")


def open_model(name_or_path: str | Path | None = None, experts: str = "resident", *,
               dtype: torch.dtype | str = "auto", device: str | torch.device | None = None) -> Any:
    """Open an MoE model for inference.

    Parameters
    ----------
    name_or_path : a hub id, a checkpoint folder, or None for the small model shipped in `data/small`.
    experts : "resident" loads everything, with transformers' `eager` experts, the reference that everything else
        is compared with; "external" neither reads nor allocates the experts' weights and supplies them one by one
        from the checkpoint, slowly, until another source is plugged in (`moelab.models.plug`).
    dtype : of the weights; "auto" takes the checkpoint's.
    device : where to; the CPU by default.

    Returns
    -------
    A transformers model in eval mode, with `.tokenizer` (None if the checkpoint has none) and `.spec`.

    Raises
    ------
    FileNotFoundError : no such folder, or a hub id that can be had neither from the cache nor the network.
    ValueError : a dense model, an unknown architecture, a damaged file, an unknown `experts`.
    """
    from transformers.utils import logging

    if experts not in ("resident", "external"):
        raise ValueError(f"experts is {experts!r}; it must be 'resident' or 'external'")
    checkpoint = Checkpoint.at(find(name_or_path))
    config = compat.dequantising(load_config(checkpoint.folder))
    spec = MoESpec.from_config(config, name=model_name(name_or_path, checkpoint.folder))
    cls = compat.model_class(config)
    options = {"dtype": dtype, "experts_implementation": "eager", "local_files_only": True}

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    level = logging.get_verbosity()
    logging.set_verbosity_error()       # with external experts, their unread weights would be reported as unexpected
    try:
        if experts == "resident":
            model = cls.from_pretrained(checkpoint.folder, config=config, **options)
        else:
            stock = {type(layer.experts) for layer in discover(compat.meta_twin(config))}
            with compat.classes_replaced(stock, external_class):
                model = cls.from_pretrained(checkpoint.folder, config=config, **options)
            plug(model, source=CheckpointExperts(checkpoint, config, model.dtype, device or "cpu"))
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    _align(model)
    model.spec = spec
    model.tokenizer = _load_tokenizer(checkpoint.folder)
    return model.to(device).eval() if device is not None else model.eval()


def _align(model: torch.nn.Module) -> None:
    """Move fp32 weights to multiples of 64 bytes; mapped from a file they lie wherever its header happens to end.

    On some processors the last bits of a product with one row depend on that, and a store's file is another than its
    checkpoint's.
    """
    for weight in model.parameters():
        if weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.data_ptr() % 64:
            weight.data = weight.data.clone()


def find(name_or_path: str | Path | None) -> Path:
    """The local folder of a model; a hub id is downloaded (config, tokenizer, safetensors) or found in the cache."""
    if name_or_path is None:
        return SMALL
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    text = str(name_or_path)
    looks_like_id = text.count("/") <= 1 and not text.startswith((".", "/", "~")) and os.sep * 2 not in text
    if not looks_like_id:
        raise FileNotFoundError(f"there is no checkpoint folder at {path}")
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(text, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except Exception as error:          # the hub client has a dozen kinds of "cannot be had"
        raise FileNotFoundError(
            f"{text!r} is no folder here, and as a hub id it cannot be had ({type(error).__name__}). Check the "
            f"spelling and the network, or give the folder of a checkpoint; no argument opens the shipped small model"
        ) from error


def identity(model: torch.nn.Module) -> str:
    """Sixteen hex digits that name a model's routing: its geometry and its routers' weights.

    Two checkpoints with the same routers route alike, whatever their experts' precision; that is what traces and
    calibrations depend on.
    """
    digest = hashlib.sha256(spec_of(model).fingerprint().encode())
    for layer in discover(model):
        for name, tensor in sorted(layer.router.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def spec_of(model: torch.nn.Module) -> MoESpec:
    """The spec that `open_model` left on the model, or one from its config."""
    return getattr(model, "spec", None) or MoESpec.from_config(model.config)


def load_config(folder: Path) -> Any:
    """The config of a checkpoint folder; ValueError for one that transformers does not know or that is damaged."""
    import transformers

    from moelab.models import deepseek
    deepseek.register()
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        import json
        try:
            model_type = json.loads((folder / "config.json").read_text()).get("model_type")
        except ValueError as broken:
            raise ValueError(f"{folder / 'config.json'} is damaged ({broken}); download it again") from error
        raise ValueError(f"transformers {transformers.__version__} does not know model_type {model_type!r} "
                         f"({folder / 'config.json'}): upgrade transformers, or check the config") from error


def require_tokenizer(name_or_path: str | Path | None) -> None:
    """Refuse a model that has no tokenizer before anything of it is loaded. Raises ValueError; as `find`."""
    folder = find(name_or_path)
    if not has_tokenizer(folder):
        raise ValueError(f"{name_or_path} has no tokenizer, so no prompt can be given to it: put {TOKENIZERS[0]} and "
                         f"{TOKENIZERS[1]} into {folder}")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZERS)


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer
    if not has_tokenizer(folder):
        return None
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"         # what batched generation with a decoder needs
    return tokenizer


def model_name(name_or_path: str | Path | None, folder: Path) -> str:
    """What to call a model in print: "small", the folder's name, or the hub id."""
    if name_or_path is None:
        return "small"
    text = str(name_or_path)
    return folder.name if Path(text).expanduser().exists() else text
