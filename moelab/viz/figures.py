"""What all figures share, and the figures of popularity: arrays in, a plotly figure out.

Series differ in colour *and* in dash, marker or pattern. Seconds are drawn in milliseconds and
shares from 0 to 1 in per cent, unless an axis says otherwise. Published values are grey lines or
open diamonds; the axis or the legend's title says whether numbers are exact, measured, simulated or
modelled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from moelab.records import Record
from moelab.viz import theme
from moelab.viz.plotly_json import Figure, merged

GREY = "#555555"
EDGE = {"color": theme.BLACK, "width": 1}
PAPER = {"symbol": "diamond-open", "size": 10, "color": theme.BLACK, "line": {"width": 2}}
DASHED = {"color": GREY, "dash": "dash", "width": 1.5}
NOTE = {"size": 11, "color": GREY}
#: ticks of a logarithmic axis
ROUND = tuple(digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5))
Points = Sequence[tuple[float, float]]
Spread = tuple[float, float, float]
Values = Mapping[str, float]


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
    figure = Figure(
        (),
        _grid(
            tuple(map(bool, titles)),
            columns,
            tuple(
                (name, tuple(value) if isinstance(value, list) else value)
                for name, value in how.items()
            ),
        ),
        columns,
    )
    for note, title in zip(figure.frame.get("annotations", ()), filter(None, titles)):
        note["text"] = title
    for column in range(1, columns + 1):
        figure.update_xaxes(title=x, row=(len(titles) - column) // columns + 1, col=column)
    figure.update_yaxes(title=y, col=1).update_annotations(font_size=13)
    return figure, [{"row": i // columns + 1, "col": i % columns + 1} for i in range(len(titles))]


@cache
def _grid(titled: tuple[bool, ...], columns: int, how: tuple[tuple[str, Any], ...]) -> Record:
    """The empty panels, some with a title, as plotly lays them out."""
    from plotly.subplots import make_subplots

    n = len(titled)
    return merged(
        make_subplots(
            rows=-(-n // columns),
            cols=columns,
            **dict(how),
            subplot_titles=["title" * there for there in titled] if n > 1 and any(titled) else None,
        ).layout.to_plotly_json(),
        {"template": None},
    )


def add_lines(
    figure: Figure,
    series: Mapping[str, Sequence[Sequence[Any]]],
    template: str = "%{x:g}: %{y:.3g}",
    names: Iterable[str] = (),
    **how: Any,
) -> Figure:
    """Add a line a series of points (x, y) or (x, y, low, high); one of `names` has the same look
    in every panel."""
    names = list(names or series)
    for name, points in series.items():
        x, y, *ends = zip(*points) if points else ((), ())
        figure.add_scatter(
            x=x,
            y=y,
            name=name,
            error_y=interval(y, *ends) if ends else None,
            **line_look(names.index(name)) | {"hovertemplate": hover(template, name)} | how,
        )
    return figure


def add_points(
    figure: Figure, points: Points, name: str, i: int, template: str, **how: Any
) -> None:
    """Add points (x, y) in the look of the i-th series."""
    x, y = zip(*points) if points else ((), ())
    figure.add_scatter(
        **{
            "x": x,
            "y": y,
            "name": name,
            "mode": "markers",
            "marker": point_look(i),
            "hovertemplate": hover(template, name),
        }
        | how
    )


def add_ranges(
    figure: Figure, rows: Mapping[str, Spread], name: str, template: str, **at: int
) -> None:
    """Add a point with its interval in each named row: {row: (value, low, high)}."""
    value, low, high = np.array(list(rows.values()), dtype=float).T
    figure.add_scatter(
        x=value,
        y=list(rows),
        name=name,
        mode="markers",
        showlegend=False,
        marker={"size": 10, "symbol": "diamond", "color": theme.BLUE, "line": EDGE},
        error_x=interval(value, low, high, color="#333333", thickness=1.5, width=4),
        hovertemplate=hover(template, name),
        **at,
    )


def add_band(
    figure: Figure,
    x: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
    colour: str,
    opacity: float,
    name: str,
    **how: Any,
) -> None:
    """Add a band from low to high in a colour "#rrggbb"."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    x, low, high = map(np.asarray, (x, low, high))
    figure.add_scatter(
        x=np.r_[x, x[::-1]],
        y=np.r_[high, low[::-1]],
        fill="toself",
        name=name,
        mode="lines",
        line={"width": 0},
        fillcolor=f"rgba({red},{green},{blue},{opacity})",
        hoverinfo="skip",
        **how,
    )


def add_reference(figure: Figure, y: float, text: str, dash: str = "dash", shift: int = 0) -> None:
    """Add a grey horizontal line, labelled in the right margin; the label is `shift` pixels up."""
    figure.add_hline(
        y=y,
        line=DASHED | {"dash": dash},
        annotation_text=text,
        annotation_position="right",
        annotation_font_size=11,
        annotation_yshift=shift,
    )


def apart(values: Sequence[float], gap: float, high: float) -> list[float]:
    """Values moved so that any two are at least `gap` from each other and none is above `high`, in
    their order."""
    order, moved = np.argsort(values, kind="stable"), np.array(values, dtype=float)
    for before, here in zip(order, order[1:]):
        moved[here] = max(moved[here], moved[before] + gap)
    above = high + gap
    for here in order[::-1]:
        moved[here] = above = min(moved[here], above - gap)
    return moved.tolist()


def label_ends(figure: Figure, high: float, height: int) -> Figure:
    """Names beside the last points of the right panel's lines in place of a legend, moved apart
    where they are close.

    high : the upper end of the vertical axis, which begins at 0. height : of the figure, pixels.
    """
    last = figure.traces[-1].get("yaxis", "y")
    lines = {trace["name"]: trace for trace in figure.traces if trace.get("yaxis", "y") == last}
    ends = [next((y for y in trace["y"][::-1] if np.isfinite(y)), 0.0) for trace in lines.values()]
    for (name, trace), y in zip(lines.items(), apart(ends, 17 * high / (height - 96), high)):
        figure.add_annotation(
            x=1.01,
            xref="paper",
            y=y,
            yref=last,
            xanchor="left",
            showarrow=False,
            font={"size": 12},
            text=f'<span style="color:{trace["line"]["color"]}">'
            f"{theme.GLYPHS[trace['marker']['symbol']]}</span> {name}",
        )
    return figure.update_layout(
        showlegend=False, margin_r=40 + 7 * max(map(len, lines)), height=height
    )


def quantiles(samples: Sequence[float]) -> Spread:
    """Median, tenth and ninetieth percentile of seconds, in ms."""
    low, middle, high = np.quantile(1e3 * np.asarray(samples, dtype=float), (0.1, 0.5, 0.9))
    return middle, low, high


def whole_steps(n: int) -> int:
    """A tick distance that keeps the labels of n layers apart and whole."""
    return max(1, -(-n // 12))


def power_ticks(figure: Figure, values: Iterable[float]) -> None:
    """Logarithmic horizontal axes with a tick at each of the values."""
    ticks = sorted({float(value) for value in values})
    figure.update_xaxes(
        type="log", tickmode="array", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks]
    )


def finish(
    figure: Figure, x: str = "", y: str = "", legend: str | None = None, **layout: Any
) -> Figure:
    """The figure in moelab's look: titles of all axes, every name once in the legend.

    legend : the title of a legend beside the figure; without, the legend is above, and the right
    margin holds notes."""
    if x:
        figure.update_xaxes(title=x)
    if y:
        figure.update_yaxes(title=y)
    names = [trace.get("name") for trace in figure.traces]
    for i, (name, trace) in enumerate(zip(names, figure.traces)):
        if name and names.count(name) > 1 and "showlegend" not in trace:
            trace |= {"legendgroup": name, "showlegend": name not in names[:i]}
    if legend is None:
        place = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
        notes = [
            len(note["text"])
            for note in figure.frame.get("annotations", ())
            if note.get("xref") == "x domain"
        ]
        right = 20 + 6 * max(notes, default=0)  # plotly leaves no room for them
    else:
        title = {"text": legend, "font": {"size": 13}}
        place = {"x": 1.02, "y": 1, "yanchor": "top", "tracegroupgap": 0, "title": title}
        right = 24
    figure.update_layout(
        legend=place,
        showlegend=legend is not None or len(figure.traces) > 1,
        margin={"l": 72, "r": right, "t": 40, "b": 56},
    )
    return figure.update_layout(**layout)


def bars(
    groups: Mapping[str, Mapping[str, Mapping[str, Spread | None]]],
    y: str,
    x: str = "",
    *,
    paper: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]] | None = None,
    columns: int = 2,
    line: tuple[float, str] | None = None,
    percent: bool = False,
    kind: str = "modelled",
    upwards: bool = True,
) -> Figure:
    """Groups of bars with whiskers, panels side by side.

    groups : {panel: {series: {group: (value, low, high)}}}; None is drawn as N.S., not supported.
    paper : {panel: {series: {group: values}}}, open diamonds on the bars; two values are the ends
        of a range.
    line : (value, what it is), drawn across. percent : values from 0 to 1 are drawn in per cent.
    kind : the legend's title. upwards : the vertical axis begins at 0.
    """
    height = 310 * -(-len(groups) // columns) + 80
    figure, places = panels(
        groups, columns, x, y, horizontal_spacing=0.07, vertical_spacing=80 / height
    )
    scale = 100 if percent else 1
    names = list(dict.fromkeys(name for of in groups.values() for name in of))
    for at, (panel, of) in zip(places, groups.items()):
        for name, by_group in of.items():
            there = {group: spread for group, spread in by_group.items() if spread is not None}
            spreads = [tuple(spread) for spread in there.values()]
            value, low, high = scale * np.array(spreads, float).reshape(-1, 3).T
            n = names.index(name)
            figure.add_bar(
                x=list(there),
                y=value,
                name=name,
                offsetgroup=str(n),
                marker=bar_look(n),
                error_y=interval(value, low, high, color="#333333") if (high > low).any() else None,
                hovertemplate=hover("%{x}: %{y:.3g}", name),
                **at,
            )
            if said := (paper or {}).get(panel, {}).get(name):
                _add_paper(figure, said, name, n, scale, at)
        every = list(dict.fromkeys(group for by_group in of.values() for group in by_group))
        figure.update_xaxes(categoryarray=every, **at)
        _add_unsupported(figure, of, every, names, at)
        if line:
            figure.add_hline(y=scale * line[0], line=DASHED, **at)
    figure.update_xaxes(type="category", categoryorder="array", showgrid=False)
    figure.update_yaxes(rangemode=None if upwards else "normal")
    return finish(
        figure,
        legend=kind + (f"<br>dashed: {line[1]}" if line else ""),
        barmode="group",
        scattermode="group",
        bargap=0.18,
        height=height,
    )


def _add_paper(
    figure: Figure,
    said: Mapping[str, Sequence[float]],
    name: str,
    n: int,
    scale: float,
    at: Mapping[str, Any],
) -> None:
    """A series' published values, open diamonds on its bars; two are the ends of a line."""
    # NaN ends a line
    ends = [(group, v) for group, values in said.items() for v in (*values, np.nan)]
    figure.add_scatter(
        x=[group for group, _ in ends],
        y=[scale * v for _, v in ends],
        mode="lines+markers",
        name="the paper",
        offsetgroup=str(n),
        marker=PAPER,
        line=EDGE | {"dash": "solid"},
        hovertemplate=hover("%{x}: %{y:.3g}", f"{name}, paper"),
        **at,
    )


def _add_unsupported(
    figure: Figure,
    of: Mapping[str, Mapping[str, Spread | None]],
    groups: Sequence[str],
    names: Sequence[str],
    at: Mapping[str, Any],
) -> None:
    """N.S. in each group that has a series without a value."""
    for group in groups:
        missing = [
            name for name, by_group in of.items() if group in by_group and by_group[group] is None
        ]
        if missing:
            figure.add_scatter(
                x=[group],
                y=[0],
                mode="text",
                text="N.S.",
                textposition="top center",
                offsetgroup=str(names.index(missing[len(missing) // 2])),
                showlegend=False,
                textfont={"size": 11, "color": GREY},
                hoverinfo="skip",
                name="not supported",
                **at,
            )


def lines(
    groups: Mapping[str, Mapping[str, Points]],
    y: str,
    x: str,
    *,
    columns: int = 2,
    log: str = "",
    at: float | None = None,
    kind: str = "modelled",
) -> Figure:
    """A line a series, panels side by side.

    groups : {panel: {series: [(x, y), …]}}; NaN where there is nothing. A series looks alike in all
        panels.
    log : the axes with a logarithmic scale: "x", "y" or "xy". at : where a vertical line is drawn.
    """
    rows = -(-len(groups) // columns)
    figure, places = panels(
        groups, columns, x, y, horizontal_spacing=0.08, vertical_spacing=0.2 / rows
    )
    names = list(dict.fromkeys(name for of in groups.values() for name in of))
    for place, of in zip(places, groups.values()):
        add_lines(figure, of, names=names, **place)
        if at is not None:
            figure.add_vline(x=at, line=DASHED, **place)
    for axis, update in (("x", figure.update_xaxes), ("y", figure.update_yaxes)):
        values = np.array(
            [
                p["xy".index(axis)]
                for of in groups.values()
                for points in of.values()
                for p in points
            ]
        )
        if axis in log and np.isfinite(values).any():
            low, high = np.nanmin(values), np.nanmax(values)
            few = [tick for tick in ROUND if low / 1.6 <= tick <= high * 1.6]
            update(
                type="log",
                tickvals=few,
                range=np.log10([low / 1.15, high * 1.15]).tolist(),
                ticktext=[f"{t:g}" for t in few],
            )
        elif axis == "x":
            update(rangemode="tozero")
    return finish(figure, legend=kind, height=310 * rows + 80)


def differences(
    tasks: Mapping[str, Mapping[str, Spread]],
    title: Mapping[str, str] | str,
    limits: Values | None = None,
) -> Figure:
    """Each way's difference from a baseline with its interval, a panel a task.

    tasks : {task: {way: (value, low, high)}}; NaN where a point is off the scale.
    title : of the horizontal axes, of all or of each task. limits : the largest difference allowed,
    dotted."""
    figure, places = panels(tasks, shared_yaxes=True, horizontal_spacing=0.04)
    names = list(dict.fromkeys(name for of in tasks.values() for name in of))
    for at, (task, of) in zip(places, tasks.items()):
        add_ranges(figure, of, task, "%{y}: %{x:+.2f}", **at)
        figure.add_vline(x=0, line=EDGE, **at)
        if task in (limits or {}):
            figure.add_vline(
                x=limits[task], line={"color": theme.VERMILLION, "dash": "dot", "width": 2}, **at
            )
        figure.update_xaxes(title=title if isinstance(title, str) else title[task], **at)
    figure.update_xaxes(tickangle=0, nticks=max(4, 15 // len(tasks)), tickfont_size=12)
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1])
    return finish(figure, legend="measured", height=150 + 38 * len(names), margin_l=130)


def heatmap(counts: ArrayLike) -> Figure:
    """Expert popularity: each expert's share of its layer's routings; `counts` [L, E], layers down,
    experts across."""
    counts = np.asarray(counts, dtype=float)
    figure = Figure().add_heatmap(
        z=100 * counts / np.maximum(counts.sum(1, keepdims=True), 1),
        zmin=0,
        xgap=1,
        ygap=1,
        colorbar={"title": {"text": "share of<br>routings (%)"}},
        hovertemplate="layer %{y}, expert %{x}: %{z:.2f} %<extra></extra>",
    )
    figure.update_yaxes(autorange="reversed", dtick=whole_steps(len(counts)), showgrid=False)
    return finish(figure, "expert", "MoE layer", xaxis_showgrid=False)


def imbalance(by_phase: Mapping[str, ArrayLike]) -> Figure:
    """Imbalance ratio r_l by layer, one line a phase: {"prefill": [L], "decode": [L]}; 1 is perfect
    balance."""
    figure = _by_layer(by_phase)
    add_reference(figure, 1, "perfect balance")
    return finish(figure, y="busiest expert ÷ mean load")


def overlap(
    by_name: Mapping[str, ArrayLike], paper: Values | None = None, chance: Values | None = None
) -> Figure:
    """Overlap@K by layer, one line a comparison: {"top-4, code": [L], ...}, values from 0 to 1.

    chance : what two random rankings would reach, k/E; drawn across, like the published values of
    `paper`."""
    figure = _by_layer(
        {name: 100 * np.asarray(values, dtype=float) for name, values in by_name.items()}
    )
    for what, values, dash in (("chance", chance, "dash"), ("paper", paper, "dot")):
        for name, value in (values or {}).items():
            add_reference(figure, 100 * value, f"{what}, {name}: {100 * value:.1f} %", dash)
    return finish(figure, y="Overlap@K (%)", yaxis_range=[0, 104])


def agreement(values: ArrayLike, rows: Sequence[str], columns: Sequence[str]) -> Figure:
    """Overlap, 0 to 1 [rows, columns], each cell with its number: calibrated on a row, run on a
    column."""
    figure = Figure().add_heatmap(
        z=100 * np.asarray(values, dtype=float),
        x=list(columns),
        y=list(rows),
        zmin=0,
        zmax=100,
        xgap=2,
        ygap=2,
        texttemplate="%{z:.0f} %",
        colorbar={"title": {"text": "Overlap@K (%)"}},
        hovertemplate="calibrated on %{y}, run on %{x}: %{z:.1f} %<extra></extra>",
    )
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return finish(figure, "run on", "calibrated on", xaxis_showgrid=False)


def load_distribution(loads: ArrayLike, capacities: Values | None = None) -> Figure:
    """Tokens of each expert of one layer in a chunk, `loads` [chunks, E], busiest expert first.

    Bands: all chunks, and the middle half of them; line: the median; `capacities` are drawn across.
    """
    loads = np.asarray(loads)
    order = np.argsort(-loads.mean(0), kind="stable")
    low, q1, median, q3, high = np.quantile(loads[:, order], [0, 0.25, 0.5, 0.75, 1], axis=0)
    ranks = np.arange(loads.shape[1])
    figure = Figure()
    add_band(figure, ranks, low, high, theme.BLUE, 0.25, "all chunks")
    add_band(figure, ranks, q1, q3, theme.BLUE, 0.5, "middle half of the chunks")
    figure.add_scatter(
        x=ranks,
        y=median,
        name="median chunk",
        customdata=order,
        **line_look(0),
        hovertemplate="expert %{customdata} (rank %{x}): %{y:.0f} tokens<extra></extra>",
    )
    shift, below = 0, -np.inf
    for name, tokens in sorted((capacities or {}).items(), key=lambda item: item[1]):
        shift = (
            shift + 12 if tokens - below < 0.05 * high.max() else 0
        )  # labels that would overlap move up
        add_reference(figure, tokens, f"{name}: {tokens:.0f}", shift=shift)
        below = tokens
    return finish(figure, "popularity rank of the expert (0 = busiest)", "tokens in a chunk")


def inclusion(by_name: Mapping[str, ArrayLike]) -> Figure:
    """Rank-based inclusion probabilities f_r, one curve a batch size: {"batch 1": [E], ...}."""
    figure = add_lines(
        Figure(), {name: list(enumerate(np.asarray(f))) for name, f in by_name.items()}
    )
    return finish(
        figure,
        "popularity rank of the expert (0 = busiest)",
        "probability that a step needs it",
        yaxis_range=[0, 1.02],
    )


def _by_layer(series: Mapping[str, ArrayLike]) -> Figure:
    figure = add_lines(
        Figure(), {name: list(enumerate(np.asarray(of, float))) for name, of in series.items()}
    )
    return figure.update_xaxes(
        title="MoE layer", dtick=whole_steps(max(map(len, series.values()), default=1))
    )
