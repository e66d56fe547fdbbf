"""Cache-aware routing: where a router is nearly indifferent, an expert that is in memory is chosen.
Lossy.

Source: Skliar et al., "Mixture of Cache-Conditional Experts for Efficient Mobile Device Inference"
(arXiv 2412.00099), whose cache prior is a share of the logits' usual spread; here the margin is in
logits. Logits of experts in memory are raised by the margin for the choice alone, so one on disk
gives way to one that trails it by less; weights are those of the router's own logits. Decode steps
only: a prompt needs most experts anyway. Left out: experts that are always kept.

Shapes: x [T, H], ids and weights [T, K].
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from moelab.base.specs import State
from moelab.models import MoELayer, discover, eager
from moelab.models.patches import Patches
from moelab.speculate.execution import found, intercept
from moelab.speculate.routers import route, router_logits

#: hidden states on which a router's rule is compared with the live router
PROBE = 64
SOFTMAX = partial(torch.softmax, dim=-1)


class Router:
    """A layer's router, whose choice can be influenced, and its rule for weights: each expert's
    softmax or sigmoid, divided by their sum or not, times a factor.

    Which of these it is, a comparison with the live router on random hidden states shows.
    ValueError: none of them."""

    def __init__(self, layer: MoELayer, dtype: torch.dtype) -> None:
        self.layer = layer
        weight = next(matrix for matrix in layer.router.parameters() if matrix.dim() > 1)
        x = torch.randn(PROBE, weight.shape[-1], generator=torch.Generator().manual_seed(0))
        x = x.to(weight.device, dtype)
        logits = router_logits(layer, x)
        off = {}
        ids, weights = route(layer, x)
        again, _ = route(layer, x, logits)
        for rule in product((SOFTMAX, torch.sigmoid), (False, True)):
            self.activation, self.normalise = rule
            factor = weights.float() / self.weights(logits, ids)
            off[rule] = (factor / factor.mean() - 1).abs().max().item()
        self.activation, self.normalise = best = min(off, key=off.get)
        if off[best] > 2**-6 or not torch.equal(again.sort(-1).values, ids.sort(-1).values):
            raise ValueError(
                f"{layer.name}: its {type(layer.router).__name__} chooses or weighs experts in another "
                f"way; cache-aware routing is for routers that do both by a softmax or sigmoid of logits"
            )

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, favour: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the router, which chose ids with weights [T, K] for x [T, H], had chosen with
        `favour` [E] added to the logits that are compared: ids and weights [T, K]."""
        logits = router_logits(self.layer, x)
        chosen, _ = route(self.layer, x, logits + favour)
        own = self.weights(logits, ids)
        other = self.weights(logits, chosen)
        return chosen, other * (weights.float().sum(-1, keepdim=True) / own.sum(-1, keepdim=True))

    def weights(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Of these experts, but for the factor."""
        weights = self.activation(logits).gather(1, ids)
        return weights / weights.sum(-1, keepdim=True) if self.normalise else weights


class CacheAwareRouting(Patches):
    """An offloaded model whose routers prefer experts in memory, until `close()` or the end of the
    `with`.

    margin : logits by which an expert on disk must lead one in memory to be chosen before it; 0
        changes nothing.

    requests, hits, changed : exact counts over decode steps: choices; those of experts that were in
        memory; those that the router had not made.

    Raises ValueError: a model that is not offloaded; a negative margin; the executor "exact", which
    promises every bit; a router that does not choose by its logits alone."""

    def __init__(self, model: nn.Module, margin: float) -> None:
        super().__init__()
        engine = getattr(getattr(model, "moelab", None), "engine", None)
        if engine is None:
            raise ValueError(
                "cache-aware routing prefers experts that are in memory: open the model with memory="
            )
        self.margin, self.engine, layers = require_margin(margin), engine, discover(model)
        if margin and model.moelab.executor is eager:
            raise ValueError(
                'cache-aware routing changes the output, and the executor "exact" promises every bit of '
                'it: use executor="fast"'
            )
        self.requests = self.hits = self.changed = 0
        with torch.no_grad():
            routers = [Router(layer, model.dtype) if margin else None for layer in layers]
        with Patches() as patches:
            for layer, router in zip(layers, routers):
                intercept(patches, layer, partial(self._before, layer, router))
            self.push(patches.pop_all())

    @property
    def hit_rate(self) -> float:
        """Share of the choices of decode steps that were in memory."""
        return self.hits / self.requests if self.requests else math.nan

    def _before(
        self, layer: MoELayer, router: Router | None, x: Tensor, ids: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the experts of a layer are to run with."""
        if not self.engine.decoding:
            return ids, weights
        state = self.engine.residency.state
        E = layer.E
        held = [state((layer.index, e)) is State.FULL for e in range(E)]
        held = torch.tensor([*held, False], device=ids.device)  # the last one is "no expert"
        if router is not None:
            favour = self.margin * held[:E].float()
            chosen, weighed = router(x, ids, weights, favour)
            new = ~found(ids, chosen)  # [T, K], which the router had not chosen
            self.changed += int(new.sum())
            other = new.any(-1, keepdim=True)  # a token whose choice is the same keeps every bit
            ids = torch.where(other, chosen, ids)
            weights = torch.where(other, weighed.to(weights.dtype), weights)
        self.requests += int((ids < E).sum())
        self.hits += int(held[ids].sum())
        return ids, weights


def require_margin(margin: float) -> float:
    """The margin. ValueError: it is negative or no finite number."""
    if not (isinstance(margin, (int, float)) and 0 <= margin < math.inf):
        raise ValueError(
            f"the margin of cache-aware routing is {margin!r}; it is a number of logits, 0 or more"
        )
    return margin
