"""The ledger of claims: how far what was found here is from what each source says, by verdict.

views.claims("zipmoe")          views.claims(verdict="not reproduced")
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

import numpy as np
from plotly.graph_objects import Figure

from moelab import claims as ledger
from moelab.base.records import Record
from moelab.viz.charts import EDGE, finish, hover, point_look
from moelab.viz.views.base import menu
from moelab.viz.views.detailed import Detail, Detailed, html_rows

#: ratios beyond are drawn at the edge
EDGES = (0.1, 10.0)
Shown = tuple[list[ledger.Row], str]  # and which these are


def chosen(rows: Sequence[ledger.Row], source: str = "", verdict: str = "") -> list[ledger.Row]:
    """Those of a source, or of all, that have a verdict, or any."""
    return [
        row for row in rows if source in ("", row.claim.source) and verdict in ("", row.verdict)
    ]


def name_of(row: ledger.Row) -> str:
    """ "source/id", by which the ledger knows a claim."""
    return f"{row.claim.source}/{row.claim.id}"


def draw(rows: Sequence[ledger.Row]) -> Figure:
    """Ours over the source's, a row a claim that is a number, in colour and shape of its
    verdict."""
    there = [row for row in rows if row.distance]
    figure = Figure()
    for i, verdict in enumerate(ledger.VERDICTS):
        if own := [row for row in there if row.verdict == verdict]:
            figure.add_scatter(
                x=np.clip([row.distance for row in own], *EDGES),
                y=[*map(name_of, own)],
                mode="markers",
                name=verdict,
                marker=point_look(i),
                customdata=[*map(name_of, own)],
                text=[
                    f"{row.claim.where}: {row.claim.text}<br>{row.claim.said}; ours "
                    f"{row.cells[3]} ({row.kind})"
                    for row in own
                ],
                hovertemplate=hover("%{text}", verdict),
            )
    ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10]
    names = ["≤ 0.1", *map(str, ticks[1:-1]), "≥ 10"]
    figure.update_xaxes(type="log", range=[-1.05, 1.05], tickvals=ticks, ticktext=names)
    figure.add_vline(x=1, line=EDGE)
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=[*map(name_of, there)][::-1],
        range=[-0.8, len(there) - 0.2],  # plotly leaves a share of the height, however high
        tickfont={"size": 11},
    )
    height = 140 + 20 * max(len(there), 4)
    return finish(figure, "found here ÷ what the source says", height=height)


def tell(row: ledger.Row) -> Detail:
    """Everything about a claim."""
    notebook, *metrics = row.claim.metric or ("nothing here",)
    rows = [*zip(ledger.HEAD, row.cells), ("answered by", f"{notebook}: {', '.join(metrics)}")]
    rows += [(f"by another choice, {name}", value) for name, value in row.readings.items()]
    return Detail(html_rows([row.claim.title, ""], rows))


def claims(source: str = "", verdict: str = "", results: str | Path | None = None) -> Detailed:
    """The ledger as a view; a claim that is chosen shows its verdict's reason and what answers it.

    source, verdict : which claims at first; all if "". results : where runs lie.
    """
    answered = ledger.rows(results=results)
    sources = {"all": ""} | {claim.title: claim.source for claim in ledger.ledger()}
    verdicts = {"any": ""} | {name: name for name in ledger.VERDICTS}

    def rows(found: Shown) -> list[Record]:
        return [
            {"id": name_of(row), **dict(zip(ledger.HEAD, row.cells)), "ours ÷ source": row.distance}
            for row in found[0]
        ]

    def words(found: Shown) -> tuple[str, str]:
        shown, asked = found
        numbers = sum(bool(row.distance) for row in shown)
        return (
            f"{asked}{ledger.summary(shown)} {numbers} are numbers and drawn; the table has all."
            if shown
            else f"{asked}no claims.",
            "Points on a logarithmic axis, one a claim: at 1, what was found is what the "
            "source says.",
        )

    def command(source: str, verdict: str) -> tuple[str, str]:
        told = f" -p verdict={quote(verdict)}" if verdict else ""
        return (
            f"moelab view claims {source}".rstrip() + told,
            f"from moelab.viz import views\nviews.claims({source!r}, {verdict!r})",
        )

    return Detailed(
        "claims",
        {"source": menu("source", source, sources), "verdict": menu("verdict", verdict, verdicts)},
        lambda source, verdict: (
            chosen(answered, source, verdict),
            f"{source or 'all sources'}, {verdict or 'any verdict'}: ",
        ),
        lambda found: draw(found[0]),
        rows,
        command,
        words,
        plays=("source", "verdict"),
        label="claim",
        names=lambda found: [*map(name_of, found[0])],
        tell=lambda found, name: tell(next(row for row in found[0] if name_of(row) == name)),
    )
