"""The residual stream around a MoE block: what its norm reads, what the block adds, what the next
block gets of it.

    s = norm(r)      v = κ Σ_k g_k e_k(s) + rest      r' = r + post(v)      r of the next MoE layer = r' + …

`AROUND`, out of `stream.toml`, says by decoder layer where norm, post and κ are. Another layer is refused: it may add
something else to its stream (hyper-connections, scaled residuals, convolutions of the sum). That the
relation holds for each that is listed, `tests/models/test_stream.py` checks.

Shapes: r, s, v [T, H]. "…" is what attention and dense layers in between add; norm and post may be
the identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from moelab.base.files import beside
from moelab.models.patches import Patches
from moelab.models.seam import MoELayer, discover
from moelab.models.unchanged import FusedModule, forward


@dataclass(frozen=True)
class Around:
    """What a decoder layer does around its MoE block.

    norm : makes the router's input of r; "" where the router reads r itself.
    post : what is done to v before it is added; "" for nothing.
    beside : whether more than the block's output is added to r, or a multiple of it: v is then all
        of it, r' − r.
    scale : the attribute of the decoder layer that is κ; "" for 1."""

    norm: str = "post_attention_layernorm"
    post: str = ""
    beside: bool = False
    scale: str = ""

    def factor(self, layer: Any) -> float:
        """κ of a decoder layer; where a block averages its shared experts and the others, ½."""
        block = getattr(layer, "mlp", None)
        averages = getattr(block, "shared_expert_combination_strategy", "") == "average"
        if averages and block.num_shared_experts:
            return 0.5
        return attrgetter(self.scale)(layer) if self.scale else 1.0


_LISTED = beside(__file__)
PLAIN: list[str] = _LISTED["plain"]
#: all layers that are known
AROUND = dict.fromkeys(PLAIN, Around()) | {n: Around(**of) for n, of in _LISTED["others"].items()}


@dataclass(frozen=True, eq=False)
class Stream:
    """The residual stream around one MoE layer.

    holder : the decoder layer that `layer` is in.
    norm, post, beside : as of `Around`.
    scale : κ.
    """

    layer: MoELayer
    holder: nn.Module
    norm: nn.Module | None
    post: nn.Module | None
    beside: bool
    scale: float

    @property
    def entry(self) -> nn.Module:
        """The module whose first argument is r."""
        return self.norm or self.layer.router

    def router_input(self, r: Tensor) -> Tensor:
        """s of r, [T, H] both."""
        return r if self.norm is None else alone(self.norm, r)

    def added(self, r: Tensor, v: Tensor) -> Tensor:
        """r' = r + post(v): [T, H], in the wider dtype of both."""
        return r + (v if self.post is None else alone(self.post, v.to(r.dtype)))

    def listen(self, patches: Patches, see: Callable[[Tensor], None]) -> None:
        """Have `see` called with every v of the running model, [B, S, H] or [T, H], until `patches`
        are undone."""
        if self.post is not None:
            patches.hook(self.post.register_forward_pre_hook, lambda _m, args: see(args[0]))
            return
        if not self.beside:
            register = self.layer.block.register_forward_hook
            patches.hook(register, lambda _m, _args, output: see(first(output)))
            return
        entered = []

        def before(_module: nn.Module, args: tuple) -> None:
            entered.append(args[0].clone())

        def after(_module: nn.Module, _args: tuple, output: Any) -> None:
            out = first(output).double()
            r = entered.pop().double()
            see(out - r.view_as(out))

        patches.hook(self.entry.register_forward_pre_hook, before)
        patches.hook(self.holder.register_forward_hook, after)


def streams(model: nn.Module) -> list[Stream]:
    """The residual stream around every MoE layer; ValueError where it is not known."""
    return [_stream(model, layer) for layer in discover(model)]


def _stream(model: nn.Module, layer: MoELayer) -> Stream:
    """Its decoder layer is the nearest module around the block that is one of a list."""
    parts = layer.name.split(".")
    while len(parts) > 1 and not parts[-1].isdigit():
        parts.pop()
    holder = model.get_submodule(".".join(parts))
    name = type(holder).__name__
    around = AROUND.get(name.removesuffix("DecoderLayer"))
    if around is None:
        raise ValueError(
            f"{layer.name}: a {name} is not among those that are known to add "
            f"post(κ Σ g e(norm(r)) + rest) to their stream (AROUND, moelab/models/stream.toml). "
            f"Residuals, and what is computed from them, are not to be had of this architecture; the "
            f"predictors that do without are router, frequency, static and previous"
        )
    inside = dict(holder.named_modules())
    norm, post = (inside.get(of or None) for of in (around.norm, around.post))
    return Stream(layer, holder, norm, post, around.beside, around.factor(holder))


def stacks(model: Any) -> list[tuple[nn.Module, list[MoELayer]]]:
    """The modules that see a batch's token ids and mask, with the MoE layers inside them."""
    layers = discover(model)
    if not model.config.is_encoder_decoder:
        return [(model.base_model, layers)]
    sides = (("encoder", model.get_encoder()), ("decoder", model.get_decoder()))
    return [
        (stack, [layer for layer in layers if side in layer.name.split(".")])
        for side, stack in sides
    ]


def first(output: Any) -> Tensor:
    """What a module puts out, without what some blocks and layers return beside it."""
    return output[0] if isinstance(output, tuple) else output


def alone(module: nn.Module, *args: Any) -> Any:
    """What a module's code, or a kernel in its place (`moelab.fast.fast_decode`), computes, past
    its hooks: no real pass."""
    kernel = forward(module)
    return kernel(*args) if isinstance(kernel, FusedModule) else type(module).forward(module, *args)
