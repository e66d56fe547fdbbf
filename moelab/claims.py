"""`moelab claims`: what the five sources claim, what answers it, and a verdict by rule.

`data/claims.toml` is the ledger; tables of the papers, which nobody disputes, are in
`moelab.papers`. A claim is a number, a range, a word or an order (`above`,
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

What is reproduced, or has the same direction, must be so under each of a metric's `readings`, other
choices where the source leaves one open, and at both ends of its `interval`, where a claim names
their metrics; else it is not reproduced.

A number agrees within its tolerance, and where no effect has a value (`neutral`) within half of the
effect, too: 20 % of a gain of 1.2 would include none. An order that could not have come out
otherwise must say so in `follows`."""

from __future__ import annotations

import argparse
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from moelab.bench.results import bench_file, metrics_of
from moelab.comparison import MetricsFile, are_numbers, finished_runs
from moelab.files import read_json, results_root, shipped
from moelab.records import Record, Records
from moelab.schema import Amount, naming, typed
from moelab.table import format_value, text_table

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
#: how several metrics become one number
COMBINE: dict[str, Callable[[list[float]], float]] = {
    "ratio": lambda v: v[0] / v[1] if len(v) == 2 else (v[0] / v[1]) / (v[2] / v[3]),
    "least": min,
    "most": max,
    "least ratio": lambda v: min(a / b for a, b in zip(v[::2], v[1::2], strict=True)),
    "largest ratio": lambda v: max(a / b for a, b in zip(v[::2], v[1::2], strict=True)),
}
Metrics = Records  # name → {"value", "kind"}


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
    null : a predictor of ids of the same source and numbers, "a * b / 2"; predictor : its value.
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
    combine: str = ""
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

    def __post_init__(self) -> None:
        value, answered = self.value, self.metric or self.fitted or self.follows
        said = sum(x is not None for x in (value, self.above, self.below))
        number = self.neutral is not None and isinstance(value, (int, float))
        unexplained = self.predictor is not None and not self.null
        checks = {
            "it has no id, place or text": not (self.id and self.where and self.text),
            "it needs exactly one of value, above and below": said != 1,
            "a range is [low, high]": isinstance(value, list) and not _is_range(value),
            "either_way goes with a number and neutral": self.either_way and not number,
            "nothing answers it": not (answered or self.needs or self.contradicted),
            "what needs something has no answer": self.needs and answered,
            "metric names a notebook or a bench and then metrics": len(self.metric) == 1,
            "an interval has two ends": self.interval
            and not len(self.interval) == len(self.metric) == 2,
            f"combine is {self.combine!r}; there are: {', '.join(COMBINE)}": self.combine
            and self.combine not in COMBINE,
        }
        for problem, wrong in checks.items():
            if wrong:
                raise ValueError(problem)
        if unexplained and not (self.follows and self.agrees(self.predictor)):
            raise ValueError("its predictor is outside the tolerance, or not explained in follows")

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

    @property
    def predicted(self) -> bool:
        """Whether a predictor without a simulator agrees."""
        return self.predictor is not None and bool(self.agrees(self.predictor))

    def verdict(self, found: float | bool | str | None) -> str:
        """By the rules above; `found` is None where no metric answers."""
        if self.contradicted or self.needs:
            return CONTRADICTED if self.contradicted else NOT_TESTABLE
        if found is None:
            return UNANSWERED if self.metric else FITTED
        if not self.agrees(found):
            same = self.either_way and (found - self.neutral) / (self.value - self.neutral) >= 0.25
            return DIRECTION if same else NOT_REPRODUCED
        if self.fitted:
            return FITTED
        if self.follows or self.predicted:
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
        ratios = (
            f"ratios of the source's own numbers give {self.predictor:.3g}" if self.null else ""
        )
        why = {
            FITTED: self.fitted,
            FOLLOWS: self.follows or ratios,
            CONTRADICTED: self.contradicted,
            NOT_REPRODUCED: self.reason or "as measured here",
        }.get(verdict, "")
        return "; ".join(filter(None, (why, self.instead and f"on {self.instead}")))


def _is_range(value: list[Any]) -> bool:
    return len(value) == 2 and {*map(type, value)} <= {int, float} and value[0] <= value[1]


@dataclass(frozen=True)
class Row:
    """A claim with its answer: ours, least and most over comparable runs, the kind of the number,
    the verdict."""

    claim: Claim
    ours: float | bool | str | None
    spread: tuple[float, float] | None
    kind: str
    verdict: str
    readings: Record = field(default_factory=dict)  # other choices → what it is by them
    lost: Record = field(default_factory=dict)  # those by which what holds by ours does not

    @property
    def why(self) -> str:
        """What stands behind the verdict."""
        if self.lost and self.verdict == NOT_REPRODUCED:
            lost = ", ".join(f"{name}: {value:.3g}" for name, value in self.lost.items())
            return (
                f"{'within its interval' if self.claim.interval else 'by our choices'} only; {lost}"
            )
        return self.claim.why(self.verdict)

    @property
    def distance(self) -> float | None:
        """Ours over the source's, of a range over its nearer end and 1 inside; None unless both are
        numbers above 0."""
        of = self.claim
        low, high = (of.above or of.below,) * 2 if of.is_order else of.ends
        if not are_numbers(self.ours, low, high) or min(self.ours, low) <= 0:
            return None
        return self.ours / min(max(self.ours, low), high)

    @property
    def cells(self) -> list[str]:
        """What `HEAD` names."""
        between = f" ({self.spread[0]:.4g} to {self.spread[1]:.4g})" if self.spread else ""
        return [
            f"{self.claim.where}: {self.claim.text}",
            f"{self.claim.model}, {self.claim.hardware}",
            self.claim.said,
            "–" if self.ours is None else format_value(self.ours) + between,
            self.kind,
            self.verdict,
            self.why,
        ]


def load(path: str | Path | None = None) -> list[Claim]:
    """The ledger's claims, or those of another file. ValueError: an unknown key, or a claim that is
    not complete."""
    path = Path(path or shipped("claims.toml"))
    with naming(path, "ledger of claims", "writing it as data/claims.toml"):
        return _claims(tomllib.loads(path.read_text(encoding="utf-8")))


def _claims(content: Record) -> list[Claim]:
    sources, found = typed(content.pop("source", {}), Records, "source"), []
    for source, claims in typed(content, dict[str, list[Record]]).items():
        if source not in sources:
            raise ValueError(
                f"claims of {source!r}, which [source] does not name; it names {', '.join(sources)}"
            )
        values = {str(of.get("id")): of.get("value") for of in claims}
        for of in claims:
            if of.get("null"):
                of["predictor"] = _of_others(str(of["null"]), values)
            given = {"text": "", "id": "", "where": "", "source": source} | sources[source] | of
            found.append(typed(given, Claim, f"claim {source}/{of.get('id')}"))
    twice = [
        f"{source}/{name}"
        for (source, name), n in Counter((c.source, c.id) for c in found).items()
        if n > 1
    ]
    if twice:
        raise ValueError(f"there are two claims {', '.join(twice)}")
    return found


def _of_others(null: str, values: Record) -> float:
    """A product and quotient of claims, by id, and of numbers; of a range its middle."""
    numbers, words = [], null.split()
    for word in words[::2]:
        value = values.get(word, word)
        try:
            numbers.append(sum(value) / 2 if isinstance(value, list) else float(value))
        except (TypeError, ValueError):
            raise ValueError(
                f"null {null!r}: {word!r} is neither the id of a claim of this source that is "
                "a number nor a number"
            ) from None
    if set(words[1::2]) - {"*", "/"} or len(words) % 2 == 0:
        raise ValueError(f"null {null!r} must be ids and numbers with * or / between them")
    return math.prod(
        numbers[:1] + [n if sign == "*" else 1 / n for sign, n in zip(words[1::2], numbers[1:])]
    )


@cache
def ledger() -> tuple[Claim, ...]:
    """The shipped claims."""
    return tuple(load())


def recorded(where: str, results: str | Path | None = None) -> list[Metrics]:
    """The metrics of a notebook's finished runs with its baseline's parameters, newest first, else
    of its baseline; or of a bench's result, names joined by " | "."""
    root = results_root(results)
    if where.startswith("bench "):
        path = bench_file(where.removeprefix("bench "), root)
        return [metrics_of(path) if path.exists() else {}]
    path = root / "baseline" / f"{where}.json"
    baseline = read_json(path, MetricsFile) if path.exists() else {"metrics": {}, "params": None}
    paths = [run / "metrics.json" for run in reversed(finished_runs(where, root))]
    runs = [read_json(path, MetricsFile) for path in paths if path.exists()]
    return [run["metrics"] for run in runs if baseline["params"] in (None, run["params"])] or [
        baseline["metrics"]
    ]


def _value(claim: Claim, metrics: Metrics) -> tuple[Any, str, Record]:
    """(value, kind, readings) of what answers a claim; (None, "", {}) if a metric is gone, or no
    number but needed."""
    names = [
        [name for name in metrics if name == wanted or fnmatchcase(name, wanted)]
        for wanted in claim.metric[1:]
    ]
    found = [metrics[name] for some in names for name in some]
    combine = COMBINE[claim.combine] if claim.combine else lambda values: values[0]

    def read(reading: str | None) -> Any:
        values = [metric.get("readings", {}).get(reading, metric["value"]) for metric in found]
        words = not isinstance(claim.value, (bool, str)) and not _are_numbers(values)
        return (
            None
            if words or claim.combine.endswith("ratio") and 0 in values[1:]
            else combine(values)
        )

    if not all(names) or (value := read(None)) is None:
        return None, "", {}
    readings = {name: read(name) for metric in found for name in metric.get("readings", {})}
    ends = [metrics.get(name, {}).get("value") for name in claim.interval]
    if not _are_numbers(ends):
        return None, "", {}
    return value, found[0]["kind"], readings | dict(zip(("95 % from", "95 % to"), ends))


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


def rows(
    claims: Iterable[Claim] = (),
    results: str | Path | None = None,
    own: dict[str, Metrics] | None = None,
) -> list[Row]:
    """Every claim, or these, with verdicts; `own` are metrics of notebooks that count instead of
    what was recorded."""
    runs: dict[str, list[Metrics]] = {where: [metrics] for where, metrics in (own or {}).items()}
    answered = []
    for claim in claims or ledger():
        where = claim.metric[0] if claim.metric else ""
        if where and where not in runs:
            runs[where] = recorded(where, results)
        found = [_value(claim, metrics) for metrics in runs[where]] if where else [(None, "", {})]
        (ours, kind, readings), numbers = (
            found[0],
            [value for value, *_ in found if isinstance(value, (int, float))],
        )
        spread = (
            (min(numbers), max(numbers))
            if len(numbers) > 1 and not isinstance(ours, bool)
            else None
        )
        verdict = claim.verdict(ours)
        lost = {
            name: value
            for name, value in readings.items()
            if NOT_REPRODUCED == claim.verdict(value) != verdict
        }
        verdict = NOT_REPRODUCED if lost and verdict in (REPRODUCED, DIRECTION) else verdict
        answered.append(Row(claim, ours, spread, kind, verdict, readings, lost))
    return answered


def counts(answered: Iterable[Row]) -> dict[str, int]:
    """Verdict → how many claims have it."""
    found = Counter(row.verdict for row in answered)
    return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}


def summary(answered: list[Row]) -> str:
    """How many claims have which verdict, in a sentence."""
    return (
        f"{len(answered)} claims: "
        + ", ".join(f"{n} {verdict}" for verdict, n in counts(answered).items())
        + "."
    )


def problems(answered: Iterable[Row]) -> list[str]:
    """What `--check` objects to: metrics that are gone, and what is not reproduced for no stated
    reason, unless it was measured: that is another machine's business, and may differ from run to
    run."""
    found = []
    for row in answered:
        of = row.claim
        if of.metric and row.ours is None:
            found.append(
                f"{of.source}/{of.id}: {of.metric[0]} has no metric {', '.join(of.metric[1:])}"
            )
        elif (
            row.verdict == NOT_REPRODUCED and not (of.reason or row.lost) and row.kind != "measured"
        ):
            found.append(f"{of.source}/{of.id}: not reproduced, and no reason is given")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sources = dict.fromkeys(claim.source for claim in ledger())
    parser.add_argument(
        "--source", choices=sources, metavar="NAME", help=f"only its claims: {', '.join(sources)}"
    )
    parser.add_argument(
        "--check", action="store_true", help="fail if a metric is gone or a claim is unanswered"
    )
    parser.add_argument(
        "--results", metavar="FOLDER", help="where results lie (results/, or $MOELAB_RESULTS)"
    )


def main(args: argparse.Namespace) -> int:
    chosen = [claim for claim in ledger() if args.source in (None, claim.source)]
    answered = rows(chosen, args.results)
    print(summary(answered))
    for source in dict.fromkeys(claim.source for claim in chosen):
        own = [row for row in answered if row.claim.source == source]
        print(f"\n{own[0].claim.title} ({source})\n" + text_table(HEAD, [row.cells for row in own]))
    wrong = problems(answered) if args.check else []
    print(
        "".join(f"\nFAILED {problem}" for problem in wrong).lstrip("\n"), end="\n" if wrong else ""
    )
    return 1 if wrong else 0
