"""Figures of GPU-NDP: bars by number of units, one layer's schedules, the balance conditions, agreement, design space.

As in `moelab.viz.figures`, nothing is computed beyond what drawing needs, and nothing depends on colour alone: bars
differ in pattern, lines in dash and marker, and what a paper says is open diamonds. Times come in seconds and are drawn
in milliseconds or seconds as the axis says; shares come from 0 to 1 and are drawn in per cent. None is "not supported"
and drawn as N.S.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike
from plotly.subplots import make_subplots

from moelab.ndp.claims import CLAIMS
from moelab.ndp.sweep import SHORT, Spread, Sweep
from moelab.specs import Event
from moelab.viz import theme
from moelab.viz.engine_figures import KINDS, _beside, _span
from moelab.viz.figures import GREY, _line
from moelab.viz.store_figures import _bar

SEEN = "modelled<br>whiskers: seeds"
#: kinds of events → colour, pattern, colour of the expert's number on it
LOOKS = {"read weights": KINDS["read E"], "read activations": KINDS["read SM"], "expert": KINDS["expert"],
         "other": KINDS["other"]}


def bars(panels: Mapping[str, Mapping[str, Mapping[str, Spread | None]]], title: str, horizontal: str = "", *,
         paper: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None, columns: int = 2,
         line: tuple[float, str] | None = None, percent: bool = False, kind: str = "modelled",
         upwards: bool = True) -> go.Figure:
    """Groups of bars with whiskers, panels side by side: Figs. 6, 8, 9, 10 and 11.

    Parameters
    ----------
    panels : {panel: {series: {group: (value, low, high)}}}; None is drawn as N.S. A series looks alike in all panels.
    title, horizontal : of the axes, with units.
    paper : {panel: {series: {group: value}}}, open diamonds on the bars.
    line : (value, what it is), drawn across.
    percent : values from 0 to 1 are drawn in per cent. kind : the legend's title.
    upwards : the vertical axis begins at 0.
    """
    rows = -(-len(panels) // columns)
    height = 310 * rows + 80
    figure = make_subplots(rows=rows, cols=min(columns, len(panels)), subplot_titles=list(panels) * (len(panels) > 1),
                           horizontal_spacing=0.07, vertical_spacing=80 / height)
    names, scale = list(dict.fromkeys(name for of in panels.values() for name in of)), 100 if percent else 1
    shown: set[str] = set()
    for i, (panel, of) in enumerate(panels.items()):
        at = {"row": i // columns + 1, "col": i % columns + 1}
        for name, groups in of.items():
            there = {group: spread for group, spread in groups.items() if spread is not None}
            value, low, high = scale * np.array(list(there.values()), float).reshape(-1, 3).T
            n = names.index(name)
            figure.add_bar(x=list(there), y=value, name=name, legendgroup=name, offsetgroup=str(n), marker=_bar(n),
                           showlegend=name not in shown, hovertemplate="%{x}: %{y:.3g}<extra>" + name + "</extra>",
                           error_y={"type": "data", "symmetric": False, "array": high - value,
                                    "arrayminus": value - low, "color": "#333333", "thickness": 1.2, "width": 3}, **at)
            shown.add(name)
            said = ((paper or {}).get(panel) or {}).get(name) or {}
            if said:
                figure.add_scatter(x=list(said), y=[scale * v for v in said.values()], mode="markers", name="the paper",
                                   legendgroup="paper", showlegend="paper" not in shown, offsetgroup=str(n),
                                   marker={"symbol": "diamond-open", "size": 10, "color": theme.BLACK,
                                           "line": {"width": 2}},
                                   hovertemplate="%{x}: %{y:.3g}<extra>" + name + ", paper</extra>", **at)
                shown.add("paper")
        every = list(dict.fromkeys(group for groups in of.values() for group in groups))
        figure.update_xaxes(categoryarray=every, **at)
        for group in every:
            missing = [name for name, groups in of.items() if group in groups and groups[group] is None]
            if missing:
                figure.add_scatter(x=[group], y=[0], mode="text", text="N.S.", textposition="top center",
                                   offsetgroup=str(names.index(missing[len(missing) // 2])), showlegend=False,
                                   textfont={"size": 11, "color": GREY}, hoverinfo="skip", name="not supported", **at)
        if line:
            figure.add_hline(y=scale * line[0], line={"color": GREY, "dash": "dash", "width": 1.2}, **at)
    figure.update_xaxes(type="category", categoryorder="array", showgrid=False)
    figure.update_yaxes(rangemode="tozero" if upwards else "normal")
    figure.update_yaxes(title=title, col=1)
    for column in range(1, min(columns, len(panels)) + 1):
        figure.update_xaxes(title=horizontal, row=(len(panels) - column) // columns + 1, col=column)
    figure.update_annotations(font_size=13)
    legend = kind + (f"<br>dashed: {line[1]}" if line else "")
    return figure.update_layout(template="moelab", barmode="group", scattermode="group", bargap=0.18, height=height,
                                margin={"l": 72, "r": 24, "t": 36, "b": 56}, legend=_beside(legend))


def speedups(sweep: Sweep, systems: Mapping[str, str], over: str, what: str, *, models: Sequence[str] = (),
             means: Mapping[str, Spread] | None = None, title: str = "speedup over MoNDE (×)", columns: int = 2
             ) -> go.Figure:
    """`bars` of a sweep, a panel a model: how much faster systems are, by number of units; whiskers run over the seeds.

    Parameters
    ----------
    systems : label → name. over, what : as in `Sweep.gain`. models : all of the sweep's, if none are named.
    means : name of a claim → (mean, least, most) over the seeds; a panel "all" then has the phase's averages with what
        the paper says.
    """
    panels = {SHORT[model]: {label: {str(N): sweep.gain(model, N, name, over, what) for N in sweep.units}
                             for label, name in systems.items()} for model in models or sweep.models}
    paper = None
    if means:
        of = {label: f"{what.removeprefix('moe_')} {name}" for label, name in systems.items()}
        panels["all"] = {label: {"mean": means[claim]} for label, claim in of.items()}
        paper = {"all": {label: {"mean": CLAIMS[claim].value} for label, claim in of.items()}}
    return bars(panels, title, "NDP-DIMMs N", columns=columns, paper=paper, line=(1, over), kind=SEEN)


def by_phase(sweep: Sweep, model: str, label: str, system: str, means: Mapping[str, Spread]) -> go.Figure:
    """`bars` of one model's experts over MoNDE, a panel a phase, with its mean and what the paper says; Fig. 8.

    means : phase → (mean, least, most) of all units.
    """
    name = SHORT[model].split("-")[0]
    return bars({phase: {label: {str(N): sweep.gain(model, N, system, "MoNDE", f"moe_{phase}") for N in sweep.units}
                         | {"mean": mean}} for phase, mean in means.items()},
                "speedup over MoNDE (×)", "NDP-DIMMs N", line=(1, "MoNDE"), kind=SEEN,
                paper={phase: {label: {"mean": CLAIMS[f"{name} {phase}"].value}} for phase in means})


def improvements(sweep: Sweep, systems: Sequence[str], phases: Mapping[str, str]) -> go.Figure:
    """`bars` of what the second of two systems gains over the first, a panel a phase, a series a model.

    phases : title → property of a `Result`.
    """
    old, new = systems
    return bars({title: {SHORT[model]: {str(N): sweep.gain(model, N, new, old, what) for N in sweep.units}
                         for model in sweep.models} for title, what in phases.items()},
                "literal ÷ improved (×)", "NDP-DIMMs N", line=(1, "literal"), kind=SEEN)


def additions(sweep: Sweep, systems: Mapping[str, str], over: str, what: str = "moe_decode") -> go.Figure:
    """`lines` of what systems add to another one by number of units, a panel a model."""
    gained = {SHORT[model]: {label: [(N, gain[0]) for N in sweep.units if (gain := sweep.gain(
        model, N, name, over, what))] for label, name in systems.items()} for model in sweep.models}
    return lines(gained, "speedup over +TP alone (×)", "NDP-DIMMs N")


def machines(found: Mapping[str, Mapping[str, Mapping[int, float]]]) -> go.Figure:
    """`lines` of seconds of a decode step, a panel a model, a line a machine: {model: {machine: {units: seconds}}}."""
    return lines({SHORT[model]: {machine: [(N, 1e3 * seconds) for N, seconds in of.items()]
                                 for machine, of in by_machine.items()} for model, by_machine in found.items()},
                 "decode step (ms)", "units N", log="xy")


def schedules(acts: Mapping[str, Sequence[Event]]) -> go.Figure:
    """What GPU, link and units do under each schedule, one below the other on the same clock; Fig. 3.

    acts : {schedule: its events}. Each starts at its first event; a dashed line marks its end; numbers are experts.
    """
    rows = [sorted({e.resource for e in events}, key=_row) for events in acts.values()]
    heights = [len(resources) + 1.2 for resources in rows]
    figure = make_subplots(rows=len(acts), cols=1, shared_xaxes=True, row_heights=heights,
                           vertical_spacing=min(0.5 / len(acts), 1.6 / (sum(heights) + 2)), subplot_titles=[
                               f"{name}: {1e3 * _span(events)[1]:.2f} ms" for name, events in acts.items()])
    shown: set[str] = set()
    for row, (events, resources) in enumerate(zip(acts.values(), rows), 1):
        start, length = _span(events)
        for kind, (colour, pattern, text) in LOOKS.items():
            of = [e for e in events if e.kind == kind]
            if not of:
                continue
            figure.add_bar(
                y=[e.resource for e in of], base=[1e3 * (e.start - start) for e in of], orientation="h", name=kind,
                x=[1e3 * (e.end - e.start) for e in of], legendgroup=kind, showlegend=kind not in shown,
                text=["" if e.expert < 0 else str(e.expert) for e in of], textposition="inside", textangle=0,
                insidetextanchor="middle", textfont={"color": text, "size": 11}, customdata=[e.layer for e in of],
                marker={"color": colour, "line": {"color": "white", "width": 0.6}, "pattern": {
                    "shape": pattern, "fillmode": "overlay", "size": 6, "fgopacity": 0.5, "fgcolor": "white"}},
                hovertemplate="%{y}, " + kind + ", layer %{customdata}, expert %{text}: %{x:.4f} ms from %{base:.4f} ms"
                              "<extra></extra>", row=row, col=1)
            shown.add(kind)
        figure.add_vline(x=1e3 * length, line={"color": theme.BLACK, "dash": "dash", "width": 1.5}, row=row, col=1)
        figure.update_yaxes(type="category", categoryorder="array", categoryarray=resources, showgrid=False,
                            range=[len(resources) - 0.5, -0.5], row=row, col=1)
    figure.update_xaxes(range=[0, 1.02e3 * max(_span(events)[1] for events in acts.values())])
    figure.update_xaxes(title="time since the first event (ms)", row=len(acts), col=1)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    return figure.update_layout(template="moelab", barmode="overlay", height=100 + 25 * round(sum(heights)),
                                uniformtext={"minsize": 8, "mode": "hide"}, margin={"l": 70, "r": 24, "t": 36, "b": 50},
                                legend=_beside("simulated<br>numbers: experts") | {"traceorder": "normal"})


def balance(panels: Mapping[str, Mapping[str, tuple[ArrayLike, ArrayLike]]],
            solutions: Mapping[str, Mapping[str, tuple[float, float]]], kind: str = "modelled") -> go.Figure:
    """Both sides of a balance condition over the experts on the GPU, with its solutions; Eqs. 1 to 3.

    Parameters
    ----------
    panels : {panel: {side: (experts, seconds)}}; NaN breaks a line.
    solutions : {panel: {what: (experts, seconds)}}, marked.
    """
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=list(panels), horizontal_spacing=0.07)
    names = list(dict.fromkeys(name for of in panels.values() for name in of))
    marks = list(dict.fromkeys(name for of in solutions.values() for name in of))
    shown: set[str] = set()
    for column, (panel, of) in enumerate(panels.items(), 1):
        for name, (x, y) in of.items():
            i = names.index(name)
            figure.add_scatter(x=np.asarray(x), y=1e3 * np.asarray(y, float), name=name, legendgroup=name, mode="lines",
                               line={"color": theme.PALETTE[i % 8], "dash": theme.DASHES[i % 8], "width": 2},
                               showlegend=name not in shown, row=1, col=column,
                               hovertemplate="%{x:.2f} experts: %{y:.3f} ms<extra>" + name + "</extra>")
        for name, (x, y) in solutions.get(panel, {}).items():
            i = len(names) + marks.index(name)
            figure.add_scatter(x=[x], y=[1e3 * y], name=name, legendgroup=name, mode="markers", row=1, col=column,
                               showlegend=name not in shown, marker={
                                   "symbol": theme.MARKERS[i % 8], "size": 15 - 3 * marks.index(name),
                                   "color": theme.PALETTE[i % 8], "line": {"color": theme.BLACK, "width": 1}},
                               hovertemplate="%{x:.3f} experts: %{y:.3f} ms<extra>" + name + "</extra>")
        shown.update(of, solutions.get(panel, {}))
    figure.update_xaxes(title="experts on the GPU", rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title="time of a layer's experts (ms)", col=1)
    figure.update_annotations(font_size=13)
    return figure.update_layout(template="moelab", height=440, margin={"l": 72, "r": 24, "t": 36, "b": 130}, legend={
        "orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "title": {"text": f"{kind}  ", "font": {"size": 13}}})


def agreement(groups: Mapping[str, Mapping[str, Spread]], tolerance: float = 0.1) -> go.Figure:
    """How far from published figures: {group: {figure: (relative error, least, most)}}, a look a group.

    The band is ± `tolerance`; whiskers run over seeds. Points outside the band are labelled with their distance.
    """
    figure = go.Figure()
    figure.add_vrect(x0=-100 * tolerance, x1=100 * tolerance, fillcolor="rgba(85,85,85,0.15)", line_width=0)
    figure.add_vline(x=0, line={"color": theme.BLACK, "width": 1})
    for i, (group, rows) in enumerate(groups.items()):
        value, low, high = 100 * np.array(list(rows.values()), float).T
        figure.add_scatter(
            x=value, y=list(rows), name=group, mode="markers+text", textposition="top center",
            text=[f"{v:+.0f} %" if abs(v) > 100 * tolerance else "" for v in value],
            marker={"symbol": theme.MARKERS[i % 8], "size": 11, "color": theme.PALETTE[i % 8],
                    "line": {"color": theme.BLACK, "width": 1}},
            error_x={"type": "data", "symmetric": False, "array": high - value, "arrayminus": value - low,
                     "color": "#333333", "thickness": 1.5},
            hovertemplate="%{y}: %{x:+.1f} %<extra>" + group + "</extra>")
    figure.update_xaxes(title="modelled against published (%)")
    figure.update_yaxes(autorange="reversed", showgrid=True, categoryorder="array",
                        categoryarray=[name for rows in groups.values() for name in rows])
    return figure.update_layout(template="moelab", height=130 + 32 * sum(map(len, groups.values())),
                                margin={"l": 220, "r": 24, "t": 24, "b": 50},
                                legend=_beside(f"modelled<br>band: ±{100 * tolerance:g} %<br>whiskers: seeds"))


def lines(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], title: str, horizontal: str, *,
          columns: int = 2, log: str = "", at: float | None = None, kind: str = "modelled") -> go.Figure:
    """A line a series over units, tokens or whatever else, panels side by side.

    Parameters
    ----------
    panels : {panel: {series: [(x, y), …]}}; NaN where there is nothing. A series looks alike in all panels.
    log : the axes with a logarithmic scale: "x", "y" or "xy". at : a vertical line, such as the present choice.
    """
    rows = -(-len(panels) // columns)
    figure = make_subplots(rows=rows, cols=min(columns, len(panels)), subplot_titles=list(panels) * (len(panels) > 1),
                           horizontal_spacing=0.08, vertical_spacing=0.2 / rows)
    names = list(dict.fromkeys(name for of in panels.values() for name in of))
    shown: set[str] = set()
    for i, of in enumerate(panels.values()):
        place = {"row": i // columns + 1, "col": i % columns + 1}
        for name, points in of.items():
            x, y = np.array(points, float).reshape(-1, 2).T
            figure.add_scatter(x=x, y=y, name=name, legendgroup=name, showlegend=name not in shown,
                               **_line(names.index(name)), hovertemplate="%{x:g}: %{y:.3g}<extra>" + name + "</extra>",
                               **place)
            shown.add(name)
        if at is not None:
            figure.add_vline(x=at, line={"color": GREY, "dash": "dash", "width": 1.2}, **place)
    for axis, update in (("x", figure.update_xaxes), ("y", figure.update_yaxes)):
        values = np.array([p["xy".index(axis)] for of in panels.values() for points in of.values() for p in points])
        if axis in log and np.isfinite(values).any():
            low, high = np.nanmin(values), np.nanmax(values)
            ticks = [d * 10.0 ** power for power in range(-6, 7) for d in (1, 2, 5)]
            few = [t for t in ticks if low / 1.6 <= t <= high * 1.6]
            update(type="log", tickvals=few, range=np.log10([low / 1.15, high * 1.15]).tolist(),
                   ticktext=[f"{t:g}" for t in few])
        else:
            update(rangemode="tozero")
    figure.update_yaxes(title=title, col=1)
    for column in range(1, min(columns, len(panels)) + 1):
        figure.update_xaxes(title=horizontal, row=(len(panels) - column) // columns + 1, col=column)
    figure.update_annotations(font_size=13)
    return figure.update_layout(template="moelab", height=310 * rows + 80, legend=_beside(kind),
                                margin={"l": 72, "r": 24, "t": 36, "b": 56})


def _row(resource: str) -> tuple:
    """The order of rows: GPU, link, host, unit 0, unit 1 …"""
    name, _, number = resource.partition(" ")
    return {"gpu": 0, "link": 1, "host": 2}.get(name, 3), int(number) if number.isdigit() else 0
