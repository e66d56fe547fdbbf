"""Decoder layers of a single token in one call: a layer up to its experts, or a stretch of layers
with theirs.

What is saved is transformers' way from one kernel to the next, a quarter of a token's time. A
stretch is a run of layers alike: the first one computes all, up to one that chooses an expert that
is not in memory; the others find in the hidden states that they are done. Between equal scores a
router's own code decides. A layer that is in no stretch, or with something on its experts or its
router, is computed up to its experts, which run as ever. With a hook on its other parts, another
forward, a prompt, a batch, a mask or a cache of another kind it takes its own forward.

    x [1, 1, H] and the cache's keys and values    →    x + attention(norm(x)) and the norm of that, [1, 1, H] each
                                                   →    x after n layers, ids and weights [L, K], times [L, 2]
"""

from __future__ import annotations

import copy
import time
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moelab.fast.attention import DecodeAttention, Room, SingleToken, agree
from moelab.fast.modules import Norm, Router
from moelab.kernels.feed_forward import ways
from moelab.kernels.layers import CLOCK, stretch, to_experts
from moelab.kernels.products import entry
from moelab.models.unchanged import Replaced, Unchanged, forward

PARTS = "input_layernorm", "self_attn", "post_attention_layernorm"
#: transformers' models that do nothing between their layers
MODELS = "MixtralModel", "OlmoeModel", "Qwen2MoeModel", "Qwen3MoeModel"


class Computed(NamedTuple):
    """What a call has done: so many layers, their choices [L, K], and seconds of
    `time.perf_counter` at which each one's experts began and ended, [L, 2], which a GPU does not
    tell."""

    layers: int
    ids: np.ndarray | Tensor
    times: np.ndarray | None


class DecodeLayer(Replaced):
    """The forward of one decoder layer, whose parts have these fast forwards; its own for all but a
    single token.

    shape : what layers of a stretch have alike.
    """

    def __init__(self, module: nn.Module, fast: list[Any]) -> None:
        first, attention, second = fast
        self._replace(module, attention)
        self.shape = attention.plan, first.H, (first.eps, second.eps)
        self.weights = attention.weights.copy()
        self.weights[0, 2:] = [norm.module.weight.data_ptr() for norm in (first, second)]

    def _replace(self, module: nn.Module, attention: SingleToken) -> None:
        super().__init__(module)
        self.attention, self.stretch = attention, None
        self.modules = [
            getattr(module, PARTS[0]),
            *attention.module.modules(),
            getattr(module, PARTS[2]),
        ]
        self.parts = Unchanged(
            self.modules[:-1], [module], self.modules[-1:], attention.parts.copied
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and self in getattr(args[0], "computed", ()):
            return args[0]
        if (call := self.attention.call(*args, **kwargs)) is None:
            return self.own(*args, **kwargs)
        x, token, cache = call
        if self.stretch and (y := self.stretch(x, token, cache)) is not None:
            return y
        if (heard := self.parts.listeners()) is None or (
            found := self.attention.room(cache)
        ) is None:
            return self.own(*args, **kwargs)
        kept_by, room = found
        y, normed = self.to_experts(x, token, room)
        room.grow(kept_by)
        for _, told in heard:
            told(y)
        return y + self.module._modules["mlp"](normed)

    def to_experts(self, x: Tensor, token: tuple, room: Room) -> tuple[Tensor, Tensor]:
        """x + attention(norm(x)), and the norm of that."""
        y, normed = torch.empty_like(x), torch.empty_like(x)
        to_experts(
            self.shape,
            self.weights,
            token,
            room.where,
            x.data_ptr(),
            y.data_ptr(),
            normed.data_ptr(),
        )
        return y, normed

    @staticmethod
    def together(model: nn.Module, layers: list[DecodeLayer]) -> Stretch:
        return Stretch(model, layers)


@torch.inference_mode()
def decode_layer(module: nn.Module) -> DecodeLayer | None:
    """The forward for this layer if its parts have ours and, with an identity for experts, a probe
    on a random token gives what its own forward gives."""
    parts = [getattr(module, name, None) for name in PARTS]
    fast = [forward(part) if isinstance(part, nn.Module) else None for part in parts]
    if [type(one) for one in fast] != [Norm, DecodeAttention, Norm] or not isinstance(
        module.mlp, nn.Module
    ):
        return None
    twin = copy.copy(module)
    twin._modules = module._modules | {"mlp": nn.Identity()}
    return (
        DecodeLayer(module, fast)
        if agree(twin, DecodeLayer(twin, fast), fast[1], fast[0].H)
        else None
    )


class Stretch:
    """Layers alike, one after the other, each with a router and experts; the first one asks it.

    An executor of experts that has `token(experts of each layer, dtype, compute) → Computed | None`
    calls compute(up, down, transposed) of SiLU-gated experts, as of `feed_forward`, with matrices
    [L, E, 4] that are 0 where experts are elsewhere; and takes note of what was computed, or gives
    None. On a GPU up and down are lists of what lies there, for each layer, and the third is
    multiply(up, down, x [1, H], ids [K], w [K]) → [1, H]."""

    def __init__(self, model: nn.Module, layers: list[DecodeLayer]) -> None:
        self.model, self.layers, layers[0].stretch = model, layers, self
        self.all, blocks = (
            model._modules["layers"],
            [layer.module._modules["mlp"] for layer in layers],
        )
        self.experts, gates = (
            [block._modules[name] for block in blocks] for name in ("experts", "gate")
        )
        parts = [part for layer in layers for part in (layer.module, *layer.modules)]
        activations = [part for of in self.experts for part in of.children()]
        self.parts = Unchanged(
            [self.all, *parts, *blocks, *activations],
            [model],
            [one for both in zip(gates, self.experts) for one in both],
            layers[0].parts.copied,
        )
        self.routers = [forward(gate) for gate in gates]
        self._prepare()

    def _prepare(self) -> None:
        self.weights = np.stack([layer.weights for layer in self.layers])
        self.gates = np.array([router.module.weight.data_ptr() for router in self.routers])

    def __call__(self, x: Tensor, token: tuple, cache: Any) -> Tensor | None:
        """x after as many layers as can be computed, which it knows as `computed`; None for
        none."""
        layers, seams = self.layers, [vars(of).get("seam") for of in self.experts]
        if None in seams or len(runs := {of.engine or of.executor for of in seams}) != 1:
            return None
        if (run := getattr(runs.pop(), "token", None)) is None:
            return None
        rooms, heard, made = [], [], []

        def compute(*experts: Any) -> Computed:
            rooms[:] = [layer.attention.room(cache) for layer in layers]
            told = (
                self.parts.listeners()
                if self.model.config.num_hidden_layers == len(self.all)
                else None
            )
            if None in rooms or told is None:
                return Computed(0, np.empty((0, 1), np.int64), np.empty((0, 2)))
            heard[:] = told
            *made[:], done = self._compute(x, token, [room for _, room in rooms], *experts)
            return done

        found = run(seams, x.dtype, compute)
        if found is None or not found.layers:
            return None
        for layer, room in rooms[: found.layers]:
            room.grow(layer)
        (y, w), ids = made, torch.as_tensor(found.ids)
        for i, told in heard:  # two modules of each layer
            if i // 2 < found.layers:
                told(ids[i // 2 :][:1], w[i // 2 :][:1])
        y.computed = {*layers[: found.layers]}
        return y

    def _compute(
        self, x: Tensor, token: tuple, rooms: list[Room], up: tuple, down: tuple, transposed: bool
    ) -> tuple[Tensor, Tensor, Computed]:
        """x after as many layers as can be computed, their weights [L, K], and what was done."""
        router, L, y, H = self.routers[0], len(self.layers), x.clone(), x.shape[-1]
        K, kind = router.module.top_k, type(self.layers[0].shape[0][0])
        w, ids, times = (
            torch.empty(L, K, dtype=router.dtype),
            np.full((L, K), -1),
            np.zeros((L, 2), np.int64),
        )
        memory = np.empty((4, max(H, up[1].shape[1])), np.float32)
        routing = router.kind, router.normalised, entry(kind, x=kind)
        given = (
            self.layers[0].shape,
            routing,
            ways(up, down, transposed, x.dtype),
            self.weights,
            self.gates,
            up[1],
            down[1],
            token,
            np.array([room.where for room in rooms]),
            y.data_ptr(),
            w.data_ptr(),
            ids,
            times,
            CLOCK,
            memory,
        )
        since = time.perf_counter() - time.clock_gettime_ns(CLOCK[1]) / 1e9
        done = stretch(*given, 0)
        while done < L and ids[done, 0] < 0:
            normed = torch.from_numpy(memory[1]).view(x.dtype)[:H]
            _, w[done], ids[done] = self.routers[done].own(normed[None])
            done = stretch(*given, done)
        return y, w, Computed(done, ids, since + times / 1e9)


@torch.inference_mode()
def stretches(model: nn.Module) -> list[Stretch]:
    """A model's stretches: layers that have our forwards, each with a router of ours and experts in
    a block that does nothing else, as a probe shows."""
    if type(model).__name__ not in MODELS or not CLOCK[0]:
        return []
    runs = groupby([forward(module) for module in model._modules["layers"]], _alike)
    return [
        layers[0].together(model, layers) for alike, run in runs if alike for layers in [list(run)]
    ]


def _alike(layer: Any) -> tuple | None:
    """What layers of a stretch have in common; None for one that can be in none."""
    if not isinstance(layer, DecodeLayer) or not _only_experts(layer):
        return None
    attention, router = layer.attention.module, forward(layer.module.mlp.gate)
    return (
        type(layer),
        repr(layer.shape),
        attention.scaling,
        id(attention.config),
        router.normalised,
        router.dtype,
        router.module.top_k,
        router.module.weight.shape,
    )


def _only_experts(layer: DecodeLayer) -> bool:
    """Whether a layer's block gives its experts the router's choice of a random token, and back
    what they give."""
    block, x = (
        layer.module.mlp,
        torch.randn(1, 1, layer.shape[1], generator=torch.Generator().manual_seed(0)),
    )
    if (
        block._modules.keys() != {"gate", "experts"}
        or not isinstance(router := forward(block.gate), Router)
        or forward(block)
        or forward(block.experts)
        or Unchanged([block]).listeners() is None
    ):
        return False
    twin, given, x = copy.copy(block), [], x.to(layer.attention.device, layer.attention.dtype)
    twin._modules = block._modules | {
        "experts": lambda *what: given.extend(what) or what[0].roll(1, -1)
    }
    y, (_, weights, ids) = twin(x), router(x[0])
    return isinstance(y, Tensor) and all(
        torch.equal(a.flatten(), b.flatten())
        for a, b in zip((y, *given), (x.roll(1, -1), x, ids, weights), strict=True)
    )
