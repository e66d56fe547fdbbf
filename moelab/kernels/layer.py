"""A decoder layer of a single token up to its experts, in one call: norm, attention, sum, norm.

The kernels are those of `norms` and `attention`; what is saved is transformers' way from one to the next. Prompts,
batches, masks, and layers with something on their parts (a hook, another forward) take the layer's own forward.

    x [1, 1, H] and the cache's keys and values    →    x + attention(norm(x)) and the norm of that, [1, 1, H] each
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere

from moelab.kernels.attention import DecodeAttention, agree, attend
from moelab.kernels.compile import kernel
from moelab.kernels.norms import Norm, rms_norm
from moelab.kernels.tiles import kept, span, weight, write

PARTS = "input_layernorm", "self_attn", "post_attention_layernorm"


class DecodeLayer:
    """The forward of one decoder layer, whose parts have these fast forwards; its own for all but a single token."""

    def __init__(self, module: nn.Module, fast: list[Any]) -> None:
        self.module, self.own, (first, self.attention, second) = module, type(module).forward, fast
        self.parts = [(name, getattr(module, name), one) for name, one in zip(PARTS, fast)]
        self.weights, self.H = self._weights(), first.H
        self.norms = *self.weights, first.eps, second.eps
        self.token: Callable[..., Tensor | None] = _nothing             # of `moelab.kernels.token`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (y := self.token(*args, **kwargs)) is not None:
            return y
        if not self.untouched() or heard_everywhere() or (token := self.attention.token(*args, **kwargs)) is None:
            return self.own(self.module, *args, **kwargs)
        x, where, _ = token
        y, normed = torch.empty_like(x), torch.empty_like(x)
        to_experts(self.attention.plan, where, self.norms, self.H, x.data_ptr(), y.data_ptr(), normed.data_ptr())
        return y + self.module._modules["mlp"](normed)

    def _weights(self) -> list[int]:
        return [self.parts[i][1]._parameters["weight"].data_ptr() for i in (0, 2)]

    def untouched(self) -> bool:
        """Whether nobody has replaced a part or its weight, or put something on it."""
        return all(self.module._modules[name] is part and not (part._forward_hooks or part._forward_pre_hooks)
                   and forward(part) is fast for name, part, fast in self.parts) and self._weights() == self.weights


def _nothing(*_: Any, **__: Any) -> None:
    pass


def forward(module: nn.Module) -> Any:
    """What was put on a module in place of its class's forward, the topmost; None for nothing."""
    return getattr(module.__dict__.get("forward"), "call", None)


def heard_everywhere() -> bool:
    """Whether a hook hears all modules."""
    return bool(everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks)


@torch.inference_mode()
def decode_layer(module: nn.Module) -> DecodeLayer | None:
    """The forward for this layer if its parts have ours and, with an identity for experts, a probe on a random token
    gives what its own forward gives."""
    parts = [getattr(module, name, None) for name in PARTS]
    fast = [forward(part) if isinstance(part, nn.Module) else None for part in parts]
    if [type(one) for one in fast] != [Norm, DecodeAttention, Norm] or not isinstance(module.mlp, nn.Module):
        return None
    twin = copy.copy(module)
    twin._modules = module._modules | {"mlp": nn.Identity()}
    return DecodeLayer(module, fast) if agree(twin, DecodeLayer(twin, fast), fast[1], fast[0].H) else None


@kernel
def to_experts(plan, token, norms, H, x, y, normed):
    kind, (first, second, first_eps, second_eps) = plan[0], norms
    inside = np.empty(span(kind, H), np.uint8)
    at = inside.ctypes.data
    rms_norm(kind, x, kind, first, 1, H, first_eps, at)
    attend(plan, token, at, H, at)
    for i in range(H):
        write(kind, y, i, weight(kind, x, i) + weight(kind, at, i))
    kept(inside)
    rms_norm(kind, y, kind, second, 1, H, second_eps, normed)
