"""Arrays of routing: .npy, .npz and safetensors, read and written.

A .npy file is [T, L, K], the form of vLLM's `routed_experts`. The others have arrays by name:

    ids        integers [T, L, K], or routed_experts, or topk_ids; without them, logits [T, L, E]
    weights    floats [T, L, K], or topk_weights
    phase, sequence, position, tokens    integers [T], as in `RoutingTrace`
    layers     integers [L], the checkpoint's own numbers
    experts    E

vLLM counts all layers of a model, and an array of it ends with the last token but one: the last is
never fed back. A .npy file says nothing of phases, so that its tokens count as decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moelab.base.files import absolute, atomic
from moelab.trace.foreign import Columns, bounded, integers
from moelab.trace.routing_trace import FIELDS, FORMAT, RoutingTrace

#: what an array may be called → its column
NAMES = {
    **dict.fromkeys(("ids", "routed_experts", "topk_ids"), "ids"),
    **dict.fromkeys(("weights", "topk_weights"), "weights"),
    **{name: name for name in ("logits", "phase", "sequence", "position", "tokens", "layers")},
    "experts": "experts",
}


def read(path: Path) -> Columns | RoutingTrace:
    """What is in the file; a trace of our own as it is. Raises ValueError."""
    if path.suffix.lower() == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("format") == FORMAT:
                return RoutingTrace.load(path)
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        return of_arrays({name: as_numpy(tensor) for name, tensor in tensors.items()})
    if path.suffix.lower() == ".npy":
        return Columns(np.lib.format.open_memmap(path, mode="r"))
    with np.load(bounded(path), allow_pickle=False) as arrays:
        return of_arrays(dict(arrays))


def as_numpy(tensor: Any) -> np.ndarray:
    """A tensor as an array; bfloat16, which numpy has not, as float32."""
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def of_arrays(arrays: dict[str, np.ndarray]) -> Columns:
    """The columns of arrays by name. ValueError: two for one column."""
    found = {}
    for name in NAMES.keys() & arrays.keys():
        if NAMES[name] in found:
            raise ValueError(f"it has {NAMES[name]} twice, also as {name}")
        found[NAMES[name]] = arrays[name]
    if "experts" in found:
        found["experts"] = int(integers("experts", found["experts"], ()))
    if "layers" in found:
        found["layers"] = tuple(integers("layers", found["layers"], (None,)).tolist())
    return Columns(**found, ignored=tuple(sorted(arrays.keys() - NAMES.keys())))


def save_arrays(trace: RoutingTrace, path: str | Path) -> Path:
    """Write a trace for other programs: .npy with the ids alone, .npz with all but hidden states;
    −1 where no expert ran. Returns the path. ValueError: another suffix."""
    path = absolute(path)
    ids = trace.ids.numpy()
    ids = np.where(ids == trace.spec.E, -1, ids).astype(np.int16)
    with atomic(path) as part:
        if path.suffix == ".npy":
            np.save(part, ids)
        elif path.suffix == ".npz":
            columns = {name: as_numpy(getattr(trace, name)) for name in FIELDS}
            about = {"layers": trace.spec.moe_layers, "experts": trace.spec.E}
            np.savez_compressed(part, **columns | about | {"ids": ids})
        else:
            raise ValueError(f"{path}: arrays are written as .npy or .npz")
    return path
