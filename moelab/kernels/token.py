"""All decoder layers of a single token in one call, as far as the experts that it chooses are in memory.

The kernels are those of `layer`, `norms` and `feed_forward`, so each number is as theirs; what is saved is the way
from one to the next, a quarter of a token's time. The first layer calls; the others find in the hidden states that they
are done. A layer that chooses an expert elsewhere ends the call, and runs as ever, like those after it. So does all
that is not exactly this: a hook on a part, another forward, prompts, batches, masks, a layer or cache of another kind.

    x [1, 1, H] and the cache's keys and values    →    x after so many layers, ids and weights [L, K], times [L, 2]
"""

from __future__ import annotations

import copy
import ctypes
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moelab.kernels.compile import kernel
from moelab.kernels.feed_forward import _feed_forward
from moelab.kernels.layer import DecodeLayer, forward, heard_everywhere, to_experts
from moelab.kernels.norms import Router, _route
from moelab.kernels.products import OUTPUTS, PIECE, TEAM, entry
from moelab.kernels.tiles import kept, now, span, weight, write

#: transformers' models that do nothing between their layers
MODELS = "MixtralModel", "OlmoeModel", "Qwen2MoeModel", "Qwen3MoeModel"
#: the C library's clock_gettime and the clock that it is asked for; 0 where there is none
try:
    CLOCK = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value or 0, time.CLOCK_MONOTONIC
except (OSError, AttributeError, TypeError):
    CLOCK = 0, 0


class Bank(NamedTuple):
    """Where one matrix of all experts of all layers lies: int64 [L, E, 4] as of `products.multiply`, zeros for experts
    that are elsewhere; its kind and number of outputs."""

    kind: type
    table: np.ndarray
    R: int


class Computed(NamedTuple):
    """What a call has done: so many layers, their choices [L, K], and seconds of `time.perf_counter` at which each
    one's experts began and ended, [L, 2]."""

    layers: int
    ids: np.ndarray
    times: np.ndarray


class DecodeToken:
    """Put on the layers of a model as their `token`.

    An executor of experts that has `token(experts of each layer, dtype, compute) → Computed | None` calls compute(up,
    down, transposed) with `Bank`s of SiLU-gated experts and takes note of what was computed, or gives None.
    """

    def __init__(self, model: nn.Module, layers: list[DecodeLayer]) -> None:
        self.model, self.layers = model, layers
        self.blocks = [layer.module._modules["mlp"] for layer in layers]
        self.routers: list[Router] = [forward(block._modules["gate"]) for block in self.blocks]
        self.chosen_by = [_address(router.module) for router in self.routers]
        plans = [layer.attention.plan for layer in layers]
        self.tables = [np.array([plan[part][1] for plan in plans]) for part in (5, 6)] + [
            np.array([[*plan[4][:2], *layer.weights, router] for plan, layer, router in
                      zip(plans, layers, self.chosen_by)])]
        for i, layer in enumerate(layers):
            layer.token = self._passed(i) if i else self._first

    def _passed(self, i: int) -> Callable[..., Tensor | None]:
        return lambda x, *_, **__: x if getattr(x, "layers", 0) > i else None

    def _first(self, *args: Any, **kwargs: Any) -> Tensor | None:
        attention, router, L = self.layers[0].attention, self.routers[0], len(self.layers)
        if (call := attention.call(*args, **kwargs)) is None or (heard := self._heard()) is None:
            return None
        x, cos, sin, cache = call
        modules = [block._modules["experts"] for block in self.blocks]
        run = getattr(getattr(modules[0], "executor", None), "token", None)
        if run is None or any(experts.executor is not modules[0].executor for experts in modules) \
                or None in (rooms := [layer.attention.room(cache) for layer in self.layers]):
            return None
        K, x = router.module.top_k, x.clone()
        w, ids, times = torch.empty(L, K, dtype=router.dtype), np.empty((L, K), np.int64), np.zeros((L, 2), np.int64)
        where = np.array([(keys.data_ptr(), values.data_ptr(), S + 1, keys.stride(1))
                          for _, (keys, values), S in rooms])

        def compute(up: Bank, down: Bank, transposed: bool) -> Computed:
            began = time.perf_counter()
            done = _token(_constants(self.layers[0], router), *self.tables, where, (cos.data_ptr(), sin.data_ptr()),
                          attention.module.scaling, x.data_ptr(), w.data_ptr(), ids, times, up.table, down.table,
                          _experts(up, down, transposed), CLOCK, TEAM, torch.get_num_threads())
            return Computed(done, ids, began + times / 1e9)
        found = run(modules, x.dtype, compute)
        if found is None or not found.layers:
            return None
        for i in range(found.layers):
            self.layers[i].attention.grow(*rooms[i])
            for told in heard[i]:
                told(torch.from_numpy(ids[i:i + 1]), w[i:i + 1])
        x.layers = found.layers
        return x

    def _heard(self) -> list[list[Callable[[Tensor, Tensor], Any]]] | None:
        """Who is told ids [1, K] and weights [1, K] of each layer; None if somebody has replaced a part, or has put
        something else on one."""
        model, layers, everyone = self.model, [layer.module for layer in self.layers], []
        if heard_everywhere() or [*model._modules["layers"]._modules.values()] != layers \
                or model.config.num_hidden_layers != len(layers):
            return None
        for layer, block, router, address in zip(self.layers, self.blocks, self.routers, self.chosen_by):
            gate, experts = parts = [block._modules[name] for name in ("gate", "experts")]
            module = layer.module
            if not layer.untouched() or module._modules["mlp"] is not block or forward(module) is not layer \
                    or forward(gate) is not router or "forward" in block.__dict__ or "forward" in experts.__dict__ \
                    or any(_hooks(module)) or any(_hooks(block)) or _address(gate) != address:
                return None
            told = [getattr(getattr(hook, "function", None), "told", None)
                    for part in parts for hooks in _hooks(part) for hook in hooks.values()]
            if None in told:
                return None
            everyone.append(told)
        return everyone


def _hooks(module: nn.Module) -> tuple[dict, dict]:
    return module._forward_pre_hooks, module._forward_hooks


def _address(router: nn.Module) -> int:
    return router._parameters["weight"].data_ptr()


def _constants(layer: DecodeLayer, router: Router) -> tuple:
    """What `_token` takes of a layer, and all have alike."""
    kind, heads_work, kv_heads, D, (_, _, *widths), before, after = layer.attention.plan
    return (kind, heads_work, kv_heads, D, tuple(widths), (before[0], *before[2:]), (after[0], *after[2:]), layer.H,
            layer.norms[2:], (router.kind, router.normalised, entry(type(kind))))


def _experts(up: Bank, down: Bank, transposed: bool) -> tuple:
    orders = [np.float32(0) if transposed else bank.kind(0) for bank in (up, down)]
    return (*orders, up.R, OUTPUTS if transposed else PIECE, entry(up.kind, transposed), entry(down.kind, transposed))


@torch.inference_mode()
def decode_token(model: nn.Module) -> DecodeToken | None:
    """For a model whose layers have our forwards, all of one geometry, each with a router of ours and experts in a
    block that does nothing else, as a probe shows."""
    modules = model._modules.get("layers")
    layers = [forward(module) for module in modules or ()] if type(model).__name__ in MODELS else []
    if not (layers and CLOCK[0] and all(isinstance(layer, DecodeLayer) and _only_experts(layer) for layer in layers)):
        return None
    found = {repr((_constants(layer, router), layer.attention.module.scaling, router.module.top_k,
                   router.module.weight.shape))
             for layer in layers for router in [forward(layer.module.mlp.gate)]}
    return DecodeToken(model, layers) if len(found) == 1 else None


class _Told(nn.Module):
    """Stands for experts."""

    def forward(self, *given: Tensor) -> Tensor:
        self.given, self.gave = given, given[0].roll(1, -1)
        return self.gave


def _only_experts(layer: DecodeLayer) -> bool:
    """Whether a layer's block gives its experts the router's choice of a random token, and back what they give."""
    block, x = layer.module.mlp, torch.randn(1, 1, layer.H, generator=torch.Generator().manual_seed(0))
    if block._modules.keys() != {"gate", "experts"} or not isinstance(router := forward(block.gate), Router) \
            or any(_hooks(block)):
        return False
    twin, told, x = copy.copy(block), _Told(), x.to(layer.attention.dtype)
    twin._modules = block._modules | {"experts": told}
    y, (_, weights, ids) = twin(x), router(x[0])
    return isinstance(y, Tensor) and all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(
        (y, *told.given), (told.gave, x, ids, weights), strict=True))


@kernel(error_model="numpy")
def _token(constants, befores, afters, addresses, where, angle, scaling, x, w, ids, times, ups, downs, experts, clock,
           team, threads):
    """How many layers were computed; x [H], w and ids [L, K] and times [L, 2] are written."""
    kind, heads_work, kv_heads, D, (q_width, k_width, eps), before, after, H, epsilons, routing = constants
    (score_kind, normalised, router_work), (up_order, down_order, two_I, outputs, up_work, down_work) = routing, experts
    (L, K), E, start = ids.shape, ups.shape[1], now(*clock)
    memory = np.empty((4, max(H, E)), np.float32)
    up, down, each = np.empty((K, 4), np.int64), np.empty((K, 4), np.int64), np.arange(K + 1)
    tokens, rows = np.zeros(K, np.int64), each[:K].copy().reshape(1, K)
    y, normed, out, logits = [memory[i:].ctypes.data for i in range(4)]
    for i in range(L):
        q_norm, k_norm, norm, next_norm, router = addresses[i]
        (order, bounds, work), (last_order, one, last_work) = before, after
        plan = (kind, heads_work, kv_heads, D, (q_norm, k_norm, q_width, k_width, eps),
                (order, befores[i], bounds, work), (last_order, afters[i], one, last_work))
        token = (*angle, where[i, 0], where[i, 1], where[i, 2], where[i, 3], scaling, team, threads)
        to_experts(plan, token, (norm, next_norm, *epsilons), H, x, y, normed)
        at = w + span(score_kind, i * K)
        _route(kind, score_kind, normed, router, E, H, K, normalised, logits, at, ids[i:i + 1], router_work,
               team, threads)
        for k in range(K):
            up[k], down[k] = ups[i, ids[i, k]], downs[i, ids[i, k]]
            if up[k, 0] == 0:
                return i
        times[i, 0] = now(*clock) - start
        _feed_forward(kind, up_order, down_order, up, two_I, down, H, each, normed, 1, H, tokens, rows, score_kind, at,
                      out, outputs, up_work, down_work, team, threads)
        times[i, 1] = now(*clock) - start
        for h in range(H):
            write(kind, x, h, weight(kind, y, h) + weight(kind, out, h))
    kept(memory)
    return L
