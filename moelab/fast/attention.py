"""Attention of a single token in one call, in place of a module of transformers.

Only for `ATTENTIONS`, where a probe shows the same result; prompts, batches, masks, gradients and
caches that do not simply grow take the module's own forward. The kernel is the CPU's; a GPU's is
part of `graphs`.

    x [1, 1, H] and a cache's keys and values [1, kv heads, S, D] → y [1, 1, H] and S + 1 of them
"""

from __future__ import annotations

import copyreg
import weakref
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moelab.fast.dense import matrices_of
from moelab.fast.modules import epsilon
from moelab.kernels.attention import attend, heads_work
from moelab.kernels.products import KINDS
from moelab.kernels.threads import team
from moelab.kernels.vectors import FLOAT32
from moelab.models import compat
from moelab.models.unchanged import FusedModule, Unchanged, watched

#: classes of transformers whose attention is that of the kernel; a probe must agree as well
ATTENTIONS = (
    "MixtralAttention",
    "OlmoeAttention",
    "PhimoeAttention",
    "Qwen2MoeAttention",
    "Qwen3MoeAttention",
)
LINEARS = "q_proj", "k_proj", "v_proj", "o_proj"
#: what a probe may differ by, relative to the largest number
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
GROWTH = 256  # tokens for which a cache gets memory at once
#: classes of caches' layers that keep all tokens, a sliding one until its window is full
GROWING = ("DynamicLayer", "DynamicSlidingWindowLayer")
GIVEN = "keys", "values"


class SingleToken(FusedModule):
    """What a forward of one layer's attention asks first: whether it is for a single token, and
    where its cache is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, Unchanged([*module.modules()][1:], [module]))
        weight = module.k_proj.weight
        self.D = module.head_dim
        self.dtype = weight.dtype
        self.device = weight.device
        self.kv_heads = len(weight) // self.D
        self.config = module.config

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
        x = hidden_states
        cache = past_key_values
        if args or attention_mask is not None or cache is None or position_embeddings is None:
            return None
        cos, sin = position_embeddings
        if (
            x.numel() != x.shape[-1]
            or cos.numel() != self.D
            or not x.device == cos.device == self.device
            or not x.dtype == cos.dtype == self.dtype
            or not (x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous())
            or watched()
            or not compat.is_sdpa(self.config)
            or vars(self.config).get("clip_qkv")
        ):
            return None
        return x, (cos, sin), cache

    def memory(self, cache: Any) -> CacheMemory | None:
        """That of this layer in a cache, with room for one token more; None for the cache's
        `update`."""
        layers = () if getattr(cache, "offloading", True) else cache.layers
        if self.module.layer_idx >= len(layers):
            return None
        layer = layers[self.module.layer_idx]
        memory = vars(layer).get("memory")
        if memory is None or not memory.is_current(layer):
            if type(layer).__name__ not in GROWING or not layer.is_initialized:
                return None
            memory = CacheMemory(layer)
        # a sliding one forgets from here on
        if layer.is_sliding and memory.where[2] >= layer.sliding_window:
            return None
        return memory if memory.suits == (self.dtype, self.device) else None


class DecodeAttention(SingleToken):
    """The forward of one layer's attention; the module's own for everything but a single token.

    plan, weights : of `moelab.kernels.attention.attend`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        matrices = [matrices_of(of.weight, of.bias) for of in linears_of(module)]
        kind = KINDS[self.dtype]
        norms = norms_of(module)
        width = (self.D, self.D, 0.0)
        if norms:
            width = *(len(norm.weight) for norm in norms), epsilon(norms[0])
        heads = matrices[0].R // self.D
        self.plan = kind.tag, self.D, heads, self.kv_heads, width, heads_work(kind)
        self.weights = np.zeros((9, 4), np.int64)
        self.weights[0, : len(norms)] = [norm.weight.data_ptr() for norm in norms]
        self.weights[1:5] = np.concatenate([one.rows for one in matrices])
        inputs = [kind] * 3 + [FLOAT32]
        self.weights[5:, :3] = [one.plan(x) for one, x in zip(matrices, inputs)]

    @classmethod
    @torch.inference_mode()
    def of(cls, module: nn.Module) -> DecodeAttention | None:
        """For this module; None if a probe on a random token and angle shows another attention."""
        linears = linears_of(module)
        if not linears or None in [matrices_of(of.weight, of.bias) for of in linears]:
            return None
        ours = cls(module)
        return ours if agree(module, ours, ours, linears[0].in_features) else None

    def fused(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None] | None:
        call = self.call(*args, **kwargs)
        if call is None or self.parts.listeners() is None:
            return None
        x, token, cache = call
        if (memory := self.memory(cache)) is None:
            return None
        y = torch.empty_like(x)
        where = np.array(memory.where)
        attend(self.plan, self.weights, token, where, x.data_ptr(), x.numel(), y.data_ptr())
        memory.grow()
        return y, None

    def call(self, *args: Any, **kwargs: Any) -> tuple | None:
        """x, what `attend` takes of its token, and the cache; None if this is no single token
        without a mask."""
        if (found := super().call(*args, **kwargs)) is None:
            return None
        x, (cos, sin), cache = found
        return x, (cos.data_ptr(), sin.data_ptr(), self.module.scaling, team()), cache


class CacheMemory:
    """Memory in which the keys and values [1, kv heads, S, D] of a cache's layer grow by `GROWTH`
    tokens.

    transformers copies all of them for every token. A layer's keys and values are tensors once they
    are asked for. What was given out, cropped or reordered stays what it was.

    where : for `attend`: addresses of keys and values, S + 1 and the distance of heads.
    suits : the type and device.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = weakref.ref(layer)
        given = layer.keys, layer.values
        self.suits = layer.keys.dtype, layer.keys.device
        S = layer.keys.shape[2]
        self.size = S + GROWTH
        self.memory = [t.new_empty(*t.shape[:2], self.size, t.shape[3]) for t in given]
        for memory, t in zip(self.memory, given):
            memory[:, :, :S] = t
        keys, values = self.memory
        self.where = [keys.data_ptr(), values.data_ptr(), S + 1, keys.stride(1)]
        self.given = dict(zip(GIVEN, given))
        layer.__class__ = lazy(type(layer))
        layer.memory = self

    def is_current(self, layer: Any) -> bool:
        """Whether the layer has what it was given last, and one token more has room."""
        held, given = vars(layer), self.given
        same = all(held.get(name, self) is given.get(name, self) for name in GIVEN)
        return same and self.where[2] <= self.size

    def give(self, name: str) -> Tensor:
        """The keys or the values."""
        self.given[name] = found = self.memory[GIVEN.index(name)].narrow(2, 0, self.where[2] - 1)
        return found

    def grow(self) -> None:
        """Let the layer have one token more of what is in memory."""
        layer = self.layer()
        for name in self.given:
            delattr(layer, name)
        self.given = {}
        if layer.is_sliding:
            layer.cumulative_length += 1
        self.where[2] += 1


@cache
def lazy(cls: type) -> type:
    """A cache's layers that ask their `memory` for keys and values; copies are plain ones."""
    if hasattr(cls, "memory"):
        return cls

    class Lazy(cls):
        _layer_type = None  # or transformers would make this one for every cache
        memory: CacheMemory

        def __getattr__(self, name: str) -> Tensor:
            if name not in GIVEN:
                raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
            setattr(self, name, self.memory.give(name))
            return vars(self)[name]

        def __reduce_ex__(self, _: Any) -> tuple:
            state = vars(self) | {name: getattr(self, name) for name in GIVEN}
            del state["memory"]
            return copyreg.__newobj__, (cls,), state

    Lazy.__name__ = cls.__name__
    return Lazy


def linears_of(module: Any) -> list[nn.Linear]:
    """q, k, v and o of an attention that may be that of the kernels, their weights contiguous and of
    one type and device; none of another module."""
    if type(module).__name__ not in ATTENTIONS:
        return []
    linears = [getattr(module, name) for name in LINEARS]
    alike = {(type(of), of.weight.dtype, of.weight.device) for of in linears}
    plain = len(alike) == 1 and type(linears[0]) is nn.Linear
    return linears if plain and all(of.weight.is_contiguous() for of in linears) else []


def norms_of(module: nn.Module) -> list[nn.Module]:
    """Those of q and k, if an attention has both."""
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    return norms if None not in norms else []


@torch.inference_mode()
def agree(theirs: Any, ours: Any, attention: SingleToken, H: int) -> bool:
    """Whether two forwards of this attention, or of a layer with it, give the same, on a random
    token and angle."""
    from transformers import DynamicCache

    rng = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        random = torch.randn(1, *shape, dtype=torch.float32, generator=rng)
        return random.to(attention.device, attention.dtype)

    x = drawn(1, H)
    past = [drawn(attention.kv_heads, 3, attention.D) for _ in range(2)]
    angle = 3 * drawn(1, attention.D // 2).repeat(1, 1, 2)
    given = {"position_embeddings": (angle.cos(), angle.sin()), "attention_mask": None}
    found = []
    for forward in (theirs, ours):
        cache = DynamicCache()
        cache.update(*past, attention.module.layer_idx)
        y = forward(x, **given, past_key_values=cache)
        found.append((y[0] if isinstance(y, tuple) else y).float())
    wanted, got = found
    within = float(TOLERANCE[attention.dtype] * wanted.abs().max())
    return got.shape == wanted.shape and torch.allclose(got, wanted, rtol=0, atol=within)
