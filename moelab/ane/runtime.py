"""A model whose prefill goes chunk by chunk through a plan (NPUMoE §3.1 "Runtime", §3.2, §4.2).

The prompt is cut into chunks of B tokens. In each layer attention runs first; the CPU routes, prunes what overflows
the static capacities, gathers each group's tokens into its zero-padded buffer, has a *backend* run the group, and adds
the valid rows, weighted, back to their tokens. Experts that the plan leaves on the CPU run on just their tokens:
shapes are free there, so nothing is padded or dropped. All of it happens behind the seam, so `generate` works.

    prompt [1, S] → chunks [1, ≤ B]    a launch: buffer [G, C, H] with weights [G, C] → [G, C, H]

A forward pass of one token (decoding, or a prompt's single last token) takes the CPU path: the model's own attention
and its experts unpadded, on the same KV cache. One prompt at a time: prompts of a batch would compete for the same
capacities. Left out: running the groups of a layer at the same time, and ANE and CPU experts side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moelab.ane.backends import Backend, TorchBackend
from moelab.ane.plan import Plan
from moelab.experts.executor import Dispatch, Executor, dispatch
from moelab.experts.static import NEED_SALIENCY, ORDERS, experts_of, select, within_capacity
from moelab.experts.static import Saliency
from moelab.models import discover, identity, plugged, spec_of
from moelab.models.patches import Patches


@dataclass
class LayerCount:
    """What one layer did in prefill, exact counts over all chunks; decode steps are not among them.

    routed : choices of an expert by a token; executed : those computed, the others were dropped; on_cpu : those of the
    executed that ran unpadded on the CPU. slots : rows computed, padding included. launches : expert graphs run.
    """

    chunks: int = 0
    launches: int = 0
    routed: int = 0
    executed: int = 0
    on_cpu: int = 0
    slots: int = 0

    @property
    def drop_rate(self) -> float:
        """Dropped choices over routed ones (Table 3, "token drop rate")."""
        return 1 - self.executed / self.routed if self.routed else 0.0

    @property
    def padded_fraction(self) -> float:
        """Share of the computed rows that were padding (Table 3, "padded tokens")."""
        return 1 - self.executed / self.slots if self.slots else 0.0

    def __add__(self, other: LayerCount) -> LayerCount:
        return LayerCount(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class PlannedExperts(Executor):
    """The executor of a plan: hot groups by a backend with static shapes, cold experts on the CPU.

    Parameters
    ----------
    plan, backend : what runs where, and who runs the groups of unit "ane".
    overflow : "prune" drops what a static capacity has no room for; "pad" launches the group again, so that nothing is
        lost.
    order : who is dropped first, a name in `moelab.experts.static.ORDERS`; NPUMoE's is "saliency".
    saliency : the tokens' norms, for the orders that need them.
    seed : of the order "random".

    Attributes
    ----------
    by_layer : [L] counts.
    """

    def __init__(self, plan: Plan, backend: Backend, overflow: str = "prune", order: str = "saliency",
                 saliency: Saliency | None = None, seed: int = 0) -> None:
        super().__init__()
        if overflow not in ("prune", "pad"):
            raise ValueError(f"overflow is {overflow!r}; it must be 'prune' or 'pad'")
        if order not in ORDERS:
            raise ValueError(f"there is no order {order!r}; there are: {', '.join(ORDERS)}")
        self.plan, self.backend, self.overflow, self.order, self.saliency = plan, backend, overflow, order, saliency
        self.lossless = overflow == "pad"
        self.by_layer = [LayerCount() for _ in plan.layers]
        self._rng = torch.Generator().manual_seed(seed)
        self._places = [_Places(layer, plan) for layer in plan.layers]

    @property
    def total(self) -> LayerCount:
        """The counts of all layers; `chunks` and `launches` are sums over layers, too."""
        return sum(self.by_layer, LayerCount())

    def reset(self) -> None:
        """Start counting again."""
        self.tally.reset()
        self.by_layer = [LayerCount() for _ in self.plan.layers]

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        layer, E, out = experts.layer, experts.num_experts, torch.zeros_like(x)
        routed = dispatch(ids, E)
        if len(x) == 1:
            self._on_cpu(out, x, weights, routed, range(E), experts)
            self.count(len(routed), len(routed), len(routed))
            return out
        if len(x) > self.plan.chunk:
            raise ValueError(f"{len(x)} tokens at once, but the plan's chunks have {self.plan.chunk}: run the model "
                             f"inside `with prefill_through(…)`, which cuts prompts into chunks")
        kept = routed if self.overflow == "pad" else self._pruned(routed, weights, layer)
        places, count, rank = self._places[layer], LayerCount(chunks=1, routed=len(routed)), _ranks(kept)
        of_group = places.group[experts_of(kept)]                                               # [n]
        for number, group in enumerate(self.plan.layers[layer].groups):
            if group.unit == "cpu":
                ran = self._on_cpu(out, x, weights, kept, group.experts, experts)
                count += LayerCount(executed=ran, on_cpu=ran, slots=ran)
                continue
            mine = torch.nonzero(of_group == number)[:, 0]
            tokens, choices, expert = kept.tokens[mine], kept.choices[mine], experts_of(kept)[mine]
            launch, row = rank[mine] // group.capacity, rank[mine] % group.capacity
            for n in range(int(launch.max()) + 1 if len(mine) else 0):
                at = launch == n
                C = self.backend.capacity(layer, number, int(row[at].max()) + 1)
                slot, rows = places.slice[expert[at]] * C + row[at], C * len(group.experts)     # slot: row of [G·C]
                self._launch(out, x, weights, number, C, slot, tokens[at], choices[at], experts)
                count += LayerCount(launches=1, executed=int(at.sum()), slots=rows)
        self.by_layer[layer] += count
        self.count(count.routed, count.executed, count.slots)
        return out

    def _pruned(self, routed: Dispatch, weights: Tensor, layer: int) -> Dispatch:
        saliency = self.saliency[layer] if self.order in NEED_SALIENCY else torch.zeros(len(weights))
        importance = ORDERS[self.order](routed, weights, saliency, self._rng)
        return select(routed, within_capacity(routed, self._places[layer].room, importance))

    def _launch(self, out: Tensor, x: Tensor, weights: Tensor, group: int, C: int, slot: Tensor, tokens: Tensor,
                choices: Tensor, experts: Any) -> None:
        """Gather, run, weighted scatter of the valid rows (§4.2, steps 2–6)."""
        G = len(self.plan.layers[experts.layer].groups[group].experts)
        buffer, scale = x.new_zeros(G * C, x.shape[1]), weights.new_zeros(G * C)
        buffer[slot], scale[slot] = x[tokens], weights[tokens, choices]
        y = self.backend.experts(experts.layer, group, buffer.view(G, C, -1), scale.view(G, C), experts)
        out.index_add_(0, tokens, y.reshape(G * C, -1)[slot].to(out.dtype))

    @staticmethod
    def _on_cpu(out: Tensor, x: Tensor, weights: Tensor, chosen: Dispatch, members: Any, experts: Any) -> int:
        ran, offsets = 0, chosen.offsets.tolist()
        for e in members:
            at = slice(offsets[e], offsets[e + 1])
            if at.start == at.stop:
                continue
            tokens, w = chosen.tokens[at], weights[chosen.tokens[at], chosen.choices[at]]
            out.index_add_(0, tokens, experts.weighted(x[tokens], w, experts.weights(e)).to(out.dtype))
            ran += len(tokens)
        return ran


class _Places:
    """Of each expert of a layer: group [E], slice within it [E], and room [E], how many tokens it takes at most."""

    def __init__(self, layer: Any, plan: Plan) -> None:
        E = plan.spec.E
        self.group, self.slice = torch.full((E,), -1), torch.zeros(E, dtype=torch.long)
        self.room = torch.full((E,), plan.chunk)
        for number, group in enumerate(layer.groups):
            members = torch.tensor(group.experts)
            self.group[members], self.slice[members] = number, torch.arange(len(members))
            if group.unit == "ane":
                self.room[members] = group.capacity


def _ranks(d: Dispatch) -> Tensor:
    """Of each choice [n], how many of its expert's stand before it."""
    return torch.arange(len(d)) - d.offsets[experts_of(d)]


# -------------------------------------------------------------------------------------------------- the whole prefill

@dataclass(frozen=True, eq=False)
class AnePrefill:
    """A model that is running through a plan; what `prefill_through` yields.

    attention : who computes the attention of chunks, "graphs" (converted ones) or the "model" itself.
    """

    model: Any
    plan: Plan
    backend: Backend
    executor: PlannedExperts
    attention: str

    @property
    def by_layer(self) -> list[LayerCount]:
        return self.executor.by_layer

    @property
    def total(self) -> LayerCount:
        return self.executor.total


@contextmanager
def prefill_through(model: Any, plan: Plan | None = None, backend: Backend | None = None, *, overflow: str = "prune",
                    order: str = "saliency", seed: int = 0) -> Iterator[AnePrefill]:
    """Within the block, prompts run through the plan, afterwards as before.

    Parameters
    ----------
    model : a decoder with its experts behind the seam or not; on the CPU.
    plan : made for this model; None takes the backend's, which a converted model has.
    backend : a backend of `moelab.ane.backends`; None is `TorchBackend`, which computes the same static shapes with
        the model's own weights.
    overflow, order, seed : as in `PlannedExperts`.

    >>> with prefill_through(model, plan) as ane:
    ...     model.generate(ids, max_new_tokens=8)
    ...     print(ane.total.drop_rate)

    Raises
    ------
    ValueError : no plan, one of another geometry or not the backend's, an encoder-decoder, an order that this model has
        no saliency for, a backend of another checkpoint; when run, a batch of several prompts, a padded one or a
        static cache.
    """
    if plan is None and backend is None:
        raise ValueError("give a plan (moelab.ane.plan.make_plan) or a backend that has one")
    plan = plan or backend.plan
    backend = backend or TorchBackend(plan)
    if plan != backend.plan:
        raise ValueError(f"this plan is not the one that the backend {backend.name!r} was made for; leave it out")
    spec = spec_of(model)
    plan.require(identity(model), spec)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; prefill in chunks is for decoders")
    layers = discover(model)
    with ExitStack() as stack:
        saliency = None
        if overflow == "prune" and order in NEED_SALIENCY:
            saliency = stack.enter_context(Saliency(model, layers))
        executor = PlannedExperts(plan, backend, overflow, order, saliency, seed)
        stack.enter_context(plugged(model, executor))
        by_graphs = stack.enter_context(backend.attention(model))
        stack.enter_context(in_chunks(model.base_model, plan.chunk))
        yield AnePrefill(model, plan, backend, executor, "graphs" if by_graphs else "model")


@contextmanager
def in_chunks(decoder: torch.nn.Module, chunk: int) -> Iterator[None]:
    """Within the block, a decoder stack reads its prompts `chunk` tokens at a time into one KV cache.

    transformers' own `generate(prefill_chunk_size=…)` does so in `generate` only; this works in plain forward passes,
    and in `generate` without the option.
    """
    from transformers import DynamicCache, StaticCache

    def chunked(forward: Any, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
                position_ids: Tensor | None = None, past_key_values: Any = None, inputs_embeds: Tensor | None = None,
                use_cache: bool | None = None, **options: Any) -> Any:
        given = input_ids if input_ids is not None else inputs_embeds
        batch, S = given.shape[:2]
        if batch > 1:
            raise ValueError(f"a batch of {batch} prompts, which would compete for the same static capacities: run "
                             f"them one by one (batch_size=1)")
        if attention_mask is not None and (attention_mask.dim() != 2 or not bool((attention_mask != 0).all())):
            raise ValueError("the prompt is padded or masked; give one prompt at a time and no padding")
        wanted, cache, parts, out = use_cache, past_key_values, [], None
        if cache is None and S > chunk:
            cache, use_cache = DynamicCache(config=decoder.config), True
        if isinstance(cache, StaticCache):
            raise ValueError(f"a {type(cache).__name__}: prefill in chunks fills a cache that grows; leave out "
                             f"cache_implementation='static'")
        past = 0 if cache is None else cache.get_seq_length()
        for start in range(0, S, chunk):
            at, end = slice(start, start + chunk), past + min(start + chunk, S)
            out = forward(
                input_ids=None if input_ids is None else input_ids[:, at],
                inputs_embeds=None if inputs_embeds is None else inputs_embeds[:, at],
                attention_mask=None if attention_mask is None else attention_mask[:, :end],
                position_ids=None if position_ids is None else position_ids[..., at],
                past_key_values=cache, use_cache=use_cache, **options)
            parts.append(out.last_hidden_state)
        if S > chunk:
            if partial := [name for name in ("hidden_states", "attentions", "router_logits")
                           if out.get(name) is not None]:
                raise ValueError(f"{', '.join(partial)} of a prompt in chunks: not collected, run it without "
                                 f"output_{partial[0]}")
            out.last_hidden_state = torch.cat(parts, dim=1)
            if wanted is False:
                out.past_key_values = None
        return out

    with Patches() as patches:
        patches.wrap(decoder, "forward", lambda below: partial(chunked, below))
        yield
