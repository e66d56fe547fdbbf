"""Attention of a single token in one call, in place of a module of transformers.

Only for `ATTENTIONS`, where a probe shows the same result; prompts, batches, masks, gradients and
caches that do not simply grow take the module's own forward. The kernel is the CPU's; a GPU's is
part of `graphs`.

    x [1, 1, H] and a cache's keys and values [1, kv heads, S, D] → y [1, 1, H] and S + 1 of them
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moelab.fast.dense import Matrices, Pack, fits
from moelab.fast.modules import epsilon
from moelab.kernels.layers import attend, heads_entry
from moelab.kernels.products import KINDS, TEAM, entry
from moelab.models.unchanged import Replaced, Unchanged, watched

#: classes of transformers whose attention is that of the kernel; a probe must agree as well
ATTENTIONS = (
    "MixtralAttention",
    "OlmoeAttention",
    "PhimoeAttention",
    "Qwen2MoeAttention",
    "Qwen3MoeAttention",
)
#: what a probe may differ by, relative to the largest number
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
ROOM = 256  # tokens for which a cache gets memory at once
#: classes of caches' layers that keep all tokens, a sliding one until its window is full
GROWING = ("DynamicLayer", "DynamicSlidingWindowLayer")


class SingleToken(Replaced):
    """What a forward of one layer's attention asks first: whether it is for a single token, and
    where its cache is."""

    def __init__(self, module: nn.Module, copied: bool = False) -> None:
        super().__init__(module)
        self.D, weight = module.head_dim, module.k_proj.weight
        self.kv_heads, self.dtype, self.device = len(weight) // self.D, weight.dtype, weight.device
        self.config, self.parts = (
            module.config,
            Unchanged([*module.modules()][1:], called=[module], copied=copied),
        )
        self.rooms: weakref.WeakKeyDictionary[Any, Room] = (
            weakref.WeakKeyDictionary()
        )  # of caches' layers

    def call(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple | None:
        """x, its (cos, sin) and the cache; None if this is no single token without a mask."""
        x, mask, cache, (cos, sin) = (
            hidden_states,
            attention_mask,
            past_key_values,
            position_embeddings or (None, None),
        )
        if (
            args
            or x.numel() != x.shape[-1]
            or cos is None
            or cache is None
            or mask is not None
            or not x.device == cos.device == sin.device == self.device
            or not x.dtype == cos.dtype == sin.dtype == self.dtype
            or not cos.numel() == sin.numel() == self.D
            or not (x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous())
            or watched()
            or self.config._attn_implementation != "sdpa"
            or vars(self.config).get("clip_qkv")
        ):
            return None
        return x, (cos, sin), cache

    def room(self, cache: Any) -> tuple[Any, Room] | None:
        """The cache's layer and its memory, with room for one token more; None for the cache's
        `update`."""
        layers, index = (
            () if getattr(cache, "offloading", True) else cache.layers,
            self.module.layer_idx,
        )
        if index >= len(layers):
            return None
        room = self.rooms.get(layer := layers[index])
        if room is None or not room.holds(layer):
            if (
                type(layer).__name__ not in GROWING
                or not layer.is_initialized
                or layer.keys.ndim != 4
                or layer.keys.dtype != self.dtype
                or layer.keys.device != self.device
                or layer.keys.shape[:3] != layer.values.shape[:3]
            ):
                return None
            self.rooms[layer] = room = Room(layer)
        if layer.is_sliding and room.where[2] >= layer.sliding_window:  # from here on it forgets
            return None
        return layer, room


class DecodeAttention(SingleToken):
    """The forward of one layer's attention; the module's own for everything but a single token.

    pack : how its weights are packed, if they are; all of q, k and v or none.
    """

    def __init__(self, module: nn.Module, pack: Pack | None = None) -> None:
        super().__init__(module, copied=pack is not None)
        D, linears = self.D, [module.q_proj, module.k_proj, module.v_proj, module.o_proj]
        norms = [
            norm
            for name in ("q_norm", "k_norm")
            if (norm := getattr(module, name, None)) is not None
        ]
        widths = (
            (*(len(norm.weight) for norm in norms), epsilon(norms[0]))
            if len(norms) == 2
            else (D, D, 0.0)
        )

        def matrices(pack: Pack | None) -> list[Matrices]:  # one for each head
            return [
                Matrices.of(linear.weight, linear.bias, linear.out_features // D, pack)
                for linear in linears[:3]
            ]

        before, after = matrices(pack), Matrices.of(linears[3].weight, linears[3].bias, 1, pack)
        if len({one.kind for one in before}) > 1:
            before = matrices(None)
        self.alive, kind = (before, after), KINDS[self.dtype]
        #: of `attend`: what layers may have alike, and where the weights of this one lie
        self.plan = (
            kind(0),
            heads_entry(kind),
            self.kv_heads,
            D,
            widths,
            before[0].kind(0),
            after.kind(0),
            entry(before[0].kind, x=kind),
            entry(after.kind),
        )
        self.weights = np.concatenate(
            [np.zeros((1, 4), np.int64), *(one.rows for one in before), after.rows]
        )
        if len(norms) == 2:
            self.weights[0, :2] = [norm.weight.data_ptr() for norm in norms]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            (call := self.call(*args, **kwargs)) is None
            or self.parts.listeners() is None
            or (found := self.room(call[-1])) is None
        ):
            return self.own(*args, **kwargs)
        (x, token, _), (layer, room) = call, found
        y = torch.empty_like(x)
        attend(self.plan, self.weights, token, room.where, x.data_ptr(), x.numel(), y.data_ptr())
        room.grow(layer)
        return y, None

    def call(self, *args: Any, **kwargs: Any) -> tuple | None:
        """x, what `attend` takes of its token and the cache; None if this is no single token
        without a mask."""
        if (found := super().call(*args, **kwargs)) is None:
            return None
        x, (cos, sin), cache = found
        return (
            x,
            (cos.data_ptr(), sin.data_ptr(), self.module.scaling, TEAM, torch.get_num_threads()),
            cache,
        )


class Room:
    """Memory in which the keys and values [1, kv heads, S, D] of a cache's layer grow by `ROOM`
    tokens.

    transformers copies all of them for every token. What was given out, cropped or reordered stays
    what it was.

    where : for `attend`, int64 [4]: addresses of keys and values, S + 1 and the distance of heads.
    """

    def __init__(self, layer: Any) -> None:
        self.given = layer.keys, layer.values
        *_, S, _ = layer.keys.shape
        self.memory = keys, values = [
            t.new_empty(*t.shape[:2], S + ROOM, t.shape[3]) for t in self.given
        ]
        for memory, t in zip(self.memory, self.given):
            memory[:, :, :S] = t
        self.where, self.size = (
            np.array([keys.data_ptr(), values.data_ptr(), S + 1, keys.stride(1)]),
            S + ROOM,
        )

    def holds(self, layer: Any) -> bool:
        """Whether the layer has what it was given last, and one token more has room."""
        return (
            layer.keys is self.given[0]
            and layer.values is self.given[1]
            and self.where[2] <= self.size
        )

    def grow(self, layer: Any) -> None:
        """Let the layer have one token more of what is in memory."""
        if layer.is_sliding:
            layer.cumulative_length += 1
        layer.keys, layer.values = self.given = tuple(
            t.narrow(2, 0, int(self.where[2])) for t in self.memory
        )
        self.where[2] += 1


def linears_of(module: Any) -> list[nn.Linear] | None:
    """q, k, v and o of an attention that may be that of the kernel."""
    if type(module).__name__ not in ATTENTIONS:
        return None
    return [getattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]


@torch.inference_mode()
def decode_attention(module: nn.Module, pack: Pack | None = None) -> DecodeAttention | None:
    """The forward for this module; None if a probe on a random token and angle shows another
    attention."""
    if (linears := linears_of(module)) is None:
        return None
    dtype = linears[0].weight.dtype
    if any(
        type(linear) is not nn.Linear
        or linear.weight.dtype != dtype
        or not fits(linear.weight, linear.bias)
        for linear in linears
    ):
        return None
    ours = DecodeAttention(module)
    if not agree(module, ours, ours, linears[0].in_features):
        return None
    return DecodeAttention(module, pack) if pack else ours


@torch.inference_mode()
def agree(theirs: Any, ours: Any, attention: SingleToken, H: int) -> bool:
    """Whether two forwards of this attention, or of a layer with it, give the same, on a random
    token and angle."""
    from transformers import DynamicCache

    rng, dtype = torch.Generator().manual_seed(0), attention.dtype
    angle = torch.rand(1, 1, attention.D // 2, generator=rng).repeat(1, 1, 2) * 6
    x, *past = (
        torch.randn(1, *shape, generator=rng).to(attention.device, dtype)
        for shape in ((1, H), *2 * [(attention.kv_heads, 3, attention.D)])
    )
    found = []
    for forward in (theirs, ours):
        cache = DynamicCache()
        cache.update(*past, attention.module.layer_idx)
        y = forward(
            x,
            position_embeddings=(angle.cos().to(x), angle.sin().to(x)),
            attention_mask=None,
            past_key_values=cache,
        )
        found.append((y[0] if isinstance(y, tuple) else y).float())
    wanted, got = found
    return got.shape == wanted.shape and bool(
        (got - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()
    )
