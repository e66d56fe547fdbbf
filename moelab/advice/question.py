"""What `advise` is asked: a model, a machine, and within which bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moelab.advice.model import Model
from moelab.advice.ways import Way, hit_rates, least, possible
from moelab.offloading.budget import RESERVE, kv_bytes, parse_budget
from moelab.simulation.costs import MachineRates
from moelab.specs import DeviceSpec
from moelab.table import size


@dataclass
class Question:
    """A model on a machine.

    memory : bytes of the whole process, or what `parse_budget` makes bytes of.
    context, batch : tokens of a sequence, and sequences at a time.
    loss : relative increase of language loss that is allowed; infinity allows any.
    on_card : whether the machine is a card's rather than this one.
    shares, popularity : [L, E] of tokens that need each expert, where no trace says it, and who
        says so.
    """

    model: Model
    device: DeviceSpec
    memory: Any
    context: int
    batch: int
    loss: float
    on_card: bool
    shares: Any
    popularity: str

    def __post_init__(self) -> None:
        """Make bytes of `memory`; ValueError for a share, which would be one of the experts."""
        given = self.memory
        self.memory = parse_budget(
            given, 0, 0, lambda: round(self.device["memory_gb"] * 1e9) + RESERVE
        )
        if not self.memory:
            raise ValueError(
                f"memory is {given!r}; it is that of the whole process, such as '8GB', or 'auto'"
            )
        self.rates = MachineRates.of(self.device)
        self.hits = hit_rates(self.shares)

    def arithmetic(self, memory: int | None = None, rates: MachineRates | None = None) -> list[Way]:
        """The ways that fit, by bytes and rates alone; in other memory, or at other rates."""
        return possible(
            self.model,
            rates or self.rates,
            memory or self.memory,
            self.context,
            self.batch,
            self.hits,
        )

    def require_room(self, simulated: bool) -> None:
        """ValueError, with what is needed, where nothing fits; simulation may find more."""
        ways = self.arithmetic()
        if any(way.within(self.loss) for way in ways):
            return
        if simulated and (not self.model.forms() or ways and self.loss):
            return
        few = f" (with loss='any', --loss any, {ways[0].form} would fit)" if ways else ""
        tokens = self.context * self.batch
        needs = -(-least(self.model, self.context, self.batch) // 10**6)
        raise ValueError(
            f"{self.model.spec.name} does not fit {size(self.memory)}: the process takes "
            f"{size(RESERVE)}, other weights {size(self.model.others)}, a KV cache of {tokens:,} "
            f"tokens {size(kv_bytes(self.model.spec, tokens))}, and a few experts are needed, "
            f"too{few}. Give {needs}MB or more, or a smaller context or batch"
        )
