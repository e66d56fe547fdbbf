"""Tensor or expert parallelism: the guide's decision framework as a function that gives its
reasons.

Source: AWS Neuron's MoE guide, "Configuring TP and EP". Few experts (≤ 32) balance badly over
devices, so each is cut; many (≥ 64) are spread. A part of an expert should keep I ≥ 128, or the
matrix unit idles. In between the two are combined with TP of 2 to 8. Where the rules disagree (our
reading), a part never falls below 128 and a device holds at least one expert. Left out: skewed
routing, and the speed of links."""

from __future__ import annotations

from dataclasses import dataclass

from moelab.base.specs import MoESpec

FEW = 32
MANY = 64
LEAST_I = 128
HYBRID = (2, 8)


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


def choose(spec: MoESpec, devices: int) -> Parallelism:
    """How to spread experts over devices, with even routing."""
    if devices < 1:
        raise ValueError(f"devices is {devices}; there must be at least one")
    if devices == 1:
        return Parallelism(1, 1, ("One device holds everything.",))
    divisors = [tp for tp in range(1, devices + 1) if devices % tp == 0]
    fitting = [tp for tp in divisors if devices // tp <= spec.E and tp <= spec.I]
    if not fitting:
        raise ValueError(
            f"{devices} devices are too many for {spec.E} experts of I = {spec.I}: no tp that divides "
            f"them gives every device a part"
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
    least, most = HYBRID
    moderate = [tp for tp in wide if least <= tp <= most and tp < devices]
    if spec.E <= FEW:
        return wide[-1], f"are few (≤ {FEW}): they are cut"
    if spec.E >= MANY:
        return wide[0], f"are many (≥ {MANY}): they are spread"
    if moderate:
        return moderate[0], "are neither few nor many: a moderate tp beside ep"
    tp = wide[-1] if wide[-1] <= most else wide[0]
    return tp, f"are neither few nor many, and no tp of {least} to {most} leaves parts and an ep"
