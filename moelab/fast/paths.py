"""Which fast paths a machine and a model take. A module that is not replaced only makes a model
slower, so a class that transformers has renamed is not noticed otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import nn

from moelab.fast.attention import DecodeAttention
from moelab.fast.layers import OneTokenLayer
from moelab.fast.modules import Linear, Norm, Router
from moelab.kernels.instructions import INSTRUCTIONS
from moelab.kernels.threads import PYTHON_TEAM, TEAM
from moelab.kernels.vectors import WIDTH
from moelab.models.unchanged import forward

#: what is replaced → (by what, the end of the names of all such classes)
PATHS = {
    "norms": (Norm, "RMSNorm"),
    "routers": (Router, "Router"),
    "attention": (DecodeAttention, "Attention"),
    "layers": (OneTokenLayer, "DecoderLayer"),
    "linear layers": (Linear, "Linear"),
}


def machine_paths() -> dict[str, str]:
    """What this machine's kernels use."""
    kinds: dict[str, list[str]] = {}
    for kind, instruction in INSTRUCTIONS.items():
        kinds.setdefault(type(instruction).__name__.lower(), []).append(type(kind).__name__.lower())
    has_triton = find_spec("triton") is not None and torch.cuda.is_available()
    return {
        "vectors": f"{WIDTH} numbers of fp32",
        "products": "; ".join(f"in {by} of {', '.join(of)}" for by, of in kinds.items()),
        "threads": "Python's, as no OpenMP is loaded" if TEAM == PYTHON_TEAM else "OpenMP's",
        "GPU": "CUDA graphs, Triton" if has_triton else "none without CUDA and Triton",
    }


def fast_paths(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Of a model opened with executor="fast": what → (how many have a kernel of ours, of how many);
    "layers in one call" are those that a token passes with their experts in one call."""
    modules = [(type(module).__name__, forward(module)) for module in model.modules()]
    found = {}
    for what, (kind, name) in PATHS.items():
        mine = [fused for of, fused in modules if of.endswith(name)]
        found[what] = sum(isinstance(fused, kind) for fused in mine), len(mine)
    layers = [fused for _, fused in modules if isinstance(fused, OneTokenLayer)]
    in_one = sum(layer.stretch is not None for layer in layers)
    return found | {"layers in one call": (in_one, found["layers"][1])}


def described(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Both, in words."""
    yield from machine_paths().items()
    for what, (n, of) in fast_paths(model).items():
        yield what, f"{n} of {of}"
