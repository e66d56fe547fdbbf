"""Does a converted model compute what the model computes? Logits of whole prefills, prompt by
prompt.

Nothing is dropped (a group that overflows is launched again), so the unconverted model in float32
is the reference. With the evaluator in double precision the difference is at most the rounding of
weights to fp16, and `LOGITS` is the limit. In fp16, and on a Mac, the arithmetic adds to it, and a
near tie in a router may send a token to another expert, so no number fits all models: a Mac is
judged by what the evaluator's fp16 makes of the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moelab.ane.backends import ConvertedBackend
from moelab.ane.plan import Account
from moelab.ane.runtime import prefill_through
from moelab.base.progress import progress

#: of a good conversion: largest difference of a logit in double precision, least share of equal
#: next tokens
LOGITS = 1e-2
SAME = 0.99
#: how many times the largest difference of the evaluator's fp16 a device's may be: it adds in
#: another order; ours
ROUNDING = 3


@dataclass(frozen=True, eq=False)
class Parity:
    """What `parity` found, for n prompts."""

    backend: str
    last: np.ndarray  # float64 [n], largest difference of a logit after the last token
    same: np.ndarray  # bool [n], whether the most likely next token is the same
    counts: Account
    limit: float = LOGITS  # of `last` in a good conversion
    least: float = SAME  # share of `same` in a good conversion

    @property
    def ok(self) -> bool:
        """The next token's logits within the limit on every prompt, and the same token on enough of
        them."""
        return bool((self.last <= self.limit).all()) and float(self.same.mean()) >= self.least

    def summary(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "prompts": len(self.same),
            "same next token": float(self.same.mean()),
            "largest difference, next token": float(self.last.max()),
            "allowed": self.limit,
            "median of these": float(np.median(self.last)),
            "expert graphs run": self.counts.launches,
            "passed": self.ok,
        }


def parity(
    backend: ConvertedBackend,
    model: Any,
    prompts: Sequence[Sequence[int]],
    rounding: Parity | None = None,
) -> Parity:
    """Prefill every prompt twice, through the packages and through the model.

    model : the model that was converted; its weights are widened to float32 for good. prompts :
        token ids.
    rounding : what the evaluator's fp16 mode made of the same prompts, to judge a device by.

    Raises ValueError: no prompts, one longer than the graphs' context, a damaged or another model's
    conversion."""
    if not len(prompts):
        raise ValueError("there are no prompts to compare on; give at least one")
    limit, least = LOGITS, SAME
    if rounding is not None:
        limit = max(LOGITS, ROUNDING * float(rounding.last.max()))
        least = min(SAME, float(rounding.same.mean()) - 1 / len(prompts))
    elif not backend.exact:
        limit = float("inf")
    model = model.float().eval()
    rows = []
    counts = Account()
    with torch.no_grad():
        for ids in progress(prompts, "comparing", unit="prompt"):
            ids = torch.as_tensor([list(ids)])
            expected = model(ids, use_cache=False).logits[0]  # [S, V]
            with prefill_through(model, backend, overflow="pad") as ane:
                found = model(ids, use_cache=False).logits[0]
            counts += ane.total
            same = bool(found[-1].argmax() == expected[-1].argmax())
            rows.append((float((found[-1] - expected[-1]).abs().max()), same))
    return Parity(backend.name, *map(np.array, zip(*rows)), counts, limit, least)
