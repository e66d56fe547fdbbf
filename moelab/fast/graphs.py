"""Decoder layers of a single token on a GPU, as CUDA graphs: a layer up to its experts, or a
stretch with theirs.

transformers launches about sixty kernels a layer, each of which takes the CPU longer than it takes
the GPU. A graph is captured once and launched as one, with weights, inputs and results where they
were then. Where the cache is, which grows and is another one in each generation, attention reads
from memory (`attention_triton`), as experts do from which of their addresses. Norms are torch's own
fused ones, a router its own."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moelab.fast.attention import CacheMemory, SingleToken, linears_of, norms_of
from moelab.fast.layers import PARTS, Computed, OneTokenLayer, Stretch
from moelab.fast.modules import Router, epsilon
from moelab.kernels.products import KINDS
from moelab.models import compat

GPUS = ("cuda",)


class Graph:
    """Captures `function()` as a CUDA graph; each call replays it, writes to and returns the same
    tensors. Elsewhere calls it.

    One thread at a time fills a graph's inputs, calls it and copies what it made, within `LOCK` and
    `in_turn`."""

    def __init__(self, function: Callable[[], Any], device: torch.device) -> None:
        self.function = function
        self.graph = None
        if device.type == "cuda":
            with LOCK:
                self._capture(device)

    def __call__(self) -> Any:
        if self.graph is None:
            return self.function()
        self.graph.replay()
        return self.made

    def _capture(self, device: torch.device) -> None:
        in_turn(device)
        stream, others = _capturing(device)
        graph = torch.cuda.CUDAGraph()
        was = gc.isenabled()
        with torch.cuda.device(device):
            stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(stream):
                    for _ in range(2):  # kernels are compiled, libraries take their memory
                        self.function()
                    gc.disable()  # CUDA gives up if another graph is freed meanwhile
                    # What is between kernels may lie where other graphs have it, as long as there
                    # is one.
                    pool = next((other.graph.pool() for other in others), None)
                    graph.capture_begin(pool, "thread_local")
                    self.made = self.function()
                    graph.capture_end()
            except BaseException:
                with suppress(Exception), torch.cuda.stream(stream):
                    graph.capture_end()  # or this thread could not go on at all
                _capturing.cache_clear()
                raise
            finally:
                if was:
                    gc.enable()
                # What was tried writes to memory that others may be given.
                torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph
        others.add(self)


LOCK = threading.RLock()
#: device → the stream that has last replayed a graph
_LAST: dict[torch.device, torch.cuda.Stream] = {}


def in_turn(device: torch.device) -> None:
    """What this thread launches on a GPU from now on waits for what others have launched within
    `LOCK`."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        if (last := _LAST.get(device, stream)) != stream:
            stream.wait_stream(last)
        _LAST[device] = stream


@cache
def _capturing(device: torch.device) -> tuple[torch.cuda.Stream, WeakSet[Graph]]:
    """The stream on which graphs are captured, and those that there are."""
    return torch.cuda.Stream(device), WeakSet()


class GraphLayer(OneTokenLayer):
    """The forward of one decoder layer; with a router in its block, that is part of the graph.

    ran : what was run as one graph since this was last set to "none": a "token", or a "layer".
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, SingleToken(module.self_attn))
        attention = self.attention
        weight = self.norms[0].weight
        self.shape = H, D, heads, _ = len(weight), attention.D, attention.kv_heads, weight.dtype
        self.inputs = [weight.new_zeros(1, 1, n) for n in (H, D, D)]  # x, cos and sin
        self.where = torch.zeros(4, dtype=torch.int64, device=weight.device)
        self.placed = []
        self.ran = "none"
        #: a cache of no generation, to be captured with
        self._nowhere = weight.new_zeros(2, heads, 8, D)
        gate = getattr(module.mlp, "gate", None)
        # Its forward makes logits, weights and ids of a token, by its weight alone.
        routes = type(gate).__name__.endswith("Router") and [*gate.state_dict()] == ["weight"]
        self.router = GraphRouter(gate) if routes else None
        self.inner = [self.router] if self.router else []
        self.place(None)
        self.graph = Graph(self.compute, weight.device)

    @classmethod
    def of(cls, module: nn.Module) -> GraphLayer | None:
        """For this layer if it is one on a GPU with whose graph it agrees."""
        if not _fits(module):
            return None
        try:
            # Tensors of inference mode cannot be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                ours = cls(module)
                same = ours.agrees()
        except Exception as error:  # no Triton, no compiler, or a kernel that does not fit this GPU
            warnings.warn(
                f"decoding without CUDA graphs: {type(module).__name__} cannot be captured here ({error})",
                stacklevel=2,
            )
            return None
        ours.ran = "none"
        return ours if same else None

    def place(self, memory: CacheMemory | None) -> None:
        """Attend to this cache, which the graph lets grow by a token each time; None for none that
        anybody uses."""
        keys, values = self._nowhere
        nowhere = [keys.data_ptr(), values.data_ptr(), 1, keys.stride(0)]
        where = [*memory.where] if memory else nowhere
        if self.placed != where:
            self.placed = []  # until it is there, should this be interrupted
            self.where.copy_(torch.tensor(where))
        where[2] += 1
        self.placed = where

    def compute(self) -> tuple[Tensor, Tensor, Any]:
        """x + attention(norm(x)), the norm of that, and what the router makes of it."""
        y, normed = self.to_block(*self.inputs)
        return y, normed, self.router and self.router.own(normed.view(1, -1))

    def to_block(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x + attention(norm(x)) and the norm of that."""
        from moelab.fast import attention_triton

        attn = self.attention.module
        D = self.attention.D
        first, second = self.norms
        h = _normed(first, x)
        *qkv, o = linears_of(attn)
        q, k, v = (F.linear(h, of.weight, of.bias) for of in qkv)
        if norms := norms_of(attn):
            q, k = map(_normed, norms, (q, k))
        heads = (each.view(-1, D) for each in (q, k, v))
        mixed = attention_triton.attend(*heads, cos, sin, self.where, attn.scaling)
        self.where[2:3].add_(1)
        y = x + F.linear(mixed.view(1, 1, -1), o.weight, o.bias)
        return y, _normed(second, y).view_as(y)

    def with_experts(
        self, x: Tensor, cos: Tensor, sin: Tensor, experts: Iterator[Callable], chosen: list
    ) -> Tensor:
        """x after the layer: its block is computed by its own code, experts by the next of these, whose
        weights and ids [1, K] are added to the chosen ones."""
        y, normed = self.to_block(x, cos, sin)
        block = self.module.mlp
        if self.router:

            def compute(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
                chosen.append((w, ids))
                return next(experts)(x, ids, w)

            block = compat.with_children(block, {"gate": self.router.own, "experts": compute})
        return y + type(block).forward(block, normed)

    def to_experts(self, x: Tensor, token: tuple, memory: CacheMemory) -> tuple[Tensor, Tensor]:
        with LOCK:
            in_turn(x.device)
            compat.copy_each(self.inputs, [x, *token])
            self.place(memory)
            y, normed, routed = self.graph()
            y = y.clone()
            normed = normed.clone()
            self.ran = "layer"
            if self.router:
                self.router.made = normed, [made.clone() for made in routed]
            return y, normed


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    shape = norm.weight.shape
    return F.rms_norm(x.view(-1, *shape), shape, norm.weight, epsilon(norm))


def _fits(module: nn.Module) -> bool:
    """Whether a module is a decoder layer on a GPU of the parts that graphs have; a probe says
    whether they compute the same."""
    attn = getattr(module, PARTS[1], None)
    linears = linears_of(attn)
    if not linears or linears[0].weight.device.type not in GPUS:
        return False
    dtype = linears[0].weight.dtype
    norms = [*norms_of(attn), *(getattr(module, name) for name in PARTS[::2])]
    known = all(
        type(norm).__name__.endswith("RMSNorm") and norm.weight.dtype == dtype for norm in norms
    )
    return known and dtype in KINDS and attn.head_dim % 8 == 0


class GraphRouter(Router):
    """The forward of a router: what its layer's graph has just made of these hidden states, or else
    its own. Whether its weights are normalised and of which type they are, its own code says, in
    the graph, too.

    made : (hidden states, what the graph made of them), for one call.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, False, module.weight.dtype)
        self.made = None

    def fused(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        (normed, made), self.made = self.made or (None, None), None
        if (
            normed is None
            or hidden_states.data_ptr() != normed.data_ptr()
            or hidden_states.numel() != normed.numel()
            or self.parts.listeners() is None
        ):
            return None
        return tuple(made)


class GraphStretch(Stretch):
    """Layers with their experts, dense ones among them, in one graph.

    of : experts, one callable for each layer that has some, (x [1, H], ids [1, K], weights [1, K]) →
        [1, H], that may be captured; as long as they are the same ones, the graph is.
    graph : None where nothing can be captured with these.
    """

    def __init__(self, layers: list[GraphLayer]) -> None:
        super().__init__(layers)
        self.of = self.graph = None

    def compute(
        self,
        x: Tensor,
        token: tuple,
        memories: list[CacheMemory],
        experts: list[Callable],
        first: int,
    ) -> tuple[Tensor, Tensor, Computed]:
        with LOCK:
            in_turn(x.device)
            compat.copy_each(self.layers[0].inputs, [x, *token])
            for layer, memory in zip(self.layers, memories):
                layer.place(memory)
            y, w, ids = (made.clone() for made in self.graph())
            self.layers[0].ran = "token"
            return y, w, Computed(len(memories), ids, None)

    def prepare(self, experts: list[Callable]) -> bool:
        """Capture a graph with these experts, if it is not of them; whether there is one."""
        with LOCK:
            if self.of is not experts:
                self.of = self.graph = None
                self.graph = self._captured(experts)
                self.of = experts
            return self.graph is not None

    def _captured(self, experts: list[Callable]) -> Graph | None:
        first = self.layers[0]

        def compute() -> tuple[Tensor, Tensor, Tensor]:
            (x, cos, sin), chosen, left = first.inputs, [], iter(experts)
            for layer in self.layers:
                x = layer.with_experts(x, cos, sin, left, chosen)
            return x, *(torch.cat(each) for each in zip(*chosen))

        for layer in self.layers:
            layer.place(None)
        try:
            with torch.inference_mode(False), torch.no_grad():
                return Graph(compute, first.where.device)
        except Exception as error:
            warnings.warn(
                f"decoding with a CUDA graph a layer, not one a token: {type(first.module).__name__} "
                f"cannot be captured whole here ({error})",
                stacklevel=2,
            )
            return None
