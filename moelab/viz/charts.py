"""What charts are made of, over the look of `theme`: looks of series, panels, what every figure ends
with, and timelines (`gantt`). Those of notebooks alone are in `notebooks/studies/charts.py`.

Series differ in colour *and* in dash, marker or pattern. Seconds are drawn in milliseconds. The
axis or the legend's title says whether numbers are exact, measured, simulated or modelled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plotly.graph_objects import Figure
from plotly.subplots import make_subplots

from moelab.base.files import beside
from moelab.base.records import Record
from moelab.base.specs import Event
from moelab.viz import theme

LOOKS = beside(__file__)
EDGE, DASHED, NOTE = (LOOKS[name] for name in ("edge", "dashed", "note"))
#: ticks of a logarithmic axis
ROUND = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]
Points = Sequence[tuple[float, float]]
Spread = tuple[float, float, float]
Values = Mapping[str, float]
AHEAD = "prefetch"
#: kind of work → colour, pattern, colour of the number on it, its name in the legend
KINDS: dict[str, list[str]] = LOOKS["kinds"]
RESOURCES: list[str] = LOOKS["resources"]  # from top to bottom


def line_look(i: int) -> Record:
    """The i-th series as a line: colour, dash and marker differ."""
    return {
        "mode": "lines+markers",
        "line": {"color": theme.PALETTE[i % 8], "dash": theme.DASHES[i % 8]},
        "marker": {"symbol": theme.MARKERS[i % 8]},
    }


def bar_look(i: int) -> Record:
    """The marker of the i-th series of bars: colour and pattern differ."""
    return {"color": theme.PALETTE[i % 8], "pattern": pattern(theme.PATTERNS[i % 8], size=6)}


def pattern(shape: str, colour: str = "white", **look: Any) -> Record:
    """A bar's pattern, laid over its colour."""
    return {"shape": shape, "fgcolor": colour, "fillmode": "overlay"} | look


def hover(template: str, name: str) -> str:
    """A hover text with the name of the series beside it."""
    return f"{template}<extra>{name}</extra>"


def panels(
    titles: Iterable[str], columns: int = 0, x: str = "", y: str = "", **how: Any
) -> tuple[Figure, list[dict[str, int]]]:
    """A figure with a panel a title, which may be empty, and where each panel is.

    columns : how many are side by side, all if 0. x, y : titles of the bottom and of the left axes.
    """
    titles = list(titles)
    columns = min(columns or len(titles), len(titles))
    named = any(titles) and len(titles) > 1
    rows = -(-len(titles) // columns)
    figure = make_subplots(rows, columns, subplot_titles=titles if named else None, **how)
    bottom = range(max(0, len(titles) - columns), len(titles))
    places = [{"row": i // columns + 1, "col": i % columns + 1} for i in range(len(titles))]
    for i in bottom:
        figure.update_xaxes(title=x, **places[i])
    figure.update_yaxes(title=y, col=1).update_annotations(font_size=13)
    return figure, places


def add_points(
    figure: Figure, points: Points, name: str, i: int, template: str, **how: Any
) -> None:
    """Add points (x, y) in the look of the i-th series: colour and symbol differ."""
    x, y = zip(*points) if points else ((), ())
    marker = line_look(i)["marker"] | {"size": 11, "color": theme.PALETTE[i % 8], "line": EDGE}
    look = {"mode": "markers", "marker": marker, "hovertemplate": hover(template, name)}
    figure.add_scatter(**{"x": x, "y": y, "name": name} | look | how)


def whole_steps(n: int) -> int:
    """A tick distance that keeps the labels of n layers apart and whole."""
    return max(1, -(-n // 12))


def finish(figure: Figure, x: str = "", y: str = "", legend: str = "", **layout: Any) -> Figure:
    """The figure in moelab's look: titles of all axes, every name once in the legend beside it.

    legend : its title."""
    if x:
        figure.update_xaxes(title=x)
    if y:
        figure.update_yaxes(title=y)
    named: set[str] = set()
    for trace in figure.data:
        if trace.name and trace.showlegend is None:
            trace.update(legendgroup=trace.name, showlegend=trace.name not in named)
            named.add(trace.name)
    figure.update_layout(
        LOOKS["finish"],
        legend_title_text=legend,
        showlegend=len(figure.data) > 1 or bool(legend),
    )
    return figure.update_layout(**layout)


def gantt(
    runs: Mapping[str, Sequence[Event]], numbers: str = "experts", kind: str = "simulated"
) -> Figure:
    """Timelines, one below the other: a row a resource, a look a kind of work; a dashed line marks
    a run's end.

    runs : {title: events}. numbers : on the bars, "experts", "layers" or, without any, "".
    """
    rows = [sorted({e.resource for e in events}, key=_row) for events in runs.values()]
    spans = [(min(e.start for e in events), max(e.end for e in events)) for events in runs.values()]
    heights = tuple(len(resources) + 1.2 for resources in rows)
    figure, places = panels(
        [f"{title}: {1e3 * (end - start):.2f} ms" for title, (start, end) in zip(runs, spans)],
        1,
        "time since the first event (ms)",
        shared_xaxes=True,
        row_heights=heights,
        vertical_spacing=min(0.5 / len(runs), 1.6 / (sum(heights) + 2)),
    )
    brief = 2e-3 * max((end - start for start, end in spans), default=0)
    for at, events, resources, (start, end) in zip(places, runs.values(), rows, spans):
        _add_work(figure, events, start, brief, numbers, at)
        figure.add_vline(x=1e3 * (end - start), line=LOOKS["end"], **at)
        figure.update_yaxes(
            LOOKS["resource"],
            categoryarray=resources,
            range=[len(resources) - 0.5, -0.5],
            **at,
        )
    figure.update_xaxes(range=[0, 1.02e3 * max(end - start for start, end in spans)])
    figure.update_annotations(x=0, xanchor="left")
    return finish(
        figure,
        legend=f"{kind}<br>numbers: {numbers}" if numbers else kind,
        height=110 + 26 * round(sum(heights)),
        **LOOKS["gantt"],
    )


def _add_work(
    figure: Figure,
    events: Sequence[Event],
    start: float,
    brief: float,
    numbers: str,
    at: Mapping[str, Any],
) -> None:
    """The bars of a run, a look a kind; `brief` seconds are hardly a pixel."""
    for name, (colour, shape, text, *called) in KINDS.items():
        if not (of := [e for e in events if e.kind == name]):
            continue
        edge = "#bbbbbb" if name == "wait" else "white"
        # a white one would hide it
        edges = [colour if e.seconds < brief else edge for e in of]
        shown = [e.layer if numbers == "layers" else e.expert for e in of]
        figure.add_bar(
            y=[e.resource for e in of],
            base=[1e3 * (e.start - start) for e in of],
            name=(called or [name])[0],
            x=[1e3 * e.seconds for e in of],
            text=["" if n < 0 else str(n) for n in shown],
            textfont_color=text,
            customdata=[(e.layer, e.expert) for e in of],
            marker={
                "color": colour,
                "line": {"color": edges if colour in edges else edge, "width": 0.8},
                "pattern": pattern(
                    shape, "#999999" if name == "wait" else "white", size=6, fgopacity=0.5
                ),
            },
            hovertemplate="%{y}, "
            + name
            + ", layer %{customdata[0]}, expert %{customdata[1]}: %{x:.4f} ms from "
            "%{base:.4f} ms<extra></extra>",
            **LOOKS["work"],
            **at,
        )


def _row(resource: str) -> tuple:
    """The sort key of a resource: its place in RESOURCES, the rest below, then its number."""
    name, _, number = resource.partition(" ")
    place = RESOURCES.index(name) if name in RESOURCES else len(RESOURCES)
    return place, int(number) if number.isdigit() else 0, resource
