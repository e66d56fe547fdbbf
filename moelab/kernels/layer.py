"""A decoder layer of a single token up to its experts, in one call: norm, attention, sum, norm.

The kernels are those of `norms` and `attention`; what is saved is transformers' way from one to the next. Prompts,
batches, masks, and layers with something on their parts (a hook, another forward) take the layer's own forward.

    x [1, 1, H] and the cache's keys and values    →    x + attention(norm(x)) and the norm of that, [1, 1, H] each
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere

from moelab.kernels import products
from moelab.kernels.attention import TOLERANCE, DecodeAttention, _attend, _project
from moelab.kernels.compile import kernel
from moelab.kernels.norms import Norm, _rms_norm
from moelab.kernels.tiles import kept, span, weight, write

PARTS = "input_layernorm", "self_attn", "post_attention_layernorm"


class DecodeLayer:
    """The forward of one decoder layer, whose parts have these fast forwards; its own for all but a single token."""

    def __init__(self, module: nn.Module, fast: list[Any]) -> None:
        self.module, self.own, self.attention = module, type(module).forward, fast[1]
        self.parts = [(name, getattr(module, name), one) for name, one in zip(PARTS, fast)]
        (first, attention, second), self.weights = fast, self._weights()
        self.constants = (attention.kind, *attention.before, *attention.after, first.H, attention.D,
                          attention.kv_heads, *attention.norms, first.eps, second.eps, *self.weights)

    def __call__(self, hidden_states: Tensor, *args: Any, position_embeddings: Any = None,
                 attention_mask: Tensor | None = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        x, module, attention = hidden_states, self.module, self.attention
        cos, sin = position_embeddings or (None, None)
        grown = attention.grown(past_key_values) if not args and self._untouched() and attention.takes(
            x, cos, sin, attention_mask, past_key_values) else None
        if grown is None:
            return self.own(module, x, *args, position_embeddings=position_embeddings, attention_mask=attention_mask,
                            past_key_values=past_key_values, **kwargs)
        x, cos, sin, (keys, values) = x.contiguous(), cos.contiguous(), sin.contiguous(), grown
        y, normed = torch.empty_like(x), torch.empty_like(x)
        _layer(*self.constants, attention.module.scaling, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), keys.data_ptr(),
               values.data_ptr(), keys.shape[2], keys.stride(1), attention.heads_work, *attention.works,
               products.TEAM, torch.get_num_threads(), y.data_ptr(), normed.data_ptr())
        return y + module._modules["mlp"](normed)

    def _weights(self) -> list[int]:
        return [self.parts[i][1]._parameters["weight"].data_ptr() for i in (0, 2)]

    def _untouched(self) -> bool:
        """Whether nobody has replaced a part or its weight, or put something on it."""
        for name, part, fast in self.parts:
            if self.module._modules[name] is not part or part._forward_hooks or part._forward_pre_hooks \
                    or getattr(part.__dict__.get("forward"), "call", None) is not fast:
                return False
        return self._weights() == self.weights and not (everywhere._global_forward_hooks
                                                        or everywhere._global_forward_pre_hooks)


@torch.inference_mode()
def decode_layer(module: nn.Module) -> DecodeLayer | None:
    """The forward for this layer if its parts have ours and, with an identity for experts, a probe on a random token
    gives what its own forward gives."""
    parts = [getattr(module, name, None) for name in PARTS]
    fast = [getattr(getattr(part, "__dict__", {}).get("forward"), "call", None) for part in parts]
    if [type(one) for one in fast] != [Norm, DecodeAttention, Norm] or not isinstance(module.mlp, nn.Module):
        return None
    from transformers import DynamicCache
    (norm, attention, _), rng, twin = fast, torch.Generator().manual_seed(0), copy.copy(module)
    twin._modules = module._modules | {"mlp": nn.Identity()}
    angle = torch.rand(1, 1, attention.D // 2, generator=rng).repeat(1, 1, 2) * 6
    turns = tuple(turn.to(attention.dtype) for turn in (angle.cos(), angle.sin()))
    x, past = (torch.randn(1, n, m, size, generator=rng).to(attention.dtype) for n, m, size in (
        (1, 1, norm.H), (attention.kv_heads, 3, attention.D)))

    def run(forward: Any) -> Tensor:
        cache = DynamicCache()
        cache.update(past, past, attention.module.layer_idx)
        return forward(x[0], position_embeddings=turns, attention_mask=None, past_key_values=cache)
    wanted, got = run(twin), run(DecodeLayer(twin, fast))
    same = got.shape == wanted.shape and (got - wanted).abs().max() <= TOLERANCE[x.dtype] * wanted.abs().max()
    return DecodeLayer(module, fast) if same else None


@kernel
def _layer(kind, order, rows, bounds, tokens, last_order, last_rows, last_bounds, last_tokens, H, D, kv_heads, q_norm,
           k_norm, q_width, k_width, eps, first_eps, second_eps, first, second, scaling, x, cos, sin, keys, values, S,
           stride, heads_work, work, last_work, team, threads, y, normed):
    inside = np.empty(span(kind, H), np.uint8)
    q, newest, at = np.empty((len(rows) - 2 * kv_heads) * D, np.float32), span(kind, (S - 1) * D), inside.ctypes.data
    _rms_norm(kind, x, first, 1, H, first_eps, at)
    _project(kind, order, rows, bounds, tokens, at, H, D, q_norm, k_norm, q_width, k_width, eps, cos, sin, scaling, q,
             keys + newest, values + newest, stride, work, team, threads)
    _attend(kind, last_order, last_rows, last_bounds, last_tokens, q, keys, values, kv_heads, S, stride, D, at, H,
            heads_work, last_work, team, threads)
    for i in range(H):
        write(kind, y, i, weight(kind, x, i) + weight(kind, at, i))
    kept(inside)
    _rms_norm(kind, y, second, 1, H, second_eps, normed)
