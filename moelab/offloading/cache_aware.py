"""Cache-aware routing: where a router is nearly indifferent, an expert that is in memory is chosen. Lossy.

Source: Skliar et al., "Mixture of Cache-Conditional Experts for Efficient Mobile Device Inference" (arXiv 2412.00099),
whose cache prior is a share of the logits' usual spread; here the margin is in logits. Logits of experts in memory are
raised by the margin for the choice alone, so one on disk gives way to one that trails it by less; weights are those of
the router's own logits. Decode steps only: a prompt needs most experts anyway. Left out: experts that are always kept.

Shapes: x [T, H], ids and weights [T, K].
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moelab.experts.routers import LinearRouter, TopK
from moelab.models import MoELayer, discover
from moelab.models.patches import Patches
from moelab.specs import State
from moelab.speculate.execution import found


class CacheAwareRouting(AbstractContextManager):
    """An offloaded model whose routers prefer experts in memory, until `close()` or the end of the `with`.

    margin : logits by which an expert on disk must lead one in memory to be chosen before it; 0 changes nothing.

    requests, hits, changed : exact counts over decode steps: choices; those of experts that were in memory; those that
        the router had not made.

    Raises ValueError: a model that is not offloaded; a negative margin; the executor "exact", which promises every bit;
    a router that does not choose by its logits alone.
    """

    def __init__(self, model: nn.Module, margin: float) -> None:
        engine = getattr(getattr(model, "moelab", None), "engine", None)
        if engine is None:
            raise ValueError("cache-aware routing prefers experts that are in memory: open the model with memory=")
        self.margin, self.engine, layers = require_margin(margin), engine, discover(model)
        if margin and engine.executor is None:
            raise ValueError('cache-aware routing changes the output, and the executor "exact" promises every bit of '
                             'it: use executor="fast"')
        self.requests = self.hits = self.changed = 0
        self._inputs: dict[int, Tensor] = {}
        routers = [LinearRouter.of(layer, model.config) if margin else None for layer in layers]
        for layer, router in zip(layers, routers):
            if margin and (not isinstance(router.rule, TopK) or router.rule.groups is not None):
                raise ValueError(f"{layer.name}: its router chooses by {router.rule}; cache-aware routing is for "
                                 f"routers that take the K best of all logits")
        with Patches() as patches:
            for layer, router in zip(layers, routers):
                patches.hook(layer.router.register_forward_pre_hook,
                             lambda _m, args, i=layer.index: self._inputs.__setitem__(i, args[0]))
                patches.hook(layer.experts.register_forward_pre_hook, partial(self._before, layer, router),
                             with_kwargs=True, prepend=True)
            self._patches = patches.pop_all()

    def close(self) -> None:
        self._patches.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def hit_rate(self) -> float:
        """Share of the choices of decode steps that were in memory."""
        return self.hits / self.requests if self.requests else math.nan

    @torch.no_grad()
    def _before(self, layer: MoELayer, router: LinearRouter | None, _: nn.Module, args: tuple, kwargs: dict[str, Any]
                ) -> tuple[tuple, dict[str, Any]] | None:
        seen = self._inputs.pop(layer.index, None)
        if not self.engine.decoding or seen is None:
            return None
        s, ids, weights = *args, *kwargs.values()
        residency, E = self.engine.residency, layer.E
        held = torch.tensor([residency.state((layer.index, e)) is State.FULL for e in range(E)] + [False],
                            device=ids.device)                      # the last one for "no expert"
        if router is not None:
            chosen, weighed = router(seen.reshape(len(ids), -1), self.margin * held[:E].float())
            new = ~found(ids, chosen)                               # [T, K], which the router had not chosen
            other = new.any(-1, keepdim=True)                       # all else stays as it is, to the bit
            self.changed += int(new.sum())
            ids, weights = torch.where(other, chosen, ids), torch.where(other, weighed.to(weights.dtype), weights)
        self.requests += int((ids < E).sum())
        self.hits += int(held[ids].sum())
        return (s, ids, weights), {}


def require_margin(margin: float) -> float:
    """The margin. ValueError: it is negative or no finite number."""
    if not (isinstance(margin, (int, float)) and 0 <= margin < math.inf):
        raise ValueError(f"the margin of cache-aware routing is {margin!r}; it is a number of logits, 0 or more")
    return margin
