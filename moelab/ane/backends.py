"""Who executes a plan's expert graphs and attention: torch, the evaluator, or Core ML (NPUMoE
§3.1).

    TorchBackend        the model's own weights and arithmetic in the same static shapes: for counts
                        and accuracy
    ConvertedBackend    the saved packages: by the evaluator on any machine, which checks a
                        conversion, or by Core ML on
                        a Mac (`moelab.ane.doctor.coreml_backend`)

    launch: buffer [G, C, H], weights [G, C] → [G, C, H] weighted
    attention: x [n, H] of a chunk → [n, H]

C is a group's capacity. The KV cache stays transformers' own; a graph gets it as its
fixed-shape input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moelab.ane.coreml.attention_graph import AttentionGraph, AttentionShape
from moelab.ane.coreml.converted import ConvertedModel
from moelab.ane.coreml.evaluator import Evaluator
from moelab.ane.coreml.ffn_graph import pack, unpack
from moelab.ane.plan import ANEPlan
from moelab.base.progress import progress
from moelab.models.identity import opened_from
from moelab.models.patches import Patches

#: makes something that is called like an `Evaluator`, of a package
Runner = Callable[[Path], Any]
#: told of a decoder layer's attention that the device has run: layer, start and end
Told = Callable[[int, float, float], None]


class Backend(ABC):
    """Runs the launches of a plan; `name` says how, and `resource` is its row of a timeline."""

    name: str
    resource: str
    plan: ANEPlan

    def require(self, model: Any) -> None:
        """ValueError unless it has the weights of this model."""

    @abstractmethod
    def experts(
        self, layer: int, group: int, buffer: Tensor, scale: Tensor, experts: Any
    ) -> Tensor:
        """One launch of a layer's group: buffer [G, C, H] with routing weights scale [G, C] → [G,
        C, H]."""

    def attention(self, model: Any, told: Told) -> AbstractContextManager:
        """Within the block, attention runs here where the plan says "ane", and each run is told."""
        return nullcontext()


class TorchBackend(Backend):
    """The model's own weights and arithmetic, expert by expert."""

    name = resource = "torch"

    def __init__(self, plan: ANEPlan) -> None:
        self.plan = plan

    def experts(
        self, layer: int, group: int, buffer: Tensor, scale: Tensor, experts: Any
    ) -> Tensor:
        """Outputs [G, C, H] of a group's experts for a buffer [G, C, H], weighted by [G, C]."""
        members = self.plan.layers[layer].groups[group].experts
        rows = zip(members, buffer, scale)
        return torch.stack([experts.weighted(x, w, experts.weights(e)) for e, x, w in rows])


class ConvertedBackend(Backend):
    """The packages of a converted model, all loaded.

    mode : of the evaluator, "double" or "fp16". runner : what runs a package instead of it; `name`
    says what."""

    def __init__(
        self,
        converted: ConvertedModel,
        mode: str = "double",
        runner: Runner | None = None,
        name: str = "evaluator",
    ) -> None:
        self.converted, self.name, self.plan = converted, name, converted.plan
        self.resource = "evaluator" if runner is None else "ane"
        self.exact = mode == "double" and runner is None
        runner = runner or partial(Evaluator, mode=mode)
        self._groups: dict[tuple[int, int], Any] = {}  # by MoE layer and number
        self._attention: dict[int, AttentionGraph] = {}  # by decoder layer
        for entry in progress(converted.layers, "loading", unit="layer"):
            if "file" in entry["attention"]:
                run = runner(converted.package(entry["attention"]))
                shape = AttentionShape(**entry["attention_shape"])
                self._attention[entry["layer"]] = AttentionGraph(shape, run)
            for number, group in enumerate(entry["groups"]):
                if "file" in group:
                    self._groups[entry["moe"], number] = runner(converted.package(group))

    def experts(
        self, layer: int, group: int, buffer: Tensor, scale: Tensor, experts: Any
    ) -> Tensor:
        """As of `TorchBackend`, by the group's saved package."""
        y = unpack(self._groups[layer, group]({"x": pack(buffer.flatten(0, 1))})["y"])
        return y.view(buffer.shape) * scale[..., None]

    def require(self, model: Any) -> None:
        where = getattr(model.config, "_name_or_path", "") or "this model"
        self.converted.require_identity(opened_from(model), where)

    def attention(self, model: Any, told: Told) -> AbstractContextManager:
        """Within the block, attention runs by the saved packages where there are any."""
        with Patches() as patches:
            for layer in self._attention:
                of = model.base_model.layers[layer].self_attn
                patches.put(of, "forward", partial(self._chunk_attention, of, layer, told))
            return patches.pop_all()

    def _chunk_attention(
        self,
        attention: nn.Module,
        layer: int,
        told: Told,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """A forward of the attention of one chunk."""
        graph, (cos, sin) = self._attention[layer], position_embeddings
        y, *new = graph(
            hidden_states[0],
            cos[0],
            sin[0],
            *cached(graph, past_key_values, attention.layer_idx),
            getattr(attention, "sliding_window", None),
        )
        told(layer, *graph.ran)
        if past_key_values is not None:
            past_key_values.update(
                *(of.mT.to(hidden_states.dtype) for of in new), attention.layer_idx
            )
        return y[None].to(hidden_states.dtype), None


def cached(graph: AttentionGraph, cache: Any, layer: int) -> tuple[Tensor, Tensor, int]:
    """transformers' cache of one layer in a graph's fixed shape: keys, values (1, KV, D, P), how
    many are filled.

    ValueError: a cache that has dropped some."""
    k, v = torch.zeros(2, *graph.shape.cache, dtype=getattr(graph.run, "dtype", torch.float32))
    length = 0 if cache is None else cache.get_seq_length(layer)
    if 0 < length <= graph.shape.context:  # more is refused with the chunk's tokens
        keys, values = cache.layers[layer].keys, cache.layers[layer].values  # [1, KV, length, D]
        if keys.shape[2] != length:
            raise ValueError(
                f"the cache of layer {layer} holds {keys.shape[2]} of {length} tokens (a "
                "sliding window); a graph with a fixed-shape cache needs all"
            )
        k[..., :length], v[..., :length] = keys.mT, values.mT
    return k, v, length
