"""The charts of the notebooks, one home for each kind: `lines`, `bars`, `intervals`, `matrix`, over
the looks of `moelab.viz.charts`; numbers in, a figure out.

`lines`, `bars` and `intervals` take one panel or several, {title: panel}. Series differ
in colour *and* in dash, marker or pattern. Seconds are drawn in milliseconds and
shares from 0 to 1 in per cent, unless an axis says otherwise. The axis or the legend's title says
whether numbers are exact, measured, simulated or modelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from plotly.graph_objects import Figure

from moelab.base.records import Record
from moelab.viz import theme
from moelab.viz.charts import (
    DASHED,
    EDGE,
    NOTE,
    ROUND,
    Points,
    Values,
    add_points,
    bar_look,
    finish,
    hover,
    line_look,
    panels,
    whole_steps,
)

Spread = tuple[float, float, float]


def interval(value: ArrayLike, low: ArrayLike, high: ArrayLike, **look: Any) -> Record:
    """Error bars from low to high around the values."""
    value, low, high = (np.asarray(of, dtype=float) for of in (value, low, high))
    return {
        "type": "data",
        "symmetric": False,
        "array": (high - value).tolist(),
        "arrayminus": (value - low).tolist(),
        "thickness": 1.2,
        "width": 3,
    } | look


def quantiles(samples: Sequence[float]) -> Spread:
    """Median, tenth and ninetieth percentile of seconds, in ms."""
    low, middle, high = np.quantile(1e3 * np.asarray(samples, dtype=float), (0.1, 0.5, 0.9))
    return middle, low, high


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


def label_right(figure: Figure, y: float, text: str, shift: int = 0) -> None:
    """A name in the right margin at a height; `shift` pixels above it."""
    look = {"xref": "x domain", "xanchor": "left", "align": "left", "font": NOTE, "yshift": shift}
    figure.add_annotation(x=1, y=y, text=f" {text}", showarrow=False, **look)
    figure.update_layout(margin_r=150)  # plotly leaves no room for notes


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
