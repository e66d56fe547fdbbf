"""Asking a layer's router what it would choose, for any input or by given logits.

Source: Speculating Experts §3.3 and §6.1: a prediction is what the next router chooses for another
signal, or by an estimator's logits. The architecture's own router code runs in both cases, so ids
and weights are as it makes them (softmax, groups, renormalisation).

Shapes: x [T, H], logits [T, E], ids and weights [T, K]."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moelab.models import MoELayer


class _GivenLogits(TorchFunctionMode):
    """While active, a router's linear layer yields the given logits [T, E] in place of its own."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        x = args[0] if args else kwargs["input"]
        return self.logits.to(x.dtype).reshape(*x.shape[:-1], -1)


def route(layer: MoELayer, x: Tensor, logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What the router of `layer` would choose for inputs x [T, H]: (ids, weights), [T, K] each.

    logits : [T, E] that take the place of the router's own; its own code makes weights of them.

    Raises ValueError: logits for a router whose code computes its own in another way than by one
    linear layer."""
    return layer.routing(ask(layer, x, logits))


def ask(layer: MoELayer, x: Tensor, logits: Tensor | None = None) -> Any:
    """As `route`, in the form that the architecture's router returns."""
    if logits is None:
        return layer.ask(x)
    with _GivenLogits(logits) as given:
        output = layer.ask(x, own=True)
    if given.calls != 1:
        raise ValueError(
            f"{layer.name}: {type(layer.router).__name__} calls F.linear {given.calls} times, so "
            f"other logits cannot take the place of its own; leave its choice to itself"
        )
    return output


#: router class → place of the logits in what it returns, … for all of it; first in all others
LOGITS = {"Llama4Router": 1, "SwitchTransformersTop1Router": 2, "DbrxRouter": ...}


def router_logits(layer: MoELayer, x: Tensor, logits: Tensor | None = None) -> Tensor:
    """The logits, float32 [T, E], by which a router chooses for x [T, H]; logits as of `route`."""
    output = ask(layer, x, logits)[LOGITS.get(type(layer.router).__name__, 0)]
    return output.reshape(len(x), -1).float()


def check_given(layer: MoELayer, H: int) -> None:
    """ValueError for a router that does not choose by given logits as by its own: one that scales
    or caps them."""
    parameter = next(layer.router.parameters())
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(8, H, dtype=torch.float32, generator=rng).to(parameter)
    logits = router_logits(layer, x)
    if not torch.allclose(router_logits(layer, x, logits), logits, rtol=2e-2):
        raise ValueError(
            f"{layer.name}: {type(layer.router).__name__} changes its logits after its linear layer, so "
            f"an estimator's cannot take their place; use a predictor that asks the router"
        )
