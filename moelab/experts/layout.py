"""What an executor that goes past `experts.weighted` must know of an experts module: names, layout, what is plain.

An expert is up (`gate_up_proj` or `up_proj`), gate or activation, down, each with a bias or without:

    rows layout        up [2I, H], down [H, I]          (`is_transposed` False: an output's weights are contiguous)
    transposed layout  up [H, 2I], down [I, H]
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

_SILU: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def plain(experts: Any) -> bool:
    """Whether an expert is nothing but up, gate, down, and its output is weighted.

    Not so where the seam knows another arithmetic (Llama 4 weighs the input, Switch has modules of its own) or where
    a norm follows.
    """
    return _usual(type(experts)) and not experts.has_post_expert_norm


@lru_cache(maxsize=None)
def _usual(cls: type) -> bool:
    return all(getattr(cls, name).__qualname__.startswith("SeamExperts.") for name in ("ffn", "weighted"))


def names(experts: Any) -> tuple[str, str]:
    """The parameters of up and down; their biases have `_bias` behind it."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def activate(experts: Any, h: Tensor) -> Tensor:
    """The architecture's own gate [n, 2I] → [n, I], or activation where there is no gate."""
    return experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)


def silu_gated(experts: Any) -> bool:
    """Whether the activation is silu(gate) · up, gate first: asked with a few numbers, once for each module.

    They are of both signs and of all sizes, each as gate with each as up: some architectures clamp either, at 7 or 10.
    """
    if experts not in _SILU:
        far = torch.logspace(-2, 6, 25)
        gate, up = torch.meshgrid(*[torch.cat([-far, torch.linspace(-9, 9, 19), far])] * 2, indexing="ij")
        _SILU[experts] = experts.has_gate and torch.allclose(activate(experts, torch.cat([gate, up], -1)),
                                                             F.silu(gate) * up, atol=1e-6)
    return _SILU[experts]


def banks(experts: Any, name: str) -> Tensor | None:
    """All experts' weights of one name, [E, …], where the module holds them and no source is asked; else None."""
    return experts._parameters.get(name) if experts.source is None else None


def wants_grad(*tensors: Tensor) -> bool:
    """Whether a gradient may be asked of what is made of these, which compiled kernels do not record."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def on_cpu(x: Tensor, *weights: Tensor) -> bool:
    """Whether all are CPU tensors of one floating type."""
    return x.device.type == "cpu" and all(w.device == x.device and w.dtype == x.dtype for w in weights) \
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
