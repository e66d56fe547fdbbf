"""What static shapes cost a model: `limited` is a mode for `moelab.bench.accuracy.compare`, whose executor counts.

Beside it what notebook 05 needs for its figures: logits of texts that share no capacity, routings of a wanted skew, and
the two limits of a layer's time. Times themselves are `moelab.bench.experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moelab.experts.saliency import Saliency
from moelab.models import discover, plugged


@contextmanager
def limited(model: Any, make: Callable[[Saliency], Any], into: list[Any]) -> Iterator[Any]:
    """A mode for `compare`: the model on a new executor `make(saliency)`, which goes into a list at the end."""
    with Saliency(model, discover(model)) as saliency, plugged(model, make(saliency)) as executor:
        yield executor
    into.append(executor)


def read_all(model: Any, texts: Iterable[str]) -> list[Tensor]:
    """Logits [S, V], float32, of each text in a forward pass of its own: prompts share no capacity."""
    with torch.no_grad():
        return [model(**model.tokenizer(text, return_tensors="pt"), use_cache=False).logits[0].float()
                for text in texts]


def routing(T: int, E: int, K: int, skew: float = 0.0, seed: int = 0) -> Tensor:
    """ids [T, K]: K distinct experts a token, popularity of expert e falling like (e + 1)^−skew."""
    generator = torch.Generator().manual_seed(seed)
    gumbel = -torch.log(-torch.log(torch.rand(T, E, generator=generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)))
    return (gumbel - skew * torch.arange(1, E + 1).double().log()).topk(K).indices


def least_seconds(unique: float, T: int, K: int, H: int, I: int, weight_bytes: int, bandwidth: float, rate: float
                  ) -> dict[str, float]:
    """The roofline of one gated layer: reading the weights of `unique` experts once, and computing T·K of them."""
    return {"weights ÷ bandwidth": unique * 3 * H * I * weight_bytes / bandwidth,
            "FLOPs ÷ rate": T * K * 2 * 3 * H * I / rate}
