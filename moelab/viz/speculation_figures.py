"""Figures of speculation: signals and recall by layer, training, the price in accuracy, time, and the prefetch theatre.

As in `moelab.viz.figures`, nothing is computed beyond what drawing needs, and nothing depends on colour alone: lines
differ in dash and marker, bars in pattern, points in shape. Times come in seconds and are drawn in milliseconds, shares
come from 0 to 1 and are drawn in per cent. A layer on an axis, "0→1", is the one that predicts and the one that is
predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike
from plotly.subplots import make_subplots

from moelab.specs import Event
from moelab.viz import theme
from moelab.viz.engine_figures import KINDS, _beside
from moelab.viz.figures import GREY, _line

#: what a processor and a copy engine do together → colour, pattern of its bar
OCCUPIED = {"compute alone": (theme.GREEN, ""), "both at once": (theme.YELLOW, "\\"),
            "copy alone": (theme.BLUE, "/"), "idle": ("#dddddd", "x")}
#: rows of the theatre, its kinds of bars and their looks
AHEAD = "read ahead"
LOOKS = {"read": (*KINDS["read"][:1], "", "white"), AHEAD: (theme.SKY, "/", "black"), "expert": KINDS["expert"],
         "other": KINDS["other"], "wait": KINDS["wait"]}


def by_layer(panels: Mapping[str, Mapping[str, ArrayLike]], title: str, *, ahead: int = 1,
             errors: Mapping[str, Mapping[str, ArrayLike]] | None = None, chance: float | None = None,
             lowest: float = 0.0, percent: bool = True, legend: str = "") -> go.Figure:
    """Values by predicting layer, a line a series, panels side by side with a common scale (Figs. 3, 4, 5 and 10).

    Parameters
    ----------
    panels : {panel: {series: [L − ahead]}}; a series looks alike in all panels. NaN where there is nothing.
    title : of the vertical axis, with its unit.
    errors : the same shape, half of each bar (`Score.margin`). Series without are drawn plain.
    chance : a dashed line across.
    lowest : where the vertical axis begins. percent : whether values from 0 to 1 are drawn in per cent.
    legend : the legend's title, such as the kind of the numbers.
    """
    scale, names = 100 if percent else 1, list(dict.fromkeys(name for of in panels.values() for name in of))
    figure = make_subplots(rows=1, cols=len(panels), shared_yaxes=True, horizontal_spacing=0.03,
                           subplot_titles=list(panels) if len(panels) > 1 else None)
    seen: set[str] = set()
    for column, (panel, series) in enumerate(panels.items(), 1):
        for name, values in series.items():
            values = np.asarray(values, dtype=float)
            error = (errors or {}).get(panel, {}).get(name)
            bars = None if error is None else {"type": "data", "array": scale * np.asarray(error, dtype=float),
                                               "thickness": 1.2, "width": 3}
            figure.add_scatter(
                x=[f"{l}→{l + ahead}" for l in range(len(values))], y=scale * values, name=name, legendgroup=name,
                showlegend=name not in seen, error_y=bars, **_line(names.index(name)), row=1, col=column,
                hovertemplate="layer %{x}: %{y:.2f}" + " %" * percent + f"<extra>{name}</extra>")
            seen.add(name)
        if chance is not None:
            figure.add_hline(y=scale * chance, line={"color": GREY, "dash": "dash", "width": 1.5}, row=1, col=column)
    if chance is not None:
        figure.add_annotation(x=0, xref="paper", y=scale * chance, xanchor="left", yanchor="top", showarrow=False,
                              text=f"chance: {scale * chance:.3g}" + " %" * percent, font={"size": 11, "color": GREY})
    figure.update_xaxes(title="layer → layer", type="category", showgrid=False)
    figure.update_yaxes(range=[scale * lowest, scale * 1.02])
    figure.update_yaxes(title=title, row=1, col=1)
    return figure.update_layout(template="moelab", height=400, margin={"l": 72, "r": 24, "t": 40, "b": 50},
                                legend=_beside(legend))


def training(series: Mapping[str, Sequence[tuple[int, float]]], references: Mapping[str, float] | None = None,
             kind: str = "measured") -> go.Figure:
    """Validation hit rate against tokens seen: {"mean over layers": [(tokens, 0 to 1), …]}; Fig. 9.

    references : {name: 0 to 1}, what needs no training, drawn across.
    """
    figure = go.Figure()
    for i, (name, points) in enumerate(series.items()):
        x, y = np.array(points, dtype=float).T
        figure.add_scatter(x=x / 1e3, y=100 * y, name=name, **_line(i),
                           hovertemplate="%{x:.1f} thousand tokens: %{y:.1f} %<extra>" + name + "</extra>")
    for i, (name, value) in enumerate(sorted((references or {}).items(), key=lambda item: item[1])):
        figure.add_hline(y=100 * value, line={"color": GREY, "dash": "dash", "width": 1.5},
                         annotation_text=f"{name}: {100 * value:.1f} %", annotation_font={"size": 11, "color": GREY},
                         annotation_position="top right" if i else "bottom right",      # neighbours may be close
                         annotation_yshift=12 * max(0, i - 1))
    figure.update_xaxes(title="training tokens seen (thousands)", rangemode="tozero")
    figure.update_yaxes(title="validation hit rate, recall@K (%)", range=[0, 102])
    return figure.update_layout(template="moelab", height=400, margin={"l": 72, "r": 24, "t": 30, "b": 50},
                                legend=_beside(kind))


def price(found: Mapping[str, Mapping[str, tuple[float, float, float]]], units: Mapping[str, str],
          bars: Mapping[str, float] | None = None) -> go.Figure:
    """What each mode costs: a panel a task, a row a mode, its difference from the baseline with a 95 % interval.

    Parameters
    ----------
    found : {task: {mode: (difference, low, high)}}; NaN where a point is off the scale.
    units : {task: the horizontal axis' title, with the unit of its differences}.
    bars : {task: the largest cost that was allowed}, signed as the differences are; drawn as a dotted line.
    """
    figure = make_subplots(rows=1, cols=len(found), shared_yaxes=True, horizontal_spacing=0.04,
                           subplot_titles=list(found))
    modes = list(dict.fromkeys(mode for of in found.values() for mode in of))
    for column, (task, rows) in enumerate(found.items(), 1):
        for mode, (value, low, high) in rows.items():
            i = modes.index(mode)
            figure.add_scatter(
                x=[value], y=[mode], mode="markers", name=mode, showlegend=False, row=1, col=column,
                marker={"symbol": theme.MARKERS[i % 8], "size": 11, "color": theme.PALETTE[i % 8],
                        "line": {"color": theme.BLACK, "width": 1}},
                error_x={"type": "data", "symmetric": False, "array": [high - value], "arrayminus": [value - low],
                         "color": "#444444", "thickness": 1.5},
                hovertemplate="%{y}: %{x:+.2f}" + f" [{low:+.2f}, {high:+.2f}]<extra>{task}</extra>")
        figure.add_vline(x=0, line={"color": theme.BLACK, "width": 1}, row=1, col=column)
        if task in (bars or {}):
            figure.add_vline(x=bars[task], line={"color": theme.VERMILLION, "dash": "dot", "width": 2}, row=1,
                             col=column)
        figure.update_xaxes(title=units[task], row=1, col=column)
    figure.update_yaxes(categoryorder="array", categoryarray=modes[::-1])
    figure.update_annotations(font_size=13)
    return figure.update_layout(template="moelab", height=140 + 38 * len(modes),
                                margin={"l": 110, "r": 24, "t": 36, "b": 56})


def tpot(found: Mapping[str, Mapping[str, Sequence[float]]], bounds: Mapping[str, float] | None = None,
         title: str = "", kind: str = "measured") -> go.Figure:
    """TPOT of each way of running, a group of bars a setting: {setting: {way: its samples, seconds}}; Fig. 8.

    Bars are medians, whiskers run from the tenth to the ninetieth percentile.

    Parameters
    ----------
    bounds : {setting: seconds}, the least that eq. (1) allows, drawn as a thick mark across the group.
    title : of the horizontal axis, which names the settings.
    """
    figure = go.Figure()
    ways = list(dict.fromkeys(way for of in found.values() for way in of))
    for i, way in enumerate(ways):
        there = {setting: 1e3 * np.asarray(of[way], dtype=float) for setting, of in found.items() if way in of}
        low, middle, high = np.array([np.quantile(samples, (0.1, 0.5, 0.9)) for samples in there.values()]).T
        figure.add_bar(x=list(there), y=middle, name=way, offsetgroup=i, error_y={
                           "type": "data", "symmetric": False, "array": high - middle, "arrayminus": middle - low,
                           "color": "#333333", "thickness": 1.2, "width": 3},
                       marker={"color": theme.PALETTE[i % 8], "line": {"color": theme.BLACK, "width": 1}, "pattern": {
                           "shape": theme.PATTERNS[i % 8], "fillmode": "overlay", "fgcolor": "white", "size": 6}},
                       hovertemplate="%{x}: %{y:.2f} ms<extra>" + way + "</extra>")
    if bounds:
        figure.add_scatter(x=list(bounds), y=[1e3 * value for value in bounds.values()], mode="markers",
                           name="eq. (1): no less", marker={"symbol": "line-ew", "size": 90, "color": theme.BLACK,
                                                            "line": {"color": theme.BLACK, "width": 3}},
                           hovertemplate="%{x}: %{y:.2f} ms<extra>eq. (1)</extra>")
    figure.update_xaxes(title=title, type="category", showgrid=False)
    figure.update_yaxes(title="TPOT (ms)", rangemode="tozero")
    return figure.update_layout(template="moelab", barmode="group", bargap=0.2, height=400, legend=_beside(kind),
                                margin={"l": 72, "r": 24, "t": 24, "b": 56})


def occupancy(events: Sequence[Event], start: float, end: float) -> dict[str, float]:
    """How a stretch of time was used by compute and by the disk, in seconds: the parts of `OCCUPIED`, which add up.

    Waiting and the gaps between events are no work.
    """
    work = [(max(e.start, start), min(e.end, end), e.resource) for e in events
            if e.resource in ("compute", "disk") and e.kind != "wait" and e.end > start and e.start < end]
    edges = np.unique([start, end, *(time for a, b, _ in work for time in (a, b))])
    middle, length = (edges[:-1] + edges[1:]) / 2, np.diff(edges)
    busy = {name: np.zeros(len(middle), dtype=bool) for name in ("compute", "disk")}
    for a, b, resource in work:
        busy[resource] |= (a < middle) & (middle < b)
    compute, disk = busy["compute"], busy["disk"]
    parts = (compute & ~disk, compute & disk, disk & ~compute, ~compute & ~disk)
    return {name: float(length[part].sum()) for name, part in zip(OCCUPIED, parts)}


def breakdown(found: Mapping[str, Mapping[str, float]], title: str = "", kind: str = "measured") -> go.Figure:
    """What a token's time is made of: {row: seconds of the parts of `OCCUPIED`}, stacked bars; Fig. 7."""
    figure = go.Figure()
    for part, (colour, pattern) in OCCUPIED.items():
        values = [1e3 * of[part] for of in found.values()]
        shares = [of[part] / sum(of.values()) for of in found.values()]
        figure.add_bar(y=list(found), x=values, name=part, orientation="h",
                       text=[f"{share:.0%}" if share >= 0.08 else "" for share in shares], textposition="inside",
                       insidetextanchor="middle", textangle=0, cliponaxis=False,
                       textfont={"color": "white" if part in ("compute alone", "copy alone") else "black", "size": 12},
                       marker={"color": colour, "line": {"color": "#444444", "width": 1}, "pattern": {
                           "shape": pattern, "fillmode": "overlay", "fgcolor": "#888888" if part == "idle" else "white",
                           "fgopacity": 0.35, "size": 7}},
                       hovertemplate="%{y}, " + part + ": %{x:.2f} ms<extra></extra>")
    figure.update_xaxes(title="time of a token (ms)", rangemode="tozero")
    figure.update_yaxes(title=title, autorange="reversed", showgrid=False, type="category")
    return figure.update_layout(template="moelab", barmode="stack", bargap=0.3, height=130 + 34 * len(found),
                                uniformtext={"minsize": 10, "mode": "hide"},
                                margin={"l": 150, "r": 24, "t": 24, "b": 50}, legend=_beside(kind) | {
                                    "traceorder": "normal"})


def theatre(acts: Mapping[str, Sequence[Event]]) -> go.Figure:
    """The prefetch theatre: one token under each mode, one below the other on the same clock.

    acts : {mode: the events of one token}. Each starts at its first event; a dashed line marks its end. A read that
    begins before its layer's router has run is drawn as read ahead; numbers in bars are layers.
    """
    figure = make_subplots(rows=len(acts), cols=1, shared_xaxes=True, vertical_spacing=0.32 / max(len(acts), 1),
                           subplot_titles=[f"{name}: {1e3 * _length(events):.1f} ms" for name, events in acts.items()])
    seen: set[str] = set()
    for row, events in enumerate(acts.values(), 1):
        start, length = min(e.start for e in events), _length(events)
        for kind, (colour, pattern, text) in LOOKS.items():
            bars = [e for e in events if kind_of(e, events) == kind]
            if not bars:
                continue
            figure.add_bar(
                y=["compute" if e.resource == "compute" else "copy" for e in bars], orientation="h", name=kind,
                base=[1e3 * (e.start - start) for e in bars], x=[1e3 * (e.end - e.start) for e in bars],
                text=["" if e.layer < 0 else str(e.layer) for e in bars], textposition="inside", textangle=0,
                insidetextanchor="middle", textfont={"color": text, "size": 11}, legendgroup=kind,
                showlegend=kind not in seen, customdata=[e.expert for e in bars],
                marker={"color": colour, "line": {"color": "#bbbbbb" if kind == "wait" else "white", "width": 0.6},
                        "pattern": {"shape": pattern, "fillmode": "overlay", "size": 6, "fgopacity": 0.5,
                                    "fgcolor": "#999999" if kind == "wait" else "white"}},
                hovertemplate="%{y}, " + kind + ", layer %{text}, expert %{customdata}: %{x:.3f} ms from "
                              "%{base:.3f} ms<extra></extra>", row=row, col=1)
            seen.add(kind)
        figure.add_vline(x=1e3 * length, line={"color": theme.BLACK, "dash": "dash", "width": 1.5}, row=row, col=1)
    figure.update_yaxes(categoryorder="array", categoryarray=["copy", "compute"], autorange="reversed", showgrid=False)
    figure.update_xaxes(range=[0, 1.02e3 * max(map(_length, acts.values()))], ticks="")
    figure.update_xaxes(title="time since the token began (ms)", ticks="outside", row=len(acts), col=1)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    return figure.update_layout(
        template="moelab", barmode="overlay", bargap=0.12, showlegend=True, height=110 + 125 * len(acts),
        uniformtext={"minsize": 8, "mode": "hide"}, margin={"l": 80, "r": 24, "t": 64, "b": 50},
        legend={"orientation": "h", "x": 0, "y": 1.06, "yanchor": "bottom", "traceorder": "normal",
                "title": {"text": "numbers: layers  ", "font": {"size": 13}}})


def what_if(lines: Mapping[str, Sequence[tuple[float, float]]], chosen: float | None = None,
            points: Mapping[str, Sequence[tuple[float, float]]] | None = None, kind: str = "modelled") -> go.Figure:
    """TPOT against copy ÷ compute: {way: [(ratio, seconds), …]} as lines, measured `points` on top of them.

    chosen : a ratio that is marked by a vertical line. A series of points has the look of the line of its name.
    """
    figure = go.Figure()
    for i, (name, values) in enumerate(lines.items()):
        x, y = np.array(sorted(values), dtype=float).T
        look = _line(i)
        figure.add_scatter(x=x, y=1e3 * y, name=name, mode="lines", line=look["line"] | {"width": 2.5},
                           hovertemplate="%{x:.2f}: %{y:.2f} ms<extra>" + name + "</extra>")
        if name in (points or {}):
            x, y = np.array(points[name], dtype=float).T
            figure.add_scatter(x=x, y=1e3 * y, name=f"{name}, measured", mode="markers",
                               marker=look["marker"] | {"size": 11, "color": look["line"]["color"],
                                                        "line": {"color": theme.BLACK, "width": 1}},
                               hovertemplate="%{x:.2f}: %{y:.2f} ms<extra>" + name + ", measured</extra>")
    if chosen is not None:
        figure.add_vline(x=chosen, line={"color": GREY, "dash": "dash", "width": 1.5},
                         annotation_text=f"{chosen:.2g}", annotation_font={"size": 12, "color": GREY})
    figure.update_xaxes(title="copy ÷ compute (ratio of seconds a token)", rangemode="tozero")
    figure.update_yaxes(title="TPOT (ms)", rangemode="tozero")
    return figure.update_layout(template="moelab", height=400, margin={"l": 72, "r": 24, "t": 24, "b": 56},
                                legend=_beside(f"lines: {kind}"))


def _length(events: Sequence[Event]) -> float:
    return max(e.end for e in events) - min(e.start for e in events)


def kind_of(event: Event, events: Sequence[Event]) -> str | None:
    """The kind of bar of an event; None for what the theatre doesn't show (workers)."""
    if event.resource == "compute":
        return event.kind
    if event.resource != "disk":
        return None
    routed = min((e.end for e in events if e.kind == "other" and e.layer == event.layer), default=event.start)
    return AHEAD if event.start < routed else "read"
