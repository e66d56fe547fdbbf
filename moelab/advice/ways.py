"""One way of running a model, and what each gives by arithmetic: bytes over rates.

Source: the limits of `moelab.bench.limits`: a layer takes as long as reading its missing
experts or multiplying all of them, whichever is longer, after what comes before. A cache is taken
to hold the most popular experts, as it does at best. Left out: codecs that are decoded before they
are multiplied; prefetching, which hides reads behind other work but reads no fewer bytes; whatever
an engine does besides."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moelab.advice.model import AS_IS, Model
from moelab.cache.policies import DEFAULT_POLICY
from moelab.offloading.budget import RESERVE, kv_bytes
from moelab.simulation.costs import MachineRates
from moelab.specs import MoESpec
from moelab.table import percent

#: tokens of a sequence that are played and measured: of the prompt, to fill the cache, and timed
PROMPT, WARM, TIMED = 64, 24, 24
#: experts that must have slots beside those that are kept, so that a layer can load while it
#: computes
STAGING = 2
#: assumed popularity where nobody has counted: a Zipf law by rank, whose busiest of 32 experts has
#: twice the mean load, about as in the decoded tokens of the small model that is shipped (notebook
#: 01)
ZIPF = 0.3


@dataclass(frozen=True)
class Way:
    """One way of running a model, and what it gives.

    form : of the stored experts, or "as it is".    experts : bytes of all in memory.
    budget : what they may take.
    loss : of language loss, relative; 0.0 is lossless, None unknown.
    memory : bytes of everything.
    hit_rate : of a token's experts.    read : bytes that a step reads from the disk.
    written : bytes of a new store.
    tpot, ttft : s.    kind : "modelled", "simulated" or "measured".
    error : of `tpot`, relative; None for unknown.
    predicted : of a measured one, the TPOT that had been expected.
    """

    form: str
    loss: float | None
    experts: int
    budget: int
    memory: int
    hit_rate: float
    read: float
    tpot: float
    ttft: float
    limited_by: str = ""
    written: int = 0
    executor: str = "fast"
    cache: str = DEFAULT_POLICY
    prefetch: str | None = None
    workers: int = 1
    pools: Any = None
    kind: str = "modelled"
    error: float | None = None
    predicted: float | None = None

    @property
    def resident(self) -> bool:
        """Whether all experts stay in memory."""
        return self.budget >= self.experts

    @property
    def lossless(self) -> bool:
        """Whether no bit of the output changes."""
        return self.loss == 0

    def within(self, loss: float) -> bool:
        """Whether it loses no more than was allowed; infinity allows what nobody has measured."""
        return loss == math.inf or self.loss is not None and self.loss <= loss

    @property
    def settings(self) -> dict[str, Any]:
        """What tells it from other ways of running the model, as plain values."""
        return {"form": self.form, "executor": self.executor, "budget": self.budget} | (
            {}
            if self.resident
            else {"cache": self.cache, "prefetch": self.prefetch, "workers": self.workers}
        )

    @property
    def name(self) -> str:
        """In a few words."""
        parts = [
            self.form,
            self.executor,
            *(
                []
                if self.resident
                else [
                    self.cache,
                    *([f"prefetch {self.prefetch}"] if self.prefetch else []),
                    *([f"{self.workers} workers"] if self.workers > 1 else []),
                ]
            ),
        ]
        return ", ".join(parts)

    @property
    def loses(self) -> str:
        """Its loss in words."""
        return (
            "lossless"
            if self.lossless
            else "loss unknown"
            if self.loss is None
            else f"{percent(self.loss, 2)} more loss"
        )

    def row(self, batch: int) -> dict[str, Any]:
        """All that is known of it, in bytes and seconds; `moelab.advice.answer.in_units` makes it
        readable."""
        return {
            "experts as": self.form,
            "executor": self.executor,
            "cache": "–" if self.resident else self.cache,
            "prefetch": self.prefetch or "–",
            "TPOT, s": self.tpot,
            "±": "–" if self.error is None else f"{100 * self.error:.0f} %",
            "tokens/s": batch / self.tpot,
            "TTFT, s": self.ttft,
            "memory, B": self.memory,
            "experts in memory, B": self.budget,
            "written, B": self.written,
            "hit rate": self.hit_rate,
            "read a token, B": self.read / batch,
            "loss": self.loses,
            "limited by": self.limited_by,
            "kind": self.kind,
        }


def zipf(spec: MoESpec, exponent: float = ZIPF) -> np.ndarray:
    """Share of tokens that need each expert, [L, E], by rank⁻ᵉ; no more than all, K together in
    each layer."""
    f = np.arange(1, spec.E + 1) ** -exponent
    certain = 0
    while True:  # who is needed by all tokens leaves less for the others
        f[certain:] *= (spec.K - certain) / f[certain:].sum()
        if f.max(initial=0) <= 1 + 1e-12:
            return np.tile(np.minimum(f, 1), (spec.L, 1))
        certain = int((f >= 1).sum())
        f[:certain] = 1


def hit_rates(shares: np.ndarray) -> Callable[[int], float]:
    """Kept experts (of all L·E) → share of a token's experts among them, if the most popular are
    kept."""
    popular = np.sort(shares, axis=None)[::-1].cumsum()
    return lambda kept: (
        float(popular[min(kept, len(popular)) - 1] / popular[-1]) if kept > 0 else 0.0
    )


def needed(model: Model, context: int, batch: int) -> int:
    """Bytes of everything but the experts: other weights, KV cache, process."""
    return model.others + kv_bytes(model.spec, context * batch) + RESERVE


def least(model: Model, context: int, batch: int) -> int:
    """Bytes of everything, of experts only those that a token needs of one layer."""
    return needed(model, context, batch) + (STAGING + model.spec.K) * model.spec.expert_bytes


def fitted(
    model: Model, form: str, loss: float | None, expert: int, memory: int, context: int, batch: int
) -> Way | None:
    """A way of so many bytes an expert in so much memory, of which nothing else is known yet; None
    if it does not fit.

    What is decoded before it is multiplied (`DECODED`) takes less on disk than in memory; `written`
    then says too much."""
    count = model.spec.L * model.spec.E
    fixed = needed(model, context, batch)
    budget = min(memory - fixed, count * expert)
    if budget < min(STAGING + model.spec.K, count) * expert:
        return None
    return Way(
        form,
        loss,
        count * expert,
        budget,
        fixed + budget,
        0.0,
        0.0,
        math.inf,
        math.inf,
        written=0 if form == AS_IS else count * expert + model.others,
    )


def possible(
    model: Model,
    rates: MachineRates,
    memory: int,
    context: int,
    batch: int,
    hits: Callable[[int], float],
) -> list[Way]:
    """All ways that fit `memory`, the fastest first; of equally fast ones, the lossless first."""
    spec = model.spec
    dense = model.dense
    ways = []
    kv = kv_bytes(spec, context * batch)
    count = spec.L * spec.E
    visits = count * (1 - (1 - spec.K / spec.E) ** batch)  # experts of a step, if chosen at random
    weights = spec.L * spec.K * spec.expert_params + dense / 2  # that each token multiplies
    for form, (bits, lossless) in model.forms().items():
        expert = round(spec.expert_params * bits / 8)
        way = fitted(model, form, 0.0 if lossless else None, expert, memory, context, batch)
        if way is None:
            continue
        kept = count if way.resident else max(way.budget // expert - STAGING, 0)
        hit = hits(kept)
        touched = visits * expert
        parts = {
            "memory bandwidth": touched / rates.memory,
            "reading experts": touched * (1 - hit) / rates.read,
        }
        prompt = (
            (dense + way.experts) / rates.memory,
            (count - kept) * expert / rates.read,
            2 * context * batch * weights / rates.flops,
        )
        ways.append(
            replace(
                way,
                hit_rate=hit,
                read=touched * (1 - hit),
                ttft=max(prompt),
                tpot=(dense + kv) / rates.memory + max(parts.values()),
                limited_by=max(parts, key=parts.get),
            )
        )
    return sorted(ways, key=lambda way: (way.tpot, not way.lossless))
