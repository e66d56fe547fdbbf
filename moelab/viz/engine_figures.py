"""Figures of the offloading engine: timelines, the budget curve, the planner's choices, the
comparisons.

Sizes come in bytes and are drawn in GB of 10⁹ bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moelab.specs import Event
from moelab.viz import theme
from moelab.viz.figures import (
    DASHED,
    EDGE,
    GREY,
    NOTE,
    Points,
    Values,
    add_band,
    add_points,
    bar_look,
    finish,
    hover,
    line_look,
    panels,
    pattern,
    point_look,
)
from moelab.viz.plotly_json import Figure

AHEAD = "prefetch"
#: kind of work → colour, pattern, colour of the number on it
KINDS = {
    "read E": (theme.BLUE, "", "white"),
    "read SM": (theme.SKY, "/", "black"),
    "read": (theme.BLUE, "-", "white"),
    AHEAD: (theme.SKY, "/", "black"),
    "read weights": (theme.BLUE, "", "white"),
    "read activations": (theme.SKY, "/", "black"),
    "decompress": (theme.ORANGE, "", "black"),
    "recover": (theme.PURPLE, "\\", "black"),
    "decode": (theme.ORANGE, "-", "black"),
    "expert": (theme.GREEN, "", "white"),
    "other": ("#8c8c8c", ".", "white"),
    "wait": ("#eeeeee", "x", "#222"),
}
RESOURCES = ("gpu", "link", "host", "disk", "copy", "worker", "compute")  # from top to bottom
POOLS = {"F": "F: full", "C": "C: compressed", "S": "S: sign-mantissa", "E": "E: exponents"}


def gantt(
    runs: Mapping[str, Sequence[Event]], numbers: str = "experts", kind: str = "simulated"
) -> Figure:
    """Timelines, one below the other: a row a resource, a look a kind of work; a dashed line marks
    a run's end.

    runs : {title: events}. numbers : on the bars, "experts" or "layers".
    """
    rows = [sorted({e.resource for e in events}, key=_row) for events in runs.values()]
    spans = [(min(e.start for e in events), max(e.end for e in events)) for events in runs.values()]
    heights = [len(resources) + 1.2 for resources in rows]
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
        legend=f"{kind}<br>numbers: {numbers}",
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
    for name, (colour, shape, text) in KINDS.items():
        if not (of := [e for e in events if e.kind == name]):
            continue
        edge = "#bbbbbb" if name == "wait" else "white"
        # a white one would hide it
        edges = [colour if e.end - e.start < brief else edge for e in of]
        # a number on less than a digit's width would be measured and then hidden
        shown = [
            -1 if e.end - e.start < 6 * brief else e.layer if numbers == "layers" else e.expert
            for e in of
        ]
        figure.add_bar(
            y=[e.resource for e in of],
            base=[1e3 * (e.start - start) for e in of],
            orientation="h",
            name=name,
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


def budget_curve(
    curves: Mapping[str, Sequence[tuple[float, float, float]]],
    ceiling: Sequence[tuple[float, float, float]] = (),
    limits: Mapping[str, Points] | None = None,
    marks: Values | None = None,
    *,
    most_hits: Points = (),
    measured: Sequence[tuple[str, Sequence[float]]] = (),
    target: tuple[float, str] | None = None,
) -> Figure:
    """TPOT and hit rate against the memory for experts, simulated, a line a policy.

    curves : {policy: [(bytes, TPOT in seconds, hit rate from 0 to 1, …), …]}. ceiling : the same of
        Belady's optimum.
    limits : {name: [(bytes, seconds), …]}, lower bounds of the TPOT. marks : {name: bytes},
        vertical lines.
    most_hits : [(bytes, hit rate), …], an upper bound.
    measured : [(policy, as of `curves`), …], points.
    target : (seconds, what it is), a horizontal line.
    """
    curves = {name: [point[:3] for point in points] for name, points in curves.items()}
    ceiling = [point[:3] for point in ceiling]
    scale, unit = _unit(point[0] for points in curves.values() for point in points)
    figure, (upper, lower) = panels(
        [""] * 2,
        1,
        f"memory for experts ({unit})",
        shared_xaxes=True,
        vertical_spacing=0.07,
        row_heights=[0.55, 0.45],
    )
    optimum = {"mode": "lines", "line": {"color": theme.BLACK, "width": 3, "dash": "solid"}}
    looks = {
        name: (sorted(points), line_look(i)) for i, (name, points) in enumerate(curves.items())
    }
    looks |= {"Belady, whole experts": (sorted(ceiling), optimum)} if ceiling else {}
    _add_policies(figure, looks, (scale, unit), upper, lower)
    _add_limits(figure, limits or {}, most_hits, (scale, unit), upper, lower)
    if measured:
        _add_measured(figure, measured, (scale, unit), upper, lower)
    if target is not None:
        figure.add_hline(
            y=1e3 * target[0],
            line=DASHED | {"dash": "dot"},
            annotation_text=target[1],
            annotation_position="top right",
            annotation_font=NOTE,
            **upper,
        )
    _add_marks(figure, marks or {}, scale)
    figure.update_yaxes(title="TPOT (ms)", **upper)
    figure.update_yaxes(title="hit rate (%)", range=[0, 104], **lower)
    return finish(figure, legend="policies: simulated", height=560)


def _add_policies(
    figure: Figure,
    looks: Mapping[str, tuple[Points, Mapping[str, Any]]],
    scaled: tuple[float, str],
    upper: Mapping[str, Any],
    lower: Mapping[str, Any],
) -> None:
    """A line a policy in both panels."""
    scale, unit = scaled
    for name, (points, look) in looks.items():
        size, tpot, hits = np.array(points, dtype=float).T
        for at, y, what in ((upper, 1e3 * tpot, "ms"), (lower, 100 * hits, "%")):
            figure.add_scatter(
                x=size / scale,
                y=y,
                name=name,
                **look,
                **at,
                hovertemplate=hover("%{x:.2f} " + unit + ": %{y:.1f} " + what, name),
            )


def _add_limits(
    figure: Figure,
    limits: Mapping[str, Points],
    most_hits: Points,
    scaled: tuple[float, str],
    upper: Mapping[str, Any],
    lower: Mapping[str, Any],
) -> None:
    """Lower bounds of the TPOT, and the upper bound of the hit rate."""
    scale, unit = scaled
    for i, (name, points) in enumerate(limits.items()):
        x, y = np.array(sorted(points)).T
        figure.add_scatter(
            x=x / scale,
            y=1e3 * y,
            name=f"limit: {name}",
            mode="lines",
            **upper,
            line={"color": GREY, "dash": ("dot", "dashdot", "longdash")[i % 3], "width": 2},
            hovertemplate=hover("%{x:.2f} " + unit + ": %{y:.1f} ms", name),
        )
    if most_hits:
        x, y = np.array(sorted(most_hits)).T
        figure.add_scatter(
            x=x / scale,
            y=100 * y,
            name="limit: hits of any cache",
            mode="lines",
            **lower,
            line={"color": GREY, "dash": "longdashdot", "width": 2},
            hovertemplate=hover("%{x:.2f} " + unit + ": %{y:.1f} %", "ceiling"),
        )


def _add_measured(
    figure: Figure,
    measured: Sequence[tuple[str, Sequence[float]]],
    scaled: tuple[float, str],
    upper: Mapping[str, Any],
    lower: Mapping[str, Any],
) -> None:
    """A star for each real run."""
    scale, unit = scaled
    for at, place, factor, what in ((upper, 1, 1e3, "ms"), (lower, 2, 100, "%")):
        figure.add_scatter(
            x=[point[0] / scale for _, point in measured],
            mode="markers",
            name="measured",
            y=[factor * point[place] for _, point in measured],
            text=[name for name, _ in measured],
            marker={"symbol": "star", "size": 15, "color": theme.VERMILLION, "line": EDGE},
            **at,
            hovertemplate=hover("%{text}, %{x:.2f} " + unit + ": %{y:.1f} " + what, "measured"),
        )


def _add_marks(figure: Figure, marks: Values, scale: float) -> None:
    """Vertical lines at sizes, with their names above."""
    for i, (name, size) in enumerate(marks.items()):
        figure.add_vline(x=size / scale, line=DASHED)
        figure.add_annotation(
            x=size / scale,
            y=1,
            yref="paper",
            text=name,
            showarrow=False,
            yanchor="bottom",
            yshift=13 * (i % 2),
            font=NOTE,
        )  # neighbours may be close


def memory_bar(parts: Values, on_disk: str) -> Figure:
    """What takes memory, {part: bytes}, stacked; a line where memory ends and the part `on_disk`
    begins, hatched."""
    scale, unit = _unit([sum(parts.values())])
    figure = Figure()
    for i, (name, size) in enumerate(parts.items()):
        look = (
            bar_look(i)
            if name != on_disk
            else {"color": "#d0d0d0", "pattern": pattern("x", "#888888", size=6)}
        )
        figure.add_bar(
            y=["memory"],
            x=[size / scale],
            name=name,
            orientation="h",
            marker=look | {"line": EDGE},
            text=f"{size / scale:.3g}",
            textposition="inside",
            textangle=0,
            insidetextanchor="middle",
            hovertemplate=hover("%{x:.3g} " + unit, name),
        )
    end = sum(size for name, size in parts.items() if name != on_disk) / scale
    figure.add_vline(x=end, line={"color": theme.BLACK, "width": 3})
    figure.add_annotation(
        x=end,
        y=1,
        yref="paper",
        text=f"in memory: {end:.3g} {unit}",
        showarrow=False,
        yanchor="bottom",
        font=NOTE,
    )
    figure.update_yaxes(showgrid=False, showticklabels=False)
    return finish(
        figure,
        f"memory ({unit})",
        legend="exact",
        barmode="stack",
        height=250,
        uniformtext={"minsize": 9, "mode": "hide"},
        legend_traceorder="normal",
    )


def pools_chart(
    plans: Mapping[str, Values], predicted: Values, measured: Values | None = None
) -> Figure:
    """What the planner chose, {budget: {pool: bytes}}, and the TPOT, predicted and measured,
    {budget: seconds}."""
    scale, unit = _unit(sum(plan.values()) for plan in plans.values())
    figure, (left, right) = panels(
        [""] * 2, x="budget for experts", column_widths=[0.54, 0.46], horizontal_spacing=0.16
    )
    for i, (pool, name) in enumerate(POOLS.items()):
        figure.add_bar(
            x=list(plans),
            y=[plan.get(pool, 0) / scale for plan in plans.values()],
            name=name,
            marker=bar_look(i),
            hovertemplate=hover("%{x}: %{y:.2f} " + unit, name),
            **left,
        )
    for name, values, symbol, colour, dash in (
        ("predicted", predicted, "diamond-open", theme.BLACK, "dot"),
        ("measured", measured, "circle", theme.VERMILLION, "solid"),
    ):
        if values:
            figure.add_scatter(
                x=list(values),
                y=[1e3 * value for value in values.values()],
                name=f"TPOT, {name}",
                mode="lines+markers",
                **right,
                line={"color": colour, "width": 1.5, "dash": dash},
                marker={"symbol": symbol, "size": 11, "color": colour, "line": {"width": 2}},
                hovertemplate=hover("%{x}: %{y:.1f} ms", name),
            )
    figure.update_xaxes(
        showgrid=False, type="category", categoryorder="array", categoryarray=list(plans)
    )
    figure.update_yaxes(title=f"memory of each pool ({unit})", **left)
    figure.update_yaxes(title="TPOT (ms)", **right)
    return finish(figure, legend="", barmode="stack", bargap=0.35, height=380)


def ablation(points: Mapping[str, tuple[float, float]]) -> Figure:
    """Latency against throughput, measured, a point a variant: {"LRU": (seconds, tokens/s), …};
    ZipMoE's Fig. 10."""
    figure = Figure()
    for i, (name, point) in enumerate(points.items()):
        add_points(
            figure, [point], name, i, "%{x:.3f} s, %{y:.2f} tokens/s", marker=point_look(i, 14)
        )
    for axis, values in zip(
        (figure.update_xaxes, figure.update_yaxes), np.array(list(points.values())).T
    ):
        margin = 0.15 * max(np.ptp(values), 0.02 * np.abs(values).max())
        axis(range=[values.min() - margin, values.max() + margin])
    figure.add_annotation(
        x=0.01,
        y=0.99,
        xref="paper",
        yref="paper",
        text="↖ better",
        showarrow=False,
        font={"color": GREY, "size": 13},
        xanchor="left",
        yanchor="top",
    )
    return finish(figure, "latency of a generation (s)", "throughput (tokens/s)", "measured")


def batches(by_system: Mapping[str, Mapping[int, float]]) -> Figure:
    """Throughput by batch size, measured: {"moelab": {1: tokens/s, 4: …, 16: …}}; ZipMoE's Fig.
    8."""
    figure = Figure()
    for i, (name, values) in enumerate(by_system.items()):
        figure.add_bar(
            x=[str(batch) for batch in values],
            y=list(values.values()),
            name=name,
            marker=bar_look(i),
            text=[f"{value:.3g}" for value in values.values()],
            textposition="outside",
            cliponaxis=False,
            hovertemplate=hover("batch %{x}: %{y:.2f} tokens/s", name),
        )
    figure.update_xaxes(type="category", showgrid=False)
    return finish(
        figure, "batch size (sequences)", "throughput (tokens/s)", "measured", bargap=0.25
    )


def output_lengths(by_system: Mapping[str, Sequence[tuple[float, float, float, float]]]) -> Figure:
    """Mean latency of a generation by output length, measured, with a band from p10 to p90;
    ZipMoE's Fig. 9.

    by_system : {"moelab": [(tokens, mean, p10, p90 in seconds), …]}.
    """
    figure = Figure()
    for i, (name, points) in enumerate(by_system.items()):
        tokens, mean, low, high = np.array(sorted(points), dtype=float).T
        add_band(
            figure,
            tokens,
            low,
            high,
            theme.PALETTE[i % 8],
            0.18,
            f"{name}, p10 to p90",
            showlegend=False,
            legendgroup=name,
        )
        figure.add_scatter(
            x=tokens,
            y=mean,
            name=name,
            legendgroup=name,
            **line_look(i),
            hovertemplate=hover("%{x} tokens: %{y:.2f} s", name),
        )
    return finish(
        figure,
        "tokens generated",
        "latency of a generation (s)",
        "measured<br>band: p10 to p90",
        xaxis_rangemode="tozero",
    )


def simulated_vs_measured(by_series: Mapping[str, Points], title: str = "TPOT") -> Figure:
    """Points (measured, simulated) in seconds; the band is ±15 % of measured."""
    values = 1e3 * np.array(
        [point for points in by_series.values() for point in points], dtype=float
    ).reshape(-1, 2)
    ends = np.array((values.min() / 1.3, values.max() * 1.3) if len(values) else (1.0, 10.0))
    figure = Figure()
    add_band(figure, ends, 0.85 * ends, 1.15 * ends, GREY, 0.15, "within ±15 %")
    figure.add_scatter(
        x=ends, y=ends, mode="lines", name="equal", hoverinfo="skip", line=EDGE | {"dash": "dash"}
    )
    for i, (name, points) in enumerate(by_series.items()):
        add_points(
            figure,
            [(1e3 * x, 1e3 * y) for x, y in points],
            name,
            i,
            "measured %{x:.1f} ms, simulated %{y:.1f} ms: %{customdata:+.1f} %",
            customdata=[100 * (y / x - 1) for x, y in points],
        )
    for axis, word in ((figure.update_xaxes, "measured"), (figure.update_yaxes, "simulated")):
        axis(
            title=f"{title}, {word} (ms)",
            type="log",
            range=np.log10(ends).tolist(),
            tickvals=[
                digit * 10.0**power for power in range(-3, 6) for digit in (1, 1.5, 2, 3, 4, 6, 8)
            ],
        )
    return finish(figure, legend="", height=460, width=640)


def _unit(sizes: Iterable[float]) -> tuple[float, str]:
    """Bytes of the unit in which the largest size reads well, and its name."""
    return (1e9, "GB") if max(sizes, default=0) >= 0.5e9 else (1e6, "MB")


def _row(resource: str) -> tuple:
    """The sort key of a resource: its place in RESOURCES, the rest below, then its number."""
    name, _, number = resource.partition(" ")
    place = RESOURCES.index(name) if name in RESOURCES else len(RESOURCES)
    return place, int(number) if number.isdigit() else 0, resource
