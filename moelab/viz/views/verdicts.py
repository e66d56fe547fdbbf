"""The claims: how each source's stand, and one after another what stands behind the verdict.

Source: `moelab.claims`, whose rules decide."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from plotly.graph_objects import Figure

from moelab import claims as ledger
from moelab.base.records import Rows
from moelab.viz import theme
from moelab.viz.charts import EDGE, finish, hover, pattern
from moelab.viz.views.base import View, slider

#: verdict → colour, pattern: blue agrees, red does not, what cannot be said is grey
LOOKS = dict(
    zip(
        ledger.VERDICTS,
        (
            (theme.BLUE, ""),
            (theme.SKY, "/"),
            (theme.SKY, "-"),
            (theme.GREEN, "."),
            (theme.VERMILLION, "x"),
            (theme.ORANGE, "\\"),
            ("#b0b0b0", ""),
            ("#dddddd", "+"),
        ),
    )
)


class Claims(NamedTuple):
    """All claims by source and verdict, and which of them is told."""

    answered: list[ledger.Row]
    at: int

    @property
    def told(self) -> ledger.Row:
        return self.answered[self.at]


def draw(found: Claims) -> Figure:
    """A bar a source, as long as its claims are many; a diamond is at the one that is told."""
    figure, sources = Figure(), [row.claim.source for row in found.answered]
    for verdict, (colour, shape) in LOOKS.items():
        if of := Counter(row.claim.source for row in found.answered if row.verdict == verdict):
            figure.add_bar(
                y=[*of],
                x=[*of.values()],
                orientation="h",
                name=f"{verdict}: {of.total()}",
                marker={"color": colour, "pattern": pattern(shape, size=6), "line": EDGE},
                hovertemplate=hover("%{y}: %{x} claims", verdict),
            )
    source = found.told.claim.source
    figure.add_scatter(
        x=[found.at - sources.index(source) + 0.5],
        y=[source],
        mode="markers",
        name="told above",
        marker={"symbol": "diamond", "size": 16, "color": theme.YELLOW, "line": EDGE},
        hovertemplate=hover("told above", source),
    )
    order = {"categoryorder": "array", "categoryarray": [*dict.fromkeys(sources)][::-1]}
    figure.update_yaxes(type="category", showgrid=False, **order)
    return finish(figure, "claims", legend="verdicts", barmode="stack", height=360)


def words(found: Claims) -> tuple[str, str]:
    what, where, value, ours, kind, verdict, why = found.told.cells
    said = f"ours {ours} ({kind}), " if kind else ""
    told = f"{found.told.claim.source}, {what} ({where}): {value}; {said}{verdict}; {why}"
    return (
        f"{ledger.summary(found.answered)} {told.removesuffix('; ')}.",
        "A bar a source, divided by verdict: blue is reproduced, red and crossed is not, grey "
        "cannot be tested here.",
    )


def rows(found: Claims) -> Rows:
    return [dict(zip(ledger.HEAD, row.cells)) for row in found.answered]


def claims() -> View:
    """What the sources claim, and what was found; see `moelab claims`."""
    every = ledger.rows()
    sources = [*dict.fromkeys(row.claim.source for row in every)]
    every.sort(key=lambda row: (sources.index(row.claim.source), [*LOOKS].index(row.verdict)))
    last = len(every) - 1
    return View(
        "claims",
        {"claim": slider("claim", 0, 0, last, steps=range(last + 1))},
        lambda claim: Claims(every, claim),
        lambda found: [draw(found)],
        rows,
        lambda claim: f"moelab view claims -p claim={claim}",
        words,
        ("claim",),
    )
