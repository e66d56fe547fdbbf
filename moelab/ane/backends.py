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

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moelab.ane.coreml.attention_graph import AttentionShape, attention_inputs
from moelab.ane.coreml.converted import ConvertedModel
from moelab.ane.coreml.evaluator import Evaluator
from moelab.ane.coreml.ffn_graph import pack, unpack
from moelab.ane.plan import ANEPlan
from moelab.base.progress import progress
from moelab.models.identity import opened_from
from moelab.models.patches import Patches
from moelab.offloading.loading import clock

#: makes something that is called like an `Evaluator`, of a package
Runner = Callable[[Path], Any]
#: told of a decoder layer's attention that the device has run: layer, start and end
Told = Callable[[int, float, float], None]


class TorchBackend:
    """Runs the launches of a plan by the model's own weights and arithmetic, expert by expert.

    name : says how it runs them. resource : its row of a timeline."""

    name = resource = "torch"

    def __init__(self, plan: ANEPlan) -> None:
        self.plan = plan

    def require(self, model: Any) -> None:
        """ValueError unless it has the weights of this model."""

    def attention(self, model: Any, told: Told) -> AbstractContextManager:
        """Within the block, attention runs here where it has graphs of it, and each run is told."""
        return nullcontext()

    def experts(
        self, layer: int, group: int, buffer: Tensor, scale: Tensor, experts: Any
    ) -> Tensor:
        """One launch of a layer's group: buffer [G, C, H] with routing weights scale [G, C] → [G,
        C, H]."""
        members = self.plan.layers[layer].groups[group].experts
        rows = zip(members, buffer, scale)
        return torch.stack([experts.weighted(x, w, experts.weights(e)) for e, x, w in rows])


class ConvertedBackend(TorchBackend):
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
        super().__init__(converted.plan)
        self.converted, self.name = converted, name
        self.resource = "evaluator" if runner is None else "ane"
        self.exact = mode == "double" and runner is None
        runner = runner or partial(Evaluator, mode=mode)
        self._groups: dict[tuple[int, int], Any] = {}  # by MoE layer and number
        self._attention: dict[int, tuple[AttentionShape, Any]] = {}  # by decoder layer
        for entry in progress(converted.layers, "loading", unit="layer"):
            if "file" in entry["attention"]:
                run = runner(converted.package(entry["attention"]))
                shape = AttentionShape(**entry["attention_shape"])
                self._attention[entry["layer"]] = shape, run
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
        """A forward of the attention of one chunk; ValueError: a cache that has dropped tokens."""
        (shape, run), (cos, sin) = self._attention[layer], position_embeddings
        x, cache, number = hidden_states[0], past_key_values, attention.layer_idx
        length = 0 if cache is None else cache.get_seq_length(number)
        window = getattr(attention, "sliding_window", None)
        inputs = attention_inputs(shape, x, length, cos[0], sin[0], window)
        past = torch.zeros(2, *shape.cache, dtype=getattr(run, "dtype", torch.float32))
        if length:
            kept = cache.layers[number].keys, cache.layers[number].values  # [1, KV, length, D]
            if kept[0].shape[2] != length:
                raise ValueError(
                    f"the cache of layer {number} holds {kept[0].shape[2]} of {length} tokens (a "
                    "sliding window); a graph with a fixed-shape cache needs all"
                )
            past[..., :length] = torch.stack(kept).mT
        start = clock()
        out = run(inputs | {"k_past": past[0], "v_past": past[1]})
        told(layer, start, clock())
        y, *new = (
            of[..., : len(x)].mT.contiguous().to(x.dtype)
            for of in (out["y"][:, :, 0], out["k_new"], out["v_new"])
        )
        if cache is not None:
            cache.update(*new, number)
        return y, None
