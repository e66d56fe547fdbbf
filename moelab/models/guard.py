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
from torch import Tensor, nn

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
                problem = (_block if translated else _experts)(layer, dtype)
        except Exception as error:  # whatever a class does that nobody here has seen
            problem = f"cannot be compared with the seam ({type(error).__name__}: {error})"
        if problem:
            name = stock_class(layer.experts).__name__
            raise ValueError(
                f"{layer.name}: {name} of transformers {compat.transformers_version()} {problem}. Here it "
                f"would not give its own results, so it is not run: it needs lines in "
                f"moelab/models/dialects.py if its block calls experts otherwise than "
                f"experts(hidden_states, ids, weights), or else a class in moelab/models/experts.py. "
                f"Until then use the model without moelab"
            )


def check_spec(spec: MoESpec, layers: list[Any]) -> None:
    """ValueError where the geometry that was read from a config is not that of the model's
    `layers`."""
    for layer in layers:
        weights = sum(prod(shape) for shape in shapes(layer.experts).values())
        for what, said, found in (
            ("MoE layers", spec.L, len(layers)),
            ("experts a layer", spec.E, layer.E),
            ("weights an expert", spec.expert_params, weights),
        ):
            if said != found:
                raise ValueError(
                    f"{spec.name} ({spec.model_type}): {layer.name} has {found:,} {what}, and by its "
                    f"config {said:,}: moelab reads this architecture's config wrongly, so all that it "
                    f"would plan and count would be wrong. It needs a line in moelab/configs.py"
                )


def _experts(layer: Any, dtype: torch.dtype) -> str | None:
    """What the experts do otherwise than the seam, the simplest first; None for nothing."""
    random, E = torch.Generator().manual_seed(0), layer.E
    small = _miniature(layer, layer.experts, dtype, random)
    stock = inspect.unwrap(type(small).forward)  # not what the model's config would choose
    seam = seam_of(small)
    x = torch.randn(TOKENS, _width(layer), generator=random).to(dtype)
    ids = torch.rand(TOKENS, E, generator=random).topk(min(4, E)).indices
    w = torch.rand(ids.shape, generator=random) + 0.1
    nobody = torch.where(torch.rand(ids.shape, generator=random) < 0.3, E, ids)
    for what, chosen, T in (
        ("an expert", ids[:, :1], TOKENS),
        ("the sum over a token's experts", ids, TOKENS),
        ("one token", ids, 1),
        (f"the id {E}, which is no expert's,", nobody, TOKENS),
    ):
        for weights in (w,) if dtype == w.dtype else (w, w.to(dtype)):
            given = x[:T], chosen[:T], weights[:T, : chosen.shape[1]]
            try:
                expected = stock(small, *given)
            except (RuntimeError, IndexError):
                if chosen is nobody:  # an id that the class does not know will not come
                    continue
                raise
            if problem := _difference(expected, eager(*given, seam), what, dtype, exact=True):
                return problem
    return None


def _block(layer: Any, dtype: torch.dtype) -> str | None:
    """What the block does otherwise than its translation; None for nothing."""
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
    if problem := _difference(expected, small(x), "the block", dtype, exact=False):
        return problem
    if not all(map(torch.equal, *seen)):
        return (
            f"is called with other ids or weights than ROUTING reads from the output of "
            f"{type(layer.router).__name__}"
        )
    return None


def _difference(
    expected: Any, found: Any, what: str, dtype: torch.dtype, exact: bool
) -> str | None:
    expected, found = (out[0] if isinstance(out, tuple) else out for out in (expected, found))
    gives, seam = (f"{out.dtype} {list(out.shape)}" for out in (expected, found))
    if gives != seam:
        return f"gives {gives} for {what}, and the seam {seam}"
    off = (expected.double() - found.double()).abs()
    allowed = 0 if exact else 16 * torch.finfo(dtype).eps * (1 + expected.double().abs())
    if torch.isfinite(off).all() and (off <= allowed).all():
        return None
    return (
        f"computes {what} otherwise than the seam: in {str(dtype).removeprefix('torch.')} "
        f"{int((off > allowed).sum())} of {off.numel()} random outputs differ, by up to {off.max():.2g}"
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

    def drawn(shape: Any, dtype: torch.dtype) -> Tensor:
        shape = [scale.get(size, size) for size in shape]
        return (torch.randn(shape, generator=random) * 0.3).to(dtype)

    parts, parameters = dict(module.named_children()), {}
    if module is not layer.experts:
        for name, p in compat.parameters_of(module).items():
            parameters[name] = None if p is None else drawn(p.shape, p.dtype)
    elif isinstance(module, nn.ModuleDict):
        parts = dict.fromkeys((f"expert_{e}" for e in range(layer.E)), seam_of(module).first)
    else:
        for name, shape in shapes(module).items():
            experts = [drawn(shape, dtype) for _ in range(layer.E)]
            parameters[name] = torch.stack(experts)
    for name, p in parameters.items():
        made = None if p is None else nn.Parameter(p, requires_grad=False)
        small.register_parameter(name, made)
    for name, buffer in module.named_buffers(recurse=False):
        small.register_buffer(name, drawn(buffer.shape, buffer.dtype))
    for name, part in parts.items():
        small.add_module(name, _miniature(layer, part, dtype, random))
    return small.eval()


def _scale(layer: Any) -> dict[int, int]:
    """Width → its width in the miniature, for all widths of an expert."""
    widths = {size for shape in shapes(layer.experts).values() for size in shape}
    common = gcd(*widths)
    by = max(
        (d for d in range(1, common + 1) if common % d == 0 and max(widths) // d >= WIDTH),
        default=1,
    )
    return {} if layer.E in widths else {size: size // by for size in widths}


def _width(layer: Any) -> int:
    """H of the miniature: how wide an expert's output is."""
    found = shapes(layer.experts)
    shape = found.get("down_proj", found.get("wo.weight", ()))
    if len(shape) != 2:
        raise ValueError(
            f"keeps its experts as {found}, where the seam looks for down_proj of each expert"
        )
    H = shape[-1 if seam_of(layer.experts).is_transposed else -2]
    return _scale(layer).get(H, H)
