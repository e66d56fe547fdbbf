"""`load`: a routing trace of any program, chosen by the file's name.

    .safetensors   our own; or arrays named as in `moelab.trace.arrays`
    .npz .npy      arrays: ids [T, L, K], as vLLM's users keep them
    .json          responses of a vLLM server with --enable-return-routed-experts
    .pt            SGLang's expert distribution recorder, mode per_token
    .jsonl         Megatron-LM's router trace
    .csv           BigMoeOnEdge's route trace

A further format is a module with `read(path) -> Columns` and a line in `READERS`."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path

from moelab.base.files import absolute
from moelab.base.schema import naming
from moelab.trace.foreign import model_of, of_model, trace_of
from moelab.trace.routing_trace import RoutingTrace

#: suffix → the module that reads it
READERS = {
    ".safetensors": "arrays",
    ".npz": "arrays",
    ".npy": "arrays",
    ".json": "vllm",
    ".pt": "sglang",
    ".jsonl": "megatron",
    ".csv": "route_csv",
}


def load(path: str | Path, model: str | Path | None = None) -> RoutingTrace:
    """Read a trace.

    model : whose it is, by a card's name, a hub id or a folder, which is taken at your word. A trace
        of fewer experts a token or fewer layers than the model keeps its own. Without it, sizes of
        experts are not known, and E is the largest id and one, unless the file says more.

    Warns of what a file has beyond routing. Raises FileNotFoundError, ValueError: not a whole and
    readable trace, or not of this model."""
    path = absolute(path)
    suffix = path.suffix.lower()
    spec, model_id = model_of(model)
    with naming(path, "routing trace", "recording it again, or `moelab trace import`,"):
        if not path.is_file():
            raise FileNotFoundError(path)
        if suffix not in READERS:
            raise ValueError(
                f"its name ends in {suffix!r}; known are {', '.join(READERS)}, and of counts without order "
                "moelab.Calibration.load reads .gguf and .csv"
            )
        found = import_module(f"moelab.trace.{READERS[suffix]}").read(path)
        if isinstance(found, RoutingTrace):
            return of_model(found, spec, model_id) if spec else found
        trace = trace_of(found, path.stem, spec, model_id)
    if found.ignored:
        warnings.warn(f"{path}: not read: {', '.join(found.ignored)[:200]!r}", stacklevel=2)
    return trace
