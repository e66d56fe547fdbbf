"""The guard: at the first `plug` of an architecture its experts are compared with transformers'
own, bit for bit.

A miniature of the layer (its classes, settings and number of experts, small random weights) is run
by the stock class and by the seam. What passed is remembered by class, settings and dtype. Blocks
that the seam translates (`moelab.models.dialects`) are compared whole, within the dtype's
tolerance: their products have other shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn

from moelab.models.dialects import BLOCKS, ROUTING
from moelab.models.patches import STACKS
from moelab.specs import MoESpec

#: widths are divided by their greatest common divisor, as far as the widest stays this wide
WIDTH = 48
TOKENS = 7
#: attributes that are no settings of a module: torch's own, ours, accelerate's
_NOT_SETTINGS = {
    *vars(nn.Module()),
    "forward",
    "source",
    "executor",
    "layer",
    "shapes",
    "_template",
    "_hf_hook",
    STACKS,
    "_old_forward",
    "_is_hf_initialized",
}
_PASSED: set[Any] = set()


def check(
    layer: Any,
    dtype: torch.dtype,
    stock: type,
    seam: Callable[[type], type],
    run: Callable[..., Tensor],
    translated: type | None,
) -> None:
    """Compare the experts of an MoE layer, or its whole block where that is `translated`, with the
    stock forward.

    run : the executor that repeats transformers' arithmetic.
    stock : transformers' class of the experts; seam : makes the seam's class of it.

    Raises ValueError: they differ, or the stock class cannot be run.
    """
    forward = BLOCKS[translated.stock.__name__] if translated else None
    routing = ROUTING.get(type(layer.router).__name__)
    own = stock.forward, translated and translated.stock.forward
    shaped = tuple(shapes(layer.experts).items())
    key = stock, own, dtype, translated, forward, routing, _settings(layer.experts), shaped
    if key in _PASSED:
        return
    with torch.no_grad():
        try:
            problem = (_block if translated else _experts)(
                layer, dtype, stock, seam(stock), run, translated
            )
        except Exception as error:  # whatever a class does that nobody here has seen
            problem = f"cannot be compared with the seam ({type(error).__name__}: {error})"
    if problem:
        import transformers

        remedy = (
            "other lines in moelab/models/dialects.py"
            if translated
            else (
                "lines in moelab/models/dialects.py if its block calls experts otherwise than experts(hidden_states, ids, "
                "weights), or else a class in moelab/models/seam.py"
            )
        )
        raise ValueError(
            f"{layer.name}: {stock.__name__} of transformers {transformers.__version__} {problem}. Here "
            f"it would not give its own results, so it is not run: it needs {remedy}. Until then use the "
            f"model without moelab"
        )
    _PASSED.add(key)


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


def _experts(
    layer: Any, dtype: torch.dtype, stock: type, seam: type, run: Callable, _: None
) -> str | None:
    """What the experts do otherwise than the seam, the simplest first; None for nothing."""
    random, scale, E = torch.Generator().manual_seed(0), _scale(layer), layer.E
    small = _miniature(layer.experts, stock, dtype, scale, random)
    forward = inspect.unwrap(
        stock.forward
    )  # not what the model's `experts_implementation` would choose
    H = _width(layer.experts, getattr(small, "is_transposed", False))
    x = torch.randn(TOKENS, scale.get(H, H), generator=random).to(dtype)
    ids = torch.rand(TOKENS, E, generator=random).topk(min(4, E)).indices
    w = torch.rand(ids.shape, generator=random) + 0.1
    nobody = torch.where(torch.rand(ids.shape, generator=random) < 0.3, E, ids)
    for what, chosen, T in (
        ("an expert", ids[:, :1], TOKENS),
        ("the sum over a token's experts", ids, TOKENS),
        ("one token", ids, 1),
        (f"the id {E}, which is no expert's,", nobody, TOKENS),
    ):
        for weights in {weight.dtype: weight for weight in (w, w.to(dtype))}.values():
            given = x[:T], chosen[:T], weights[:T, : chosen.shape[1]]
            small.__class__ = stock
            try:
                expected = forward(small, *given)
            except (RuntimeError, IndexError):
                if chosen is nobody:  # an id that the class does not know will not come
                    continue
                raise
            found = _plugged(small, seam, run)(*given)
            if problem := _difference(expected, found, what, dtype, exact=True):
                return problem
    return None


def _block(
    layer: Any, dtype: torch.dtype, stock: type, seam: type, run: Callable, translated: type
) -> str | None:
    """What the block does otherwise than its translation; None for nothing."""
    random, scale = torch.Generator().manual_seed(0), _scale(layer)
    small = _miniature(
        layer.block, translated.stock, dtype, scale, random, {id(layer.experts): stock}
    )
    H = _width(layer.experts, seam.is_transposed)
    x = torch.randn(1, TOKENS, scale.get(H, H), generator=random).to(dtype)
    expected = small(x)
    small.__class__ = translated
    router = next(
        part for name, part in small.named_children() if getattr(layer.block, name) is layer.router
    )
    told: list[Any] = []  # (ids, weights): as they are read from the router, as experts get them
    router.register_forward_hook(lambda _, args, out: told.append(layer.routing(out)))
    _plugged(small.experts, seam, run).register_forward_pre_hook(
        lambda _, args, kwargs: told.append([*args, *kwargs.values()][1:3]), with_kwargs=True
    )
    problem = _difference(expected, small(x), "the block", dtype, exact=False)
    if not problem and not all(map(torch.equal, *told)):
        return (
            f"is called with other ids or weights than ROUTING reads from the output of "
            f"{type(layer.router).__name__}"
        )
    return problem


def _plugged(experts: Any, seam: type, run: Callable[..., Tensor]) -> Any:
    experts.__class__, experts.executor, experts.source, experts.layer = seam, run, None, 0
    return experts


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
    module: nn.Module,
    kind: type,
    dtype: torch.dtype,
    scale: dict[int, int],
    random: torch.Generator,
    kinds: dict[int, type] | None = None,
) -> nn.Module:
    """A `kind` with the module's settings, its parts (of `kinds` by their ids) and random
    parameters, widths scaled."""
    small = object.__new__(kind)
    nn.Module.__init__(small)
    for key, value in vars(module).items():
        if key not in _NOT_SETTINGS:
            vars(small)[key] = scale.get(value, value) if type(value) is int else value
    banks = isinstance(getattr(module, "down_proj", None), nn.Parameter)
    for name, p in module._parameters.items():
        if p is not None:  # the first axis of a bank counts experts and is no width
            shape = [
                size if banks and axis == 0 else scale.get(size, size)
                for axis, size in enumerate(p.shape)
            ]
            p = _random(shape, p.dtype, random)
        small.register_parameter(name, p)
    parts = dict(module.named_children())
    if hasattr(module, "_template"):
        parts = {f"expert_{e}": module._template[0] for e in range(module.num_experts)}
    elif hasattr(module, "shapes"):
        for name, shape in module.shapes.items():
            shape = [module.num_experts, *(scale.get(size, size) for size in shape)]
            small.register_parameter(name, _random(shape, dtype, random))
    for name, buffer in module.named_buffers(recurse=False):
        shape = [scale.get(size, size) for size in buffer.shape]
        small.register_buffer(name, _random(shape, buffer.dtype, random).data)
    for name, part in parts.items():
        small.add_module(
            name,
            _miniature(part, (kinds or {}).get(id(part), type(part)), dtype, scale, random, kinds),
        )
    return small.eval()


def _random(shape: list[int], dtype: torch.dtype, random: torch.Generator) -> nn.Parameter:
    return nn.Parameter((torch.randn(shape, generator=random) * 0.3).to(dtype), requires_grad=False)


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """What was set on a module and its parts, as far as it can be compared."""
    own = (item for item in vars(module).items() if item[0] not in _NOT_SETTINGS)
    plain = tuple(
        (key, value) for key, value in own if isinstance(value, (bool, int, float, str, type(None)))
    )
    parts = () if isinstance(module, nn.ModuleDict) else module.named_children()
    return (*plain, *((name, type(part), _settings(part)) for name, part in parts))


def shapes(experts: nn.Module) -> dict[str, tuple[int, ...]]:
    """Parameter name → shape of one expert's tensor, of experts in memory or not."""
    if hasattr(experts, "shapes"):
        return experts.shapes
    if isinstance(experts, nn.ModuleDict):
        return {name: tuple(p.shape) for name, p in experts["expert_0"].named_parameters()}
    return {name: tuple(p.shape[1:]) for name, p in experts.named_parameters(recurse=False)}


def _scale(layer: Any) -> dict[int, int]:
    """Width → its width in the miniature, for all widths of an expert."""
    widths = {size for shape in shapes(layer.experts).values() for size in shape}
    common = gcd(*widths)
    by = max(
        (d for d in range(1, common + 1) if common % d == 0 and max(widths) // d >= WIDTH),
        default=1,
    )
    return {} if layer.E in widths else {size: size // by for size in widths}


def _width(experts: nn.Module, transposed: bool) -> int:
    """H: how wide an expert's output is."""
    name, shape = next(
        (item for item in shapes(experts).items() if item[0] in ("down_proj", "wo.weight")),
        ("", ()),
    )
    if len(shape) != 2:
        raise ValueError(
            f"keeps its experts as {shapes(experts)}, where the seam looks for down_proj of each expert"
        )
    return shape[-1 if transposed else -2]
