"""Figures of the Neural Engine: plans, parity of a conversion, what dropping costs, and the device model.

As in `moelab.viz.figures`, nothing is computed beyond what drawing needs, and nothing depends on colour alone: bars
differ in pattern, lines in dash and marker. What the paper reports is drawn as open diamonds, a range as a line
between two; everything else of cost is modelled, and the axes say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moelab.ane.device.comparison import (
    MACHINES, RIVALS, TOLERANCE, Comparison, Outcome, Setting, Study, claimed, ratio)
from moelab.ane.device.device_model import Prefill
from moelab.ane.device.published import Sample
from moelab.ane.device.rates import Rates
from moelab.ane.plan import ANEPlan
from moelab.ane.systems import SYSTEMS, TABLE_2
from moelab.cards import load_device
from moelab.viz import theme
from moelab.viz.ane_tables import label
from moelab.viz.figures import GREY, _line, _reference, _styled, _whole_steps
from moelab.viz.store_figures import _bar

PAPER = {"symbol": "diamond-open", "size": 9, "color": theme.BLACK, "line": {"width": 2}}


def tiers(plan: ANEPlan) -> go.Figure:
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


def residency(plan: ANEPlan) -> go.Figure:
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


def systems(found: Study, metric: str, title: str) -> go.Figure:
    """`ratios` of one metric of `moelab.ane.device.comparison.METRICS` in every run of PhiMoE's study."""
    name = {system: SYSTEMS[system].title for system in RIVALS}
    ours = {label(run): {name[s]: ratio(of, metric, s) for s in RIVALS} for run, of in found.items()}
    paper = {label(run): {name[s]: claim for s, claim in claimed("Phi-3.5-MoE", run, metric).items() if s in name}
             for run in found}
    return ratios(ours, paper, title)


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


def parity(by_mode: Mapping[str, Sequence[float]], limit: float) -> go.Figure:
    """Largest difference of a next token's logit, a point a prompt, on a logarithmic axis, and what is allowed."""
    figure = go.Figure()
    for i, (mode, differences) in enumerate(by_mode.items()):
        figure.add_scatter(x=list(range(1, len(differences) + 1)), y=list(differences), name=mode,
                           **_line(i) | {"mode": "markers"})
    ends = [0.5, max(map(len, by_mode.values())) + 0.5]       # a line as a series: a log axis misplaces its label
    figure.add_scatter(x=ends, y=[limit] * 2, name=f"allowed: {limit:g}", mode="lines",
                       line={"color": theme.BLACK, "dash": "dash", "width": 1.5})
    figure.update_xaxes(title="prompt", dtick=1, range=ends)
    figure.update_yaxes(title="largest difference of a logit", type="log", exponentformat="power", dtick=1)
    return _styled(figure).update_layout(showlegend=True)


def dropping(by_order: Mapping[str, Sequence[tuple[float, float, float]]], title: str) -> go.Figure:
    """What dropping costs, a line an order of dropping: points (share dropped, cost in %, its standard error)."""
    figure = go.Figure()
    for i, (order, points) in enumerate(by_order.items()):
        dropped, cost, error = zip(*sorted(points))
        figure.add_scatter(x=[100 * d for d in dropped], y=cost, name=order, **_line(i),
                           error_y={"array": error, "width": 4, "thickness": 1})
    figure.add_hline(y=0, line={"color": GREY, "dash": "dash", "width": 1.5})
    figure.update_xaxes(title="choices of an expert that were dropped (%)", rangemode="tozero")
    figure.update_yaxes(title=title)
    return _styled(figure)


def breakdown(by_system: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Stacked bars of seconds: {"ANEMLL": {"attention": 1.9, …}, …}, the sum at the end of each bar."""
    parts = list(dict.fromkeys(part for of in by_system.values() for part in of))
    systems, figure = list(by_system), go.Figure()
    for i, part in enumerate(parts):
        figure.add_bar(y=systems, x=[of.get(part, 0.0) for of in by_system.values()], orientation="h", name=part,
                       marker=_bar(i), hovertemplate="%{y}, " + part + ": %{x:.2f} s<extra></extra>")
    sums = [sum(of.values()) for of in by_system.values()]
    figure.add_scatter(x=sums, y=systems, mode="text", text=[f" {value:.1f} s" for value in sums], showlegend=False,
                       textposition="middle right", cliponaxis=False, hoverinfo="skip")
    figure.update_xaxes(title="TTFT (s, modelled)", range=[0, 1.12 * max(sums)])
    figure.update_yaxes(title="", autorange="reversed", showgrid=False)
    return _styled(figure).update_layout(barmode="stack", legend={"traceorder": "normal"})


def parts(run: Mapping[str, Prefill]) -> go.Figure:
    """`breakdown` of one run's systems."""
    return breakdown({SYSTEMS[system].title: {
        "attention": p.attention.ms / 1e3, "experts": (p.experts.ms - p.dispatch_ms) / 1e3,
        "launches and placing": p.dispatch_ms / 1e3, "router, moving": p.host.ms / 1e3} for system, p in run.items()})


def time_and_energy(found: Mapping[str, Study], run: tuple[int, int]) -> go.Figure:
    """`trade_off` of the four systems in one run of each model, on the machine that the paper ran it on."""
    return trade_off({
        f"{model}, {load_device(MACHINES[model]).name.removeprefix('Apple ')}": {
            SYSTEMS[system].title: (of[run][system].ttft_s, of[run][system].mj_per_token) for system in TABLE_2}
        for model, of in found.items()})


def trade_off(by_model: Mapping[str, Mapping[str, tuple[float, float]]]) -> go.Figure:
    """TTFT against energy, a panel a model and a marker a system: {"Phi": {"cpu": (s, mJ a prompt token), …}, …}."""
    figure = make_subplots(rows=1, cols=len(by_model), subplot_titles=list(by_model), horizontal_spacing=0.09)
    systems = list(dict.fromkeys(system for of in by_model.values() for system in of))
    for column, of in enumerate(by_model.values(), start=1):
        for i, system in enumerate(systems):
            if system in of:
                s, mj = of[system]
                figure.add_scatter(x=[s], y=[mj], name=system, showlegend=column == 1, row=1, col=column,
                                   mode="markers", marker=_line(i)["marker"] | {"color": theme.PALETTE[i], "size": 13},
                                   hovertemplate=f"{system}: %{{x:.2f}} s, %{{y:.0f}} mJ<extra></extra>")
        figure.update_xaxes(title="TTFT (s, modelled)", rangemode="tozero", row=1, col=column)
        figure.update_yaxes(rangemode="tozero", row=1, col=column)
    figure.update_yaxes(title="energy (mJ a prompt token)", row=1, col=1)
    return _styled(figure).update_layout(legend={"y": 1.12}, margin={"r": 24, "t": 84})


def misses(rows: Sequence[Comparison]) -> go.Figure:
    """`errors` of all published figures that only judge, by kind."""
    kinds = {": ttft": "TTFT", ": energy": "energy", ": cpu cycles": "CPU cycles", ": communication": "communication",
             "": "tables, shares"}                          # part of a figure's name → its kind
    by_kind: dict[str, dict[str, float]] = {kind: {} for kind in kinds.values()}
    for row in rows:
        by_kind[next(kind for part, kind in kinds.items() if part in row.name)][row.name] = row.error
    return errors(by_kind, TOLERANCE)


def errors(by_group: Mapping[str, Mapping[str, float]], tolerance: float) -> go.Figure:
    """How far the model is outside each published range: {"TTFT": {"Phi, P=1024: naive": 0.26, …}, …}.

    Inside the range is 0; misses are crosses, all else is a circle. Points that would coincide are put side by side.
    """
    figure, groups = go.Figure(), list(by_group)
    for missed, symbol, name in ((False, "circle-open", f"within {tolerance:.0%}"), (True, "x", "a miss")):
        x, y, text = [], [], []
        for row, of in enumerate(by_group.values()):
            for i, (what, error) in enumerate(of.items()):
                if (abs(error) > tolerance) == missed:
                    x.append(100 * error)
                    y.append(row + 0.6 * (i + 0.5) / len(of) - 0.3)
                    text.append(what)
        figure.add_scatter(x=x, y=y, text=text, mode="markers", name=name, hovertemplate="%{text}: %{x:+.0f} %",
                           marker={"symbol": symbol, "size": 9, "line": {"width": 2},
                                   "color": theme.VERMILLION if missed else theme.BLUE})
    for edge in (-100 * tolerance, 0, 100 * tolerance):
        figure.add_vline(x=edge, line={"color": GREY, "dash": "dot" if edge else "dash", "width": 1.5}, layer="below")
    figure.update_xaxes(title="modelled beside the paper's range (%; 0: inside)")
    figure.update_yaxes(title="", tickvals=list(range(len(groups))), ticktext=groups, autorange="reversed",
                        range=[-0.5, len(groups) - 0.5], showgrid=False)
    return _styled(figure)


def around(found: Mapping[Setting, Outcome], setting: Setting) -> go.Figure:
    """`settings` of all with the setting's chunk, the setting itself marked."""
    return settings({str(one): of.point for one, of in found.items() if one.chunk == setting.chunk}, str(setting))


def settings(points: Mapping[str, tuple[float, float, float, float]], chosen: str) -> go.Figure:
    """All settings of a plan, and the chosen one: name → (share dropped, share padded, TTFT in s, mJ a token)."""
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    for column, (i, j, scale) in enumerate(((0, 1, 100), (2, 3, 1)), start=1):
        for name, of, marker in (
                ("other settings", points, {"symbol": "circle-open", "size": 7, "color": GREY}),
                (chosen, {chosen: points[chosen]}, {"symbol": "star", "size": 18, "color": theme.VERMILLION})):
            figure.add_scatter(x=[scale * p[i] for p in of.values()], y=[scale * p[j] for p in of.values()],
                               text=list(of), mode="markers", name=name, marker=marker, showlegend=column == 1,
                               hovertemplate="%{text}: %{x:.3g}, %{y:.3g}<extra></extra>", row=1, col=column)
    for column, x, y in ((1, "choices dropped (%)", "rows padded (%)"),
                         (2, "TTFT (s, modelled)", "energy (mJ a token, modelled)")):
        figure.update_xaxes(title=x, rangemode="tozero", row=1, col=column)
        figure.update_yaxes(title=y, rangemode="tozero", row=1, col=column)
    return _styled(figure)
