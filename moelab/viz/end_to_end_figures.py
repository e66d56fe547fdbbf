"""Figures of `moelab.bench.end_to_end`: every configuration beside the others, and which of them no
other beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moelab.viz.figures import DASHED, GREY, NOTE, ROUND, add_points, finish, hover, panels
from moelab.viz.plotly_json import Figure

Point = tuple[float, float]


def against(sections: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure:
    """TPOT of every configuration, a panel a disk rate and a marker a budget, logarithmic; a grey
    bar is the limit of the same run. Those that could not run are left out.

    sections : {"25% of experts, 250 MB/s": {configuration: {"TPOT s": …, "TPOT limit s": …}}}.
    """
    titles = {title: title.partition(", ")[::2] for title in sections}
    budgets, rates = (list(dict.fromkeys(of[i] for of in titles.values())) for i in (0, 1))
    names = list(
        dict.fromkeys(
            name for rows in sections.values() for name, row in rows.items() if "TPOT s" in row
        )
    )
    figure, places = panels(
        [f"disk: {rate}" for rate in rates], shared_yaxes=True, horizontal_spacing=0.03
    )
    for title, rows in sections.items():
        (budget, rate), there = (
            titles[title],
            {name: row for name, row in rows.items() if "TPOT s" in row},
        )
        at = places[rates.index(rate)]
        add_points(
            figure,
            [(1e3 * row["TPOT s"], name) for name, row in there.items()],
            budget,
            budgets.index(budget),
            "%{y}: %{x:.3g} ms",
            **at,
        )
        limits = [
            (1e3 * row["TPOT limit s"], name)
            for name, row in there.items()
            if "TPOT limit s" in row and not isinstance(row.get("TPOT ÷ limit"), str)
        ]  # beaten: in words
        figure.add_scatter(
            x=[x for x, _ in limits],
            y=[name for _, name in limits],
            mode="markers",
            name="limit",
            marker={"symbol": "line-ns-open", "size": 12, "color": GREY, "line": {"width": 2}},
            hovertemplate=hover("%{y}: %{x:.3g} ms", f"limit, {budget}"),
            **at,
        )
    figure.update_xaxes(type="log", tickvals=ROUND, title="TPOT (ms, log)")
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=names[::-1])
    return finish(figure, y="", legend="measured", height=140 + 26 * len(names), margin_l=170)


def fronts(groups: Mapping[str, tuple[Mapping[str, Point], Sequence[str]]], y: str) -> Figure:
    """Points that a line joins where no other is better in both, a panel a trade; these are
    numbered, and named below.

    groups : {title of the horizontal axis: ({name: (x, y)}, names on the front, by x)}. y : the
    vertical axis."""
    figure, places = panels([""] * len(groups), y=y, horizontal_spacing=0.1)
    for at, (title, (points, best)) in zip(places, groups.items()):
        rest = {name: point for name, point in points.items() if name not in best}
        add_points(
            figure,
            list(rest.values()),
            "others are better",
            5,
            "%{customdata}: %{x:.3g}, %{y:.3g}",
            customdata=list(rest),
            cliponaxis=False,
            **at,
        )
        x, y_ = zip(*(points[name] for name in best)) if best else ((), ())
        figure.add_scatter(
            x=x,
            y=y_,
            mode="lines",
            line=DASHED | {"shape": "hv"},
            showlegend=False,
            name="front",
            hoverinfo="skip",
            **at,
        )
        add_points(
            figure,
            list(zip(x, y_)),
            "none is better in both",
            0,
            "%{customdata}: %{x:.3g}, %{y:.3g}",
            customdata=list(best),
            text=[f"{n}" for n, _ in enumerate(best, 1)],
            mode="markers+text",
            textposition="top right",
            textfont=NOTE,
            cliponaxis=False,
            **at,
        )
        names = [
            f'<span style="font-size:{NOTE["size"]}px">{n}: {name}</span>'
            for n, name in enumerate(best, 1)
        ]
        figure.update_xaxes(title="<br>".join([title, *names]), rangemode="tozero", **at)
    below = 18 * max((len(best) for _, best in groups.values()), default=0)
    return finish(figure, legend="measured", height=420 + below, margin_b=56 + below)
