"""Decoder layers of a single token in one call: a layer up to its experts, or a stretch of layers
with theirs.

What is saved is transformers' way from one kernel to the next, a quarter of a token's time. A
stretch is a run of layers alike, which `moelab.fast.token` has computed in one call, up to one that
chooses an expert that is not in memory: its block runs as ever, and another call does the layers
after it. Between equal scores torch decides, as it does for a router. A layer that is in no stretch,
or with something on its experts or its router, is computed up to its experts, which run as ever.
With a hook on its other parts, another forward, a prompt, a batch, a mask or a cache of another kind
it takes its own forward.

    x [1, 1, H] and the cache's keys and values    →    x + attention(norm(x)) and the norm of that, [1, 1, H] each
                                                   →    x after n layers, ids and weights [L, K], times [L, 2]
"""

from __future__ import annotations

import time
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moelab.fast.attention import CacheMemory, DecodeAttention, SingleToken, agree
from moelab.fast.modules import Norm, Router
from moelab.kernels.feed_forward import plans
from moelab.kernels.layers import CLOCK, decode_layers, to_experts
from moelab.kernels.products import KINDS, Matrices
from moelab.models import compat
from moelab.models.unchanged import FusedModule, Unchanged, forward

PARTS = "input_layernorm", "self_attn", "post_attention_layernorm"
#: blocks that do nothing else
BARE = "MixtralSparseMoeBlock", "OlmoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock"


class Computed(NamedTuple):
    """What a call has done: so many layers, the choices [L, K] of those that have a router, and seconds
    of `time.perf_counter` at which each one's experts began and ended, [L, 2]; None on a GPU.

    inside : of the next layer, whose experts are not all in memory: x + attention(norm(x)), and the
        norm of that.
    """

    layers: int
    ids: np.ndarray | Tensor
    times: np.ndarray | None
    inside: tuple[Tensor, Tensor] | None = None


class OneTokenLayer(FusedModule):
    """The forward of one decoder layer for a single token: up to its experts, or all of its stretch.

    `to_experts(x, token, memory)` of a subclass gives x + attention(norm(x)), and the norm of that.

    shape : what layers of a stretch have alike.
    """

    shape: tuple

    def __init__(self, module: nn.Module, attention: SingleToken) -> None:
        self.norms = first, second = module.input_layernorm, module.post_attention_layernorm
        self.modules = [first, *attention.module.modules(), second]
        super().__init__(module, Unchanged(self.modules[:-1], [module], [second]))
        self.attention = attention

    def fused(self, *args: Any, **kwargs: Any) -> Tensor | None:
        if (call := self.attention.call(*args, **kwargs)) is None:
            return None
        x, token, cache = call
        heard = self.parts.listeners()
        if heard is None or (memory := self.attention.memory(cache)) is None:
            return None
        y, normed = self.to_experts(x, token, memory)
        memory.grow()
        for _, hear in heard:
            hear(y)
        return y + compat.children_of(self.module)["mlp"](normed)

    def agrees(self) -> bool:
        """Whether, with an identity for experts, it gives what the layer's own forward gives for a
        random token."""
        module = self.module
        self.module = twin = compat.with_children(module, {"mlp": nn.Identity()})
        same = agree(twin, self, self.attention, len(self.norms[0].weight))
        self.module = module
        return same

    def is_sparse(self) -> bool:
        """Whether it has experts."""
        return "experts" in compat.children_of(self.module.mlp)

    def alike(self) -> tuple | None:
        """What all layers of a stretch have in common; None for a layer that can be in no stretch: one whose
        block or experts have another forward than transformers', or whose router has none of ours."""
        block = self.module.mlp
        plain = forward(block) is None
        if plain and self.is_sparse():
            plain = forward(block.experts) is None and isinstance(forward(block.gate), Router)
        attention = self.attention.module
        shape = repr(self.shape), attention.scaling, id(attention.config)
        return (type(self), *shape) if plain else None


class DecodeLayer(OneTokenLayer):
    """A layer whose norms and attention have kernels of ours.

    shape, weights : of `moelab.kernels.layers.to_experts`.
    """

    def __init__(self, module: nn.Module, parts: list[Any]) -> None:
        first, attention, second = parts
        super().__init__(module, attention)
        self.shape = attention.plan, first.H, (first.eps, second.eps)
        self.weights = attention.weights.copy()
        self.weights[0, 2:] = [norm.module.weight.data_ptr() for norm in (first, second)]

    @classmethod
    @torch.inference_mode()
    def of(cls, module: nn.Module) -> DecodeLayer | None:
        """For this layer if its parts have kernels of ours and both agree."""
        children = compat.children_of(module)
        parts = [forward(children[name]) for name in PARTS if name in children]
        if [type(part) for part in parts] != [Norm, DecodeAttention, Norm]:
            return None
        ours = cls(module, parts)
        return ours if ours.agrees() else None

    def alike(self) -> tuple | None:
        """Also the numbers of experts and of those chosen; None unless the block does nothing but route."""
        alike = super().alike() if CLOCK[0] else None
        if alike is None or type(self.module.mlp).__name__ not in BARE:
            return None
        gate = self.module.mlp.gate
        router = forward(gate)
        return *alike, router.normalised, router.dtype, gate.top_k, gate.weight.shape

    def to_experts(self, x: Tensor, token: tuple, memory: CacheMemory) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(x)
        normed = torch.empty_like(x)
        out = y.data_ptr(), normed.data_ptr()
        to_experts(self.shape, self.weights, token, np.array(memory.where), x.data_ptr(), *out)
        return y, normed


class Stretch:
    """Layers, one after the other.

    An executor of experts says where these lie: `token` of `moelab.experts.gemv.GEMV`.
    `compute(x, token, memories, experts, first)` of a subclass gives x after as many layers from the
    `first` as can be computed, weights [L, K] of those with a router, and what was `Computed`. A layer
    whose experts are not all in memory runs its own block. Of an engine that is not told what was done,
    it is prepared only."""

    def __init__(self, layers: list[OneTokenLayer]) -> None:
        self.layers = layers
        #: x, what kernels take of its token, and the cache, of a call of a layer
        self.call = layers[0].attention.call
        blocks = [layer.module.mlp for layer in layers]
        sparse = [block for block in blocks if "experts" in compat.children_of(block)]
        self.experts = [block.experts for block in sparse]
        self.routers = [forward(block.gate) for block in sparse]
        heard = [module for block in sparse for module in (block.gate, block.experts)]
        silent = [
            module
            for layer in layers
            for module in (layer.module, *layer.modules, *layer.module.mlp.modules())
            if module not in heard
        ]
        self.parts = Unchanged(silent, heard=heard)

    def prepare(self, experts: Any) -> bool:
        """Make what computes with experts that lie so; whether that is possible."""
        return True

    def __call__(self, x: Tensor, token: tuple, memories: list[CacheMemory]) -> tuple[Tensor, int]:
        """x after as many layers as can be computed, and how many these are.

        memories : of the cache, for these layers and perhaps others behind them."""
        seams = [vars(experts).get("seam") for experts in self.experts]
        runs = set() if None in seams else {of.engine or of.executor for of in seams}
        executing = getattr(runs.pop(), "token", None) if len(runs) == 1 else None
        first, L = 0, len(self.layers)
        while executing and first < L:
            with executing(seams, x.dtype) as (experts, done):
                heard = None if experts is None else self.parts.listeners()
                if heard is None or not self.prepare(experts) or done is None:
                    break
                x, w, found = self.compute(x, token, memories[:L], experts, first)
                done(first, found)
            for memory in memories[first : first + found.layers]:
                memory.grow()
            ids = torch.as_tensor(found.ids)
            for i, hear in heard:  # two modules of each layer
                if 0 <= (at := i // 2 - first) < len(ids):
                    hear(ids[at:][:1], w[at:][:1])
            first += found.layers
            if found.inside is not None:
                y, normed = found.inside
                memories[first].grow()
                x = y + compat.children_of(self.layers[first].module)["mlp"](normed)
                first += 1
        return x, first


class DecodeStretch(Stretch):
    """`DecodeLayer`s and their experts, by one kernel."""

    def __init__(self, layers: list[DecodeLayer]) -> None:
        super().__init__(layers)
        self.weights = np.stack([layer.weights for layer in layers])
        self.plans: tuple = None, None  # of `gated`: kinds of matrices, and theirs
        self.gates = np.array([router.module.weight.data_ptr() for router in self.routers])

    def compute(
        self,
        x: Tensor,
        token: tuple,
        memories: list[CacheMemory],
        experts: tuple[Matrices, Matrices],
        first: int,
    ) -> tuple[Tensor, Tensor, Computed]:
        up, down = experts
        router = self.routers[0]
        y = x.clone()
        H = x.shape[-1]
        L = len(self.layers)
        K = router.module.top_k
        E = up.rows.shape[1]
        w = torch.empty(L, K, dtype=router.dtype)
        ids = np.full((L, K), -1)
        times = np.zeros((L, 2), np.int64)
        memory = np.empty((4, max(H, E)), np.float32)
        if self.plans[0] != (of := [(m.kind, m.transposed, m.biases) for m in experts]):
            self.plans = of, plans(up, down, KINDS[x.dtype])
        plan = self.layers[0].shape, router.plan(), self.plans[1]
        where = np.array([memory.where for memory in memories])
        given = plan, self.weights, self.gates, (up.rows, down.rows), token, where, y.data_ptr()
        made = (w.data_ptr(), ids, times), CLOCK, memory
        since = time.perf_counter() - time.clock_gettime_ns(CLOCK[1]) / 1e9
        done = decode_layers(*given, *made, first)
        logits = torch.from_numpy(memory[3]).view(x.dtype)[:E]
        while done < L and ids[done, 0] < 0:  # between equal scores, torch decides
            ids[done] = torch.topk(logits, K).indices
            done = decode_layers(*given, *made, done)
        mine = slice(first, done)
        inside = None
        if done < L:
            inside = tuple(torch.from_numpy(of).view(x.dtype)[:H].view_as(x) for of in memory[:2])
        return y, w[mine], Computed(done - first, ids[mine], since + times[mine] / 1e9, inside)


def stretches(layers: list[OneTokenLayer], kinds: dict[type, type]) -> dict[int, Stretch]:
    """A model's stretches, by the position of the first layer: runs of layers that are `alike`.

    kinds : class of layers → of their stretches."""
    found = {}
    runs = groupby(enumerate(layers), lambda layer: layer[1].alike())
    for alike, run in runs:
        positions, run = zip(*run)
        if alike and any(layer.is_sparse() for layer in run):
            found[positions[0]] = kinds[type(run[0])]([*run])
    return found
