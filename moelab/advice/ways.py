"""One way of running a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moelab.advice.model import AS_IS
from moelab.base.records import Record
from moelab.base.table import duration, percent, plain, size
from moelab.cache.policies import DEFAULT_POLICY

#: tokens of a sequence that are played and measured: of the prompt, to fill the cache, and timed
PROMPT, WARM, TIMED = 64, 24, 24


@dataclass(frozen=True)
class Way:
    """One way of running a model, and what it gives.

    form : of the stored experts, or "as it is".    experts : bytes of all in memory.
    budget : what they may take.
    loss : of language loss, relative; 0.0 is lossless, None unknown.
    memory : bytes of everything.
    hit_rate : of a token's experts.
    written : bytes of a new store.
    tpot, ttft : s.    kind : "modelled", "simulated" or "measured".
    between : what `tpot` may be, the least and the most, s; None: nobody can say.
    predicted : of a measured one, the TPOT that had been expected.
    device : what computes; `budget` is of its memory.
    pinned, hybrid : beside a GPU, bytes of experts in the CPU's memory, and threads of the CPU that
        compute some of the missing ones there.
    """

    form: str
    loss: float | None
    experts: int
    budget: int
    memory: int
    hit_rate: float = 0.0
    tpot: float = 0.0
    ttft: float = 0.0
    limited_by: str = ""
    written: int = 0
    cache: str = DEFAULT_POLICY
    prefetch: str | None = None
    kind: str = "modelled"
    between: tuple[float, float] | None = None
    predicted: float | None = None
    device: str = "cpu"
    pinned: int = 0
    hybrid: int = 0

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
    def settings(self) -> Record:
        """What tells it from other ways of running the model, as plain values."""
        plain = {"form": self.form, "executor": "fast", "budget": self.budget} | self._place
        if self.resident:
            return plain
        return plain | {"cache": self.cache, "prefetch": self.prefetch, "workers": 1}

    def options(self, stored: str | None) -> Record:
        """What `open_model` takes to run it, of a model that is stored in this form (None: as
        it was published, which needs no memory of its own to be whole)."""
        options = {"executor": "fast"} | self._place
        if self.resident:
            whole = self.form == AS_IS and stored is None
            return options if whole else {"memory": "100%"} | options
        unit, of = ("MB", 10**6) if self.budget >= 10**8 else ("kB", 10**3)
        options = {"memory": f"{self.budget // of}{unit}"} | options
        return options | {"cache": self.cache, "prefetch": self.prefetch or "none"}

    @property
    def _place(self) -> Record:
        """The options that say where to compute; none for the CPU."""
        if self.device == "cpu":
            return {}
        place = {"device": self.device}
        if self.pinned:
            place["host"] = f"{self.pinned // 10**6 + 1}MB"
        return place | ({"hybrid": self.hybrid} if self.hybrid else {})

    @property
    def name(self) -> str:
        """In a few words."""
        parts = [self.form] if self.device == "cpu" else [self.form, "GPU"]
        if not self.resident:
            parts += [self.cache, *([f"prefetch {self.prefetch}"] if self.prefetch else [])]
        return ", ".join(parts)

    @property
    def loses(self) -> str:
        """Its loss in words."""
        if self.loss is None:
            return "loss unknown"
        return f"{percent(self.loss, 2)} more loss" if self.loss else "lossless"

    @property
    def range(self) -> str:
        """What its TPOT may be, in words."""
        ends = [] if self.between is None else [duration(end) for end in self.between]
        return f" ({ends[0]} to {ends[1]})" if len({*ends}) == 2 else ""

    def row(self, batch: int) -> dict[str, str]:
        """All that is known of it, as a person reads it."""
        return {
            "experts as": self.form,
            "on": "CPU" if self.device == "cpu" else "GPU",
            "cache": "–" if self.resident else self.cache,
            "prefetch": self.prefetch or "–",
            "TPOT": duration(self.tpot) + self.range,
            "tokens/s": plain(batch / self.tpot),
            "TTFT": duration(self.ttft),
            "memory": size(self.memory),
            "written": size(self.written),
            "hit rate": percent(self.hit_rate),
            "loss": self.loses,
            "limited by": self.limited_by,
            "kind": self.kind,
        }
