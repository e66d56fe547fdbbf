"""Figures of experts: padding, dropping, tiers, executors, selective loading, exchange and balance between ranks.

As in `moelab.viz.figures`, nothing is computed beyond what drawing needs, and nothing depends on colour alone: lines
differ in dash and marker, bars in pattern, and what is measured is points where a formula is a line. Times come in
seconds and are drawn in milliseconds, shares come from 0 to 1 and are drawn in per cent, sizes come in bytes; what
`dropping` and `differences` get is in the unit of its axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike
from plotly.subplots import make_subplots

from moelab.bench.static import NOBODY, DropCosts, Ran
from moelab.experts.blocks import Padding
from moelab.viz import theme
from moelab.viz.engine_figures import _beside
from moelab.viz.figures import GREY, _line, _whole_steps
from moelab.viz.store_figures import _bar

Points = Sequence[tuple[float, float]]


def padding(series: Mapping[str, Points], kind: str = "exact") -> go.Figure:
    """Padded share of the computed slots against the block size: {skew: [(B, 0 to 1), …]}."""
    figure = go.Figure()
    for i, (name, points) in enumerate(series.items()):
        x, y = _columns(points)
        figure.add_scatter(x=x, y=100 * y, name=name, **_line(i),
                           hovertemplate="B = %{x}: %{y:.1f} % padding<extra>" + name + "</extra>")
    _powers(figure, [x for points in series.values() for x, _ in points])
    figure.update_xaxes(title="block size B (tokens, log scale)")
    figure.update_yaxes(title="padding (% of the computed slots)", range=[0, 102])
    return _styled(figure, kind)


def block_sizes(made: Mapping[int, Padding]) -> go.Figure:
    """`padding` of one routing, by block size: of the filled blocks, and of all that are provided."""
    return padding({"filled blocks": [(B, 1 - p.pairs / (p.needed * B)) for B, p in made.items()],
                    "all N blocks": [(B, p.padded / p.slots) for B, p in made.items()]})


def dropping(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float, float]]]],
             title: str = "capacity factor", kind: str = "measured") -> go.Figure:
    """What is dropped, and what that costs, against the room that experts have: panels one above the other.

    Parameters
    ----------
    panels : {vertical title: {series: [(room, value, low, high), …]}}, in the title's unit; low and high are the ends
        of an interval, or the value itself. Series of one name look alike in all panels.
    title : of the horizontal axis, which may be another measure of the room.
    """
    figure = make_subplots(rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=0.06)
    names = list(dict.fromkeys(name for of in panels.values() for name in of))
    shown: set[str] = set()
    for row, (vertical, of) in enumerate(panels.items(), 1):
        for name, points in of.items():
            x, value, low, high = _columns(points)
            figure.add_scatter(x=x, y=value, **_line(names.index(name)), name=name, legendgroup=name,
                               showlegend=name not in shown, row=row, col=1,
                               error_y={"type": "data", "symmetric": False, "array": high - value,
                                        "arrayminus": value - low, "thickness": 1.2, "width": 3},
                               hovertemplate="%{x:g}: %{y:.1f}<extra>" + name + "</extra>")
            shown.add(name)
        figure.update_yaxes(title=vertical, row=row, col=1)
    figure.update_xaxes(title=title, row=len(panels), col=1)
    return _styled(figure, kind, height=140 + 190 * len(panels))


def capacity(costs: DropCosts) -> go.Figure:
    """What capacity factors drop, pad and cost, a panel each for counts, language loss and right answers.

    costs : ways named by their factor, e.g. of `moelab.bench.static.capacity_factors`.
    """
    tasks = [task for task in costs.scores if task != "loss"]

    def over_factors(values: Callable[[str], Sequence[float]]) -> list[tuple[float, float, float, float]]:
        return [(float(way), *values(way)) for way in costs.tallies]
    return dropping({
        "of choices or slots (%)": {
            "dropped": over_factors(lambda way: [100 * costs.tally(way).drop_rate] * 3),
            "padding": over_factors(lambda way: [100 * costs.tally(way).padded_fraction] * 3)},
        "language loss (% more)": {"language loss": over_factors(costs.loss)},
        "right answers<br>(points, difference)": {
            task: over_factors(lambda way, task=task: costs.points(task, way)) for task in tasks}})


def differences(panels: Mapping[str, Mapping[str, tuple[float, float, float]]], title: Mapping[str, str] | str,
                kind: str = "measured") -> go.Figure:
    """Each way's difference from a baseline with its interval, a panel a task: {panel: {way: (value, low, high)}}.

    title : of the horizontal axes with their unit, one for all or one for each panel; 0 is the baseline.
    """
    figure = make_subplots(rows=1, cols=len(panels), shared_yaxes=True, horizontal_spacing=0.04,
                           subplot_titles=list(panels))
    names = list(dict.fromkeys(name for of in panels.values() for name in of))
    for column, (panel, of) in enumerate(panels.items(), 1):
        value, low, high = np.array(list(of.values()), dtype=float).T
        figure.add_scatter(x=value, y=list(of), mode="markers", name=panel, showlegend=False, row=1, col=column,
                           marker={"size": 10, "symbol": "diamond", "color": theme.BLUE,
                                   "line": {"color": theme.BLACK, "width": 1}},
                           error_x={"type": "data", "symmetric": False, "array": high - value,
                                    "arrayminus": value - low, "color": "#333333", "thickness": 1.5, "width": 4},
                           hovertemplate="%{y}: %{x:+.1f}<extra>" + panel + "</extra>")
        figure.add_vline(x=0, row=1, col=column, line={"color": theme.BLACK, "dash": "dash", "width": 1.5})
        figure.update_xaxes(title=title if isinstance(title, str) else title[panel], row=1, col=column)
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1])
    return _styled(figure, kind, height=150 + 38 * len(names), left=130)


def drop_orders(costs: DropCosts) -> go.Figure:
    """What each order of dropping costs in language loss and right answers; no experts at all in the latter only."""
    tasks = [task for task in costs.scores if task != "loss"]
    loss = {way: costs.loss(way) for way in costs.tallies if way != NOBODY}
    return differences(
        {"language loss": loss} | {task: {way: costs.points(task, way) for way in costs.tallies} for task in tasks},
        {"language loss": "more loss (%)"} | dict.fromkeys(tasks, "difference (points)"))


def by_layer(dropped: Mapping[str, ArrayLike], padded: Mapping[str, ArrayLike],
             paper: Mapping[str, tuple[float, float]] | None = None, kind: str = "measured") -> go.Figure:
    """Dropped choices and padded slots of every layer, one line a plan: {plan: [L], from 0 to 1}.

    paper : {name: (dropped, padded)}, published averages, drawn across both panels.
    """
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07)
    names = list(dict.fromkeys([*dropped, *padded]))
    for row, values in enumerate((dropped, padded), 1):
        for name, of in values.items():
            figure.add_scatter(
                x=np.arange(len(of)), y=100 * np.asarray(of, dtype=float), name=name, legendgroup=name,
                showlegend=row == 1 or name not in dropped, **_line(names.index(name)), row=row, col=1,
                hovertemplate="layer %{x}: %{y:.1f} %<extra>" + name + "</extra>")
        for i, (name, pair) in enumerate((paper or {}).items()):
            figure.add_hline(y=100 * pair[row - 1], row=row, col=1, annotation_text=f"paper, {name}",
                             line={"color": GREY, "dash": ("dot", "dash", "dashdot", "longdash")[i % 4], "width": 1.5},
                             annotation_position="top left" if i % 2 else "top right",
                             annotation_font={"size": 11, "color": GREY})
    layers = max((len(of) for values in (dropped, padded) for of in values.values()), default=1)
    figure.update_xaxes(dtick=_whole_steps(layers))
    figure.update_xaxes(title="MoE layer", row=2, col=1)
    figure.update_yaxes(title="dropped (% of choices)", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="padding (% of slots)", rangemode="tozero", row=2, col=1)
    return _styled(figure, kind, height=540)


def plans(ran: Mapping[str, Ran], paper: Mapping[str, tuple[float, float]] | None = None) -> go.Figure:
    """`by_layer` of ways of running tiers; the literal ones drop too much to share an axis, padding drops none."""
    shown = {name: of.by_layer for name, of in ran.items() if "literal" not in name}
    dropped = {name: [layer.drop_rate for layer in of] for name, of in shown.items() if not name.endswith("pad")}
    return by_layer(dropped, {name: [layer.padded_fraction for layer in of] for name, of in shown.items()}, paper,
                    "plan (exact)")


def executors(found: Mapping[str, Mapping[str, Sequence[float]]],
              limits: Mapping[str, Mapping[str, float]] | None = None, kind: str = "measured") -> go.Figure:
    """Time of each executor beside the roofline, a panel a phase: {"prefill, 512 tokens": {executor: its samples, s}}.

    Points are medians, whiskers run from the tenth to the ninetieth percentile; the time axes are logarithmic.

    limits : {panel: {what limits: seconds}}, lines that no executor can be left of.
    """
    names = list(dict.fromkeys(name for of in found.values() for name in of))
    figure = make_subplots(rows=1, cols=len(found), shared_yaxes=True, horizontal_spacing=0.04,
                           subplot_titles=list(found))
    for column, (panel, of) in enumerate(found.items(), 1):
        low, middle, high = np.array([np.quantile(1e3 * np.asarray(samples, dtype=float), (0.1, 0.5, 0.9))
                                      for samples in of.values()]).T
        figure.add_scatter(x=middle, y=list(of), mode="markers", name=panel, showlegend=False, row=1, col=column,
                           marker={"size": 10, "symbol": "diamond", "color": theme.BLUE,
                                   "line": {"color": theme.BLACK, "width": 1}},
                           error_x={"type": "data", "symmetric": False, "array": high - middle,
                                    "arrayminus": middle - low, "color": "#333333", "thickness": 1.5, "width": 4},
                           hovertemplate="%{y}: %{x:.2f} ms<extra>" + panel + "</extra>")
        for i, (name, seconds) in enumerate((limits or {}).get(panel, {}).items()):
            label = f"{panel.split(',')[0]}: {name}, {1e3 * seconds:.2f} ms"
            figure.add_scatter(x=[1e3 * seconds] * len(names), y=names, mode="lines", name=label, row=1, col=column,
                               line={"color": theme.VERMILLION, "dash": ("dash", "dot", "dashdot")[i % 3], "width": 2},
                               hovertemplate=label + "<extra></extra>")
        figure.update_xaxes(title="time of a layer's experts (ms)", type="log", dtick=1, row=1, col=column)
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1])
    figure = _styled(figure, kind, height=210 + 34 * len(names), left=130)
    return figure.update_layout(legend={"orientation": "h", "x": 0, "y": -0.2, "xanchor": "left"})


def selective(measured: Mapping[str, Points], expected: Mapping[str, Points], E: int,
              times: Mapping[str, Sequence[tuple[float, Sequence[float]]]] | None = None) -> go.Figure:
    """Unique experts of a step against the batch size, and what selective loading and all experts take.

    Parameters
    ----------
    measured : {series: [(batch, unique experts), …]}, points.
    expected : {series: the same}, lines: the expectation, the worst case min(batch · K, E).
    E : experts there are, drawn across.
    times : {executor: [(batch, samples in seconds), …]}, a second panel of medians with quantiles.
    """
    figure = make_subplots(rows=1 + bool(times), cols=1, shared_xaxes=True, vertical_spacing=0.07)
    for i, (name, points) in enumerate(expected.items()):
        x, y = _columns(points)
        look = {**_line(i + 1), "mode": "lines"}
        figure.add_scatter(x=x, y=y, name=name, **look, row=1, col=1,
                           hovertemplate="batch %{x}: %{y:.1f} experts<extra>" + name + "</extra>")
    for i, (name, points) in enumerate(measured.items()):
        x, y = _columns(points)
        figure.add_scatter(x=x, y=y, name=name, mode="markers", row=1, col=1, marker={
            "symbol": theme.MARKERS[i % 8], "size": 9, "color": theme.PALETTE[i % 8],
            "line": {"color": theme.BLACK, "width": 1}},
            hovertemplate="batch %{x}: %{y:.1f} experts<extra>" + name + "</extra>")
    figure.add_hline(y=E, row=1, col=1, line={"color": GREY, "dash": "dash", "width": 1.5},
                     annotation_text=f"all {E}", annotation_font={"size": 11, "color": GREY})
    for i, (name, points) in enumerate((times or {}).items(), 3):
        x = [batch for batch, _ in points]
        low, middle, high = np.array([np.quantile(1e3 * np.asarray(samples, dtype=float), (0.1, 0.5, 0.9))
                                      for _, samples in points]).T
        figure.add_scatter(x=x, y=middle, name=name, **_line(i), row=2, col=1, error_y={
            "type": "data", "symmetric": False, "array": high - middle, "arrayminus": middle - low, "thickness": 1.2,
            "width": 3}, hovertemplate="batch %{x}: %{y:.2f} ms<extra>" + name + "</extra>")
    batches = [x for points in (*measured.values(), *expected.values()) for x, _ in points]
    _powers(figure, batches)
    figure.update_xaxes(title="sequences in the batch (tokens a step, log scale)", row=1 + bool(times), col=1)
    figure.update_yaxes(title="experts needed (of a layer)", range=[0, 1.08 * E], row=1, col=1)
    if times:
        figure.update_yaxes(title="a layer's experts (ms)", rangemode="tozero", row=2, col=1)
    return _styled(figure, "", height=540 if times else 400)


def volumes(formula: Mapping[str, Points], measured: Mapping[str, Points],
            title: str = "sent and received (bytes a token)") -> go.Figure:
    """What each way of parallel execution exchanges, by the number of ranks: {way: [(ranks, bytes), …]}.

    A way's formula is a line and its measurements are points, alike in colour and shape.
    """
    figure = go.Figure()
    ways = list(dict.fromkeys([*formula, *measured]))
    for i, way in enumerate(ways):
        look = _line(i)
        if way in formula:
            x, y = _columns(formula[way])
            figure.add_scatter(x=x, y=y, name=f"{way}: formula", legendgroup=way, mode="lines", line=look["line"],
                               hovertemplate="%{x} ranks: %{y:,.0f}<extra>" + way + ", formula</extra>")
        if way in measured:
            x, y = _columns(measured[way])
            figure.add_scatter(x=x, y=y, name=f"{way}: measured", legendgroup=way, mode="markers",
                               marker={**look["marker"], "color": look["line"]["color"], "size": 11,
                                       "line": {"color": theme.BLACK, "width": 1}},
                               hovertemplate="%{x} ranks: %{y:,.0f}<extra>" + way + ", measured</extra>")
    _powers(figure, [x for points in (*formula.values(), *measured.values()) for x, _ in points])
    figure.update_xaxes(title="ranks (processes, log scale)")
    figure.update_yaxes(title=title, rangemode="tozero")
    return _styled(figure, "")


def balance(loads: Mapping[str, ArrayLike], kind: str = "exact") -> go.Figure:
    """Load of every rank relative to the mean, a group of bars a placement: {"no spare experts": [N ranks]}.

    The legend says each placement's max/mean, which is how much longer the slowest rank takes than a balanced one.
    """
    figure = go.Figure()
    for i, (name, of) in enumerate(loads.items()):
        of = np.asarray(of, dtype=float)
        share = of / of.mean()
        figure.add_bar(x=np.arange(len(share)), y=share, name=f"{name}: max/mean {share.max():.3f}",
                       marker={**_bar(i), "line": {"color": theme.BLACK, "width": 1}},
                       hovertemplate="rank %{x}: %{y:.3f} of the mean<extra>" + name + "</extra>")
    figure.add_hline(y=1, line={"color": theme.BLACK, "dash": "dash", "width": 1.5})
    figure.update_xaxes(title="rank", dtick=1, showgrid=False)
    figure.update_yaxes(title="load (× the mean of the ranks)", rangemode="tozero")
    return _styled(figure, kind).update_layout(barmode="group", bargap=0.2)


def _columns(points: Sequence[Sequence[float]]) -> list[np.ndarray]:
    """Columns of rows sorted by their first value."""
    return list(np.array(sorted(points), dtype=float).T)


def _powers(figure: go.Figure, values: Sequence[float]) -> None:
    """Logarithmic horizontal axes with a tick at each of the values that occur."""
    ticks = sorted({float(value) for value in values})
    figure.update_xaxes(type="log", tickmode="array", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])


def _styled(figure: go.Figure, legend: str, height: int = 400, left: int = 76) -> go.Figure:
    return figure.update_layout(template="moelab", height=height, legend=_beside(legend),
                                margin={"l": left, "r": 24, "t": 40, "b": 56})
