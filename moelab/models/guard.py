"""The guard: when a model is plugged its experts are compared with transformers' own, bit for bit.

A miniature of the layer (its classes, settings and number of experts, small random weights) is run
by the stock class and by the seam. Blocks that the seam translates (`moelab.models.dialects`) are
compared whole, within the dtype's tolerance: their products have other shapes."""

from __future__ import annotations

import inspect
from functools import partial
from math import gcd, prod
from typing import Any

import torch
from torch import nn

from moelab.models import compat
from moelab.models.dialects import BLOCKS, block_class, stock_class
from moelab.models.experts import eager, run, seam_of, shapes
from moelab.specs import MoESpec

#: widths are divided by their greatest common divisor, as far as the widest stays this wide
WIDTH = 48
TOKENS = 7
#: attributes that are no settings of a module: torch's own, ours, transformers' notes
_NOT_SETTINGS = {*vars(nn.Module()), "forward", "seam", "_is_hf_initialized"}


def check(layers: list[Any], dtype: torch.dtype) -> None:
    """Compare the experts of MoE layers, or their whole blocks where these are translated, with the
    stock forward; of layers alike one.

    Raises ValueError: they differ, or the stock class cannot be run."""
    alike = {
        (type(layer.experts), type(layer.block), *shapes(layer.experts).items()): layer
        for layer in reversed(layers)
    }
    for layer in alike.values():
        translated = stock_class(layer.block).__name__ in BLOCKS
        try:
            with torch.no_grad():
                (_compare_block if translated else _compare_experts)(layer, dtype)
        except Exception as error:  # whatever a class does that nobody here has seen
            raise ValueError(
                f"{layer.name}: {stock_class(layer.experts).__name__} of transformers "
                f"{compat.transformers_version()} is not run: in {dtype}, {error}. It needs lines in "
                f"moelab/models/dialects.py if its block calls experts otherwise than "
                f"experts(hidden_states, ids, weights), or else a class in moelab/models/experts.py. "
                f"Until then use the model without moelab"
            ) from error


def check_spec(spec: MoESpec, layers: list[Any]) -> None:
    """ValueError where the geometry that was read from a config is not that of the model's
    `layers`."""
    for layer in layers:
        weights = sum(prod(shape) for shape in shapes(layer.experts).values())
        said, found = (spec.L, spec.E, spec.expert_params), (len(layers), layer.E, weights)
        if said != found:
            raise ValueError(
                f"{spec.name} ({spec.model_type}): MoE layers, experts a layer and weights an expert "
                f"are {found} at {layer.name}, and by its config {said}: moelab reads this "
                f"architecture's config wrongly. It needs a line in moelab/configs.py"
            )


def _compare_experts(layer: Any, dtype: torch.dtype) -> None:
    """ValueError for what the experts do otherwise than the seam, the simplest first."""
    random = torch.Generator().manual_seed(0)
    small = _miniature(layer, layer.experts, dtype, random)
    stock = inspect.unwrap(type(small).forward)  # not what the model's config would choose
    x = torch.randn(TOKENS, _width(layer), generator=random).to(dtype)
    ids = torch.rand(TOKENS, layer.E, generator=random).topk(min(4, layer.E)).indices
    w = torch.rand(ids.shape, generator=random) + 0.1
    for what, K, T in (
        ("an expert", 1, TOKENS),
        ("the sum over a token's experts", len(ids[0]), TOKENS),
        ("one token", len(ids[0]), 1),
    ):
        for weights in (w, w.to(dtype)):
            given = x[:T], ids[:T, :K], weights[:T, :K]
            _require_same(stock(small, *given), eager(*given, seam_of(small)), what)


def _compare_block(layer: Any, dtype: torch.dtype) -> None:
    """ValueError for what the block does otherwise than its translation."""
    random = torch.Generator().manual_seed(0)
    small = _miniature(layer, layer.block, dtype, random)
    x = torch.randn(1, TOKENS, _width(layer), generator=random).to(dtype)
    parts, experts = layer.block.named_children(), small.experts
    router = small.get_submodule(next(name for name, part in parts if part is layer.router))
    experts.forward = partial(inspect.unwrap(type(experts).forward), experts)
    expected = small(x)
    small.__class__, experts.seam = block_class(type(small)), seam_of(experts)
    experts.forward = partial(run, experts)
    seen: list[Any] = []  # (ids, weights): as they are read from the router, as experts get them
    router.register_forward_hook(lambda _, args, out: seen.append(layer.routing(out)))
    experts.register_forward_pre_hook(lambda _, args: seen.append(args[1:3]))
    _require_same(expected, small(x), "the block", tolerance=16 * torch.finfo(dtype).eps)
    if not all(map(torch.equal, *seen)):
        raise ValueError(
            f"it is called with other ids or weights than ROUTING reads from the output of "
            f"{type(layer.router).__name__}"
        )


def _require_same(expected: Any, found: Any, what: str, tolerance: float = 0.0) -> None:
    expected, found = (out[0] if isinstance(out, tuple) else out for out in (expected, found))
    off = (expected.double() - found.double()).abs()
    same = off <= tolerance * (1 + expected.double().abs())  # NaN is not
    if expected.dtype != found.dtype or expected.shape != found.shape or not same.all():
        raise ValueError(
            f"it computes {what} otherwise than the seam: {expected.dtype} {list(expected.shape)} "
            f"for {found.dtype} {list(found.shape)}, differing by up to {off.max():.2g}"
        )


def _miniature(
    layer: Any, module: nn.Module, dtype: torch.dtype, random: torch.Generator
) -> nn.Module:
    """A module of the layer, of its stock class, with the same settings and parts and with random
    parameters, widths scaled."""
    cls, scale = stock_class(module), _scale(layer)
    small = cls.__new__(cls)
    nn.Module.__init__(small)
    for name, value in vars(module).items():
        if name not in _NOT_SETTINGS:
            vars(small)[name] = scale.get(value, value) if type(value) is int else value
    parts = dict(module.named_children())
    tensors = compat.parameters_of(module) | compat.buffers_of(module)
    if isinstance(module, nn.ModuleDict):
        parts = dict.fromkeys((f"expert_{e}" for e in range(layer.E)), seam_of(module).first)
    elif module is layer.experts:  # whose parameters need not be in memory
        for name, shape in shapes(module).items():
            tensors[name] = torch.empty((layer.E, *shape), dtype=dtype, device="meta")
    for name, like in tensors.items():
        made = None
        if like is not None:
            shape = [scale.get(size, size) for size in like.shape]
            made = (torch.randn(shape, generator=random) * 0.3).to(like.dtype)
            made = nn.Parameter(made, requires_grad=False)
        small.register_parameter(name, made)
    for name, part in parts.items():
        small.add_module(name, _miniature(layer, part, dtype, random))
    return small.eval()


def _scale(layer: Any) -> dict[int, int]:
    """Width → its width in the miniature, for all widths of an expert."""
    widths = {size for shape in shapes(layer.experts).values() for size in shape}
    common, most = gcd(*widths), max(widths) // WIDTH
    by = max((d for d in range(1, most + 1) if common % d == 0), default=1)
    return {} if layer.E in widths else {size: size // by for size in widths}


def _width(layer: Any) -> int:
    """H of the miniature: how wide an expert's output is."""
    found = shapes(layer.experts)
    shape = found["wo.weight"] if "wo.weight" in found else found["down_proj"]
    H = shape[-1 if seam_of(layer.experts).is_transposed else -2]
    return _scale(layer).get(H, H)
