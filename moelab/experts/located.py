"""Where experts' matrices lie: as kernels take them, without copying or unpacking any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.experts.executor import names, plain
from moelab.kernels.ggml import GGML
from moelab.kernels.products import KINDS, PACKED, Matrices, multiply
from moelab.models import compat

#: of more rows, weights are widened once, for all of them
FEW_ROWS = 64


def locate(
    experts: Any, chosen: np.ndarray, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Matrices, Matrices] | None:
    """The matrices of up (or gates and up) and of down of experts in this order; None if these
    weights are of another type, on another type of device, or not contiguous.

    A source may have `matrices(layer, experts, dtype)`: where its tensors lie, see
    `moelab.offloading.slots`; and a `device`, if that is not the CPU."""
    if (find := getattr(experts.source, "matrices", None)) is not None:
        if getattr(getattr(experts.source, "device", None), "type", "cpu") != device:
            return None
        if (found := find(experts.layer, chosen.tolist(), dtype)) is not None:
            if device != "cpu" and any(
                codec.removesuffix(".T") in GGML for codec, _ in found.values()
            ):
                return None  # no kernel of GPUs reads these
            return _matrices(experts, found, experts.shapes, dtype, found)
    parts = parts_of(experts)
    whole = [banks(experts, part) for part in parts]
    together = all(bank is not None for bank in whole)
    if together:  # all lie as the first one does
        given = [{part: bank[0] for part, bank in zip(parts, whole)}]
    else:
        given = [experts.weights(e) for e in chosen.tolist()]
    tensors = [tensors[part] for tensors in given for part in parts]
    if any(w.dtype != dtype or w.device.type != device or not w.is_contiguous() for w in tensors):
        return None
    found = {}
    for part, bank in zip(parts, whole):
        rows = np.zeros((len(chosen), 4), np.int64)
        rows[:, 0] = [tensors[part].data_ptr() for tensors in given]
        if together:
            rows[:, 0] += chosen * (bank.stride(0) * bank.itemsize)
        found[part] = "raw", rows
    shapes = {part: given[0][part].shape for part in parts}
    return _matrices(experts, found, shapes, dtype, given)


def weighted(experts: Any, expert: int, rows: Tensor, w: Tensor) -> Tensor:
    """One expert's contribution to rows [n, H] with routing weights w [n]: up to `FEW_ROWS` by weights
    in few bits as they lie, where the source has such, else by dense ones."""
    packed = hasattr(experts.source, "matrices") and plain(experts)
    if packed and len(rows) <= FEW_ROWS and rows.is_cpu and rows.dtype in KINDS:
        found = locate(experts, np.array([expert]), rows.dtype)
        if found and {of.kind for of in found}.isdisjoint(KINDS.values()):
            bounds = np.array([0, len(rows)])
            h = experts.activate(multiply(found[0], bounds, rows))
            return multiply(found[1], bounds, h, dtype=rows.dtype) * w[:, None]
    return experts.weighted(rows, w, experts.weights(expert))


def parts_of(experts: Any) -> list[str]:
    """The parameters of up, then of down, each followed by its bias, if they have such."""
    suffixes = ("", "_bias") if experts.has_bias else ("",)
    return [name + suffix for name in names(experts) for suffix in suffixes]


def banks(experts: Any, name: str) -> Tensor | None:
    """All experts' weights of one name, [E, …], where the module holds them and there is no source;
    else None."""
    return compat.parameters_of(experts.module).get(name) if experts.source is None else None


def _matrices(
    experts: Any,
    found: dict[str, tuple],
    shapes: dict[str, Sequence[int]],
    dtype: torch.dtype,
    owner: Any,
) -> tuple[Matrices, Matrices]:
    """Of (codec, rows of addresses) and the shape of one expert's tensor by name."""
    both = []
    for name in names(experts):
        codec, rows = found[name]
        if experts.has_bias:
            rows[:, 2] = found[name + "_bias"][1][:, 0]
        # Few bits lie in rows in either layout.
        transposed = experts.is_transposed and not codec.endswith(".T")
        kind = PACKED.get(codec.removesuffix(".T"), KINDS[dtype])
        R = shapes[name][-1 if experts.is_transposed else -2]
        both.append(Matrices(kind, rows, R, transposed, owner, KINDS[dtype]))
    return tuple(both)
