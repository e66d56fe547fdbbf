"""Which fast paths a machine and a model take. A module that is not replaced only makes a model
slower, so a class that transformers has renamed is not noticed otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from moelab.fast.attention import DecodeAttention
from moelab.fast.layers import OneTokenLayer
from moelab.fast.modules import Linear, Norm, Router
from moelab.fast.token import DecodeModel
from moelab.kernels.threads import PYTHON_TEAM, TEAM
from moelab.kernels.vectors import WIDTH
from moelab.models.unchanged import forward

#: what is replaced → by what
PATHS = {
    "norms": Norm,
    "routers": Router,
    "attention": DecodeAttention,
    "layers": OneTokenLayer,
    "models": DecodeModel,
    "linear layers": Linear,
}


def fast_paths(model: nn.Module) -> Counter[str]:
    """How many modules of a model opened with executor="fast" have a kernel of ours; "layers in one
    call" are those that a token passes with their experts in one call."""
    found = Counter(dict.fromkeys(PATHS, 0))
    for fused in map(forward, model.modules()):
        found.update(what for what, kind in PATHS.items() if isinstance(fused, kind))
        if isinstance(fused, DecodeModel):
            found["layers in one call"] += sum(len(of.layers) for of in fused.stretches.values())
    return found


def described(model: nn.Module) -> Iterator[tuple[str, str]]:
    """What this machine's kernels use, and what a model makes of them."""
    yield "vectors", f"{WIDTH} numbers of fp32"
    yield "threads", "Python's, as no OpenMP is loaded" if TEAM == PYTHON_TEAM else "OpenMP's"
    for what, n in fast_paths(model).items():
        yield what, f"{n} modules"
