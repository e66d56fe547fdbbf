"""The residual stream around a MoE block: what its norm reads, what the block adds, what the next
block gets of it.

    s = norm(r)      v = κ Σ_k g_k e_k(s) + rest      r' = r + post(v)      r of the next MoE layer = r' + …

`AROUND` says by decoder layer where norm and post are; what it does not list is a plain pre-norm
layer. One forward pass of a few tokens, with noise in place of the experts' output, checks that and
measures κ; an architecture for which it does not hold (hyper-connections, scaled residuals,
convolutions of the sum) is refused.

Shapes: r, s, v [T, H]. "…" is what attention and dense layers in between add; norm and post may be
the identity."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moelab.models.patches import Patches
from moelab.models.seam import MoELayer, discover, plugged
from moelab.models.unchanged import FusedModule, forward


@dataclass(frozen=True)
class Around:
    """What a decoder layer does around its MoE block.

    norm : makes the router's input of r; None where the router reads r itself.
    post : what is done to v before it is added; None for nothing.
    beside : whether more than the block's output is added to r, or a multiple of it: v is then all
        of it, r' − r."""

    norm: str | None = "post_attention_layernorm"
    post: str | None = None
    beside: bool = False


#: decoder layers that are not plain
AROUND = {
    "AfmoeDecoderLayer": Around("pre_mlp_layernorm", "post_mlp_layernorm"),
    "AXK1DecoderLayer": Around(post="mlp.post_mlp_layernorm"),
    "Cohere2MoeDecoderLayer": Around("input_layernorm", beside=True),
    "FlexOlmoDecoderLayer": Around(None, "post_feedforward_layernorm"),
    "GraniteMoeDecoderLayer": Around(beside=True),
    "GraniteMoeHybridDecoderLayer": Around(beside=True),
    "GraniteMoeSharedDecoderLayer": Around(beside=True),
    "GraniteMoeSWADecoderLayer": Around(beside=True),
    "JambaAttentionDecoderLayer": Around("pre_ff_layernorm"),
    "JambaMambaDecoderLayer": Around("pre_ff_layernorm"),
    "Kolibri1DecoderLayer": Around(post="post_mlp_layernorm"),
    "Lfm2MoeDecoderLayer": Around("ffn_norm"),
    "LongcatFlashDecoderLayer": Around("post_attention_layernorm.0", beside=True),
    "NemotronHBlock": Around("norm"),
    "SwitchTransformersLayerFF": Around("layer_norm"),
}


@dataclass(frozen=True, eq=False)
class Stream:
    """The residual stream around one MoE layer, checked on the live model.

    holder : the decoder layer that `layer` is in.
    norm, post, beside : as of `Around`.
    scale : κ.
    """

    layer: MoELayer
    holder: nn.Module
    norm: nn.Module | None
    post: nn.Module | None
    beside: bool
    scale: float = 1.0

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
        entered: list[Tensor] = []

        def before(_module: nn.Module, args: tuple) -> None:
            entered.append(args[0].clone())

        def after(_module: nn.Module, _args: tuple, output: Any) -> None:
            out, r = first(output).double(), entered.pop().double()
            see(out - r.view_as(out))

        patches.hook(self.entry.register_forward_pre_hook, before)
        patches.hook(self.holder.register_forward_hook, after)


def streams(model: nn.Module) -> list[Stream]:
    """The residual stream around every MoE layer, measured once a model; ValueError for another
    relation."""
    found = _measured(model)
    for layer, stream in zip(discover(model), found):
        if stream is None:
            raise ValueError(
                f"{layer.name} ({type(layer.block).__name__}): its decoder layer adds something else than "
                f"post(κ Σ g e(norm(r)) + rest) to its stream, or its router chooses by more than "
                f"norm(r). Residuals, and what is computed from them, are not to be had of this "
                f"architecture; the predictors that do without are router, frequency, static and previous"
            )
    return found


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


# --------------------------------------------------------------------------------------------------
# checking and measuring

TOKENS = 5
#: what a sum of the dtype may differ by, root mean square, relative to its terms
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
#: the attribute under which a model keeps the stream of each of its MoE layers; None for none
FOUND = "_streams"


def _measured(model: nn.Module) -> list[Any]:
    if FOUND not in vars(model):
        session = getattr(model, "moelab", None)
        with getattr(session, "turn", nullcontext()):  # the experts are others meanwhile
            vars(model)[FOUND] = _measure(model)
    return vars(model)[FOUND]


@torch.no_grad()
def _measure(model: Any) -> list[Stream | None]:
    probes = []
    with Patches() as patches:
        patches.callback(model.train, model.training)
        patches.enter_context(
            plugged(model)
        )  # then blocks call their experts with (x, ids, weights)
        for layer in discover(model):
            probes.append(_Probe(_stream(model, layer), patches))
        model.eval()
        _forward(model)
    return [probe.checked() for probe in probes]


def _stream(model: nn.Module, layer: MoELayer) -> Stream:
    """The stream as the table has it, κ unknown. Its decoder layer is the nearest module around the
    block that is one of a list."""
    parts = layer.name.split(".")
    while len(parts) > 1 and not parts[-1].isdigit():
        parts.pop()
    holder = model.get_submodule(".".join(parts))
    around, inside = AROUND.get(type(holder).__name__, Around()), dict(holder.named_modules())
    norm, post = inside.get(around.norm), inside.get(around.post)
    return Stream(layer, holder, norm, post, around.beside)


def _forward(model: Any) -> None:
    """Two copies of a few tokens through every stack, without cache, logits or the hooks of whoever
    watches it."""
    ids = (torch.arange(TOKENS, device=model.device) + 3).expand(2, -1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not model.config.is_encoder_decoder:
        model.base_model.forward(**inputs, use_cache=False)
        return
    encoded = model.get_encoder().forward(**inputs)
    model.get_decoder().forward(**inputs, encoder_hidden_states=encoded[0], use_cache=False)


class _Probe:
    """What passes through one MoE layer: of the first copy the experts put out noise u, of the
    second one zeros."""

    def __init__(self, stream: Stream, patches: Patches) -> None:
        self.stream, self.seen = stream, {}
        layer = stream.layer
        patches.hook(stream.entry.register_forward_pre_hook, self._entered)
        patches.hook(layer.router.register_forward_hook, self._routed)
        patches.put(layer.experts, "forward", self._noise)
        stream.listen(patches, partial(self._see, "v"))
        patches.hook(stream.holder.register_forward_hook, self._left)

    def _see(self, name: str, x: Tensor) -> None:
        self.seen[name] = x.reshape(2, TOKENS, -1).clone()

    def _entered(self, _module: nn.Module, args: tuple) -> None:
        self._see("r", args[0])

    def _routed(self, _module: nn.Module, args: tuple, output: Any) -> None:
        self._see("s", args[0])
        self.routing = tuple(t.clone() for t in self.stream.layer.routing(output))

    def _noise(self, x: Tensor, *_: Any) -> Tensor:
        """Noise that stands out from the stream."""
        generator = torch.Generator().manual_seed(self.stream.layer.index)
        size = self.seen.get("r", x).float().square().mean().sqrt()
        u = torch.randn(x.shape, generator=generator).to(x) * (8 * size).to(x)
        u[len(u) // 2 :] = 0
        self._see("u", u)
        return u

    def _left(self, _module: nn.Module, _args: tuple, output: Any) -> Any:
        """The noisy copy goes on as the quiet one: noise that went on from layer to layer would
        grow, in deep models beyond what an fp32 holds."""
        x = first(output).clone()
        self._see("out", x)
        x[0] = x[1]
        return (x, *output[1:]) if isinstance(output, tuple) else x

    def checked(self) -> Stream | None:
        """The stream with κ; None where the relation does not hold."""
        seen = self.seen
        if seen.keys() != {"r", "s", "u", "v", "out"} or seen["r"].shape != seen["out"].shape:
            return None  # more than one residual stream a token
        r, s, v = (seen[name].flatten(0, 1) for name in "rsv")
        out, noise = seen["out"], seen["u"][0].double()
        added = v[:TOKENS].double() - v[TOKENS:].double()
        if added.shape != noise.shape or not torch.equal(self.stream.router_input(r), s):
            return None
        if not self._chooses_again(s):
            return None
        tolerance = max(TOLERANCE[out.dtype], TOLERANCE[seen["u"].dtype])
        scale = float((added * noise).sum() / noise.square().sum())
        if abs(scale - 1) < tolerance / 8:  # rounding averages out
            scale = 1.0
        reaches = scale != 0 and close(added, scale * noise, tolerance)
        if reaches and close(out, self.stream.added(r, v).view_as(out), tolerance):
            return replace(self.stream, scale=scale)
        return None

    def _chooses_again(self, s: Tensor) -> bool:
        """Whether the router, asked for its inputs by itself, says what it said."""
        (ids, weights), layer = self.routing, self.stream.layer
        try:
            again, again_weights = layer.routing(layer.ask(s.reshape(len(ids), -1)))
        except ValueError:
            return False
        ran = ids != layer.E  # capacity drops tokens of a sequence only
        return torch.equal(again[ran], ids[ran]) and torch.equal(again_weights[ran], weights[ran])


def close(y: Tensor, x: Tensor, tolerance: float) -> bool:
    """Whether two tensors are equal up to the rounding of a sum."""
    y, x = y.double(), x.double()
    return bool((y - x).norm() <= tolerance * torch.stack([y, x]).norm())
