"""The residual stream around a MoE block: what its norm reads, what the block adds, what the next
block gets of it.

    s = norm(r)      v = κ Σ_k g_k e_k(s) + rest      r' = α r + β post(v)      r of the next MoE layer = γ r' + …

`AROUND` says by decoder layer where norm and post are, and α, β and γ where they are not 1; what it
does not list is a plain pre-norm layer. One forward pass of a few tokens, with noise in place of
the experts' output, checks that and measures κ; an architecture for which it does not hold
(hyper-connections, convolutions of the sum, gated residuals) is refused.

Shapes: r, s, v [T, H]. "…" is what attention and dense layers in between add; norm and post may be
the identity."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
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
    beside : whether more than the block's output is added to r: v is then all of it, r' − α r.
    factors : (β, α, γ) of a layer and of the layer of the MoE block before."""

    norm: str | None = "post_attention_layernorm"
    post: str | None = None
    beside: bool = False
    factors: Callable[[Any, Any], tuple[float, float, float]] = lambda *_: (1.0, 1.0, 1.0)


def _beam(layer: Any, before: Any) -> tuple[float, float, float]:
    """The n-th of all residual sums has the factors √((n−1)/n) and √(1/n)."""
    n, earlier = layer.mlp_residual_add_idx, getattr(before, "mlp_residual_add_idx", None)
    return sqrt(1 / n), sqrt((n - 1) / n), 1.0 if earlier is None else sqrt(earlier / (n - 1))


#: decoder layers that are not plain
AROUND = {
    "AfmoeDecoderLayer": Around("pre_mlp_layernorm", "post_mlp_layernorm"),
    "AXK1DecoderLayer": Around(post="mlp.post_mlp_layernorm"),
    "BeamDecoderLayer": Around(
        "pre_feedforward_layernorm", "post_feedforward_layernorm", factors=_beam
    ),
    "Cohere2MoeDecoderLayer": Around("input_layernorm", beside=True),
    "FlexOlmoDecoderLayer": Around(None, "post_feedforward_layernorm"),
    "GraniteMoeDecoderLayer": Around(
        factors=lambda layer, _: (layer.residual_multiplier, 1.0, 1.0)
    ),
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
    scale, gain, keep, carry : κ, β, α and γ.
    """

    layer: MoELayer
    holder: nn.Module
    norm: nn.Module | None
    post: nn.Module | None
    beside: bool
    scale: float
    gain: float
    keep: float
    carry: float

    @property
    def entry(self) -> nn.Module:
        """The module whose first argument is r."""
        return self.norm or self.layer.router

    def router_input(self, r: Tensor) -> Tensor:
        """s of r, [T, H] both."""
        return r if self.norm is None else alone(self.norm, r)

    def added(self, r: Tensor, v: Tensor) -> Tensor:
        """r' = α r + β post(v): [T, H], in the wider dtype of both."""
        v = v if self.post is None else alone(self.post, v.to(r.dtype))
        return times(self.keep, r) + times(self.gain, v)

    def listen(self, see: Callable[[Tensor], None]) -> list[Any]:
        """Hooks that hand every v of the running model to `see`, [B, S, H] or [T, H]."""
        if self.post is not None:
            return [self.post.register_forward_pre_hook(lambda _m, args: see(args[0]))]
        if not self.beside:
            return [
                self.layer.block.register_forward_hook(lambda _m, _a, output: see(first(output)))
            ]
        entered: list[Tensor] = []

        def after_layer(_module: nn.Module, _args: tuple, output: Any) -> None:
            out, r = first(output).double(), entered.pop().double()
            see(out - self.keep * r.view_as(out))

        return [
            self.entry.register_forward_pre_hook(lambda _m, args: entered.append(args[0].clone())),
            self.holder.register_forward_hook(after_layer),
        ]


def streams(model: nn.Module) -> list[Stream]:
    """The residual stream around every MoE layer, measured once a model; ValueError for another
    relation."""
    found = _measured(model)
    for layer, stream in zip(discover(model), found):
        if isinstance(stream, str):
            raise ValueError(
                f"{layer.name} ({type(layer.block).__name__}): {stream}. Residuals, and what is computed "
                f"from them, are not to be had of this architecture; the predictors that do without are "
                f"router, frequency, static and previous"
            )
    return found


def check_routers(model: nn.Module) -> None:
    """ValueError if a router, asked by itself, does not choose what it chose in a forward pass."""
    for layer, stream in zip(discover(model), _measured(model)):
        if isinstance(stream, str) and stream.startswith(ASKED):
            raise ValueError(
                f"{layer.name} ({type(layer.router).__name__}): {stream}, so it cannot be asked what it "
                f"would choose"
            )


ASKED = "the router's choice does not follow from its input alone"


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


def times(factor: float, x: Tensor) -> Tensor:
    return x if factor == 1.0 else factor * x


# --------------------------------------------------------------------------------------------------
# checking and measuring

TOKENS = 5
#: what a sum of the dtype may differ by, root mean square, relative to its terms
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
#: the attribute under which a model keeps for each of its MoE layers the stream, or why there is
#: none
FOUND = "_streams"


def _measured(model: nn.Module) -> list[Any]:
    if FOUND not in vars(model):
        session = getattr(model, "moelab", None)
        with getattr(session, "turn", nullcontext()):  # the experts are others meanwhile
            vars(model)[FOUND] = _measure(model)
    return vars(model)[FOUND]


@torch.no_grad()
def _measure(model: Any) -> list[Stream | str]:
    probes: dict[int, _Probe] = {}
    with Patches() as patches:
        patches.callback(model.train, model.training)
        patches.enter_context(
            plugged(model)
        )  # then blocks call their experts with (x, ids, weights)
        for _, layers in stacks(model):
            before = None
            for layer in layers:
                stream = _stream(model, layer, before)
                probes[layer.index], before = _Probe(stream, patches), stream.holder
        model.eval()
        _forward(model)
    return [probes[index].checked() for index in sorted(probes)]


def _stream(model: nn.Module, layer: MoELayer, before: nn.Module | None) -> Stream:
    """The stream as the table has it, κ unknown."""
    holder = model.get_submodule(holder_name(layer.name))
    around, parts = AROUND.get(type(holder).__name__, Around()), dict(holder.named_modules())
    norm, post = parts.get(around.norm), parts.get(around.post)
    gain, keep, carry = around.factors(holder, before)
    return Stream(layer, holder, norm, post, around.beside, 1.0, gain, keep, carry)


def holder_name(name: str) -> str:
    """The decoder layer that a block is in: the nearest name that ends in a number, its own
    included."""
    parts = name.split(".")
    while parts and not parts[-1].isdigit():
        parts.pop()
    if not parts:
        raise ValueError(f"{name} is in no list of layers, so its residual stream cannot be found")
    return ".".join(parts)


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
        for hook in stream.listen(partial(self._see, "v")):
            patches.callback(hook.remove)
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

    def checked(self) -> Stream | str:
        """The stream with κ, or why the relation does not hold."""
        if "s" in self.seen and (problem := self._router_problem(self.seen["s"])):
            return problem
        if self.seen.keys() != {"r", "s", "u", "v", "out"}:
            return "not all of its modules ran in a forward pass"
        r, s, u, v, out = (self.seen[name] for name in ("r", "s", "u", "v", "out"))
        if r.shape != out.shape:
            return (
                f"its layer carries {list(out.shape[1:])} for {TOKENS} tokens where the router reads "
                f"{list(r.shape[1:])}: more than one residual stream a token"
            )
        if not torch.equal(self.stream.router_input(r.flatten(0, 1)), s.flatten(0, 1)):
            return "the router does not read the norm of what enters its layer's MoE half"
        tolerance = max(TOLERANCE[out.dtype], TOLERANCE[u.dtype])
        added, noise = v[0].double() - v[1].double(), u[0].double()
        if added.shape != noise.shape or not added.any():
            return "what its routed experts put out does not reach the residual stream"
        scale = float((added * noise).sum() / noise.square().sum())
        if abs(scale - 1) < tolerance / 8:  # rounding averages out
            scale = 1.0
        if not close(added, scale * noise, tolerance):
            return "what its routed experts put out reaches the residual stream through more than a factor"
        if not close(
            out, self.stream.added(r.flatten(0, 1), v.flatten(0, 1)).view_as(out), tolerance
        ):
            return "next = r + y does not hold of what its layer puts out"
        return replace(self.stream, scale=scale)

    def _router_problem(self, s: Tensor) -> str:
        (ids, weights), layer = self.routing, self.stream.layer
        try:
            again, again_weights = layer.routing(layer.ask(s.reshape(len(ids), -1)))
        except ValueError as error:
            return f"{ASKED} ({error})"
        ran = ids != layer.E  # capacity drops tokens of a sequence only
        same = torch.equal(again[ran], ids[ran]) and torch.equal(again_weights[ran], weights[ran])
        return "" if same else ASKED


def close(y: Tensor, x: Tensor, tolerance: float) -> bool:
    """Whether two tensors are equal up to the rounding of a sum."""
    y, x = y.double(), x.double()
    terms = (y.square().mean() + x.square().mean()).sqrt()
    return bool((y - x).square().mean().sqrt() <= tolerance * terms)
