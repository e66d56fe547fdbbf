"""What AWS Neuron's guide decides by sizes alone, without torch: how experts are spread over devices,
which algorithm runs them, and how many blocks hold any routing.

Source: AWS Neuron's MoE guide, "Configuring TP and EP", "Selective loading", "All-Experts", "BWMM";
the SDK's `ExpertMLPsV2`. Few experts (≤ 32) balance badly over devices, so each is cut; many (≥ 64)
are spread. A part of an expert should keep I ≥ 128, or the matrix unit idles. In between the two are
combined, with TP of 2 to 8. Where the guide leaves it open, our reading: "very large EP" suffers from
uneven loads, and the largest that it shows is 16, so experts are spread over 16 groups and further
devices cut them, which gives its third example, TP = 4 and EP = 16 on 64. Left out: skewed routing,
and the speed of links; `moelab.advice.neuron` adds memory, phases and bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moelab.base.specs import MoESpec

FEW = 32
MANY = 64
LEAST_I = 128
MOST_TP = 8
MOST_EP = 16


@dataclass(frozen=True)
class Parallelism:
    tp: int
    ep: int
    reasons: tuple[str, ...]

    @property
    def kind(self) -> str:
        if self.tp == 1:
            return "one device" if self.ep == 1 else "EP"
        return "TP" if self.ep == 1 else "hybrid"

    def __str__(self) -> str:
        return f"{self.kind}: tp = {self.tp}, ep = {self.ep}. " + " ".join(self.reasons)


def choose(
    spec: MoESpec, devices: int, allowed: Callable[[int, int], bool] = lambda tp, ep: True
) -> Parallelism:
    """How to spread experts over devices, with even routing.

    allowed : which (tp, ep) a runtime can do; all of them if not given.

    Raises ValueError: no device, or none of the ways is possible."""
    if devices < 1:
        raise ValueError(f"devices is {devices}; there must be at least one")
    if devices == 1:
        return Parallelism(1, 1, ("One device holds everything.",))
    fitting = [
        tp
        for tp in range(1, min(devices, spec.I) + 1)
        if devices % tp == 0 and devices // tp <= spec.E and allowed(tp, devices // tp)
    ]
    if not fitting:
        raise ValueError(
            f"{devices} devices are too many for {spec.E} experts of I = {spec.I}: no tp that divides "
            f"them gives every device a part that the runtime can compute"
        )
    tp, why = _rule(spec, devices, fitting)
    reasons = [f"{spec.E} experts {why}."]
    if tp > 1:
        part = spec.I / tp
        size = "at least" if part >= LEAST_I else "less than"
        reasons.append(f"A part keeps I = {part:.4g}, {size} {LEAST_I}.")
    return Parallelism(tp, devices // tp, tuple(reasons))


def _rule(spec: MoESpec, devices: int, fitting: list[int]) -> tuple[int, str]:
    """tp, one of `fitting`, and why."""
    wide = [tp for tp in fitting if spec.I / tp >= LEAST_I] or fitting[:1]
    low = [tp for tp in wide if tp <= MOST_TP] or wide[:1]
    spread = [tp for tp in low if devices // tp <= MOST_EP] or low[-1:]
    if len(fitting) == 1:
        return fitting[0], "can be spread in this way only"
    if spec.E <= FEW:
        tp, amount = wide[-1], f"few (≤ {FEW})"
    elif spec.E >= MANY:
        tp, amount = spread[0], f"many (≥ {MANY})"
    else:
        tp = next((tp for tp in spread if tp > 1), spread[0])
        amount = "neither few nor many"
    groups = f"spread over {devices // tp} groups, and cut"
    how = "spread" if tp == 1 else "cut" if tp == devices else groups
    return tp, f"are {amount}: they are {how}"


def neuron_choice(
    T: int,
    K: int,
    E: int,
    *,
    decode: bool,
    block_size: int = 512,
    capacity_factor: float | None = None,
    alpha: float = 1.0,
) -> str:
    """ "selective", "all_experts", "capacity" or "blockwise", by the SDK's rule."""
    if decode:
        return "all_experts" if alpha * E <= T * K else "selective"
    if capacity_factor is not None and capacity_factor < E / K:  # from E/K on it is taken for None
        return "capacity"
    if alpha * E > T * K:
        return "selective"
    return "all_experts" if block_size > T * K else "blockwise"


def blocks_by_code(T: int, K: int, E: int, B: int) -> int:
    """N, the blocks of B tokens that hold any routing of T tokens to K of E experts, as the SDK's code
    has it: E − 1 experts with a token each, and all other pairs one expert's."""
    return min(-(-(T * K - (E - 1)) // B) + E - 1, T * K)
