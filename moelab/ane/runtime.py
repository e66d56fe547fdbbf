"""Runs a model's prefill chunk by chunk through a plan (NPUMoE §3.1 "Runtime", §3.2, §4.2).

The prompt is cut into chunks of B tokens. In each layer attention runs first; the CPU routes,
prunes what overflows the static capacities, gathers each group's tokens into its zero-padded
buffer, has a backend run the group, and adds the valid rows, weighted, back to their tokens.
Experts that the plan leaves on the CPU run on just their tokens.

A forward pass of one token takes the CPU path: the model's own attention and its experts unpadded,
on the same KV cache. Batch size 1: prompts of a batch would compete for the same capacities."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moelab.ane.backends import Backend, TorchBackend
from moelab.ane.plan import Account, ANEPlan, PlannedGroup
from moelab.checkpoint.opening import spec_of
from moelab.experts.executor import Dispatch, dispatch
from moelab.models import discover, plugged
from moelab.models.identity import identity
from moelab.models.patches import Patches
from moelab.static.static import (
    NEED_SALIENCY,
    Saliency,
    StaticExecutor,
)


class PlannedExperts(StaticExecutor):
    """The executor of a plan: hot groups by a backend with static shapes, cold experts on the CPU.

    overflow : "prune" drops what a static capacity has no room for; "pad" launches the group again,
        without loss.
    order, saliency : who is dropped first, a key of `ORDERS`, and the tokens' norms, for the orders
        that need them.
    by_layer : [L] exact counts over all chunks; decode steps are not among them.
    """

    def __init__(
        self,
        plan: ANEPlan,
        backend: Backend,
        overflow: str = "prune",
        order: str = "saliency",
        saliency: Saliency | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(overflow, order, saliency, seed)
        self.plan = plan
        self.backend = backend
        self.by_layer = [Account() for _ in plan.layers]
        self._room = [_room(layer.groups, plan) for layer in plan.layers]

    @property
    def total(self) -> Account:
        """Sums over all layers, of `chunks` too."""
        return sum(self.by_layer, Account())

    def capacities(self, layer: int, T: int, K: int, E: int) -> Tensor:
        """Capacities of a layer's experts, [E], whatever the chunk's tokens are."""
        return self._room[layer]

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """A chunk's tokens [T, H] through the plan's graphs, and through the CPU what the plan
        leaves there; returns [T, H]. A single token takes the CPU. ValueError: more tokens than a
        chunk."""
        layer = experts.layer
        E = experts.num_experts
        out = torch.zeros_like(x)
        routed = dispatch(ids, E)
        if len(x) == 1:
            self._on_cpu(out, x, weights, routed, range(E), experts)
            self.count(len(routed), len(routed), len(routed))
            return out
        if len(x) > self.plan.chunk:
            raise ValueError(
                f"{len(x)} tokens at once, but the plan's chunks have {self.plan.chunk}: run "
                "the model inside `with prefill_through(…)`, which cuts prompts into chunks"
            )
        kept = self.admitted(routed, self._room[layer], weights, layer, slice(None))
        count = Account(chunks=1, routed=len(routed))
        for number, group in enumerate(self.plan.layers[layer].groups):
            if group.unit == "cpu":
                ran = self._on_cpu(out, x, weights, kept, group.experts, experts)
                count += Account(executed=ran, slots=ran)
                continue
            for now, slot in _launches(group, kept.offsets.tolist()):
                chosen = kept.tokens[now], kept.choices[now]
                self._launch(out, x, weights, number, group, slot, *chosen, experts)
                count += Account(launches=1, executed=len(now), slots=group.slots)
        self.by_layer[layer] += count
        self.count(count.routed, count.executed, count.slots)
        return out

    def _launch(
        self,
        out: Tensor,
        x: Tensor,
        weights: Tensor,
        number: int,
        group: PlannedGroup,
        slot: list[int],
        tokens: Tensor,
        choices: Tensor,
        experts: Any,
    ) -> None:
        """Gather, run, weighted scatter of the valid rows (§4.2, steps 2–6)."""
        shape = len(group.experts), group.capacity
        buffer = x.new_zeros(group.slots, x.shape[1])
        scale = weights.new_zeros(group.slots)
        buffer[slot], scale[slot] = x[tokens], weights[tokens, choices]
        y = self.backend.experts(
            experts.layer, number, buffer.view(*shape, -1), scale.view(shape), experts
        )
        out.index_add_(0, tokens, y.flatten(0, 1)[slot].to(out.dtype))

    @staticmethod
    def _on_cpu(
        out: Tensor, x: Tensor, weights: Tensor, chosen: Dispatch, members: Any, experts: Any
    ) -> int:
        ran, offsets = 0, chosen.offsets.tolist()
        for e in members:
            at = slice(offsets[e], offsets[e + 1])
            tokens = chosen.tokens[at]
            if len(tokens):
                w = weights[tokens, chosen.choices[at]]
                y = experts.weighted(x[tokens], w, experts.weights(e))
                out.index_add_(0, tokens, y.to(out.dtype))
                ran += len(tokens)
        return ran


def _launches(group: PlannedGroup, offsets: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """(choices of a dispatch, their rows of the buffer [G·C]) of each launch of a group."""
    C = group.capacity
    for n in itertools.count():
        now, slot = [], []
        for g, e in enumerate(group.experts):
            first = offsets[e] + n * C
            more = range(first, min(first + C, offsets[e + 1]))
            now += more
            slot += range(g * C, g * C + len(more))
        if not now:
            return
        yield now, slot


def _room(groups: Sequence[PlannedGroup], plan: ANEPlan) -> Tensor:
    """How many tokens each expert of a layer takes at most, [E]."""
    room = torch.full((plan.spec.E,), plan.chunk)
    for group in groups:
        if group.unit == "ane":
            room[list(group.experts)] = group.capacity
    return room


@contextmanager
def prefill_through(
    model: Any,
    through: ANEPlan | Backend,
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
    plan = backend.plan
    plan.require(identity(model), spec_of(model))
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder; prefill in chunks is for decoders"
        )
    with ExitStack() as stack:
        saliency = None
        if overflow == "prune" and order in NEED_SALIENCY:
            saliency = stack.enter_context(Saliency(model, discover(model)))
        executor = PlannedExperts(plan, backend, overflow, order, saliency, seed)
        stack.enter_context(plugged(model, executor))
        stack.enter_context(backend.attention(model))
        decoder = model.base_model
        how = {"config": decoder.config, "chunk": plan.chunk}
        stack.enter_context(Patches()).wrap(
            decoder, "forward", lambda below: partial(_forward_in_chunks, below, **how)
        )
        yield executor


def _forward_in_chunks(
    forward: Any,
    config: Any,
    chunk: int,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    **options: Any,
) -> Any:
    """A decoder stack's `forward`, `chunk` tokens at a time; its arguments and result are
    transformers'."""
    from transformers import DynamicCache, StaticCache

    given = input_ids if input_ids is not None else inputs_embeds
    batch, S = given.shape[:2]
    if batch > 1 or isinstance(past_key_values, StaticCache):
        raise ValueError(
            "a batch of prompts, which would compete for the same static capacities, or a static "
            "cache, where prefill in chunks fills one that grows: run prompts one by one "
            "(batch_size=1), without cache_implementation='static'"
        )
    if attention_mask is not None and not (attention_mask.dim() == 2 and attention_mask.all()):
        raise ValueError("the prompt is padded or masked; give one prompt at a time and no padding")
    wanted = use_cache
    cache = past_key_values
    parts = []
    out = None
    if cache is None and chunk < S:
        cache = DynamicCache(config=config)
        use_cache = True
    past = 0 if cache is None else cache.get_seq_length()
    for start in range(0, S, chunk):
        at = slice(start, start + chunk)
        end = past + min(start + chunk, S)
        out = forward(
            input_ids=None if input_ids is None else input_ids[:, at],
            inputs_embeds=None if inputs_embeds is None else inputs_embeds[:, at],
            attention_mask=None if attention_mask is None else attention_mask[:, :end],
            position_ids=None if position_ids is None else position_ids[..., at],
            past_key_values=cache,
            use_cache=use_cache,
            **options,
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
