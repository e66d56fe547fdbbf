"""Runs a model's prefill chunk by chunk through a plan (NPUMoE §3.1 "Runtime", §3.2, §4.2).

The prompt is cut into chunks of B tokens. In each layer attention runs first; the CPU routes,
prunes what overflows the static capacities, gathers each group's tokens into its zero-padded
buffer, and hands the groups to the device's queue, in which a backend runs one after the other.
Meanwhile the CPU computes, on just their tokens, the experts that the plan leaves there; then it
adds the valid rows, weighted, back to their tokens. The timeline shows both resources.

Decoding is the model's own, with the executor and the offloading that it was opened with, on the
same KV cache. Batch size 1: prompts of a batch would compete for the same capacities."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moelab.ane.backends import TorchBackend
from moelab.ane.plan import Account, ANEPlan, PlannedGroup
from moelab.base.forks import renew_in_children
from moelab.base.specs import Event
from moelab.checkpoint.opening import spec_of
from moelab.experts.executor import dispatch, zeros
from moelab.models import discover, plugged
from moelab.models.experts import execute
from moelab.models.forward import INPUTS, forward_info
from moelab.models.identity import identity
from moelab.models.patches import Patches
from moelab.offloading.engine import Engine
from moelab.offloading.loading import clock
from moelab.offloading.run import Timeline
from moelab.static.static import ATTENTION, NEED_SALIENCY, Saliency, StaticExecutor


class PlannedExperts(StaticExecutor):
    """A plan's layers: hot groups by a backend with static shapes, and meanwhile what the plan leaves
    on the CPU by what computed the experts before.

    backend : its plan is the one that runs.
    options : of `StaticExecutor`; with overflow="pad" a group is launched again, without loss.
    timeline : where it reports what backend and CPU do.
    below : an engine that loads and computes the experts of the CPU; None: the layer's executor.
    total : exact counts over all layers and chunks; decode steps are not among them.
    """

    def __init__(
        self, backend: TorchBackend, timeline: Timeline | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.backend, self.plan = backend, backend.plan
        self.timeline = Timeline() if timeline is None else timeline
        self.below: Engine | None = None
        self.total = Account()
        spec = self.plan.spec
        self._room = torch.full((spec.L, spec.E), self.plan.chunk)  # tokens that an expert takes
        for room, layer in zip(self._room, self.plan.layers):
            for group in layer.on("ane"):
                room[list(group.experts)] = group.capacity
        self._cold = [layer.cold for layer in self.plan.layers]
        self._since = clock()  # what the caller's thread does now began
        self.forked()
        renew_in_children(self)

    def forked(self) -> None:
        """The device runs one graph after the other: its queue is a thread, which a fork loses."""
        self._queue = ThreadPoolExecutor(1, "moelab ane")

    def mark(self, kind: str, layer: int, until: float | None = None) -> None:
        """Report what the caller's thread has done since the last mark."""
        until = clock() if until is None else until
        self.timeline.add(Event("compute", kind, layer, -1, self._since, until))
        self._since = until

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """A chunk's tokens [T, H] through the plan's graphs, and through the CPU what the plan
        leaves there; returns [T, H]. A single token takes the CPU. The sum is the CPU's part, then
        the launches in the plan's order, whatever ends first. ValueError: more tokens than a
        chunk."""
        layer, E = experts.layer, experts.num_experts
        routed = dispatch(ids, E)
        self.mark("other", layer)
        if len(x) == 1:
            self.count(len(routed), len(routed), len(routed))
            return self._on_cpu(x, ids, weights, experts)
        if len(x) > self.plan.chunk:
            raise ValueError(
                f"{len(x)} tokens at once, but the plan's chunks have {self.plan.chunk}: run "
                "the model inside `with prefill_through(…)`, which cuts prompts into chunks"
            )
        kept = self.admitted(routed, self._room[layer], weights, layer)
        count = Account(chunks=1, routed=len(routed))
        out, flights = zeros(x, weights, experts), []
        try:
            for number, group in enumerate(self.plan.layers[layer].groups):
                for now, slot in _launches(group, kept.offsets.tolist()):
                    tokens = kept.tokens[now]
                    buffer = x.new_zeros(group.slots, x.shape[1])
                    scale = weights.new_zeros(group.slots)
                    buffer[slot], scale[slot] = x[tokens], weights[tokens, kept.choices[now]]
                    launch = layer, number, group, buffer, scale, experts
                    flights.append((tokens, slot, self._queue.submit(self._launch, *launch)))
                    count += Account(launches=1, executed=len(now), slots=group.slots)
            self.mark("gather", layer)
            cold = torch.where(torch.isin(ids, ids.new_tensor(self._cold[layer])), ids, E)
            if on_cpu := int((cold < E).sum()):
                count += Account(executed=on_cpu, slots=on_cpu)
                out += self._on_cpu(x, cold, weights, experts)
            if self.below is not None:
                counts = enumerate(routed.counts.tolist())
                hot = {e: n for e, n in counts if n and e not in self._cold[layer]}
                self.below.residency.elsewhere(layer, hot)
            for tokens, slot, flight in flights:
                y = flight.result()
                self.mark("wait", layer)
                out.index_add_(0, tokens, y.flatten(0, 1)[slot].to(out.dtype))
                self.mark("scatter", layer)
        finally:
            for *_, flight in flights:
                flight.cancel()
        self.total += count
        self.count(count.routed, count.executed, count.slots)
        return out.to(x.dtype)

    def _launch(
        self, layer: int, number: int, group: PlannedGroup, buffer: Tensor, scale: Tensor, of: Any
    ) -> Tensor:
        """Run a group on its buffer [G·C, H], in the queue's thread (§4.2, step 5)."""
        start, shape = clock(), (len(group.experts), group.capacity)
        with torch.no_grad():
            y = self.backend.experts(layer, number, buffer.view(*shape, -1), scale.view(shape), of)
        self.timeline.add(Event(self.backend.resource, "launch", layer, -1, start, clock()))
        return y

    def _on_cpu(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """What computed the experts before computes these; an engine reports that itself."""
        if self.below is None:
            y = execute(experts.executor, x, ids, weights, experts)
            self.mark("expert", experts.layer)
            return y
        after = experts.layer + 1
        if after < len(self._cold):  # not all experts, as a prompt would want them otherwise
            self.below.prefetch(after, torch.tensor([self._cold[after]]))
        self.below.idle_since = None
        y = execute(self.below, x, ids, weights, experts)
        self._since = clock()
        return y

    @contextmanager
    def prompt(self, model: Any) -> Iterator[None]:
        """Within the block, a prompt's chunks run through the plan; single tokens do not get here."""
        layers, moe = discover(model), dict(zip(self.plan.spec.moe_layers, range(self.plan.spec.L)))
        self.below = layers[0].seam.engine if layers[0].plugged else None
        self._since = self.below and self.below.idle_since or clock()
        with Patches() as patches:
            patches.enter_context(plugged(model, engine=self))
            if self.saliency is not None:
                patches.enter_context(self.saliency)
            parts = [
                (part, "attention", moe.get(number, -1))
                for number, layer in enumerate(model.base_model.layers)
                for name, part in layer.named_children()
                if name in ATTENTION
            ]
            for part, kind, layer in parts + [(of.router, "router", of.index) for of in layers]:
                patches.hook(part.register_forward_pre_hook, partial(self._passed, "other", layer))
                patches.hook(part.register_forward_hook, partial(self._passed, kind, layer))
            patches.enter_context(self.backend.attention(model, partial(self._attended, moe)))
            yield
        if self.below is not None:
            self.below.idle_since = self._since

    def _passed(self, kind: str, layer: int, *_: Any) -> None:
        self.mark(kind, layer)

    def _attended(self, moe: dict[int, int], number: int, start: float, end: float) -> None:
        """The backend has run a decoder layer's attention, for which this thread has waited."""
        layer = moe.get(number, -1)
        self.timeline.add(Event(self.backend.resource, "attention", layer, -1, start, end))
        self.mark("attention", layer, start)
        self.mark("wait", layer, end)


def _launches(group: PlannedGroup, offsets: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """(choices of a dispatch, their rows of the buffer [G·C]) of each launch of a group; none on the
    CPU."""
    C = group.capacity
    for n in itertools.count() if group.unit == "ane" else ():
        now, slot = [], []
        for g, e in enumerate(group.experts):
            first = offsets[e] + n * C
            more = range(first, min(first + C, offsets[e + 1]))
            now += more
            slot += range(g * C, g * C + len(more))
        if not now:
            return
        yield now, slot


@contextmanager
def prefill_through(
    model: Any,
    through: ANEPlan | TorchBackend,
    *,
    overflow: str = "prune",
    order: str = "saliency",
    seed: int = 0,
) -> Iterator[PlannedExperts]:
    """Within the block, prompts run through the plan; yields the executor, which counts.

    model : a decoder on the CPU, its experts behind the seam or not.
    through : a backend, or a plan made for this model, which `TorchBackend` runs.
    overflow, order, seed : as in `PlannedExperts`.

    Raises ValueError for a plan or backend of another model, an encoder-decoder, an order that this
    model has no saliency for; when run, for a batch of several prompts, a padded one or a static
    cache."""
    backend = TorchBackend(through) if isinstance(through, ANEPlan) else through
    backend.plan.require(identity(model), spec_of(model))
    backend.require(model)
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder; prefill in chunks is for decoders"
        )
    needs = overflow == "prune" and order in NEED_SALIENCY
    saliency = Saliency(model, discover(model)) if needs else None
    timeline = model.moelab.timeline if hasattr(model, "moelab") else None
    options = {"overflow": overflow, "order": order, "saliency": saliency, "seed": seed}
    planned = PlannedExperts(backend, timeline, **options)
    with Patches() as patches:
        patches.wrap(
            model.base_model,
            "forward",
            lambda below: partial(_forward_in_chunks, below, model=model, planned=planned),
        )
        yield planned


def _forward_in_chunks(
    forward: Any, model: Any, planned: PlannedExperts, input_ids: Tensor | None = None, **given: Any
) -> Any:
    """A decoder stack's `forward`, a chunk of tokens at a time; its arguments and result are
    transformers'. What decodes runs as without a plan."""
    from transformers import DynamicCache, StaticCache

    given["input_ids"] = input_ids
    if forward_info((), given).phase == "decode":
        return forward(**given)
    cut = {name: of for name in INPUTS if (of := given.get(name)) is not None}
    (batch, S), chunk = next(iter(cut.values())).shape[:2], planned.plan.chunk
    mask, cache, wanted = map(given.get, ("attention_mask", "past_key_values", "use_cache"))
    if batch > 1 or isinstance(cache, StaticCache):
        raise ValueError(
            "a batch of prompts, which would compete for the same static capacities, or a static "
            "cache, where prefill in chunks fills one that grows: run prompts one by one "
            "(batch_size=1), without cache_implementation='static'"
        )
    if mask is not None and not (mask.dim() == 2 and mask.all()):
        raise ValueError("the prompt is padded or masked; give one prompt at a time and no padding")
    positions = given.get("position_ids")
    if cache is None and chunk < S:
        cache = given["past_key_values"] = DynamicCache(config=model.base_model.config)
        given["use_cache"] = True
    past = 0 if cache is None else cache.get_seq_length()
    parts = []
    with planned.prompt(model):
        for start in range(0, S, chunk):
            end = start + chunk
            given |= {name: of[:, start:end] for name, of in cut.items()}
            if positions is not None:
                given["position_ids"] = positions[..., start:end]
            out = forward(
                **given | {"attention_mask": mask if mask is None else mask[:, : past + end]}
            )
            parts.append(out.last_hidden_state)
    if chunk < S:
        for name in ("hidden_states", "attentions", "router_logits"):
            if out.get(name) is not None:
                raise ValueError(
                    f"{name} of a prompt in chunks: not collected, run it without output_{name}"
                )
        out.last_hidden_state = torch.cat(parts, dim=1)
        if wanted is False:
            out.past_key_values = None
    return out
