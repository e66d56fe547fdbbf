"""What the five sources claim, what answers it, and a verdict by rule; `moelab claims` prints it.

`data/claims.toml` is the ledger; tables of the papers, which nobody disputes, are in
`moelab.base.papers`. A claim is a number, a range, a word or an order (`above`,
`below`), and is answered by metrics of a notebook or of a bench, or by what testing it would need.
Its verdict is the first that applies:

    contradicted by the source itself   another place of the source says otherwise
    not testable here   it needs hardware, weights or figures that are not here
    fitted              it agrees, because something was chosen with this number; never counted
    follows             it agrees as a consequence of fitted numbers, of construction, or by a
                        prediction without a simulator (`predictor`, within the same tolerance;
                        where `null` says it by other claims, it alone decides)
    reproduced          it agrees, for the source's model and machine
    same direction      an order holds; it agrees, but another model or machine was looked at
                        `instead`; or it has at least a quarter of the claim's effect, and could
                        have come out on the other side of none (`either_way`)
    not reproduced      none of these; the claim says the likely reason

What is reproduced, follows or has the same direction must be so under each of a metric's `readings`,
other choices where the source leaves one open, and at both ends of its `interval`, where a claim
names their metrics; else it is not reproduced. So is a measured order that has no interval and is
within `SLIGHT` of turning round: the next run may. How many readings agree is said of every verdict.

A number agrees within its tolerance, and where no effect has a value (`neutral`) within half of the
effect, too: 20 % of a gain of 1.2 would include none. An order that could not have come out
otherwise must say so in `follows`."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, reduce
from operator import truediv
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moelab.base.files import read_json, results_root, shipped
from moelab.base.records import Record, Records
from moelab.base.schema import Amount, typed
from moelab.base.table import format_value
from moelab.bench.results import bench_file, metrics_of
from moelab.comparison import MetricsFile, are_numbers, differing, finished_runs

REPRODUCED, FITTED, FOLLOWS, DIRECTION, NOT_REPRODUCED, CONTRADICTED, NOT_TESTABLE, UNANSWERED = (
    VERDICTS
) = (
    "reproduced",
    "fitted",
    "follows",
    "same direction",
    "not reproduced",
    "contradicted by the source itself",
    "not testable here",
    "unanswered",
)
HEAD = ["claim", "model, hardware", "source's value", "ours", "kind", "verdict", "why"]


def ratios(values: list[float]) -> list[float]:
    """The first over the second, the third over the fourth, …"""
    return [a / b for a, b in zip(values[::2], values[1::2], strict=True)]


#: how several metrics become one number
COMBINE: dict[str, Callable[[list[float]], float]] = {
    "ratio": lambda v: reduce(truediv, ratios(v)),
    "least": min,
    "most": max,
    "least ratio": lambda v: min(ratios(v)),
    "largest ratio": lambda v: max(ratios(v)),
}
#: a difference that a run says little about, relative
SLIGHT = 0.05


@dataclass(frozen=True)
class Claim:
    """One claim; what `data/claims.toml` may say of it.

    title : the source's. where : section, table or figure. tolerance : relative.
    value : what is claimed; a list is a range, whose second end may be infinite. above, below : an
        order, instead: what it compares is larger or smaller than this.
    metric : a notebook or "bench NAME", then names of metrics; * stands for any text. combine : a
        key of `COMBINE`. interval : two metrics of the same place, the ends of a 95 % interval.
    neutral : the value of no effect. either_way : ours could have come out on the other side of it.
    instead : what was looked at instead of the source's model or machine.
    needs, fitted, follows, contradicted, reason : why it is not tested, fitted, …, not reproduced.
    null : a prediction by ids of the same source and numbers, "a * b / 2"; predictor : its value.
    """

    source: str
    title: str
    id: str
    where: str
    text: str
    hardware: str
    model: str
    tolerance: Amount = 0.0
    value: float | bool | str | list[Any] | None = None
    above: float | None = None
    below: float | None = None
    unit: str = ""
    metric: tuple[str, ...] = ()
    combine: Literal["", *COMBINE] = ""
    interval: tuple[str, ...] = ()
    needs: str = ""
    neutral: float | None = None
    either_way: bool = False
    instead: str = ""
    fitted: str = ""
    follows: str = ""
    predictor: float | None = None
    null: str = ""
    contradicted: str = ""
    reason: str = ""

    @property
    def is_order(self) -> bool:
        """Whether it compares instead of giving a value."""
        return self.above is not None or self.below is not None

    @property
    def ends(self) -> tuple[float, float]:
        """Of a range; a number is both."""
        return tuple(self.value) if isinstance(self.value, list) else (self.value, self.value)

    def agrees(self, found: Any) -> Any:
        """Whether a value is what the claim says."""
        if self.is_order:
            return found > self.above if self.above is not None else found < self.below
        if isinstance(self.value, (bool, str)):
            return found == self.value
        low, high = self.ends
        return low - self._slack(low) <= found <= high + self._slack(high)

    def _slack(self, end: float) -> float:
        """How far beyond an end still agrees: the tolerance, and at most half of the effect."""
        effect = math.inf if self.neutral is None else abs(end - self.neutral)
        return min(self.tolerance * abs(end), effect / 2)

    def verdict(self, found: float | bool | str | None) -> str:
        """By the rules above; `found` is None where no metric answers."""
        if self.contradicted or self.needs:
            return CONTRADICTED if self.contradicted else NOT_TESTABLE
        if found is None:
            return UNANSWERED if self.metric else FITTED if self.fitted else FOLLOWS
        if not self.agrees(found):
            same = self.either_way and (found - self.neutral) / (self.value - self.neutral) >= 0.25
            return DIRECTION if same else NOT_REPRODUCED
        if self.fitted:
            return FITTED
        if self.follows or self.null and self.agrees(self.predictor):
            return FOLLOWS
        return DIRECTION if self.is_order or self.instead else REPRODUCED

    @property
    def said(self) -> str:
        """The source's value in words."""
        if self.is_order:
            return f"> {self.above:g}" if self.above is not None else f"< {self.below:g}"
        if isinstance(self.value, list):
            low, high = self.value
            return f"{low:g} to {high:g}" if math.isfinite(high) else f"{low:g} or more"
        return f"{format_value(self.value)} {self.unit}".rstrip()

    def why(self, verdict: str) -> str:
        """What stands behind a verdict."""
        if verdict == NOT_TESTABLE:
            return f"needs {self.needs}"
        why = {
            FITTED: self.fitted,
            FOLLOWS: self.follows
            or self.null
            and f"ratios of the source's own numbers give {self.predictor:.3g}",
            CONTRADICTED: self.contradicted,
            NOT_REPRODUCED: self.reason or "as measured here",
        }.get(verdict, "")
        return "; ".join(filter(None, (why, self.instead and f"on {self.instead}")))


@dataclass(frozen=True)
class Row:
    """A claim with its answer: ours, and the kind of the number.

    readings : other choices, and the ends of an interval → what it is by them."""

    claim: Claim
    ours: float | bool | str | None
    kind: str
    readings: Record = field(default_factory=dict)

    @property
    def doubt(self) -> str:
        """Why what holds by our number is not reproduced all the same, or ""."""
        of, found = self.claim, self.claim.verdict(self.ours)
        if found not in (REPRODUCED, FOLLOWS, DIRECTION):
            return ""
        if lost := {by: v for by, v in self.readings.items() if of.verdict(v) == NOT_REPRODUCED}:
            holds = "within its interval" if of.interval else "by our choices"
            return f"{holds} only; " + ", ".join(f"{by}: {v:.3g}" for by, v in lost.items())
        bound = of.above or of.below  # None of what is no order; of 0 nothing is a share
        if found != DIRECTION or not bound or of.interval or self.kind != "measured":
            return ""
        slight = abs(self.ours / bound - 1) < SLIGHT
        return f"by less than {SLIGHT:.0%}, and no interval was measured" * slight

    @property
    def verdict(self) -> str:
        """By the rules above."""
        return NOT_REPRODUCED if self.doubt else self.claim.verdict(self.ours)

    @property
    def why(self) -> str:
        """What stands behind the verdict, and how many readings agree with the source."""
        said = self.doubt or self.claim.why(self.verdict)
        if self.claim.interval or not self.readings:
            return said
        agree = sum(map(self.claim.agrees, self.readings.values()))
        return f"{said}; {agree} of {len(self.readings)} other choices agree".removeprefix("; ")

    @property
    def cells(self) -> list[str]:
        """What `HEAD` names."""
        return [
            f"{self.claim.where}: {self.claim.text}",
            f"{self.claim.model}, {self.claim.hardware}",
            self.claim.said,
            "–" if self.ours is None else format_value(self.ours),
            self.kind,
            self.verdict,
            self.why,
        ]


@cache
def ledger() -> tuple[Claim, ...]:
    """The claims of `data/claims.toml`."""
    content = tomllib.loads(shipped("claims.toml").read_text(encoding="utf-8"))
    sources, found = content.pop("source"), []
    for source, claims in content.items():
        values = {of["id"]: of.get("value") for of in claims}
        for of in claims:
            if null := of.get("null"):
                of["predictor"] = of_others(null, values)
            given = {"source": source} | sources[source] | of
            found.append(typed(given, Claim, f"claim {source}/{of['id']}"))
    return tuple(found)


def of_others(null: str, values: Record) -> float:
    """A product and quotient of claims, by id, and of numbers; of a range its middle."""
    found, words = 1.0, ["*", *null.split()]
    for sign, word in zip(words[::2], words[1::2], strict=True):
        number = float(np.mean(values[word]) if word in values else word)
        found = {"*": found * number, "/": found / number}[sign]
    return found


def recorded(where: str, results: str | Path | None = None) -> Records:
    """The metrics of a notebook's newest finished run with its baseline's parameters, else of its
    baseline; or of a bench's result, names joined by " | "."""
    root = results_root(results)
    if where.startswith("bench "):
        path = bench_file(where.removeprefix("bench "), root)
        return metrics_of(path) if path.exists() else {}
    path = root / "baseline" / f"{where}.json"
    baseline = read_json(path, MetricsFile) if path.exists() else {"metrics": {}, "params": None}
    for run in reversed(finished_runs(where, root)):
        found = read_json(run / "metrics.json", MetricsFile)
        if baseline["params"] is None or not differing(baseline["params"], found["params"]):
            return found["metrics"]
    return baseline["metrics"]


def _answer(claim: Claim, metrics: Records) -> tuple[Any, str, Record]:
    """(value, kind, readings) of what answers a claim; (None, "", {}) if a metric is gone, or no
    number but needed."""
    names = [
        [name for name in metrics if name == wanted or fnmatchcase(name, wanted)]
        for wanted in claim.metric[1:]
    ]
    found = [metrics[name] for some in names for name in some]

    def read(reading: str | None) -> Any:
        values = [of.get("readings", {}).get(reading, of["value"]) for of in found]
        if isinstance(claim.value, (bool, str)):
            return values[0]
        if not are_numbers(*values) or claim.combine.endswith("ratio") and 0 in values[1:]:
            return None
        return COMBINE[claim.combine](values) if claim.combine else values[0]

    ends = [metrics.get(name, {}).get("value") for name in claim.interval]
    value = read(None) if found and all(names) and are_numbers(*ends) else None
    if value is None:
        return None, "", {}
    readings = {name: read(name) for of in found for name in of.get("readings", {})}
    return value, found[0]["kind"], readings | dict(zip(("95 % from", "95 % to"), ends))


def rows(
    claims: Iterable[Claim] = (),
    results: str | Path | None = None,
    own: dict[str, Records] | None = None,
) -> list[Row]:
    """Every claim, or these, with verdicts; `own` are metrics of notebooks that count instead of
    what was recorded."""
    known, answered = dict(own or {}), []
    for claim in claims or ledger():
        where = claim.metric[0] if claim.metric else ""
        if where and where not in known:
            known[where] = recorded(where, results)
        answered.append(Row(claim, *_answer(claim, known.get(where, {}))))
    return answered


def counts(answered: Iterable[Row]) -> dict[str, int]:
    """Verdict → how many claims have it."""
    found = Counter(row.verdict for row in answered)
    return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}


def summary(answered: list[Row]) -> str:
    """How many claims have which verdict, in a sentence."""
    said = ", ".join(f"{n} {verdict}" for verdict, n in counts(answered).items())
    return f"{len(answered)} claims: {said}."
