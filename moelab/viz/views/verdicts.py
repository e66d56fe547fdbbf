"""The claims: how those of each source stand, and one after another, what stands behind a verdict.

Source: `moelab.claims`, whose rules decide."""

from __future__ import annotations

from collections import Counter

from plotly.graph_objects import Figure

from moelab import claims as ledger
from moelab.base.files import beside
from moelab.base.records import Rows
from moelab.viz.charts import add_points, finish
from moelab.viz.views.base import View, slider

#: verdict → the marker of its bars
LOOKS = beside(__file__)


def draw(rows: Rows) -> Figure:
    """A bar a source, as long as its claims are many; a triangle is to be at the one that is told."""
    figure = Figure()
    for verdict, look in LOOKS.items():
        of = Counter(row["source"] for row in rows if row["verdict"] == verdict)
        figure.add_bar(
            y=[*of],
            x=[*of.values()],
            orientation="h",
            name=f"{verdict}: {of.total()}",
            marker=look,
        )
    add_points(figure, [], "told above", 7, "this claim")
    return finish(figure, "claims", barmode="stack")


def claims() -> View:
    """What the sources claim and what answers it: see `moelab.claims`."""
    every = ledger.rows()
    rows = [{"source": of.claim.source} | dict(zip(ledger.HEAD, of.cells)) for of in every]
    rows.sort(key=lambda row: (row["source"], [*LOOKS].index(row["verdict"])))

    sources = [row["source"] for row in rows]
    figure = draw(rows)

    def told(at: int) -> list[Figure]:
        place = at - sources.index(sources[at]) + 0.5
        return [figure.update_traces({"x": [place], "y": [sources[at]]}, {"name": "told above"})]

    def words(at: int) -> tuple[str, str]:
        cells = "; ".join(f"{name}: {cell}" for name, cell in rows[at].items() if cell)
        return (
            f"{ledger.summary(every)} Number {at}: {cells}.",
            "A bar a source, divided by verdict: blue and green agree, red and crossed does not, "
            "grey cannot be tested here.",
        )

    return View(
        "claims",
        {"claim": slider("claim", 0, 0, len(rows) - 1, steps=range(len(rows)))},
        lambda claim: claim,
        told,
        lambda _: rows,
        "moelab view claims -p claim={claim}".format,
        words,
        ("claim",),
    )
