"""What another program's file says of routing, checked, and made a `RoutingTrace`.

A reader returns `Columns` as the file has them. Here they are checked once for all formats: ids in
range, no expert twice in a cell, positions that rise within a sequence, finite weights; and put
together with what is known of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import numpy as np
import torch

from moelab.base.configs import spec_from_config
from moelab.base.files import from_hub, small_model
from moelab.base.registry import near
from moelab.base.schema import FLOATS, checked
from moelab.base.specs import MoESpec
from moelab.cards import MODELS, card_of, load_model
from moelab.trace.routing_trace import DECODE, RoutingTrace

#: no checkpoint has as many; ids are int16, and the id E means that no expert ran
MOST = 2**15 - 1
#: bytes of a file that is read as a whole, unpacked; experts of all layers
LARGE = 1 << 29
ALL = 1 << 22


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
            f"there is no model card and no folder {str(model)!r}.{near(model, MODELS)} Give a card's name "
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


def unknown(name: str, layers: tuple[int, ...], E: int, K: int) -> tuple[MoESpec, str]:
    """(geometry, identity) of a model that is not known but by its routing. ValueError: none is as
    large."""
    if len(layers) * E > ALL or max(layers[-1], E) > MOST:
        raise ValueError(
            f"it has {len(layers)} layers, up to {layers[-1]}, of {E} experts; at most {MOST} are known, "
            f"and {ALL:,} experts in all"
        )
    spec = MoESpec(name, "", layers[-1] + 1, layers, E, K, H=0, I=0)
    return spec, digest("unknown", name, spec.fingerprint())


def trace_of(found: Columns, name: str, spec: MoESpec | None, model_id: str) -> RoutingTrace:
    """The trace that the columns are, of a model as `model_of` knows it; `name` : of one that it
    does not. Raises ValueError."""
    if found.ids is None:
        found = _chosen(found, spec)
    ids = integers("ids", found.ids, (None, None, None)).numpy()
    if not ids.size:
        raise ValueError(f"it has no routing: ids are {list(ids.shape)}")
    kept, layers = _moe_layers(ids, found.layers, spec)
    T, _, K = ids.shape
    experts = found.experts or (spec.E if spec else max(int(ids[:, kept].max()) + 1, K))
    if spec is None:
        spec, model_id = unknown(name, layers, experts, K)
    elif experts != spec.E:
        raise ValueError(f"it has {experts} experts a layer, and {spec.name} has {spec.E}")
    spec = replace(spec, moe_layers=layers, K=K)
    columns = {}
    if found.weights is not None:
        weights = {"weights": torch.from_numpy(np.asarray(found.weights))}
        weights = checked(weights, "weights", FLOATS, ids.shape).float()
        columns["weights"] = torch.where(torch.from_numpy(ids < experts), weights, 0)[:, kept]
    for column in ("phase", "sequence", "position", "tokens"):
        if (values := getattr(found, column)) is not None:
            most = DECODE if column == "phase" else np.iinfo(np.int32).max
            columns[column] = integers(column, values, (T,), 0, most).int()
    if "phase" in columns:
        columns["phase"] = columns["phase"].to(torch.uint8)
    if "sequence" in columns:  # their numbers may be anybody's
        columns["sequence"] = columns["sequence"].unique(return_inverse=True)[1].int()
    ids = np.where(ids == -1, experts, ids)[:, kept]
    ids = integers("ids", ids, ids.shape, 0, min(experts, MOST))
    trace = RoutingTrace.of_ids(ids, spec, model_id, **columns)
    _check_order(trace, found.position is not None)
    return trace


def of_model(trace: RoutingTrace, spec: MoESpec, model_id: str) -> RoutingTrace:
    """A trace of ours as this model's. ValueError: it is not."""
    layers = trace.spec.moe_layers
    E = trace.spec.E
    found = Columns(ids=trace.ids.numpy(), layers=layers, experts=E)
    return replace(trace, spec=trace_of(found, "", spec, model_id).spec, model_id=model_id)


def _chosen(found: Columns, spec: MoESpec | None) -> Columns:
    """Ids and weights of what the router's logits choose: the K largest, softmax over all."""
    if found.logits is None or spec is None:
        raise ValueError(
            "it has neither ids nor, of a model that is known (give model=), logits of routing"
        )
    logits = {"logits": torch.from_numpy(found.logits)}
    logits = checked(logits, "logits", FLOATS, (None, None, None)).float()
    weights, ids = logits.softmax(-1).topk(spec.K)
    return replace(found, ids=ids.numpy(), weights=weights.numpy(), experts=logits.shape[-1])


def integers(
    name: str, values: Any, shape: Sequence[int | None], low: int | None = None, high: float = inf
) -> torch.Tensor:
    """`values` as int64; ValueError unless they are integers of this shape and, if `low` is given,
    from it to `high`."""
    values = np.asarray(values)
    if values.dtype.kind not in "iu":
        raise ValueError(f"{name} is {values.dtype}; it must be of integers")
    tensor = torch.from_numpy(values.astype(np.int64))
    return checked({name: tensor}, name, ("int64",), shape, low, high)


def _moe_layers(
    ids: np.ndarray, layers: tuple[int, ...] | None, spec: MoESpec | None
) -> tuple[list[int], tuple[int, ...]]:
    """(which of the ids' layers are MoE, their numbers in the checkpoint)."""
    L = ids.shape[1]
    if layers is None:
        layers = spec.moe_layers if spec and spec.L == L else range(spec.num_layers if spec else L)
    if len(layers) != L:
        raise ValueError(
            f"ids have {L} layers, and known are {len(layers)}: say which these are, in an array "
            "`layers` of the checkpoint's own numbers"
        )
    # engines that number all layers alike leave zeros where a layer is dense
    dense = (ids == 0).all((0, 2)) & (ids.shape[2] > 1)
    kept = [
        at for at, of in enumerate(layers) if (of in spec.moe_layers if spec else not dense[at])
    ]
    strange = [layers[at] for at in sorted({*range(L)} - {*kept}) if not dense[at]]
    if strange or not kept:
        raise ValueError(
            f"{len(kept)} of its layers are MoE by {spec.name if spec else 'its ids'}, and it has "
            f"routing of others: {strange}"
        )
    return kept, tuple(layers[at] for at in kept)


def _check_order(trace: RoutingTrace, told: bool) -> None:
    """ValueError for an expert twice in a cell; or, if positions are `told`, unless each sequence's
    tokens stand in their order, prefill first."""
    ordered = trace.ids.sort(2).values
    twice = (ordered.diff() == 0) & (ordered[..., 1:] < trace.spec.E)
    if twice.any():
        token, layer, _ = twice.nonzero()[0].tolist()
        raise ValueError(
            f"token {token} has an expert twice in its layer {layer}, {trace.ids[token, layer].tolist()}: "
            "these are no ids of a router's choice, or of physical copies"
        )
    by = trace.sequence.argsort(stable=True)
    columns = (column[by].int().diff() for column in (trace.sequence, trace.position, trace.phase))
    sequence, position, phase = columns
    wrong = (sequence == 0) & ((position <= 0) | (phase < 0))
    if told and wrong.any():
        at = int(by[1:][wrong][0])
        raise ValueError(
            f"token {at} has position {int(trace.position[at])} after a token of the same or a later one, "
            "or prefill after decode: tokens must stand in the order in which they ran, each turn in a "
            "sequence of its own"
        )
