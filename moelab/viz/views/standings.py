"""The arena: a cache policy of your own, ranked against all others and the optimum.

moelab.lab.arena(MyPolicy)          see `moelab.bench.arena`
"""

from __future__ import annotations

import sys
from html import escape
from typing import Any

from plotly.graph_objects import Figure

from moelab.base.records import Rows
from moelab.bench import arena as contests
from moelab.bench.arena import Contest
from moelab.viz.charts import EDGE, bar_look, finish, hover
from moelab.viz.views.base import View

#: of the scores
UNIT = "hit rate (%)"


def draw(contest: Contest) -> Figure:
    """What each reached of the ceiling, best on top, a bar a trace; the own one's name is bold."""
    figure = Figure()
    order = contest.standings[::-1]
    names = [f"<b>{escape(of.name)}</b>" if of.own else of.name for of in order]
    for i, trace in enumerate(contest.ceiling):
        figure.add_bar(
            y=names,
            x=[100 * contest.share(of, trace) for of in order],
            orientation="h",
            name=trace,
            marker=bar_look(i),
            customdata=[trace] * len(order),
            text=[f"{of.scores[trace]:.3g}" if trace in of.scores else "–" for of in order],
            textposition="outside",
            textfont={"size": 10},
            cliponaxis=False,
            hovertemplate=hover("%{y}: %{x:.1f} % of the ceiling, %{text} " + UNIT, trace),
        )
    figure.add_vline(x=100, line=EDGE).update_xaxes(range=[0, 112])
    figure.update_yaxes(type="category", tickfont={"size": 12})
    legend, height = f"numbers:<br>{UNIT}", 140 + 11 * len(contest.ceiling) * len(order)
    look = {"barmode": "group", "bargap": 0.25, "height": height, "legend_traceorder": "normal"}
    return finish(figure, "reached of the ceiling (%)", legend=legend).update_layout(**look)


def words(contest: Contest) -> tuple[str, str]:
    own = contest.own
    best = contest.standings[0]
    if own.error:
        said = f"{own.name} raised {own.error.strip().splitlines()[-1]}."
    else:
        far = max(100 * (1 - contest.share(own, trace)) for trace in contest.ceiling)
        said = (
            f"{own.name} is number {contest.place} of {len(contest.standings)}, "
            f"at most {far:.1f} % below the ceiling."
        )
        said += "" if contest.place == 1 else f" First is {best.name}."
    return (
        f"{said} Scores: {UNIT}, exact counts; the ceiling is 100 %.",
        f"Bars of {len(contest.standings)} contestants on {', '.join(contest.ceiling)}: share "
        "of the ceiling.",
    )


def arena(mine: Any, of: Any = None, share: float = 0.5, tokens: int = 256, each: int = 2) -> View:
    """Rank a class or an object of one's own; see `moelab.bench.arena.arena`, whose arguments these
    are.

    What it raises is printed with its traceback, and breaks nothing."""
    contest = contests.arena(mine, of, share, tokens, each)
    if contest.own.error:
        print(contest.own.error, file=sys.stderr)

    def command() -> str:
        made = mine if isinstance(mine, type) else type(mine)
        home = made.__module__ if made.__module__ != "__main__" else "your_file"
        given = contest.own.name if of is None else f"{contest.own.name}, of"
        call = f"moelab.lab.arena({given}, share={share:g}, tokens={tokens}, each={each})"
        imports = f"from {home} import {contest.own.name}; import moelab.lab"
        return f'python -c "{imports}; print({call}.csv())"'

    compute, figures = lambda: contest, lambda contest: [draw(contest)]
    return View("arena", {}, compute, figures, _rows, command, words)


def _rows(contest: Contest) -> Rows:
    every = [(i, of.name, of.scores) for i, of in enumerate(contest.standings, 1)]
    return [
        {"place": place, "name": name}
        | {f"{trace}, {UNIT}": scores.get(trace) for trace in contest.ceiling}
        for place, name, scores in [*every, ("ceiling", "", contest.ceiling)]
    ]
