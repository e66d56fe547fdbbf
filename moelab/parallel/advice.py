"""Tensor or expert parallelism: the guide's decision framework as a function that gives its
reasons.

Source: AWS Neuron's MoE guide, "Configuring TP and EP". Few experts (≤ 32) balance badly over
devices, so each is cut; many (≥ 64) are spread. A part of an expert should keep I ≥ 128, or the
matrix unit idles. In between the two are combined with TP of 2 to 8. Where the rules disagree (our
reading), a part never falls below 128 and a device holds at least one expert. Left out: skewed
routing, and the speed of links."""

from __future__ import annotations

from dataclasses import dataclass

from moelab.specs import MoESpec

FEW, MANY, LEAST_I, HYBRID = 32, 64, 128, (2, 8)


@dataclass(frozen=True)
class Advice:
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


def advise(spec: MoESpec, devices: int) -> Advice:
    """How to spread experts over devices, with even routing."""
    if devices < 1:
        raise ValueError(f"devices is {devices}; there must be at least one")
    if devices == 1:
        return Advice(1, 1, ("One device holds everything.",))
    divisors = [tp for tp in range(1, devices + 1) if devices % tp == 0]
    fitting = [tp for tp in divisors if devices // tp <= spec.E and tp <= spec.I]
    if not fitting:
        raise ValueError(
            f"{devices} devices are too many for {spec.E} experts of I = {spec.I}: no tp that divides "
            f"them gives every device a part"
        )
    wide = [tp for tp in fitting if spec.I / tp >= LEAST_I] or fitting[:1]
    rule = _few if spec.E <= FEW else _between if spec.E < MANY else _many
    tp, *reasons = rule(spec, devices, wide)
    if tp > 1:
        part = spec.I / tp
        reasons.append(
            f"A part keeps I = {part:.4g}, at least {LEAST_I}."
            if part >= LEAST_I
            else f"A part keeps only I = {part:.4g}, less than {LEAST_I}; fewer devices would do better."
        )
    return Advice(tp, devices // tp, tuple(reasons))


# Each rule gives tp and the reasons. wide : the possible tp with which a part keeps I ≥ 128.


def _few(spec: MoESpec, devices: int, wide: list[int]) -> tuple[int, *tuple[str, ...]]:
    tp, cut = wide[-1], f"{spec.E} experts are few (≤ {FEW}): they are cut"
    if tp == devices:
        return tp, f"{cut}, every device works on every token, and none is a straggler."
    return (
        tp,
        f"{cut}.",
        f"Cut into {devices}, an expert would keep I = {spec.I / devices:.4g}, less than {LEAST_I}: "
        f"so tp is {tp}, and the experts are spread over {devices // tp}.",
    )


def _between(spec: MoESpec, devices: int, wide: list[int]) -> tuple[int, str]:
    neither = f"{spec.E} experts are neither few (≤ {FEW}) nor many (≥ {MANY}): "
    least, most = HYBRID
    if moderate := [tp for tp in wide if least <= tp <= most and tp < devices]:
        return moderate[0], f"{neither}a moderate tp beside ep."
    tp = wide[-1] if wide[-1] <= most else wide[0]
    if tp == 1:
        then = "So the experts are spread."
    elif tp == devices:
        then = "So they are cut: every device works on every token, and none is a straggler."
    else:
        then = f"So tp is {tp}, the least with which every device holds a part."
    return tp, (
        f"{neither}both would be combined, but {devices} devices have no tp of {least} to {most} that "
        f"leaves parts of I ≥ {LEAST_I} and an ep. {then}"
    )


def _many(spec: MoESpec, devices: int, wide: list[int]) -> tuple[int, str]:
    tp, many = wide[0], f"{spec.E} experts are many (≥ {MANY}): they"
    if tp == 1:
        return tp, f"{many} are spread, each device computes whole ones."
    return tp, (
        f"{many} would be spread, but {devices} devices are more than the experts, so tp is {tp}."
    )
