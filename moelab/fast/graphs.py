"""Decoder layers of a single token on a GPU, as CUDA graphs: a layer up to its experts, or a
stretch with theirs.

transformers tells the GPU a layer in about sixty launches, each of which takes the CPU longer than
it takes the GPU. A graph is one launch of what was told once, with weights, inputs and results
where they were then. Where the cache is, which grows and is another one in each generation,
attention reads from memory (`attention_triton`), as experts do from which of their addresses. Norms
are torch's own fused ones, a router its own."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moelab.fast.attention import Room, SingleToken, agree, linears_of
from moelab.fast.layers import PARTS, Computed, DecodeLayer, Stretch
from moelab.fast.modules import Router, epsilon
from moelab.kernels.products import KINDS

GPUS = ("cuda",)


class Graph:
    """What `tell` tells the GPU, again with each call: writes to and returns the same tensors.
    Elsewhere calls it.

    One thread at a time fills a graph's inputs, calls it and copies what it made, within `LOCK` and
    `in_turn`."""

    def __init__(self, tell: Callable[[], Any], device: torch.device) -> None:
        self.again = tell
        if device.type == "cuda":
            with LOCK:
                self._capture(tell, device)  # one line: an interruption comes before or within it

    def __call__(self) -> Any:
        return self.again()

    def _capture(self, tell: Callable[[], Any], device: torch.device) -> None:
        in_turn(device)
        stream, others = _capturing(device)
        self.graph, was = torch.cuda.CUDAGraph(), gc.isenabled()
        with torch.cuda.device(device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # kernels are compiled, libraries take their memory
                    tell()
                gc.disable()  # CUDA gives up if another graph is freed meanwhile
                try:
                    # What is between kernels may lie where other graphs have it, as long as there
                    # is one.
                    self.graph.capture_begin(
                        next((other.graph.pool() for other in others), None), "thread_local"
                    )
                    made = tell()
                    self.graph.capture_end()
                except BaseException:
                    with suppress(Exception):  # or this thread could not go on at all
                        self.graph.capture_end()
                    _capturing.cache_clear()
                    raise
                finally:
                    if was:
                        gc.enable()
            torch.cuda.current_stream().wait_stream(stream)
        others.add(self)
        self.again = partial(_replay, self.graph, made)


def _replay(graph: Any, made: Any) -> Any:
    graph.replay()
    return made


LOCK = threading.RLock()
_LAST: dict[
    torch.device, torch.cuda.Stream
] = {}  # device → the stream that has last replayed a graph


def in_turn(device: torch.device) -> None:
    """What this thread tells a GPU from now on waits for what others have told it within `LOCK`."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        if (last := _LAST.get(device, stream)) != stream:
            stream.wait_stream(last)
        _LAST[device] = stream


@cache
def _capturing(device: torch.device) -> tuple[torch.cuda.Stream, WeakSet[Graph]]:
    """The stream on which graphs are captured, and those that there are."""
    return torch.cuda.Stream(device), WeakSet()


class GraphLayer(DecodeLayer):
    """The forward of one decoder layer; with a router in its block, that is part of the graph."""

    def __init__(self, module: nn.Module) -> None:
        self._replace(module, SingleToken(module.self_attn))
        attention, weight = self.attention, module.input_layernorm.weight
        self.eps, H = [epsilon(getattr(module, PARTS[i])) for i in (0, 2)], len(weight)
        self.shape = (attention.dtype, attention.kv_heads, attention.D), H, self.eps
        self.x, self.cos, self.sin = (
            weight.new_zeros(1, 1, n) for n in (H, attention.D, attention.D)
        )
        self.where, self.placed = torch.zeros(4, dtype=torch.int64, device=weight.device), []
        self._nowhere = weight.new_zeros(
            2, attention.kv_heads, 8, attention.D
        )  # of no generation, to be captured
        gate = getattr(module.mlp, "gate", None)
        self.router = GraphRouter(gate) if _is_router(gate) else None
        self.place(None)
        self.graph = Graph(lambda: self.tell(self.x, self.cos, self.sin), self.x.device)

    def place(self, room: Room | None) -> None:
        """Attend to this cache, which the graph lets grow by a token each time; None for none that
        anybody uses."""
        keys, values = self._nowhere
        where = (
            [keys.data_ptr(), values.data_ptr(), 1, keys.stride(0)]
            if room is None
            else room.where.tolist()
        )
        if room is None or self.placed != where:
            self.placed = []  # until it is there, should this be interrupted
            self.where.copy_(torch.tensor(where))
        where[2] += 1
        self.placed = where

    def tell(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Any]:
        """x + attention(norm(x)), the norm of that, and what the router makes of it."""
        from moelab.fast import attention_triton

        attn, D = self.attention.module, self.attention.D
        first, *_, second = self.modules
        h = F.rms_norm(x, x.shape[-1:], first.weight, self.eps[0])
        q, k, v, o = linears_of(attn)
        q, k, v = (F.linear(h, of.weight, of.bias) for of in (q, k, v))
        if (norm := getattr(attn, "q_norm", None)) is not None:
            q = F.rms_norm(
                q.view(-1, len(norm.weight)), norm.weight.shape, norm.weight, epsilon(norm)
            )
            k = F.rms_norm(
                k.view(-1, len(attn.k_norm.weight)),
                attn.k_norm.weight.shape,
                attn.k_norm.weight,
                epsilon(attn.k_norm),
            )
        y = attention_triton.attend(
            q.view(-1, D), k.view(-1, D), v.view(-1, D), cos, sin, self.where, attn.scaling
        )
        self.where[2:3].add_(1)
        y = x + F.linear(y.view(1, 1, -1), o.weight, o.bias)
        normed = F.rms_norm(y, y.shape[-1:], second.weight, self.eps[1])
        return y, normed, self.router and self.router.own(normed.view(1, -1))

    def listen(self, x: Tensor, token: tuple) -> None:
        """The graph's inputs."""
        torch._foreach_copy_([self.x, self.cos, self.sin], [x, *token])

    def to_experts(self, x: Tensor, token: tuple, room: Room) -> tuple[Tensor, Tensor]:
        with LOCK:
            return self._to_experts(x, token, room)  # one line: see `Graph`

    def _to_experts(self, x: Tensor, token: tuple, room: Room) -> tuple[Tensor, Tensor]:
        in_turn(x.device)
        self.listen(x, token)
        self.place(room)
        y, normed, routed = self.graph()
        y, normed = y.clone(), normed.clone()
        if self.router:
            self.router.made = normed, [made.clone() for made in routed]
        return y, normed

    @staticmethod
    def together(model: nn.Module, layers: list[DecodeLayer]) -> Stretch:
        return GraphStretch(model, layers)


def graph_layer(module: nn.Module) -> GraphLayer | None:
    """The graph of this layer if it is one on a GPU that gives, with an identity for experts, what
    its own forward gives for a random token."""
    linears = linears_of(getattr(module, PARTS[1], None))
    norms = [getattr(module, name, None) for name in (PARTS[0], PARTS[2])]
    if (
        not linears
        or linears[0].weight.device.type not in GPUS
        or not _fits(module, linears, norms)
    ):
        return None
    try:
        from moelab.fast import attention_triton  # noqa: F401
    except ImportError:  # no Triton: the layer's own forward does
        return None
    twin = copy.copy(module)
    twin._modules = module._modules | {"mlp": nn.Identity()}
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # or nobody could write to a graph's inputs elsewhere
            ours = GraphLayer(module)
            ours.module = twin
            same = agree(twin, ours, ours.attention, len(norms[0].weight))
    except Exception as error:  # no compiler for Triton, or a kernel that does not fit this GPU
        warnings.warn(
            f"decoding without CUDA graphs: {type(module).__name__} cannot be captured here ({error})",
            stacklevel=2,
        )
        return None
    ours.module = module
    return ours if same else None


def _fits(module: nn.Module, linears: list[nn.Linear], norms: list[Any]) -> bool:
    attn = module.self_attn
    extra = [
        norm for name in ("q_norm", "k_norm") if (norm := getattr(attn, name, None)) is not None
    ]
    weights = [getattr(norm, "weight", None) for norm in norms + extra] + [
        of.weight for of in linears
    ]
    return (
        all(
            isinstance(w, Tensor)
            and w.dtype == weights[0].dtype
            and w.device == weights[0].device
            and w.is_contiguous()
            and w.dtype.itemsize < 8
            for w in weights
        )
        and all(
            type(norm).__name__.endswith("RMSNorm") and epsilon(norm) is not None
            for norm in norms + extra
        )
        and all(type(of) is nn.Linear for of in linears)
        and attn.head_dim % 8 == 0
        and len(extra) in (0, 2)
        and isinstance(getattr(module, "mlp", None), nn.Module)
    )


def _is_router(gate: Any) -> bool:
    """Whether a router's own forward makes logits, weights and ids of one token, and its weight
    alone says which."""
    return (
        isinstance(gate, nn.Module)
        and type(gate).__name__.endswith("Router")
        and [name for name, _ in gate.named_parameters()] == ["weight"]
        and gate.weight.device.type in GPUS
        and isinstance(getattr(gate, "top_k", None), int)
        and gate.weight.dtype in KINDS
        and not list(gate.buffers())
    )


class GraphRouter(Router):
    """The forward of a router: what its layer's graph has just made of these hidden states, or else
    its own. Whether its weights are normalised and of which type they are, its own code says, in
    the graph, too.

    made : (hidden states, what the graph made of them), for one call.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, False, module.weight.dtype)
        self.made = None

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (normed, made), self.made = self.made or (None, None), None
        if (
            normed is None
            or hidden_states.data_ptr() != normed.data_ptr()
            or hidden_states.numel() != normed.numel()
            or self.parts.listeners() is None
        ):
            return self.own(hidden_states)
        return tuple(made)


class GraphStretch(Stretch):
    """Layers alike with their experts, all in memory, in one graph."""

    def _prepare(self) -> None:
        self.of, self.graph = (None, None), None

    def _compute(self, *given: Any) -> tuple[Tensor, Tensor, Computed]:
        with LOCK:
            return self._computed(*given)  # one line: see `Graph`

    def _computed(
        self,
        x: Tensor,
        token: tuple,
        rooms: list[Room],
        up: list,
        down: list,
        multiply: Callable[..., Tensor],
    ) -> tuple[Tensor, Tensor, Computed]:
        in_turn(x.device)
        if self.of[0] is not up or self.of[1] is not down:  # other matrices now
            with torch.inference_mode(False), torch.no_grad():
                self.graph = self._captured(up, down, multiply)
            self.of = up, down
        self.layers[0].listen(x, token)
        for layer, room in zip(self.layers, rooms):
            layer.place(room)
        y, w, ids = (made.clone() for made in self.graph())
        return y, w, Computed(len(rooms), ids, None)

    def _captured(self, ups: list, downs: list, multiply: Callable[..., Tensor]) -> Graph:
        first = self.layers[0]

        def tell() -> tuple[Tensor, Tensor, Tensor]:
            x, chosen = first.x, []
            for layer, up, down in zip(self.layers, ups, downs):
                y, normed, (_, w, ids) = layer.tell(x, first.cos, first.sin)
                x = y + multiply(up, down, normed.view(1, -1), ids[0], w[0]).view_as(y)
                chosen.append((w, ids))
            return x, *(torch.cat(each) for each in zip(*chosen))

        for layer in self.layers:
            layer.place(None)
        return Graph(tell, first.x.device)
