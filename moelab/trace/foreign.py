"""What another program's file says of routing, checked, and made a `RoutingTrace`.

A reader returns `Columns` as the file has them. Here they are checked once for all formats: ids in
range, no expert twice in a cell, positions that rise within a sequence, finite weights; and put
together with what is known of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import numpy as np
import torch

from moelab.base.configs import spec_from_config
from moelab.base.files import from_hub, small_model
from moelab.base.specs import MoESpec
from moelab.cards import card_of, load_model
from moelab.trace.routing_trace import DECODE, PREFILL, RoutingTrace

#: no checkpoint has as many; ids are int16, and the id E means that no expert ran
MOST = 2**15 - 1
#: bytes of a file that is read as a whole, unpacked; experts of all layers
LARGE, ALL = 1 << 29, 1 << 22


@dataclass
class Columns:
    """Routing as a file has it; None: it does not say.

    ids : integers [T, L, K]; −1, or E where E is known, means that no expert ran.
    logits : [T, L, E], of the routers.
    layers : the checkpoint's own numbers of the L layers.
    experts : E.
    ignored : what else the file has, by name."""

    ids: np.ndarray | None = None
    weights: np.ndarray | None = None
    logits: np.ndarray | None = None
    phase: np.ndarray | None = None
    sequence: np.ndarray | None = None
    position: np.ndarray | None = None
    tokens: np.ndarray | None = None
    layers: tuple[int, ...] | None = None
    experts: int | None = None
    ignored: tuple[str, ...] = ()


def model_of(model: str | Path | None) -> tuple[MoESpec | None, str]:
    """(geometry, identity) of a card's name, a hub id or a folder; "small" is the shipped model.

    A folder with weights gives its own identity. A card or a config has none: what is counted on
    such a trace fits traces of the same card or config alone. Raises FileNotFoundError,
    ValueError."""
    if model is None:
        return None, ""
    path = small_model() if str(model) == "small" else Path(model).expanduser()
    if not path.exists() and (name := card_of(str(model))):
        return load_model(name), digest("card", name)
    if not path.exists() and str(model).count("/") != 1:
        raise ValueError(
            f"there is no model card and no folder {str(model)!r}: give a card's name "
            "(moelab.names('model')), a hub id or a checkpoint's folder"
        )
    from moelab.checkpoint.checkpoint import Checkpoint
    from moelab.checkpoint.config import load_config

    folder = path if path.exists() else from_hub(str(model), ["config.json"])
    if any(folder.glob("*.safetensors")):
        checkpoint = Checkpoint.at(folder)
        return checkpoint.spec, checkpoint.identity
    spec = spec_from_config(load_config(folder), name=str(model))
    return spec, digest("config", spec.fingerprint())


def bounded(path: Path) -> Path:
    """`path`. ValueError: it has more than is read, unpacked if it is a zip file."""
    size = path.stat().st_size
    if size <= LARGE and is_zipfile(path):
        with ZipFile(path) as parts:
            size = sum(part.file_size for part in parts.infolist())
    require_bytes(size)
    return path


def require_bytes(size: int) -> None:
    if size > LARGE:
        raise ValueError(
            f"it has {size:,} bytes, and at most {LARGE:,} are read: record fewer tokens, or split it "
            "(.npy and .safetensors may have any size)"
        )


def digest(*words: str) -> str:
    return sha256("\n".join(words).encode()).hexdigest()[:16]


def trace_of(found: Columns, name: str, spec: MoESpec | None, model_id: str) -> RoutingTrace:
    """The trace that the columns are, of a model as `model_of` knows it; `name` : of one that it
    does not. Raises ValueError."""
    if found.ids is None:
        found = _chosen(found, spec)
    elif found.logits is not None:
        found = replace(found, experts=found.logits.shape[-1])
    ids = integers("ids", found.ids, 3)
    if not ids.size:
        raise ValueError(f"it has no routing: ids are {list(ids.shape)}")
    weights = _weights(found.weights, ids)
    kept, layers = _moe_layers(ids, found.layers, spec)
    ids = ids[:, kept]
    experts = found.experts or (spec.E if spec else max(int(ids.max()) + 1, ids.shape[2]))
    if spec is None:
        spec = MoESpec(name, "", layers[-1] + 1, layers, experts, ids.shape[2], H=0, I=0)
        model_id = digest("unknown", name, spec.fingerprint())
    elif experts != spec.E:
        raise ValueError(f"it has {experts} experts a layer, and {spec.name} has {spec.E}")
    spec = replace(spec, moe_layers=layers, K=ids.shape[2])
    ids = np.where(ids == -1, spec.E, ids)
    _check_ids(ids, spec)
    T = len(ids)
    columns = {}
    if weights is not None:
        columns["weights"] = torch.from_numpy(np.where(ids < spec.E, weights[:, kept], 0))
    for column in ("sequence", "position", "tokens"):
        columns[column] = _per_token(column, getattr(found, column), T, np.iinfo(np.int32).max)
    if columns["sequence"] is not None:  # their numbers may be anybody's
        columns["sequence"] = columns["sequence"].unique(return_inverse=True)[1].int()
    columns["phase"] = _per_token("phase", found.phase, T, DECODE, torch.uint8)
    _check_order(columns["sequence"], columns["position"], columns["phase"])
    return RoutingTrace.of_ids(torch.from_numpy(ids), spec, model_id, **columns)


def of_model(trace: RoutingTrace, spec: MoESpec, model_id: str) -> RoutingTrace:
    """A trace of ours as this model's. ValueError: it is not."""
    layers, E = trace.spec.moe_layers, trace.spec.E
    found = Columns(ids=trace.ids.numpy(), layers=layers, experts=E)
    return replace(trace, spec=trace_of(found, "", spec, model_id).spec, model_id=model_id)


def _chosen(found: Columns, spec: MoESpec | None) -> Columns:
    """Ids and weights of what the router's logits choose: the K largest, softmax over all."""
    if found.logits is None:
        raise ValueError("it has neither ids nor logits of routing")
    if found.logits.ndim != 3 or found.logits.dtype.kind != "f":
        raise ValueError(
            f"logits are {found.logits.dtype} {list(found.logits.shape)}; they must be floats [T, L, E]"
        )
    logits = torch.from_numpy(found.logits).float()
    if not logits.isfinite().all():
        raise ValueError("logits are not all finite")
    if spec is None:
        raise ValueError(
            "it has logits but no ids, and so many experts a token are not known: give model="
        )
    weights, ids = logits.softmax(-1).topk(spec.K)
    return replace(found, ids=ids.numpy(), weights=weights.numpy(), experts=logits.shape[-1])


def integers(name: str, values: Any, dims: int) -> np.ndarray:
    """`values` as int64; ValueError unless they are integers with so many dimensions."""
    values = np.asarray(values)
    if values.dtype.kind not in "iu" or values.ndim != dims:
        raise ValueError(
            f"{name} is {values.dtype} {list(values.shape)}; it must be of integers with {dims} "
            f"dimension{'s' * (dims > 1)}"
        )
    return values.astype(np.int64)


def _moe_layers(
    ids: np.ndarray, layers: tuple[int, ...] | None, spec: MoESpec | None
) -> tuple[list[int], tuple[int, ...]]:
    """(which of the ids' layers are MoE, their numbers in the checkpoint)."""
    L = ids.shape[1]
    if layers is not None and (len(layers) != L or max(layers) > MOST):
        raise ValueError(
            f"it names {len(layers)} layers, up to {max(layers, default=0)}; ids have {L}, and {MOST} is "
            "the most"
        )
    # engines that number all layers alike leave zeros where a layer is dense
    dense = (ids == 0).all((0, 2)) & (ids.shape[2] > 1)
    numbers = tuple(layers if layers is not None else range(L))
    if spec is None:
        kept = np.flatnonzero(~dense).tolist()
        if not kept:
            raise ValueError("all its ids are 0, so no layer of it is MoE")
        return kept, tuple(numbers[at] for at in kept)
    if layers is None and L == spec.L:
        return list(range(L)), spec.moe_layers
    if layers is None and spec.num_layers != L:
        raise ValueError(
            f"it has {L} layers, and {spec.name} has {spec.L} MoE layers among {spec.num_layers}: say "
            "which these are, in an array `layers` of the checkpoint's own numbers"
        )
    kept = [at for at, number in enumerate(numbers) if number in spec.moe_layers]
    if not kept:
        raise ValueError(f"it has no layer that is MoE in {spec.name}")
    if strange := [numbers[at] for at in range(L) if at not in kept and not dense[at]]:
        raise ValueError(f"it has routing of layers that are not MoE in {spec.name}: {strange}")
    return kept, tuple(numbers[at] for at in kept)


def _check_ids(ids: np.ndarray, spec: MoESpec) -> None:
    E = spec.E
    if spec.L * E > ALL:
        raise ValueError(
            f"it has {spec.L:,} layers of {E:,} experts, and no model has {ALL:,} in all"
        )
    if E > MOST or ids.min() < 0 or ids.max() > E:
        raise ValueError(
            f"ids are from {ids.min()} to {ids.max()}, with {E} experts a layer (at most {MOST}); they "
            f"must be from 0 to {E - 1}, or −1 or {E} where no expert ran"
        )
    ordered = np.sort(ids, axis=2)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] < E)
    if twice.any():
        token, layer, _ = np.argwhere(twice)[0]
        raise ValueError(
            f"token {token} has an expert twice in its layer {layer}, {ids[token, layer].tolist()}: "
            "these are no ids of a router's choice, or of physical copies"
        )


def _weights(weights: Any, ids: np.ndarray) -> np.ndarray | None:
    if weights is None:
        return None
    weights = np.asarray(weights)
    if weights.dtype.kind != "f" or weights.shape != ids.shape:
        raise ValueError(f"weights are {weights.dtype} {weights.shape}; ids are {ids.shape}")
    with np.errstate(over="ignore"):
        weights = weights.astype(np.float32)
    if not np.isfinite(weights).all():
        raise ValueError("weights are not all finite")
    return weights


def _per_token(
    name: str, values: Any, T: int, most: int, dtype: torch.dtype = torch.int32
) -> torch.Tensor | None:
    if values is None:
        return None
    values = integers(name, values, 1)
    if len(values) != T or values.min() < 0 or values.max() > most:
        raise ValueError(
            f"{name} has {len(values)} values from {values.min()} to {values.max()}; it must have {T}, "
            f"one a token, from 0 to {most}"
        )
    return torch.from_numpy(values).to(dtype)


def _check_order(
    sequence: torch.Tensor | None, position: torch.Tensor | None, phase: torch.Tensor | None
) -> None:
    """ValueError unless each sequence's tokens stand in the order of their positions."""
    if position is None:
        return
    sequence = torch.zeros_like(position) if sequence is None else sequence
    by = sequence.long().argsort(stable=True)
    same = sequence[by][1:] == sequence[by][:-1]
    wrong = same & (position[by][1:] <= position[by][:-1])
    if wrong.any():
        at = int(by[1:][wrong][0])
        raise ValueError(
            f"token {at} has position {int(position[at])} after a token of the same or a later one in "
            f"sequence {int(sequence[at])}: tokens must stand in the order in which they ran"
        )
    if phase is not None and (same & (phase[by][1:] == PREFILL) & (phase[by][:-1] == DECODE)).any():
        raise ValueError(
            "a sequence has prefill after decode: give each turn a sequence of its own"
        )
