"""What `advise` is asked, and what each form gives by arithmetic: bytes over rates.

Source: the limits of `moelab.bench.limits`: a layer takes as long as reading its missing
experts or multiplying all of them, whichever is longer, after what comes before. A cache is taken
to hold the most popular experts, as it does at best. Left out: codecs that are decoded before they
are multiplied; prefetching, which hides reads behind other work but reads no fewer bytes; whatever
an engine does besides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moelab.advice.model import AS_IS, Model
from moelab.advice.ways import Way, hit_rates
from moelab.base.specs import DeviceSpec
from moelab.base.table import size
from moelab.offloading.budget import RESERVE, kv_bytes
from moelab.simulation.costs import MachineRates

#: experts that must have slots beside those that are kept, so that a layer can load while it
#: computes
STAGING = 2


@dataclass(frozen=True)
class Question:
    """A model on a machine.

    memory : bytes of the whole process.
    context, batch : tokens of a sequence, and sequences at a time.
    loss : relative increase of language loss that is allowed; infinity allows any.
    on_card : whether the machine is a card's rather than this one.
    shares, popularity : [L, E] of tokens that need each expert, where no trace says it, and who
        says so.
    """

    model: Model
    device: DeviceSpec
    memory: int
    context: int
    batch: int
    loss: float
    on_card: bool
    shares: Any
    popularity: str

    @property
    def kv(self) -> int:
        """Bytes of the KV cache."""
        return kv_bytes(self.model.spec, self.context * self.batch)

    @property
    def fixed(self) -> int:
        """Bytes of everything but the experts: other weights, KV cache, process."""
        return self.model.others + self.kv + RESERVE

    def way(self, form: str, loss: float | None, expert: int) -> Way | None:
        """A form, of so many bytes an expert in memory, of which nothing else is known yet; None if
        it does not fit."""
        spec = self.model.spec
        count = spec.L * spec.E
        budget = min(self.memory - self.fixed, count * expert)
        if budget < min(STAGING + spec.K, count) * expert:
            return None
        written = 0 if form == AS_IS else count * expert + self.model.others
        return Way(form, loss, count * expert, budget, self.fixed + budget, written=written)

    def arithmetic(self, faster: float = 1.0) -> list[Way]:
        """The forms that fit, the fastest first; of equally fast ones, the lossless first.

        faster : than the machine's is the disk that is asked about."""
        model, spec = self.model, self.model.spec
        rates = MachineRates.of(self.device)
        read = faster * rates.read
        hits = hit_rates(self.shares)
        dense = model.dense
        count = spec.L * spec.E
        # experts of a step, if chosen at random; weights that each token multiplies
        visits = count * (1 - (1 - spec.K / spec.E) ** self.batch)
        weights = spec.L * spec.K * spec.expert_params + dense / 2
        ways = []
        for form in model.forms():
            expert = model.expert_bytes(form)
            way = self.way(form, model.loss(form), expert)
            if way is None:
                continue
            kept = count if way.resident else max(way.budget // expert - STAGING, 0)
            hit = hits(kept)
            touched = visits * expert
            parts = {
                "memory bandwidth": touched / rates.memory,
                "reading experts": touched * (1 - hit) / read,
            }
            prompt = (
                (dense + way.experts) / rates.memory,
                (count - kept) * expert / read,
                2 * self.context * self.batch * weights / rates.flops,
            )
            limit = max(parts, key=parts.get)
            tpot = (dense + self.kv) / rates.memory + parts[limit]
            ways.append(replace(way, hit_rate=hit, ttft=max(prompt), tpot=tpot, limited_by=limit))
        return sorted(ways, key=lambda way: (way.tpot, not way.lossless))

    def refusal(self) -> ValueError:
        """The error where nothing that fits is known to lose no more than is allowed."""
        spec = self.model.spec
        least = -(-(self.fixed + (STAGING + spec.K) * spec.expert_bytes) // 10**6)
        return ValueError(
            f"{spec.name} does not fit {size(self.memory)} with a loss of at most {self.loss:.2%}: "
            f"the process takes {size(RESERVE)}, other weights {size(self.model.others)}, a KV "
            f"cache of {self.context * self.batch:,} tokens {size(self.kv)}, and a few experts are "
            f"needed, too. Give {least}MB or more, or a smaller context or batch, measure the loss "
            "of few bits (--verify) or allow any (--loss any)"
        )
