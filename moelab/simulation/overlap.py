"""By how much executing predictions can shorten a decoded token at most, on a card.

Source: Speculating Experts §5.1, Eq. (1). On demand a layer computes, then copies its experts; with
the next layer's experts predicted, the shorter of the two is hidden behind the longer.

    TPOT = Σ_l (compute_l + copy_l)        ΔTPOT = Σ_l min(copy_l, compute_l)

Times are what a card's published rates allow at batch size 1: K experts over the host link; the
weights of attention, router and those experts, and the context's keys and values, once from memory.
Left out: launches and waiting (the paper's "idle"), what links and memories do not reach of their
rates, embedding and head, which no layer's copy runs beside."""

from __future__ import annotations

from dataclasses import dataclass

from moelab.base.specs import DeviceSpec, MoESpec
from moelab.offloading.budget import kv_bytes
from moelab.simulation.costs import MachineRates


@dataclass(frozen=True)
class Overlap:
    """Seconds of a token whose layers are alike: of copying experts, and of all that computes."""

    copy: float
    compute: float

    @property
    def tpot(self) -> float:
        """On demand, seconds."""
        return self.copy + self.compute

    @property
    def gain(self) -> float:
        """ΔTPOT of Eq. (1), seconds."""
        return min(self.copy, self.compute)


def overlap(spec: MoESpec, device: DeviceSpec, context: int = 0) -> Overlap:
    """A token after `context` others, all experts beside the device and none kept on it (modelled).

    spec : in the dtype in which experts are copied; with ordinary attention (`kv_bytes`).

    Raises ValueError: the card has no link, or no rates."""
    rates = MachineRates.of(device, reached=0)
    experts = spec.routed_bytes
    ends = round(spec.dense_bytes) - 4 * spec.vocab * spec.H  # but for embedding and head, 16 bits
    read = experts + ends + kv_bytes(spec, context)
    return Overlap(experts / rates.read, read / rates.memory)
