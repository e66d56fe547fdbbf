"""Figures of planning for the Neural Engine: tiers, groups and residency, systems beside the paper, Table 5, weights.

As in `moelab.viz.figures`, nothing is computed beyond what drawing needs, and nothing depends on colour alone: bars
differ in pattern, lines in dash and marker. What the paper reports is drawn as open diamonds, a range as a line
between two; everything else of cost is modelled, and the axes say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from moelab.ane.plan import Plan
from moelab.ane.published import Sample
from moelab.ane.rates import Rates
from moelab.viz import theme
from moelab.viz.figures import GREY, _line, _reference, _styled, _whole_steps
from moelab.viz.store_figures import _bar

PAPER = {"symbol": "diamond-open", "size": 9, "color": theme.BLACK, "line": {"width": 2}}


def tiers(plan: Plan) -> go.Figure:
    """The capacities of each layer's tiers, largest first, and the mean tokens an expert gets in a chunk."""
    levels = max(len(layer.tiers.levels) for layer in plan.layers)
    figure = go.Figure()
    for i in range(levels):
        of_layer = [layer.tiers.levels[i] if i < len(layer.tiers.levels) else None for layer in plan.layers]
        holding = [layer.tiers.capacity.count(capacity) for layer, capacity in zip(plan.layers, of_layer)]
        figure.add_scatter(x=list(range(len(of_layer))), y=of_layer, name=f"tier {i + 1}", customdata=holding,
                           hovertemplate="layer %{x}: %{y} tokens, %{customdata} experts<extra></extra>", **_line(i))
    mean = plan.chunk * plan.spec.K / plan.spec.E
    _reference(figure, mean, f"mean load {mean:.0f}", "dash")
    figure.update_xaxes(title="MoE layer", dtick=_whole_steps(len(plan.layers)))
    figure.update_yaxes(title="capacity (tokens of a chunk)", rangemode="tozero")
    return _styled(figure)


def residency(plan: Plan) -> go.Figure:
    """Each layer's groups as bars, as wide as they have experts; one look a capacity, and one for the CPU."""
    groups = [(l, group) for l, layer in enumerate(plan.layers) for group in layer.on("ane") + layer.on("cpu")]
    starts, ends = [], {}
    for l, group in groups:
        starts.append(ends.get(l, 0))
        ends[l] = starts[-1] + len(group.experts)
    kinds = [("ane", capacity) for capacity in sorted({g.capacity for _, g in groups if g.unit == "ane"}, reverse=True)]
    figure = go.Figure()
    for i, (unit, capacity) in enumerate([*kinds, ("cpu", None)]):
        chosen = [(l, group, start) for (l, group), start in zip(groups, starts)
                  if group.unit == unit and capacity in (None, group.capacity)]
        if not chosen:
            continue
        look = _bar(i) if unit == "ane" else {"color": "#bbbbbb", "pattern": {"shape": "x", "fgcolor": "#555555",
                                                                              "fillmode": "overlay", "size": 5}}
        figure.add_bar(
            y=[l for l, _, _ in chosen], x=[len(group.experts) for _, group, _ in chosen], orientation="h",
            base=[start for _, _, start in chosen], width=0.85,
            name=f"ANE, C={capacity}" if unit == "ane" else "CPU",
            marker=look | {"line": {"color": "white", "width": 1}},
            customdata=[[", ".join(map(str, group.experts)), group.expected] for _, group, _ in chosen],
            hovertemplate="layer %{y}, experts %{customdata[0]}: %{customdata[1]:.0f} tokens expected<extra></extra>")
    figure.update_xaxes(title="experts, from hot to cold")
    figure.update_yaxes(title="MoE layer", autorange="reversed", dtick=_whole_steps(len(plan.layers)), showgrid=False)
    return _styled(figure).update_layout(barmode="overlay", showlegend=True)


def ratios(ours: Mapping[str, Mapping[str, float]], paper: Mapping[str, Mapping[str, tuple[float, float]]],
           title: str) -> go.Figure:
    """Bars of each system's figure over NPUMoE's, a group of bars a run, with the paper's values or ranges beside them.

    ours : {"P=1024, B=256": {"cpu": 1.8, …}, …}; paper : the same with (low, high), where there are any.
    title : of the axis, e.g. "TTFT over NPUMoE's (modelled)".
    """
    runs, systems = list(ours), list(dict.fromkeys(system for values in ours.values() for system in values))
    figure, width = go.Figure(), 0.8 / max(len(systems), 1)
    for i, system in enumerate(systems):
        places = [r - 0.4 + (i + 0.5) * width for r in range(len(runs))]
        figure.add_bar(x=places, y=[ours[run].get(system) for run in runs], width=0.92 * width, name=system,
                       marker=_bar(i), hovertemplate="%{y:.2f}<extra>" + system + ", modelled</extra>")
    x, y = [], []
    for r, run in enumerate(runs):
        for i, system in enumerate(systems):
            if found := paper.get(run, {}).get(system):
                x += [r - 0.4 + (i + 0.5) * width] * 2 + [None]
                y += [*found, None]
    if x:
        figure.add_scatter(x=x, y=y, mode="lines+markers", name="the paper", marker=PAPER,
                           line={"color": theme.BLACK, "width": 1.5, "dash": "solid"})
    figure.add_hline(y=1, line={"color": GREY, "dash": "dash", "width": 1.5})
    figure.update_xaxes(title="run", tickvals=list(range(len(runs))), ticktext=runs, showgrid=False)
    figure.update_yaxes(title=title, rangemode="tozero")
    return _styled(figure)


def sweep(rates: Rates, samples: Sequence[Sample], mode: str = "serial") -> go.Figure:
    """Latency of an expert slot against its capacity, a line a group size from the fit; points are the samples."""
    figure, timed = go.Figure(), [s for s in samples if s.mode == mode]
    capacities = np.arange(16, max(s.C for s in timed) + 1, 4)
    for i, G in enumerate(sorted({s.G for s in timed})):
        look = _line(i)
        figure.add_scatter(x=capacities, y=[rates.graph_ms(G, int(C), mode) / (G * C) for C in capacities],
                           name=f"G={G}, fitted", **look | {"mode": "lines"})
        figure.add_scatter(x=[s.C for s in timed if s.G == G], y=[s.ms for s in timed if s.G == G], mode="markers",
                           name=f"G={G}, timed", marker=look["marker"] | {"color": theme.PALETTE[i], "size": 10})
    figure.update_xaxes(title="capacity C (slots of an expert)", type="log", tickvals=[16, 32, 64, 128, 256, 512])
    figure.update_yaxes(title=f"latency, {mode} (ms a slot)", rangemode="tozero")
    return _styled(figure)


def graph_weights(gb_by_model: Mapping[str, Mapping[int, float]], limit: float) -> go.Figure:
    """Weights of one graph by group size, in GB: {"Phi-3.5-MoE": {1: 0.16, 8: 1.26}, …}, and the limit."""
    figure = go.Figure()
    for i, (model, by_size) in enumerate(gb_by_model.items()):
        figure.add_scatter(x=list(by_size), y=list(by_size.values()), name=model, **_line(i))
    sizes = sorted({size for by_size in gb_by_model.values() for size in by_size})
    figure.add_scatter(x=sizes, y=[limit] * len(sizes), name=f"limit, {limit:.2f} GB", mode="lines",
                       line={"color": theme.BLACK, "dash": "longdash", "width": 1.5})
    figure.update_xaxes(title="group size G (experts a graph)", type="log", tickvals=[1, 2, 4, 8, 16])
    figure.update_yaxes(title="weights of one graph (GB)", type="log",
                        tickvals=[0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5])
    return _styled(figure).update_layout(showlegend=True)
