"""The charts of every notebook and view, one home for each kind: `lines`, `bars`, `intervals`,
`matrix`, `gantt`, over the look of `theme`; numbers in, a figure out.

`lines`, `bars` and `intervals` take one panel or several, {title: panel}. Series differ
in colour *and* in dash, marker or pattern. Seconds are drawn in milliseconds and
shares from 0 to 1 in per cent, unless an axis says otherwise. The axis or the legend's title says whether numbers are exact, measured, simulated or
modelled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from plotly.graph_objects import Figure
from plotly.subplots import make_subplots

from moelab.base.records import Record
from moelab.base.specs import Event
from moelab.viz import theme

GREY = "#555555"
EDGE = {"color": theme.BLACK, "width": 1}
DASHED = {"color": GREY, "dash": "dash", "width": 1.5}
NOTE = {"size": 11, "color": GREY}
#: ticks of a logarithmic axis
ROUND = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]
Points = Sequence[tuple[float, float]]
Spread = tuple[float, float, float]
Values = Mapping[str, float]
AHEAD = "prefetch"
#: kind of work → colour, pattern, colour of the number on it, its name in the legend
KINDS = {
    "read E": (theme.BLUE, "", "white", "read exponents (E)"),
    "read SM": (theme.SKY, "/", "black", "read signs, mantissas (SM)"),
    "read": (theme.BLUE, "-", "white"),
    AHEAD: (theme.SKY, "/", "black"),
    "read weights": (theme.BLUE, "", "white"),
    "read activations": (theme.SKY, "/", "black"),
    "decompress": (theme.ORANGE, "", "black"),
    "recover": (theme.PURPLE, "\\", "black"),
    "decode": (theme.ORANGE, "-", "black"),
    "attention": (theme.PURPLE, "", "white"),
    "router": (theme.SKY, "", "black"),
    "gather": (theme.SKY, "-", "black"),
    "launch": (theme.ORANGE, "/", "black", "launch of a group of experts"),
    "scatter": (theme.SKY, "\\", "black"),
    "expert": (theme.GREEN, "", "white"),
    "other": ("#8c8c8c", ".", "white"),
    "wait": ("#eeeeee", "x", "#222"),
}
RESOURCES = (
    "gpu",
    "link",
    "host",
    "disk",
    "copy",
    "worker",
    "ane",
    "evaluator",
    "compute",
)  # from top to bottom


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


def point_look(i: int, size: int = 11) -> Record:
    """The marker of the i-th series of points: colour and symbol differ."""
    return {
        "symbol": theme.MARKERS[i % 8],
        "size": size,
        "color": theme.PALETTE[i % 8],
        "line": EDGE,
    }


def pattern(shape: str, colour: str = "white", **look: Any) -> Record:
    """A bar's pattern, laid over its colour."""
    return {"shape": shape, "fgcolor": colour, "fillmode": "overlay"} | look


def interval(value: ArrayLike, low: ArrayLike, high: ArrayLike, **look: Any) -> Record:
    """Error bars from low to high around the values."""
    value, low, high = (np.asarray(of, dtype=float) for of in (value, low, high))
    return {
        "type": "data",
        "symmetric": False,
        "array": high - value,
        "arrayminus": value - low,
        "thickness": 1.2,
        "width": 3,
    } | look


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
    """Add points (x, y) in the look of the i-th series."""
    x, y = zip(*points) if points else ((), ())
    look = {"mode": "markers", "marker": point_look(i), "hovertemplate": hover(template, name)}
    figure.add_scatter(**{"x": x, "y": y, "name": name} | look | how)


def quantiles(samples: Sequence[float]) -> Spread:
    """Median, tenth and ninetieth percentile of seconds, in ms."""
    low, middle, high = np.quantile(1e3 * np.asarray(samples, dtype=float), (0.1, 0.5, 0.9))
    return middle, low, high


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
    title = {"text": legend, "font": {"size": 13}}
    figure.update_layout(
        legend={"x": 1.02, "y": 1, "yanchor": "top", "tracegroupgap": 0, "title": title},
        showlegend=len(figure.data) > 1 or bool(legend),
        margin={"l": 72, "r": 24, "t": 40, "b": 56},
    )
    return figure.update_layout(**layout)


def lines(
    groups: Mapping[str, Any],
    y: str,
    x: str,
    *,
    columns: int = 2,
    log: str = "",
    across: Values | None = None,
    dots: Mapping[str, Points] | None = None,
    top: float | None = None,
    kind: str = "modelled",
    **layout: Any,
) -> Figure:
    """A line a series, a panel or several.

    groups : {series: [(x, y), …]} or {panel: that}; (x, y, low, high) has an interval, NaN is a
        gap, values alone are over 0, 1, 2, … A series looks alike in all panels.
    log : the axes with a logarithmic scale: "x", "y" or "xy".
    across : {what: value}, horizontal lines. dots : {series: [(x, y), …]}, points beside the first
        panel's lines. top : the upper end of the vertical axes. kind : the legend's title.
    """
    groups = _panelled(groups, 2)
    rows = -(-len(groups) // columns)
    figure, places = panels(
        groups, columns, x, y, horizontal_spacing=0.08, vertical_spacing=0.2 / rows
    )
    names = list(dict.fromkeys(name for of in groups.values() for name in of))
    for place, of in zip(places, groups.values()):
        for name, points in of.items():
            values = np.array(points, float)
            if values.ndim == 1:
                values = np.stack([np.arange(len(values)), values], 1)
            x_of, y_of, *ends = values.T
            figure.add_scatter(
                x=x_of,
                y=y_of,
                name=name,
                error_y=interval(y_of, *ends) if ends else None,
                **line_look(names.index(name)) | ({"mode": "lines"} if dots else {}),
                hovertemplate=hover("%{x:g}: %{y:.3g}", name),
                **place,
            )
    for name, found in (dots or {}).items():
        i = names.index(name)
        add_points(figure, found, name, i, "%{x:g}: %{y:.3g}", showlegend=False, **places[0])
    for i, (name, value) in enumerate(sorted((across or {}).items(), key=lambda item: item[1])):
        figure.add_hline(
            y=value,
            line=DASHED,
            annotation_text=name,
            annotation_position="top right" if i else "bottom right",  # of the lowest
            annotation_font=NOTE,
        )
    xs = {float(point) for trace in figure.data for point in trace["x"]}
    _scale_axes(figure, log)
    if "x" in log and len(xs) < 9:  # a tick at each
        figure.update_xaxes(tickvals=sorted(xs))
    if top is not None:
        figure.update_yaxes(range=[0, top])
    return finish(figure, legend=kind, height=310 * rows + 80).update_layout(**layout)


def _panelled(groups: Mapping[str, Any], deep: int) -> Mapping[str, Any]:
    """Dictionaries so many deep; one less is a panel without a title."""
    found = groups
    for _ in range(deep):
        if not isinstance(found, Mapping):
            return {"": groups}
        found = next(iter(found.values()), None)
    return groups


def _scale_axes(figure: Figure, log: str) -> None:
    """Logarithmic axes, "x", "y" or "xy", with round numbers."""
    for axis, update in (("x", figure.update_xaxes), ("y", figure.update_yaxes)):
        if axis in log:
            values = np.concatenate([np.asarray(of[axis], float) for of in figure.data])
            values = values[values > 0]
            wide = len(values) and values.max() > 300 * values.min()
            update(type="log", tickvals=ROUND[:: 3 if wide else 1])


def bars(
    groups: Mapping[str, Any],
    y: str,
    x: str = "",
    *,
    columns: int = 2,
    line: tuple[float, str] | None = None,
    percent: bool = False,
    kind: str = "modelled",
    text: str = "",
    **layout: Any,
) -> Figure:
    """Groups of bars, a panel or several.

    groups : {series: {group: value}} or {panel: that}; (value, low, high) has whiskers, None is no
        bar.
    line : (value, what it is), drawn across. percent : values from 0 to 1 are drawn in per cent.
    kind : the legend's title. text : the format of the numbers on bars, such as ".2f". layout :
        barmode="stack" piles the series up.
    """
    groups = _panelled(groups, 3)
    height = 310 * -(-len(groups) // columns) + 80
    figure, places = panels(
        groups, columns, x, y, horizontal_spacing=0.07, vertical_spacing=80 / height
    )
    scale = 100 if percent else 1
    names = list(dict.fromkeys(name for of in groups.values() for name in of))
    for at, of in zip(places, groups.values()):
        for n, name in enumerate(names):
            _add_bars(figure, of.get(name, {}), name, n, scale, text, at)
        every = list(dict.fromkeys(group for by_group in of.values() for group in by_group))
        figure.update_xaxes(categoryarray=every, **at)
    shown = len(names) > 1 or (len(groups) > 1 and bool(line))
    if line:
        figure.add_hline(y=scale * line[0], line=DASHED)
    figure.update_xaxes(type="category", categoryorder="array", showgrid=False)
    look = {"barmode": "group", "scattermode": "group", "bargap": 0.18, "height": height}
    if not shown:
        figure.update_yaxes(title=f"{y}, {kind}" if kind and y else y, col=1)
    if layout.get("barmode") == "stack":
        figure.update_traces(offsetgroup=None)
    title = kind + (f"<br>dashed: {line[1]}" if line else "")
    finish(figure, legend=title, showlegend=shown)
    if line and not shown:  # what it is stands in the margin, where no bar is
        label_right(figure, scale * line[0], line[1].replace(" ", "<br>", 1))
    return figure.update_layout(**look | layout)


def _add_bars(
    figure: Figure,
    by_group: Mapping[Any, Spread | float | None],
    name: str,
    n: int,
    scale: float,
    text: str,
    at: Mapping[str, int],
) -> None:
    """The bars of the n-th series in one panel."""
    there = {group: v for group, v in by_group.items() if v is not None}
    if not there:
        return
    value, low, high = scale * np.array([np.broadcast_to(v, 3) for v in there.values()], float).T
    spread = (high > low).any()
    figure.add_bar(
        x=list(there),
        y=value,
        name=name,
        offsetgroup=str(n),
        marker=bar_look(n),
        error_y=interval(value, low, high, color="#333333") if spread else None,
        texttemplate=f"%{{y:{text}}}" if text else None,
        textposition="inside" if spread else "outside",  # not on a whisker
        insidetextanchor="start",
        cliponaxis=False if text else None,
        hovertemplate=hover("%{x}: %{y:.3g}", name),
        **at,
    )


def intervals(
    groups: Mapping[str, Any],
    x: str | Mapping[str, str],
    *,
    limits: Values | None = None,
    series: Mapping[str, str] | None = None,
    zero: float | None = 0,
    log: bool = False,
    kind: str = "measured",
    **layout: Any,
) -> Figure:
    """A point with its interval in each row, a panel or several side by side.

    groups : {row: (value, low, high)} or {panel: that}; NaN where a point is off the scale.
    x : the title of the horizontal axes, of all or of each panel. limits : {panel: value},
        dotted lines.
    series : {row: series}, which tells rows apart by colour. zero : where no difference is.
    """
    groups = _panelled(groups, 2)
    figure, places = panels(groups, shared_yaxes=True, horizontal_spacing=0.04)
    names = list(dict.fromkeys(name for of in groups.values() for name in of))
    kinds = list(dict.fromkeys((series or {}).values())) or [""]
    dotted = {"color": theme.VERMILLION, "dash": "dot", "width": 2}
    for at, (panel, of) in zip(places, groups.items()):
        for i, name in enumerate(kinds):
            rows = {row: v for row, v in of.items() if not series or series[row] == name}
            value, low, high = np.array([*rows.values()], float).reshape(-1, 3).T
            add_points(
                figure,
                [*zip(value, rows)],
                name or panel,
                i,
                "%{y}: %{x:.3g}",
                error_x=interval(value, low, high, color="#333333", thickness=1.5, width=4),
                showlegend=None if series else False,
                **at,
            )
        if zero is not None:
            figure.add_vline(x=zero, line=EDGE, **at)
        if panel in (limits or {}):
            figure.add_vline(x=limits[panel], line=dotted, **at)
        figure.update_xaxes(title=x if isinstance(x, str) else x[panel], **at)
    figure.update_xaxes(tickangle=0, nticks=max(3, 10 // len(groups)), tickfont_size=12)
    if log:
        _scale_axes(figure, "x")
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1])
    look = {"height": 150 + 30 * len(names), "margin_l": 30 + 7 * max(map(len, ["", *names]))}
    return finish(figure, legend=kind, **look).update_layout(**layout)


def label_right(figure: Figure, y: float, text: str, shift: int = 0) -> None:
    """A name in the right margin at a height; `shift` pixels above it."""
    look = {"xref": "x domain", "xanchor": "left", "align": "left", "font": NOTE, "yshift": shift}
    figure.add_annotation(x=1, y=y, text=f" {text}", showarrow=False, **look)
    figure.update_layout(margin_r=150)  # plotly leaves no room for notes


def matrix(
    values: ArrayLike,
    y: str,
    x: str,
    what: str,
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    numbers: str = "",
) -> Figure:
    """A map of values [rows, columns], the first row at the top.

    what : the title of the scale. numbers : the format of a number in each cell.
    """
    values = np.asarray(values, dtype=float)
    figure = Figure().add_heatmap(
        z=values,
        x=columns and list(columns),
        y=rows and list(rows),
        zmin=0,
        zmax=np.nanmax(values, initial=0),
        xgap=1,
        ygap=1,
        texttemplate=f"%{{z:{numbers}}}" if numbers else None,
        colorbar={"title": {"text": what}},
        hovertemplate=f"{y} %{{y}}, {x} %{{x}}: %{{z:.3g}}<extra></extra>",
    )
    figure.update_yaxes(
        autorange="reversed", dtick=None if rows else whole_steps(len(values)), showgrid=False
    )
    return finish(figure, x, y, xaxis_showgrid=False)


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
        figure.add_vline(
            x=1e3 * (end - start), line={"color": theme.BLACK, "dash": "dash", "width": 1.5}, **at
        )
        figure.update_yaxes(
            type="category",
            categoryorder="array",
            categoryarray=resources,
            showgrid=False,
            range=[len(resources) - 0.5, -0.5],
            **at,
        )
    figure.update_xaxes(range=[0, 1.02e3 * max(end - start for start, end in spans)])
    figure.update_annotations(x=0, xanchor="left")
    finish(
        figure,
        legend=f"{kind}<br>numbers: {numbers}" if numbers else kind,
        barmode="overlay",
        height=110 + 26 * round(sum(heights)),
        uniformtext={"minsize": 8, "mode": "hide"},
    )
    return figure.update_layout(legend_traceorder="normal")


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
        edges = [colour if e.end - e.start < brief else edge for e in of]
        shown = [e.layer if numbers == "layers" else e.expert for e in of]
        figure.add_bar(
            y=[e.resource for e in of],
            base=[1e3 * (e.start - start) for e in of],
            orientation="h",
            name=(called or [name])[0],
            x=[1e3 * (e.end - e.start) for e in of],
            text=["" if n < 0 else str(n) for n in shown],
            textposition="inside",
            textangle=0,
            insidetextanchor="middle",
            textfont={"color": text, "size": 12},
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
            **at,
        )


def _row(resource: str) -> tuple:
    """The sort key of a resource: its place in RESOURCES, the rest below, then its number."""
    name, _, number = resource.partition(" ")
    place = RESOURCES.index(name) if name in RESOURCES else len(RESOURCES)
    return place, int(number) if number.isdigit() else 0, resource
