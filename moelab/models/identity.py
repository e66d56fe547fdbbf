"""A model's identity: sixteen hex digits of its weights and its config, whatever it was opened
from; and, of one whose experts were rounded, the format: "0123456789abcdef-int4".

An identity covers the key, dtype, shape and bytes of every tensor of the checkpoint: all bytes of a
small tensor, samples of a large one. It names the model that a calibration, a trace or an estimator
is of, and is no key of a cache: a change that leaves every sample untouched is not seen. Shards,
files, stores and `open_model(dtype=…)` do not count. A model that moelab opened has its
checkpoint's identity as long as samples of its weights are those that were loaded; one that was
changed, or opened by something else, has one of its live tensors."""

from __future__ import annotations

import json
from hashlib import sha256
from itertools import groupby
from typing import Any

import torch

from moelab.store.headers import Stored

#: bytes of a sample, of a tensor that is read whole, and of a tensor for each sample of it
PIECE = 4096
WHOLE = 1 << 16
EACH = 1 << 20
#: fields of a config that do not change what the model computes in a given precision
SAID_ELSEWHERE = (
    "_name_or_path",
    "architectures",
    "dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


def vouch(model: torch.nn.Module, checkpoint: Any) -> None:
    """Remember that a model has, now, the weights of a `Checkpoint`."""
    object.__setattr__(model, "_moelab_origin", (checkpoint, _looks(model)))


def _origin(model: torch.nn.Module) -> tuple[Any, dict[str, torch.Tensor]]:
    """(the `Checkpoint` that a model was opened from, samples of its weights at that time); (None,
    {}) for one that was not."""
    return vars(model).get("_moelab_origin", (None, {}))


def identity(model: torch.nn.Module) -> str:
    """Sixteen hex digits that name a live model: its checkpoint's (`of_tensors`), or its live
    tensors' own."""
    (checkpoint, before), seen = _origin(model), _looks(model)
    if checkpoint and all(
        name in seen and torch.equal(before[name], seen[name]) for name in before
    ):
        return checkpoint.identity
    tensors = (f"{name} {list(t.shape)} {t.tolist()}" for name, t in seen.items())
    return _digest("live", _said(model.config), *tensors)


def opened_from(model: torch.nn.Module) -> str:
    """Identity of what a model was opened from, whatever was done to its weights since; "" for
    nothing known."""
    checkpoint, _ = _origin(model)
    return checkpoint.identity if checkpoint else ""


def require_unwritten(model: torch.nn.Module) -> None:
    """StoreError if somebody writes to the files that a model was opened from: some of its weights
    are mapped."""
    checkpoint, _ = _origin(model)
    if checkpoint:
        checkpoint.require_unchanged(mapped=True)


def same_source(a: str, b: str) -> bool:
    """Whether two identities are of one model, whatever its weights were rounded to: what was
    counted or trained on one serves the other."""
    return a.partition("-")[0] == b.partition("-")[0]


def require_same_model(model: torch.nn.Module, *parts: Any) -> None:
    """ValueError if an executor or a source (a part with an `identity`) has weights of another
    model."""
    for part in parts:
        made_of = getattr(part, "identity", None)
        if isinstance(made_of, str) and made_of != (mine := identity(model)):
            raise ValueError(
                f"these are weights of {getattr(part, 'name', 'another model')} (identity {made_of}), and "
                f"the model is {mine}, or was changed since it was opened: open the model that they "
                f"belong to with moelab.open_model"
            )


def of_tensors(tensors: dict[str, Stored], config: Any) -> str:
    """The identity of a checkpoint, by its transformers config and samples of its tensors."""
    lines = []
    entries = sorted(tensors.items(), key=lambda item: (item[1].file, item[1].begin))
    for file, of_file in groupby(entries, key=lambda item: item[1].file):
        with open(file, "rb", buffering=0) as f:
            for key, entry in of_file:
                digest = sha256()
                for offset, length in samples(entry.nbytes, entry.shape):
                    f.seek(entry.begin + offset)
                    digest.update(f.read(length))
                lines.append(f"{key}\t{entry.dtype}\t{list(entry.shape)}\t{digest.hexdigest()}")
    return _digest(_said(config), *sorted(lines))


def samples(size: int, shape: list[int]) -> list[tuple[int, int]]:
    """(offset, length) of what is read of a tensor of `size` bytes: even pieces, one at least an
    expert of [E, …]."""
    if size <= WHOLE:
        return [(0, size)]
    n = max(2, size // EACH, shape[0] if len(shape) > 2 else 0)
    return [(min(i * size // n, size - PIECE), PIECE) for i in range(n)]


def _looks(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """name → samples of a live tensor's values, on the CPU; of a packed one of what was packed, or of its
    bytes."""
    found = {}
    for name, tensor in model.state_dict().items():
        if (blob := getattr(tensor, "blob", None)) is not None:
            tensor = blob if tensor.origin is None else tensor.origin
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
            n = tensor.numel()
            count = min(n, max(16, 2 * tensor.shape[0] if tensor.dim() > 2 else 0))
            places = torch.linspace(0, max(n - 1, 0), count, dtype=torch.float64).long()
            found[name] = tensor.detach().reshape(-1)[places.to(tensor.device)].cpu()
    return found


def _said(config: Any) -> str:
    """What a config says beyond its class's defaults, as text that is the same however it was
    written."""
    fields = config.to_diff_dict()
    return json.dumps(
        {k: v for k, v in fields.items() if k not in SAID_ELSEWHERE}, sort_keys=True, default=str
    )


def _digest(*lines: str) -> str:
    return sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()[:16]
