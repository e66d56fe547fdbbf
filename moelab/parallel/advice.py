"""Tensor or expert parallelism: the guide's decision framework as a function that gives its
reasons.

Source: AWS Neuron's MoE guide, "Configuring TP and EP". Few experts (≤ 32) balance badly over
devices, so each is cut; many (≥ 64) are spread. A part of an expert should keep I ≥ 128, or the
matrix unit idles. In between, and where a device would get several times the mean load, the two are
combined with TP of 2 to 8. Where the rules disagree (our reading), a part never falls below 128 and
a device holds at least one expert. Left out: the speed of links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moelab.parallel.eplb import measure
from moelab.parallel.sharding import Placement
from moelab.specs import MoESpec

FEW, MANY, LEAST_I, HYBRID = 32, 64, 128, (2, 8)
#: max/mean above which spreading alone is thought to suffer; the guide calls 3–4 the worst case
SKEWED = 1.5


@dataclass(frozen=True)
class Advice:
    tp: int
    ep: int
    reasons: tuple[str, ...]

    @property
    def kind(self) -> str:
        kinds = {
            (False, False): "one device",
            (True, False): "TP",
            (False, True): "EP",
            (True, True): "hybrid",
        }
        return kinds[self.tp > 1, self.ep > 1]

    def __str__(self) -> str:
        return f"{self.kind}: tp = {self.tp}, ep = {self.ep}. " + " ".join(self.reasons)


def advise(spec: MoESpec, devices: int, load: Sequence[float] | None = None) -> Advice:
    """How to spread experts over devices; `load` [E] counts tokens in the most skewed layer, None
    for even routing."""
    if devices < 1:
        raise ValueError(f"devices is {devices}; there must be at least one")
    if load is not None and len(load) != spec.E:
        raise ValueError(
            f"load has {len(load)} numbers, but {spec.name} has {spec.E} experts a layer"
        )
    if devices == 1:
        return Advice(1, 1, ("One device holds everything.",))
    splits = [
        tp
        for tp in range(1, devices + 1)
        if devices % tp == 0 and devices // tp <= spec.E and tp <= spec.I
    ]
    if not splits:
        raise ValueError(
            f"{devices} devices are too many for {spec.E} experts of I = {spec.I}: no tp that divides "
            f"them gives every device a part"
        )
    wide = [tp for tp in splits if spec.I / tp >= LEAST_I] or splits[:1]
    reasons: list[str] = []
    if spec.E <= FEW:
        tp = wide[-1]
        reasons.append(
            f"{spec.E} experts are few (≤ {FEW}): they are cut"
            + (
                "."
                if tp < devices
                else ", every device works on every token, and none is a straggler."
            )
        )
        if tp < devices:
            reasons.append(
                f"Cut into {devices}, an expert would keep I = {spec.I / devices:.4g}, less than {LEAST_I}: "
                f"so tp is {tp}, and the experts are spread over {devices // tp}."
            )
    elif spec.E < MANY:
        moderate = [tp for tp in wide if HYBRID[0] <= tp <= HYBRID[1] and tp < devices]
        tp = moderate[0] if moderate else wide[-1] if wide[-1] <= HYBRID[1] else wide[0]
        reasons.append(
            f"{spec.E} experts are neither few (≤ {FEW}) nor many (≥ {MANY}): "
            + (
                "a moderate tp beside ep."
                if moderate
                else f"both would be combined, but {devices} devices have no tp of {HYBRID[0]} to {HYBRID[1]} that leaves parts "
                f"of I ≥ {LEAST_I} and an ep. "
                + (
                    "So the experts are spread."
                    if tp == 1
                    else "So they are cut: every device works on every token, and none is a straggler."
                    if tp == devices
                    else f"So tp is {tp}, the least with which every device holds a part."
                )
            )
        )
    else:
        tp = wide[0]
        reasons.append(
            f"{spec.E} experts are many (≥ {MANY}): they "
            + (
                "are spread, each device computes whole ones."
                if tp == 1
                else f"would be spread, but {devices} devices are more than the experts, so tp is {tp}."
            )
        )
    if spec.I / tp >= LEAST_I and tp > 1:
        reasons.append(f"A part keeps I = {spec.I / tp:.4g}, at least {LEAST_I}.")
    elif tp > 1:
        reasons.append(
            f"A part keeps only I = {spec.I / tp:.4g}, less than {LEAST_I}; fewer devices would do better."
        )
    if load is not None and tp < devices:
        tp = _skew(spec, devices, tp, load, wide, reasons)
    return Advice(tp, devices // tp, tuple(reasons))


def _skew(
    spec: MoESpec, devices: int, tp: int, load: Sequence[float], wide: list[int], reasons: list[str]
) -> int:
    """A larger tp where the load is skewed, with its reason."""

    def ratio(tp: int) -> float:
        return measure(load, Placement.consecutive(spec.E, devices // tp)).ratio

    first = ratio(tp)
    told = f"With this load the fullest of {devices // tp} groups gets {first:.2f} times the mean"
    if first <= SKEWED:
        reasons.append(f"{told}: even enough (≤ {SKEWED}).")
        return tp
    reasons.append(told + ".")
    larger = [t for t in wide if tp < t <= HYBRID[1]]
    best = next((t for t in larger if ratio(t) <= SKEWED), min(larger, key=ratio, default=tp))
    if ratio(best) < first:
        reasons.append(
            f"With tp = {best} there are {devices // best} groups, and it gets {ratio(best):.2f} times the "
            f"mean."
        )
    else:
        best = tp
    if ratio(best) > SKEWED:
        reasons.append("Redundant experts (moelab.parallel.eplb) would even out the rest.")
    return best
