"""Where experts' matrices lie: as kernels take them, without copying or unpacking any."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from moelab.experts.executor import names
from moelab.kernels.products import KINDS, PACKED, Matrices
from moelab.models import compat


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
            return _of_source(experts, found, dtype)
    held = {name: banks(experts, name) for name in _parts(experts)}
    if any(bank is None for bank in held.values()):
        return _of_tensors(experts, [experts.weights(e) for e in chosen.tolist()], dtype, device)
    state = [(w.data_ptr(), w.stride(), w.dtype) for w in held.values()]
    if (known := _HELD.get(experts, (None, None)))[0] != state:
        _HELD[experts] = known = state, _of_banks(experts, held)
    found, down = known[1], held["down_proj"]
    if found is None or down.dtype != dtype or down.device.type != device:
        return None
    return tuple(of._replace(rows=of.rows.take(chosen, 0)) for of in found)


def banks(experts: Any, name: str) -> Tensor | None:
    """All experts' weights of one name, [E, …], where the module holds them and there is no source;
    else None."""
    return compat.parameters_of(experts.module).get(name) if experts.source is None else None


#: experts modules that hold their weights → (where these lie, the matrices of all)
_HELD: WeakKeyDictionary[Any, tuple] = WeakKeyDictionary()


def _parts(experts: Any) -> list[str]:
    """The names of up and down, and of their biases."""
    both = names(experts)
    return [*both, *(f"{name}_bias" for name in both if experts.has_bias)]


def _of_source(
    experts: Any, found: dict[str, tuple], dtype: torch.dtype
) -> tuple[Matrices, Matrices] | None:
    both, turned = [], set()
    for name in names(experts):
        codec, rows = found[name]
        if experts.has_bias:
            rows[:, 2] = found[name + "_bias"][1][:, 0]
        kind = PACKED.get(codec.removesuffix(".T"), KINDS[dtype])
        turned.add(codec.endswith(".T"))
        transposed = experts.is_transposed and not codec.endswith(".T")  # few bits lie in rows
        R = experts.shapes[name][-1 if experts.is_transposed else -2]
        both.append(Matrices(kind, rows, R, transposed, found))
    return tuple(both) if len(turned) == 1 else None


def _of_banks(experts: Any, held: dict[str, Tensor]) -> tuple[Matrices, Matrices] | None:
    """All experts of a module, which keeps its weights."""
    each = [dict(zip(held, tensors)) for tensors in zip(*[w.unbind() for w in held.values()])]
    down = held["down_proj"]
    found = _of_tensors(experts, each, down.dtype, down.device.type)
    return found and tuple(of._replace(owner=None) for of in found)


def _of_tensors(
    experts: Any, given: list[dict[str, Tensor]], dtype: torch.dtype, device: str
) -> tuple[Matrices, Matrices] | None:
    tensors = [tensors[name] for tensors in given for name in _parts(experts)]
    if any(w.dtype != dtype or w.device.type != device or not w.is_contiguous() for w in tensors):
        return None
    both = []
    for name in names(experts):
        rows = np.zeros((len(given), 4), np.int64)
        for column, part in ((0, name), (2, f"{name}_bias"))[: 1 + bool(experts.has_bias)]:
            rows[:, column] = [tensors[part].data_ptr() for tensors in given]
        R = given[0][name].shape[-1 if experts.is_transposed else -2]
        both.append(Matrices(KINDS[dtype], rows, R, experts.is_transposed, given))
    return tuple(both)
