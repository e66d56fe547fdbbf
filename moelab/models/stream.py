"""The residual stream around a MoE block: what its norm reads, what the block adds, what the next
block gets of it.

It is measured in one forward pass of a few tokens, with noise in place of the experts' output, in
three copies:

    noise    the experts put out u                          their difference is what routed experts do to the stream
    quiet    the experts put out 0
    silent   every module within a layer puts out 0         what is left is the stream itself

For each MoE layer the relation below follows; an architecture with another one (hyper-connections,
convolutions of the sum, gated residuals) is refused.

    s = norm(r)      v = κ Σ_k g_k e_k(s) + rest      r' = α r + β post(v)      r of the next MoE layer = γ r' + …

Shapes: r, s, v [T, H]. "…" is what attention and dense layers in between add; norm and post may be
the identity."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moelab.models.seam import MoELayer, discover, plugged
from moelab.models.unchanged import FusedModule, forward

NOISE, QUIET, SILENT = 0, 1, 2
TOKENS = 5
#: what a sum of the dtype may differ by, root mean square, relative to its terms
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass(frozen=True, eq=False)
class Stream:
    """The residual stream around one MoE layer, verified on the live model.

    holder : the decoder layer that `layer` is in.
    norm : makes the router's input of r; None where the router reads r itself.
    place : where v is to be seen: "block" (the block's output), "post" (the input of `post`) or
        "layer" (r' − α r).
    post : what the model does to v before it is added; None for nothing.
    scale, gain, keep, carry : κ, β, α and γ.
    """

    layer: MoELayer
    holder: nn.Module
    norm: nn.Module | None
    place: str
    post: nn.Module | None
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
        if self.place == "post":
            return [self.post.register_forward_pre_hook(lambda _m, args: see(args[0]))]
        if self.place == "block":
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
    for layer, (found, reason) in zip(discover(model), _measured(model)):
        if found is None:
            raise ValueError(
                f"{layer.name} ({type(layer.block).__name__}): {reason}. Residuals, and what is computed "
                f"from them, are not to be had of this architecture; the predictors that do without are "
                f"router, frequency, static and previous"
            )
    return [found for found, _ in _measured(model)]


def check_routers(model: nn.Module) -> None:
    """ValueError if a router, asked by itself, does not choose what it chose in a forward pass."""
    for layer, (_, reason) in zip(discover(model), _measured(model)):
        if reason.startswith(ASKED):
            raise ValueError(
                f"{layer.name} ({type(layer.router).__name__}): {reason}, so it cannot be asked what it "
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


# --------------------------------------------------------------------------------------------------------
# measuring

#: the attribute under which a model keeps for each of its MoE layers the stream, or None and the
#: reason
FOUND = "_streams"


def _measured(model: nn.Module) -> list[tuple[Stream | None, str]]:
    if FOUND not in vars(model):
        with getattr(
            getattr(model, "moelab", None), "turn", nullcontext()
        ):  # other experts run meanwhile
            vars(model)[FOUND] = _measure(model)
    return vars(model)[FOUND]


@torch.no_grad()
def _measure(model: Any) -> list[tuple[Stream | None, str]]:
    training, watches, hooks = model.training, {}, []
    modules = dict(model.named_modules())
    for _, layers in stacks(model):
        before = None
        for layer in layers:
            name = holder_name(layer.name)
            before = watches[layer.index] = _LayerProbe(layer, modules[name], name, before)
    # the layers of a model, MoE or not, have names that differ in their numbers alone
    patterns = {re.sub(r"\d+", "N", watch.name) for watch in watches.values()}
    holders = [module for name, module in modules.items() if re.sub(r"\d+", "N", name) in patterns]

    model.eval()
    try:
        # the noise is in the place of an engine, too, which would ask it about parts of a layer
        with plugged(model, engine=lambda x, ids, weights, of: watches[of.layer].noise(x)):
            for watch in watches.values():
                hooks += watch.attach()
            for holder in holders:
                hooks += [branch.register_forward_hook(_silence) for branch in _branches(holder)]
                hooks.append(holder.register_forward_hook(_restore))
            _forward(model)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    return [watch.found for watch in watches.values()]


def _forward(model: Any) -> None:
    """Three copies of a few tokens through every stack, without cache, logits or the hooks of
    whoever watches it."""
    ids = (torch.arange(TOKENS, device=model.device) + 3).expand(3, -1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not model.config.is_encoder_decoder:
        model.base_model.forward(**inputs, use_cache=False)
        return
    encoded = model.get_encoder().forward(**inputs)
    model.get_decoder().forward(**inputs, encoder_hidden_states=encoded[0], use_cache=False)


def holder_name(name: str) -> str:
    """The decoder layer that a block is in: the nearest name that ends in a number, its own
    included."""
    parts = name.split(".")
    while parts and not parts[-1].isdigit():
        parts.pop()
    if not parts:
        raise ValueError(f"{name} is in no list of layers, so its residual stream cannot be found")
    return ".".join(parts)


def _branches(holder: nn.Module) -> Iterator[nn.Module]:
    """The modules that a layer is made of."""
    for child in holder.children():
        yield from (
            child.children() if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else [child]
        )


def _silence(_module: nn.Module, _args: Any, output: Any) -> Any:
    """A forward hook: the silent copy's output is zero."""

    def zero(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() == 0 or len(x) % 3:
            return x
        x = x.clone()
        x[SILENT * len(x) // 3 :] = 0
        return x

    return tuple(map(zero, output)) if type(output) is tuple else zero(output)


def _restore(_module: nn.Module, _args: Any, output: Any) -> Any:
    """A forward hook on a layer: the noisy copy goes on as the quiet one. So they differ within a
    layer only, and noise that is a multiple of its stream does not grow from layer to layer, in
    deep models beyond what an fp32 holds."""
    x = first(output).clone()
    x[NOISE] = x[QUIET]
    return (x, *output[1:]) if isinstance(output, tuple) else x


class _LayerProbe:
    """What goes in and out of the modules of one MoE layer while the three copies pass."""

    def __init__(
        self, layer: MoELayer, holder: nn.Module, name: str, before: _LayerProbe | None
    ) -> None:
        self.layer, self.holder, self.name, self.before = layer, holder, name, before
        self.found: tuple[Stream | None, str] = None, "it did not run in a forward pass"
        #: module, its first argument, its output, whether these are all that goes in and out
        self.calls: list[tuple[nn.Module, Tensor, Tensor, bool]] = []
        self.u: Tensor | None = None
        self.output: Tensor | None = None

    def attach(self) -> list[Any]:
        inner = {self.holder, *self.layer.experts.modules(), *self.layer.router.modules()}
        return [
            self.holder.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.holder.register_forward_hook(self._leave),
            self.layer.router.register_forward_hook(self._routed, with_kwargs=True),
            *(
                module.register_forward_hook(self._called, with_kwargs=True)
                for module in self.holder.modules()
                if module not in inner
            ),
        ]

    def _enter(self, _module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.size = (
            next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            .float()
            .square()
            .mean()
            .sqrt()
        )

    def _leave(self, _module: nn.Module, _args: tuple, output: Any) -> None:
        """The layer is over: see what follows, and keep no more of it than the next one needs."""
        self.output = first(output).clone()
        if self.u is not None:
            try:
                self.found = self.stream(self.before and self.before.output), ""
            except ValueError as error:
                self.found = None, str(error)
        self.calls.clear()

    def _routed(self, _module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        x = next(iter((*args, *kwargs.values())))
        self.s, self.earlier = x.reshape(3, TOKENS, -1).clone(), len(self.calls)
        self.routing = tuple(t.clone() for t in self.layer.routing(output))

    def _called(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        x, y = args[0] if args else next(iter(kwargs.values()), None), first(output)
        if all(
            isinstance(t, Tensor) and t.numel() and t.numel() % (3 * TOKENS) == 0 for t in (x, y)
        ):
            self.calls.append(
                (
                    module,
                    x.clone().reshape(3, TOKENS, -1),
                    y.clone().reshape(3, TOKENS, -1),
                    len(args) == 1 and not kwargs and isinstance(output, Tensor),
                )
            )

    def noise(self, x: Tensor) -> Tensor:
        """What the experts put out, [3·T, H]: noise that stands out from the stream, in the first
        copy only."""
        generator = torch.Generator().manual_seed(self.layer.index)
        u = torch.randn(x.shape, generator=generator).to(x) * (8 * self.size).to(x)
        u[len(u) // 3 :] = 0
        self.u = u.clone().reshape(3, TOKENS, -1)
        return u

    # ------------------------------------------------------------------------------------------
    # what follows from it

    def stream(self, before: Tensor | None) -> Stream:
        """The relation of this layer; before : the silent stream behind the MoE layer before.
        ValueError : another."""
        self._check_router()
        self.tolerance = max(TOLERANCE[self.output.dtype], TOLERANCE[self.u.dtype])
        norm, r = self._norm()
        out = self.output
        if out.shape != r.shape:
            raise ValueError(
                f"its layer carries {list(out.shape[1:])} for {TOKENS} tokens where the router reads "
                f"{list(r.shape[1:])}: more than one residual stream a token"
            )
        carry = 1.0 if before is None else self._ratio(r[SILENT], before[SILENT])
        if carry is None:
            raise ValueError(
                f"what {'the norm' if norm else 'the router'} reads is no multiple of what the layer "
                f"before put out when every module is silent, so r is not the residual stream "
                f"({difference(r[SILENT], before[SILENT])})"
            )
        keep = self._ratio(out[SILENT], r[SILENT])
        if keep is None:
            raise ValueError(
                f"the layer's output is no multiple of what {'the norm' if norm else 'the router'} read "
                f"when every module is silent ({difference(out[SILENT], r[SILENT])}), so next = r + y "
                f"does not hold"
            )
        place, post, scale, gain = self._contribution(times(keep, r))
        return Stream(self.layer, self.holder, norm, place, post, scale, gain, keep, carry)

    def _check_router(self) -> None:
        ids, weights = self.routing
        try:
            again, again_weights = self.layer.routing(self.layer.ask(self.s.reshape(len(ids), -1)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{ASKED} ({error})") from error
        ran = ids != self.layer.E  # capacity drops tokens of a sequence only
        if not (
            torch.equal(again[ran], ids[ran]) and torch.equal(again_weights[ran], weights[ran])
        ):
            raise ValueError(
                f"{ASKED}: {int((again != ids)[ran].sum())} of {int(ran.sum())} experts differ"
            )

    def _norm(self) -> tuple[nn.Module | None, Tensor]:
        """The module that made the router's input, and what it read, [3, T, H]; None and s itself
        if there is none."""
        s = self.s[:SILENT]
        for module, x, y, only in reversed(self.calls[: self.earlier]):
            if (
                only
                and y.shape == self.s.shape
                and x.shape == y.shape
                and torch.equal(y[:SILENT], s)
                and not torch.equal(x, y)
                and same(module, x, y)
            ):
                return module, x
        return None, self.s

    def _ratio(self, y: Tensor, x: Tensor) -> float | None:
        return ratio(y, x, self.tolerance)

    def _contribution(self, kept: Tensor) -> tuple[str, nn.Module | None, float, float]:
        """(place, post, κ, β): what the routed experts' noise did; kept = α r [3, T, H]."""
        u, out = self.u[NOISE], self.output
        if u.shape != out.shape[1:]:
            raise ValueError(
                f"its experts put out {u.shape[-1]} values a token, the residual stream has "
                f"{out.shape[-1]}: a projection is in between"
            )

        def adds(v: Tensor) -> float | None:
            """β of r' = α r + β v, where it holds in both copies."""
            gain = self._ratio(apart(out), apart(v))
            holds = gain is not None and close(
                out[:SILENT], kept[:SILENT] + gain * v[:SILENT].double(), self.tolerance
            )
            return gain if holds else None

        for module, _, y, _ in self.calls:
            if module is self.layer.block and y.shape == out.shape:
                scale, gain = self._ratio(apart(y), u), adds(y)
                if scale is not None and gain is not None:
                    return "block", None, scale, gain
        for module, x, y, only in self.calls[self.earlier :]:
            if only and x.shape == y.shape == out.shape and module is not self.layer.block:
                scale, gain = self._ratio(apart(x), u), adds(y)
                if scale is not None and gain is not None and same(module, x, y):
                    return "post", module, scale, gain
        scale = self._ratio(apart(out), u)
        if scale is None:
            raise ValueError(
                f"what its routed experts put out reaches the residual stream neither times a factor "
                f"({difference(apart(out), u)}) nor through one norm"
            )
        return "layer", None, scale, 1.0


def apart(x: Tensor) -> Tensor:
    """What the noise made of a tensor [3, T, H]: [T, H]."""
    return x[NOISE].double() - x[QUIET].double()


def close(y: Tensor, x: Tensor, tolerance: float) -> bool:
    """Whether two tensors are equal up to the rounding of a sum."""
    y, x = y.double(), x.double()
    return bool(
        (y - x).square().mean().sqrt() <= tolerance * (y.square().mean() + x.square().mean()).sqrt()
    )


def ratio(y: Tensor, x: Tensor, tolerance: float) -> float | None:
    """c of y = c x, or None where that does not hold."""
    if y.shape != x.shape or not x.any():
        return None
    if torch.equal(y, x):
        return 1.0
    wide = x.double()
    c = float((y.double() * wide).sum() / wide.square().sum())
    c = 1.0 if abs(c - 1) < tolerance / 8 else c  # rounding averages out
    return c if c and close(y, c * wide, tolerance) else None


def same(module: nn.Module, x: Tensor, y: Tensor) -> bool:
    """Whether a module makes y of x token by token, whatever the shape: [3, T, H] both."""
    return torch.equal(alone(module, x.reshape(-1, x.shape[-1])), y.reshape(-1, y.shape[-1]))


def difference(y: Tensor, x: Tensor) -> str:
    """How far y is from the best multiple of x, for a message."""
    y, x = y.double().flatten(), x.double().flatten()
    if len(y) != len(x) or not x.any():
        return "that is zero" if len(y) == len(x) else f"{len(y)} values against {len(x)}"
    c = (y * x).sum() / x.square().sum()
    rest = (y - c * x).norm() / y.norm().clamp(min=1e-30)
    return (
        f"the nearest multiple is {c:.3g} times it, and {rest:.1%} off" if y.any() else "it is zero"
    )
