"""The router in sequence parallel: each rank routes its share of the tokens, and all gather what was
chosen.

Source: AWS Neuron's MoE guide, "Router execution in sequence parallel mode". The router's weights
are on every rank. Gathered are K weights and ids a token, and not E logits. A router that needs more than
hidden states, or whose output is a dialect's, and steps of a few tokens stay as they are.

    x [T, H]    weights, ids [T, K]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from moelab.experts.sharding import share
from moelab.models import MoELayer
from moelab.models.dialects import ROUTING, SEQUENCES
from moelab.parallel.exchange import FEW, Exchange, pack, unpack


def route_in_sequence(layers: Sequence[MoELayer], ranks: Exchange) -> None:
    """Have the routers of a model work so, for good."""
    for layer in layers:
        if type(layer.router).__name__ not in (*ROUTING, *SEQUENCES):
            layer.router.forward = partial(_route, type(layer.router).forward, layer.router, ranks)


def _route(
    stock: Any, router: Any, ranks: Exchange, x: Tensor, *args: Any, **kwargs: Any
) -> tuple[Any, Tensor, Tensor]:
    x = x.reshape(-1, x.shape[-1])
    if args or kwargs or len(x) <= FEW:
        return stock(router, x, *args, **kwargs)
    sizes = share(len(x), ranks.size)
    _, weights, ids, *_ = stock(router, x.split(sizes)[ranks.rank])
    rows = ranks.all_gather(pack(weights, ids.int()), sizes, "routing")
    weights, chosen = unpack(rows, (weights, ids.int()))
    return None, weights, chosen.to(ids.dtype)
