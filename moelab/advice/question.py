"""What `advise` is asked, and what each form gives by arithmetic: bytes over rates.

Source: the limits of `notebooks/studies/limits.py`: a layer takes as long as reading its missing
experts or multiplying all of them, whichever is longer, after what comes before. What a cache finds
is what the default policy finds of tokens that are drawn as the model's, or given
(`moelab.advice.assumed`). The first prompt of a process finds an empty cache, and goes through a
layer in one step: it reads each expert that it needs once. Left out: codecs that are decoded before
they are multiplied; prefetching, which hides reads behind other work but reads no fewer bytes;
whatever an engine does besides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from moelab.advice.assumed import LAYERS, TOKENS, Assumed
from moelab.advice.model import AS_IS, LOSSLESS, Model
from moelab.advice.ways import Way
from moelab.base.specs import DeviceSpec
from moelab.base.table import size
from moelab.offloading.budget import RESERVE, kv_bytes
from moelab.simulation.costs import MachineRates
from moelab.simulation.drafts import PassCosts, advised

#: shares of the memory in which ways are tried beside it
PARTS = (1.5, 0.75, 0.5)


@dataclass(frozen=True)
class Question:
    """A model on a machine.

    memory : bytes of the whole process.
    context, batch : tokens of a sequence, and sequences at a time.
    loss : relative increase of language loss that is allowed; infinity allows any.
    on_card : whether the machine is a card's rather than this one.
    assumed : the routing, where the model has not run here.
    """

    model: Model
    device: DeviceSpec
    memory: int
    context: int
    batch: int
    loss: float
    on_card: bool
    assumed: Assumed | None = None

    @property
    def kv(self) -> int:
        """Bytes of the KV cache."""
        return kv_bytes(self.model.spec, self.context * self.batch)

    @property
    def fixed(self) -> int:
        """Bytes of everything but the experts: other weights, KV cache, process."""
        return self.model.others + self.kv + RESERVE

    @property
    def staging(self) -> int:
        """Experts that must have slots beside those that are kept, so that a layer can load while
        it computes."""
        return 2

    @property
    def place(self) -> str:
        """What it is to fit, in words."""
        return size(self.memory)

    def way(self, form: str, expert: int, loss: float | None = None) -> Way | None:
        """A form, of so many bytes an expert in memory, of which nothing else is known yet but its
        loss, if it has one; None if it does not fit."""
        spec = self.model.spec
        count = spec.L * spec.E
        budget = min(self.memory - self.fixed, count * expert)
        if budget < min(self.staging + spec.K, count) * expert:
            return None
        written = 0 if form == AS_IS else count * expert + self.model.others
        return Way(
            form,
            0.0 if form in LOSSLESS else loss,
            count * expert,
            budget,
            self.fixed + budget,
            ttft=self._prompt(expert, float(budget < count * expert)),
            written=written,
        )

    def arithmetic(self, faster: float = 1.0) -> list[Way]:
        """The forms that fit.

        faster : than the machine's is the disk that is asked about."""
        # as published, as expected, and at their slowest, with a busy disk or twice the expected
        # shortfall from what is published
        found = [MachineRates.of(self.device, reached) for reached in range(3)]
        if busy := self.device.figures.get("storage_busy_gbs"):
            found[2] = replace(found[2], read=1e9 * busy.value)
        fast, rates, slow = (replace(of, read=faster * of.read) for of in found)
        ways = []
        count = self.model.spec.L * self.model.spec.E
        for form in self.model.forms():
            expert = self.model.expert_bytes(form)
            if (way := self.way(form, expert)) is None:
                continue
            kept = count if way.resident else max(way.budget // expert - self.staging, 0)
            low, hit, high = self.found(kept / count, expert)
            tpot, limit = self.token(expert, hit, rates)
            ends = self.token(expert, high, fast)[0], self.token(expert, low, slow)[0]
            ways.append(replace(way, hit_rate=hit, tpot=tpot, between=ends, limited_by=limit))
        return ways

    def found(self, share: float, expert: int) -> tuple[float, float, float]:
        """What of a step's experts, of so many bytes, is in memory with such a share of all there:
        least, middle, most."""
        return self.assumed.found(share)

    def token(self, expert: int, hit: float, rates: MachineRates) -> tuple[float, str]:
        """(seconds of a token, what limits it), of experts of so many bytes, such a share of which
        is in memory."""
        touched = self.model.spec.L * self.assumed.distinct * expert
        parts = {
            "memory bandwidth": touched / rates.memory,
            "reading experts": touched * (1 - hit) / rates.read,
        }
        limit = max(parts, key=parts.get)
        return (self.model.dense + self.kv) / rates.memory + parts[limit], limit

    def _prompt(self, expert: int, missing: float) -> float:
        """Seconds of the first prompt: all its experts are read once, such a share of them from
        where they are if not in memory, and multiplied; the head sees its last token only."""
        spec, rates = self.model.spec, MachineRates.of(self.device)
        tokens = self.context * self.batch
        experts = spec.L * min(tokens * spec.K, spec.E) * expert
        return max(
            (self.model.dense + experts) / rates.memory,
            missing * experts / rates.read,
            2 * tokens * self.model.multiplied / rates.flops,
        )

    def drafts(self, way: Way) -> str:
        """Whether draft tokens would pay in this way, in words."""
        spec, rates = self.model.spec, MachineRates.of(self.device)
        expert = way.experts / (spec.L * spec.E)
        position = 2 * (spec.L * spec.K * spec.expert_params + self.model.dense / 2)
        costs = PassCosts(
            spec.L,
            (self.model.dense + self.kv) / rates.memory,
            position / rates.flops,
            expert / rates.memory,
            expert / rates.read,
        )
        ids = self.assumed.draw(min(LAYERS, spec.L), [2 * TOKENS], 0)
        return advised([ids], spec.E, way.budget / way.experts, costs)

    def refusal(self) -> ValueError:
        """The error if no way both fits and loses no more than is allowed; it says what would fit."""
        spec = self.model.spec
        forms = [of for of in self.model.forms() if of in LOSSLESS or self.loss] or [AS_IS]
        least = min(forms, key=self.model.expert_bytes)
        few, every = (
            size(self.fixed + n * self.model.expert_bytes(least))
            for n in (self.staging + spec.K, spec.L * spec.E)
        )
        allowed = f" with a loss of at most {self.loss:.2%}" if self.loss < inf else ""
        return ValueError(
            f"{spec.name} does not fit {self.place}{allowed}: the process takes {size(RESERVE)}, other "
            f"weights {size(self.model.others)}, a KV cache of {self.context * self.batch:,} tokens "
            f"{size(self.kv)}; with them experts {'' if least == AS_IS else 'as '}{least} need at least "
            f"{few} (--memory), and {every} for all of them. Give more, or a smaller context or batch, "
            "measure the loss of few bits (--verify) or allow any (--loss any)"
        )
