"""Figures of the offloading engine: a layer's schedule, the budget curve, what the planner chose, the comparisons.

As in `moelab.viz.figures`, nothing is computed beyond what drawing needs, and nothing depends on colour alone: kinds
of work differ in pattern, lines in dash, points in shape. Times come in seconds and are drawn in milliseconds, sizes
come in bytes and are drawn in GB of 10⁹ bytes. Whether numbers are measured, simulated or a limit is part of the
series' names, or said by `kind`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moelab.specs import Event
from moelab.viz import theme
from moelab.viz.figures import GREY, _line, _styled
from moelab.viz.store_figures import _bar

#: kind of work → colour, pattern, colour of the expert's number on it
KINDS = {"read E": (theme.BLUE, "", "white"), "read SM": (theme.SKY, "/", "black"),
         "read": (theme.BLUE, "-", "white"), "decompress": (theme.ORANGE, "", "black"),
         "recover": (theme.YELLOW, "\\", "black"), "decode": (theme.ORANGE, "-", "black"),
         "expert": (theme.GREEN, "", "white"), "other": ("#8c8c8c", ".", "white"), "wait": ("#f2f2f2", "x", "black")}
POOLS = {"F": "F: full", "C": "C: compressed", "S": "S: sign-mantissa", "E": "E: exponents"}
Spread = tuple[float, float, float, float]


def gantt(events: Sequence[Event], naive: Sequence[Event] = (),
          titles: tuple[str, str] = ("chosen order", "naive order")) -> go.Figure:
    """One layer's schedule: a row a resource, a look a kind of work, each bar with its expert's number.

    `naive` is the same layer's work in another order, drawn below on the same clock. A dashed line marks where each
    schedule ends. Both start at their first event.
    """
    panels = [(list(found), title) for found, title in zip((events, naive), titles) if found]
    resources = sorted({e.resource for found, _ in panels for e in found}, key=_row)
    figure = make_subplots(rows=max(len(panels), 1), cols=1, shared_xaxes=True, vertical_spacing=0.14,
                           subplot_titles=[f"{title}: {1e3 * _span(found)[1]:.2f} ms" for found, title in panels])
    seen = set()
    kinds = [kind for kind in KINDS if any(e.kind == kind for found, _ in panels for e in found)]
    for row, (found, _) in enumerate(panels, 1):
        start, length = _span(found)
        for kind in kinds:
            bars = [e for e in found if e.kind == kind]
            if not bars:
                continue
            colour, pattern, text = KINDS[kind]
            figure.add_bar(
                y=[e.resource for e in bars], base=[1e3 * (e.start - start) for e in bars], orientation="h",
                x=[1e3 * (e.end - e.start) for e in bars], name=kind, legendgroup=kind, showlegend=kind not in seen,
                text=["" if e.expert < 0 else str(e.expert) for e in bars], textposition="inside", textangle=0,
                insidetextanchor="middle", textfont={"color": text, "size": 12},
                marker={"color": colour, "line": {"color": "white" if kind != "wait" else "#bbbbbb", "width": 1},
                        "pattern": {"shape": pattern, "fillmode": "overlay", "size": 6, "fgopacity": 0.5,
                                    "fgcolor": "#999999" if kind == "wait" else "white"}},
                hovertemplate="%{y}, " + kind + ", expert %{text}: %{x:.3f} ms from %{base:.3f} ms<extra></extra>",
                row=row, col=1)
            seen.add(kind)
        figure.add_vline(x=1e3 * length, line={"color": theme.BLACK, "dash": "dash", "width": 1.5}, row=row, col=1)
        figure.update_yaxes(categoryorder="array", categoryarray=resources, autorange="reversed", showgrid=False,
                            row=row, col=1)
    figure.update_xaxes(rangemode="tozero")
    figure.update_xaxes(title="time since the layer's first event (ms)", row=len(panels) or 1, col=1)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    return figure.update_layout(
        template="moelab", barmode="overlay", showlegend=True, uniformtext={"minsize": 8, "mode": "hide"},
        height=130 + max(len(panels), 1) * (60 + 34 * len(resources)), margin={"l": 80, "r": 24, "t": 70, "b": 50},
        legend={"orientation": "h", "x": 0, "y": 1.1, "yanchor": "bottom", "traceorder": "normal",
                "title": {"text": "numbers: experts  ", "font": {"size": 13}}})


def budget_curve(curves: Mapping[str, Sequence[tuple[float, float, float]]],
                 ceiling: Sequence[tuple[float, float, float]] = (),
                 limits: Mapping[str, Sequence[tuple[float, float]]] | None = None,
                 marks: Mapping[str, float] | None = None, kind: str = "simulated") -> go.Figure:
    """TPOT and hit rate against the memory for experts, a line a policy.

    Parameters
    ----------
    curves : {policy: [(bytes, TPOT in seconds, hit rate from 0 to 1), …]}.
    ceiling : the same of Belady's optimum, drawn as a black line without points.
    limits : {name: [(bytes, seconds), …]} of what no policy can beat, grey and dotted under the TPOT.
    marks : {name: bytes}, vertical lines ("one token's demand").
    kind : of the numbers of the policies and of the ceiling.
    """
    scale, unit = _unit(point[0] for points in curves.values() for point in points)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07, row_heights=[0.55, 0.45])
    for i, (name, points) in enumerate(curves.items()):
        _curve(figure, name, sorted(points), _line(i), scale, unit)
    if ceiling:
        _curve(figure, "Belady: no policy hits more", sorted(ceiling),
               {"mode": "lines", "line": {"color": theme.BLACK, "width": 3, "dash": "solid"}}, scale, unit)
    for i, (name, points) in enumerate((limits or {}).items()):
        x, y = np.array(sorted(points)).T
        figure.add_scatter(x=x / scale, y=1e3 * y, name=f"limit: {name}", mode="lines", row=1, col=1,
                           line={"color": GREY, "dash": ("dot", "dashdot", "longdash")[i % 3], "width": 2},
                           hovertemplate="%{x:.2f} " + unit + ": %{y:.1f} ms<extra>" + name + "</extra>")
    for i, (name, size) in enumerate((marks or {}).items()):
        figure.add_vline(x=size / scale, line={"color": GREY, "dash": "dash", "width": 1.2})
        figure.add_annotation(x=size / scale, y=1, yref="paper", text=name, showarrow=False, yanchor="bottom",
                              yshift=13 * (i % 2), font={"size": 11, "color": GREY})     # neighbours may be close
    figure.update_xaxes(title=f"memory for experts ({unit})", row=2, col=1)
    figure.update_yaxes(title="TPOT (ms)", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="hit rate (%)", range=[0, 104], row=2, col=1)
    return figure.update_layout(template="moelab", height=560, margin={"l": 72, "r": 24, "t": 36, "b": 50},
                                legend=_beside(f"policies: {kind}"))


def pools_chart(plans: Mapping[str, Mapping[str, float]], predicted: Mapping[str, float],
                measured: Mapping[str, float] | None = None) -> go.Figure:
    """What the planner chose at each budget, {"1 GB": {"F": bytes, "C": …}}, and the TPOT that it predicted.

    predicted, measured : {budget: seconds}.
    """
    scale, unit = _unit(sum(plan.values()) for plan in plans.values())
    figure = make_subplots(rows=1, cols=2, column_widths=[0.54, 0.46], horizontal_spacing=0.16)
    for i, (pool, name) in enumerate(POOLS.items()):
        values = [plan.get(pool, 0) / scale for plan in plans.values()]
        figure.add_bar(x=list(plans), y=values, name=name, marker=_bar(i), row=1, col=1,
                       hovertemplate="%{x}, " + name + ": %{y:.2f} " + unit + "<extra></extra>")
    for name, values, symbol, colour in (("predicted", predicted, "diamond-open", theme.BLACK),
                                         ("measured", measured or {}, "circle", theme.VERMILLION)):
        if values:
            figure.add_scatter(x=list(values), y=[1e3 * value for value in values.values()], name=f"TPOT, {name}",
                               mode="lines+markers", row=1, col=2, line={"color": colour, "width": 1.5,
                               "dash": "dot" if name == "predicted" else "solid"},
                               marker={"symbol": symbol, "size": 11, "color": colour, "line": {"width": 2}},
                               hovertemplate="%{x}: %{y:.1f} ms<extra>" + name + "</extra>")
    figure.update_xaxes(title="budget for experts", showgrid=False, type="category", categoryorder="array",
                        categoryarray=list(plans))
    figure.update_yaxes(title=f"memory of each pool ({unit})", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="TPOT (ms)", rangemode="tozero", row=1, col=2)
    return figure.update_layout(template="moelab", barmode="stack", bargap=0.35, height=380,
                                margin={"l": 72, "r": 24, "t": 24, "b": 50}, legend=_beside(""))


def ablation(points: Mapping[str, tuple[float, float]], kind: str = "measured") -> go.Figure:
    """Latency against throughput, a point a variant: {"LRU": (seconds, tokens/s), …}; ZipMoE's Fig. 10."""
    figure = go.Figure()
    for i, (name, (latency, throughput)) in enumerate(points.items()):
        figure.add_scatter(x=[latency], y=[throughput], name=name, mode="markers", marker={
            "symbol": theme.MARKERS[i % 8], "size": 14, "color": theme.PALETTE[i % 8],
            "line": {"color": theme.BLACK, "width": 1}},
            hovertemplate="%{x:.3f} s, %{y:.2f} tokens/s<extra>" + name + "</extra>")
    for axis, column in ((figure.update_xaxes, 0), (figure.update_yaxes, 1)):
        values = np.array([point[column] for point in points.values()])
        margin = 0.15 * max(np.ptp(values), 0.02 * np.abs(values).max())
        axis(range=[values.min() - margin, values.max() + margin])
    figure.add_annotation(x=0.01, y=0.99, xref="paper", yref="paper", text="↖ better", showarrow=False,
                          font={"color": GREY, "size": 13}, xanchor="left", yanchor="top")
    figure.update_xaxes(title="latency of a generation (s)")
    figure.update_yaxes(title="throughput (tokens/s)")
    return _styled(figure).update_layout(showlegend=True, legend=_beside(kind), margin={"r": 24})


def batches(by_system: Mapping[str, Mapping[int, float]], kind: str = "measured") -> go.Figure:
    """Throughput by batch size, a group of bars a batch: {"moelab": {1: tokens/s, 4: …, 16: …}}; ZipMoE's Fig. 8."""
    figure = go.Figure()
    for i, (name, values) in enumerate(by_system.items()):
        figure.add_bar(x=[str(batch) for batch in values], y=list(values.values()), name=name, marker=_bar(i),
                       text=[f"{value:.3g}" for value in values.values()], textposition="outside",
                       cliponaxis=False, hovertemplate="batch %{x}: %{y:.2f} tokens/s<extra>" + name + "</extra>")
    figure.update_xaxes(title="batch size (sequences)", type="category", showgrid=False)
    figure.update_yaxes(title="throughput (tokens/s)", rangemode="tozero")
    return _styled(figure).update_layout(showlegend=True, legend=_beside(kind), margin={"r": 24}, bargap=0.25)


def output_lengths(by_system: Mapping[str, Sequence[Spread]], kind: str = "measured") -> go.Figure:
    """Latency of a whole generation by output length: {"moelab": [(tokens, mean, p10, p90 in seconds), …]}; Fig. 9.

    Lines are means; the band of each runs from the best tenth to the worst.
    """
    figure = go.Figure()
    for i, (name, points) in enumerate(by_system.items()):
        tokens, mean, low, high = np.array(sorted(points), dtype=float).T
        red, green, blue = (int(theme.PALETTE[i % 8][at:at + 2], 16) for at in (1, 3, 5))
        figure.add_scatter(x=np.r_[tokens, tokens[::-1]], y=np.r_[high, low[::-1]], fill="toself", mode="lines",
                           line={"width": 0}, fillcolor=f"rgba({red},{green},{blue},0.18)", hoverinfo="skip",
                           legendgroup=name, showlegend=False, name=f"{name}, p10 to p90")
        figure.add_scatter(x=tokens, y=mean, name=name, legendgroup=name, **_line(i),
                           hovertemplate="%{x} tokens: %{y:.2f} s<extra>" + name + "</extra>")
    figure.update_xaxes(title="tokens generated", rangemode="tozero")
    figure.update_yaxes(title="latency of a generation (s)", rangemode="tozero")
    return _styled(figure).update_layout(showlegend=True, legend=_beside(f"{kind}<br>band: p10 to p90"),
                                         margin={"r": 24})


def simulated_vs_measured(by_series: Mapping[str, Sequence[tuple[float, float]]], band: float = 0.15,
                          title: str = "TPOT") -> go.Figure:
    """Does the simulator predict? Points (measured, simulated) in seconds; the band is ± `band` of measured."""
    values = 1e3 * np.array([point for points in by_series.values() for point in points], dtype=float).reshape(-1, 2)
    low, high = (values.min() / 1.3, values.max() * 1.3) if len(values) else (1.0, 10.0)
    figure = go.Figure()
    figure.add_scatter(x=[low, high, high, low], y=[low * (1 + band), high * (1 + band), high * (1 - band),
                       low * (1 - band)], fill="toself", mode="lines", line={"width": 0}, hoverinfo="skip",
                       fillcolor="rgba(85,85,85,0.15)", name=f"within ±{100 * band:g} %")
    figure.add_scatter(x=[low, high], y=[low, high], mode="lines", name="equal", hoverinfo="skip",
                       line={"color": theme.BLACK, "dash": "dash", "width": 1.5})
    for i, (name, points) in enumerate(by_series.items()):
        x, y = 1e3 * np.array(points, dtype=float).reshape(-1, 2).T
        figure.add_scatter(x=x, y=y, name=name, mode="markers", customdata=100 * (y / x - 1), marker={
            "symbol": theme.MARKERS[i % 8], "size": 11, "color": theme.PALETTE[i % 8],
            "line": {"color": theme.BLACK, "width": 1}},
            hovertemplate="measured %{x:.1f} ms, simulated %{y:.1f} ms: %{customdata:+.1f} %<extra>" + name
                          + "</extra>")
    for axis, word in ((figure.update_xaxes, "measured"), (figure.update_yaxes, "simulated")):
        axis(title=f"{title}, {word} (ms)", type="log", range=np.log10([low, high]).tolist(),
             tickvals=[digit * 10.0 ** power for power in range(-3, 6) for digit in (1, 1.5, 2, 3, 4, 6, 8)])
    return _styled(figure).update_layout(showlegend=True, legend=_beside(""), margin={"r": 24}, height=460, width=640)


def _curve(figure: go.Figure, name: str, points: Sequence[tuple[float, float, float]], look: dict, scale: float,
           unit: str) -> None:
    x, tpot, hits = np.array(points, dtype=float).T
    for row, y, what in ((1, 1e3 * tpot, "ms"), (2, 100 * hits, "%")):
        figure.add_scatter(x=x / scale, y=y, name=name, legendgroup=name, showlegend=row == 1, row=row, col=1, **look,
                           hovertemplate="%{x:.2f} " + unit + ": %{y:.1f} " + what + "<extra>" + name + "</extra>")


def _unit(sizes: Iterable[float]) -> tuple[float, str]:
    """Bytes of the unit in which the largest of these sizes reads well, and its name."""
    return (1e9, "GB") if max(sizes, default=0) >= 0.5e9 else (1e6, "MB")


def _span(events: Sequence[Event]) -> tuple[float, float]:
    """When the first event starts, and how long it takes from there until the last ends."""
    start = min(event.start for event in events)
    return start, max(event.end for event in events) - start


def _row(resource: str) -> tuple:
    """The order of rows: disk, worker 0, worker 1, …, compute, the rest."""
    name, _, number = resource.partition(" ")
    return {"disk": 0, "worker": 1, "compute": 3}.get(name, 4), int(number) if number.isdigit() else 0, resource


def _beside(title: str) -> dict:
    return {"orientation": "v", "x": 1.02, "y": 1, "xanchor": "left", "yanchor": "top",
            "title": {"text": title, "font": {"size": 13}}}
