"""What each form gives on a GPU with less memory than the model, by arithmetic.

Source: GPU-NDP §III-C, Eqs. 1 to 3, and Speculating Experts §5.1. A token is the launches of its
graphs, one where a GPU runs it alone, else one a layer and the host's work between; its other
weights and the experts that are found, read from the GPU's memory; and in each layer the missing
ones, sent over the link or, with threads that compute them where they lie, the better split of the
two (`moelab.offloading.hybrid.split`, the engine's own). How many of a layer's experts miss varies:
they are taken to miss each by itself, at the hit rate. Bytes are those of an expert as it is stored,
in every place. A first prompt needs each of its experts once: what is not in the GPU's memory comes
over the link while the rest is computed. Left out: prefetching, a disk below the CPU's memory, the growth of attention."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import comb

from moelab.advice.question import Question
from moelab.advice.ways import Way
from moelab.base.specs import DeviceSpec
from moelab.base.table import size
from moelab.cache.residency import SPARE
from moelab.offloading.budget import RESERVE
from moelab.offloading.hybrid import Wanted, far_seconds, near_seconds, split
from moelab.simulation.costs import MachineRates

#: bytes that an expert takes in pinned memory beyond its own at most
PAGE = 8192
#: threads of the CPU that compute experts, if it has as many cores
THREADS = 8
#: architectures of which a GPU runs a whole token alone (`moelab.fast.layers.FAMILIES`)
ALONE = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


def is_gpu(device: DeviceSpec) -> bool:
    """Whether a card is of a GPU with a CPU's memory beside it."""
    return {"link_bandwidth_gbs", "host_memory_bandwidth_gbs"} <= set(device.figures)


@dataclass(frozen=True)
class OnGpu(Question):
    """A model on a GPU: `memory` is the GPU's.

    host : bytes of the CPU's memory for the whole process."""

    host: int = 0

    @property
    def alone(self) -> bool:
        """Whether the GPU runs a token without asking the host between layers, which then computes
        some of what misses."""
        return self.batch == 1 and self.model.spec.model_type in ALONE

    @property
    def staging(self) -> int:
        return 2 * self.model.spec.K

    @property
    def place(self) -> str:
        return (
            f"{size(self.memory)} of the GPU's memory, with all that is not there in {size(self.host)} of "
            "the CPU's (--host)"
        )

    def way(self, form: str, expert: int, loss: float | None = None) -> Way | None:
        """As of `Question`, with what the CPU's memory must hold: what is not on the GPU, where some
        slots are free before a token, and a few more that are exchanged
        (`moelab.offloading.offload`)."""
        if (way := super().way(form, expert, loss)) is None or way.resident:
            return way and replace(way, device="cuda")
        spec = self.model.spec
        kept = max(way.budget // expert - self.staging, 0)
        away = spec.L * spec.E - kept + min(-(-kept // SPARE), spec.L * spec.K)
        pinned = (away + max(1, min(2 * spec.K, away // 50))) * (expert + PAGE)
        if pinned > self.host - RESERVE:
            return None
        ttft = self._prompt(expert, away / (spec.L * spec.E))
        threads = THREADS if self.on_card else min(THREADS, os.cpu_count() or 1)
        hybrid = threads if self.alone else 0
        return replace(way, device="cuda", pinned=pinned, hybrid=hybrid, ttft=ttft)

    def found(self, share: float, expert: int) -> tuple[float, float, float]:
        """As of `Question`; what the CPU computes is not brought to the GPU, so fewer experts are found there."""
        if not self.alone:
            return super().found(share, expert)
        rates = MachineRates.of(self.device)
        sent = (len(self.split(m, expert, rates)[0]) for m in range(self.model.spec.K + 1))
        return self.assumed.found(share, tuple(sent))

    def split(self, m: int, expert: int, rates: MachineRates) -> tuple[list[Wanted], list[Wanted]]:
        """Of m missing experts of a layer (those to send, those to compute where they lie)."""
        every = [Wanted(e, 1, expert) for e in range(m)]
        return split(every, rates.beside(expert)) if self.alone else (every, [])

    def token(self, expert: int, hit: float, rates: MachineRates) -> tuple[float, str]:
        spec = self.model.spec
        n = round(self.assumed.distinct)
        asked = hit < 1 and not self.alone  # the host, between layers
        waiting = sum(
            comb(n, m) * (1 - hit) ** m * hit ** (n - m) * self.missing(m, expert, rates)
            for m in range(1, n + 1)
        )
        parts = {
            "launches": rates.launch + spec.L * (rates.layer + asked * rates.step),
            "memory bandwidth": (self.model.dense + self.kv + spec.L * n * hit * expert)
            / rates.memory,
            "missing experts": spec.L * waiting,
        }
        return sum(parts.values()), max(parts, key=parts.get)

    def missing(self, m: int, expert: int, rates: MachineRates) -> float:
        """Seconds of m experts of a layer that are not in the GPU's memory, of one token."""
        near, far = self.split(m, expert, rates)
        beside = rates.beside(expert)
        return max(near_seconds(near, beside), far_seconds(far, beside))

    def _prompt(self, expert: int, missing: float) -> float:
        spec, rates = self.model.spec, MachineRates.of(self.device)
        return super()._prompt(expert, missing) + spec.L * (rates.layer + rates.step)
