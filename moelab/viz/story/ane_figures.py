"""Figures of the Neural Engine: plans, parity of a conversion, what dropping costs, and the device
model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moelab.ane.device.comparison import MACHINES, RIVALS, Outcome, Setting, Study, claimed, ratio
from moelab.ane.device.device_model import Prefill
from moelab.ane.device.published import Sample
from moelab.ane.device.rates import Rates
from moelab.ane.plan import ANEPlan
from moelab.ane.systems import SYSTEMS, TABLE_2
from moelab.cards import load_device
from moelab.claims import FITTED, FOLLOWS, NOT_REPRODUCED, REPRODUCED, Row
from moelab.viz import theme
from moelab.viz.charts import (
    DASHED,
    GREY,
    ROUND,
    add_lines,
    add_points,
    bar_look,
    bars,
    finish,
    line_look,
    panels,
    pattern,
    point_look,
    whole_steps,
)
from moelab.viz.plotly_json import Figure
from moelab.viz.story.ane_tables import label


def placement(plan: ANEPlan) -> Figure:
    """Each layer's groups as bars, as wide as they have experts; one look a capacity, and one for
    the CPU."""
    groups = [
        (l, group)
        for l, layer in enumerate(plan.layers)
        for group in layer.on("ane") + layer.on("cpu")
    ]
    starts, ends = [], {}
    for l, group in groups:
        starts.append(ends.get(l, 0))
        ends[l] = starts[-1] + len(group.experts)
    kinds = [
        ("ane", capacity)
        for capacity in sorted({g.capacity for _, g in groups if g.unit == "ane"}, reverse=True)
    ]
    figure = Figure()
    for i, (unit, capacity) in enumerate([*kinds, ("cpu", None)]):
        chosen = [
            (l, group, start)
            for (l, group), start in zip(groups, starts)
            if group.unit == unit and capacity in (None, group.capacity)
        ]
        if not chosen:
            continue
        look = (
            bar_look(i)
            if unit == "ane"
            else {"color": "#bbbbbb", "pattern": pattern("x", GREY, size=5)}
        )
        figure.add_bar(
            y=[l for l, _, _ in chosen],
            x=[len(group.experts) for _, group, _ in chosen],
            orientation="h",
            base=[start for _, _, start in chosen],
            width=0.85,
            name=f"ANE, C={capacity}" if unit == "ane" else "CPU",
            marker=look | {"line": {"color": "white", "width": 1}},
            customdata=[
                [", ".join(map(str, group.experts)), group.expected] for _, group, _ in chosen
            ],
            hovertemplate="layer %{y}, experts %{customdata[0]}: %{customdata[1]:.0f} tokens "
            "expected<extra></extra>",
        )
    figure.update_yaxes(autorange="reversed", dtick=whole_steps(len(plan.layers)), showgrid=False)
    return finish(
        figure, "experts, from hot to cold", "MoE layer", barmode="overlay", showlegend=True
    )


def systems(found: Study, metric: str, title: str) -> Figure:
    """One metric of `moelab.ane.device.comparison.METRICS` over NPUMoE's, a group of bars a run of
    PhiMoE's study."""
    ours = {
        SYSTEMS[s].title: {label(run): (ratio(of, metric, s),) * 3 for run, of in found.items()}
        for s in RIVALS
    }
    paper: dict[str, dict[str, tuple[float, float]]] = {}
    for run in found:
        for s, ends in claimed(run, metric).items():
            paper.setdefault(SYSTEMS[s].title, {})[label(run)] = ends
    return bars({"": ours}, title, "run", paper={"": paper}, columns=1, line=(1, "NPUMoE"))


def sweep(rates: Rates, samples: Sequence[Sample], mode: str = "serial") -> Figure:
    """Latency of an expert slot against its capacity: fitted lines and timed points, a series a
    group size."""
    figure, timed = Figure(), [s for s in samples if s.mode == mode]
    capacities = range(16, max(s.C for s in timed) + 1, 4)
    for i, G in enumerate(sorted({s.G for s in timed})):
        add_points(
            figure,
            [(C, rates.graph_ms(G, C, mode) / (G * C)) for C in capacities],
            f"G={G}, fitted",
            i,
            "C = %{x}: %{y:.3f} ms",
            mode="lines",
            line=line_look(i)["line"],
        )
        add_points(
            figure,
            [(s.C, s.ms) for s in timed if s.G == G],
            f"G={G}, timed",
            i,
            "C = %{x}: %{y:.3f} ms",
        )
    figure.update_xaxes(type="log", tickvals=[16, 32, 64, 128, 256, 512])
    return finish(figure, "capacity C (slots of an expert)", f"latency, {mode} (ms a slot)")


def graph_weights(gb_by_model: Mapping[str, Mapping[int, float]], limit: float) -> Figure:
    """Weights of one graph by group size, in GB: {"Phi-3.5-MoE": {1: 0.16, 8: 1.26}, …}, and the
    limit."""
    figure = add_lines(
        Figure(), {model: list(by_size.items()) for model, by_size in gb_by_model.items()}
    )
    _limit(figure, sorted(set().union(*gb_by_model.values())), limit, f"limit, {limit:.2f} GB")
    figure.update_xaxes(type="log", tickvals=[1, 2, 4, 8, 16])
    figure.update_yaxes(type="log", tickvals=ROUND)
    return finish(figure, "group size G (experts a graph)", "weights of one graph (GB)")


def parity(by_mode: Mapping[str, Sequence[float]], limit: float) -> Figure:
    """Largest difference of a next token's logit, a point a prompt, on a logarithmic axis, and what
    is allowed."""
    figure = add_lines(
        Figure(), {mode: list(enumerate(of, 1)) for mode, of in by_mode.items()}, mode="markers"
    )
    ends = [0.5, max(map(len, by_mode.values())) + 0.5]
    _limit(figure, ends, limit, f"allowed: {limit:g}")
    figure.update_xaxes(dtick=1, range=ends)
    figure.update_yaxes(type="log", exponentformat="power", dtick=1)
    return finish(figure, "prompt", "largest difference of a logit")


def dropping(by_order: Mapping[str, Sequence[tuple[float, float, float]]], title: str) -> Figure:
    """What dropping costs, a line an order of dropping: points (share dropped, cost in %, its
    standard error)."""
    lines = {
        order: [
            (100 * dropped, cost, cost - error, cost + error) for dropped, cost, error in sorted(of)
        ]
        for order, of in by_order.items()
    }
    figure = add_lines(Figure(), lines, "%{x:.1f} %: %{y:+.2f}").add_hline(y=0, line=DASHED)
    return finish(
        figure, "choices of an expert that were dropped (%)", title, xaxis_rangemode="tozero"
    )


def parts(run: Mapping[str, Prefill]) -> Figure:
    """Stacked bars of the seconds of one run's systems, the sum at the end of each bar."""
    systems, figure = [SYSTEMS[system].title for system in run], Figure()
    seconds = {
        "attention": [p.attention.ms / 1e3 for p in run.values()],
        "experts": [(p.experts.ms - p.dispatch_ms) / 1e3 for p in run.values()],
        "launches and placing": [p.dispatch_ms / 1e3 for p in run.values()],
        "router, moving": [p.host.ms / 1e3 for p in run.values()],
    }
    for i, (part, of) in enumerate(seconds.items()):
        figure.add_bar(
            y=systems,
            x=of,
            orientation="h",
            name=part,
            marker=bar_look(i),
            hovertemplate="%{y}, " + part + ": %{x:.2f} s<extra></extra>",
        )
    sums = [sum(of) for of in zip(*seconds.values())]
    figure.add_scatter(
        x=sums,
        y=systems,
        mode="text",
        text=[f" {value:.1f} s" for value in sums],
        showlegend=False,
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
    )
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return finish(
        figure,
        "TTFT (s, modelled)",
        barmode="stack",
        legend_traceorder="normal",
        xaxis_range=[0, 1.12 * max(sums)],
    )


def time_and_energy(found: Mapping[str, Study], run: tuple[int, int]) -> Figure:
    """TTFT against energy of the four systems in one run, a panel a model, on the machine of the
    paper."""
    titles = [
        f"{model}, {load_device(MACHINES[model]).name.removeprefix('Apple ')}" for model in found
    ]
    figure, places = panels(
        titles, x="TTFT (s, modelled)", y="energy (mJ a prompt token)", horizontal_spacing=0.09
    )
    for at, of in zip(places, found.values()):
        for i, system in enumerate(TABLE_2):
            point = of[run][system].ttft_s, of[run][system].mj_per_token
            add_points(
                figure,
                [point],
                SYSTEMS[system].title,
                i,
                "%{x:.2f} s, %{y:.0f} mJ",
                marker=point_look(i, 13),
                **at,
            )
    return finish(figure.update_xaxes(rangemode="tozero"), legend_y=1.12, margin_t=84)


def misses(rows: Sequence[Row]) -> Figure:
    """How far modelled numbers are from the published ones, by kind and verdict; equal ones are
    spread.

    Orders, and what the source itself contradicts, are left out.
    """
    kinds = {
        "_ttft": "TTFT",
        "energy": "energy",
        "cycles": "CPU cycles",
        "": "others",
    }  # part of a name → kind
    looks = {
        "reproduced": ("circle-open", theme.BLUE, {REPRODUCED}),
        "not reproduced": ("x", theme.VERMILLION, {NOT_REPRODUCED}),
        "fitted, or follows": ("diamond-open", GREY, {FITTED, FOLLOWS}),
    }
    groups = {kind: [] for kind in kinds.values()}
    for row in rows:
        if isinstance(row.claim.value, float) and row.claim.value:
            groups[
                next(kind for part, kind in kinds.items() if part in row.claim.metric[1])
            ].append(row)
    figure = Figure()
    for name, (symbol, color, verdicts) in looks.items():
        points = [
            (
                100 * (row.ours / row.claim.value - 1),
                at + 0.6 * (i + 0.5) / len(of) - 0.3,
                row.claim.text,
            )
            for at, of in enumerate(groups.values())
            for i, row in enumerate(of)
            if row.verdict in verdicts
        ]
        x, y, text = zip(*points) if points else ((), (), ())
        figure.add_scatter(
            x=x,
            y=y,
            text=text,
            mode="markers",
            name=name,
            hovertemplate="%{text}: %{x:+.0f} %",
            marker={"symbol": symbol, "size": 9, "line": {"width": 2}, "color": color},
        )
    figure.add_vline(x=0, line=DASHED, layer="below")
    figure.update_yaxes(
        tickvals=list(range(len(groups))),
        ticktext=list(groups),
        autorange="reversed",
        range=[-0.5, len(groups) - 0.5],
        showgrid=False,
    )
    return finish(figure, "modelled beside the paper's number (%)")


def around(found: Mapping[Setting, Outcome], setting: Setting) -> Figure:
    """All settings with the setting's chunk, the setting itself marked: dropped against padded,
    TTFT against energy."""
    points = {str(one): of.point for one, of in found.items() if one.chunk == setting.chunk}
    chosen = str(setting)
    figure, places = panels([""] * 2, horizontal_spacing=0.12)
    for at, (i, j, scale), x, y in zip(
        places,
        ((0, 1, 100), (2, 3, 1)),
        ("choices dropped (%)", "TTFT (s, modelled)"),
        ("rows padded (%)", "energy (mJ a token, modelled)"),
    ):
        for name, of, marker in (
            ("other settings", points, {"symbol": "circle-open", "size": 7, "color": GREY}),
            (
                chosen,
                {chosen: points[chosen]},
                {"symbol": "star", "size": 18, "color": theme.VERMILLION},
            ),
        ):
            add_points(
                figure,
                [(scale * p[i], scale * p[j]) for p in of.values()],
                name,
                0,
                "%{text}: %{x:.3g}, %{y:.3g}",
                text=list(of),
                marker=marker,
                **at,
            )
        figure.update_xaxes(title=x, rangemode="tozero", **at)
        figure.update_yaxes(title=y, **at)
    return finish(figure)


def _limit(figure: Figure, x: Sequence[float], limit: float, name: str) -> None:
    """Add a line as a series, since a logarithmic axis misplaces the label of a line across."""
    figure.add_scatter(
        x=x,
        y=[limit] * len(x),
        name=name,
        mode="lines",
        line={"color": theme.BLACK, "dash": "longdashdot", "width": 1.5},
    )
