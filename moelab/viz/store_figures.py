"""Figures of lossless compression: entropy, sizes, and rates in GB (10⁹ bytes) of weights a
second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from moelab.viz import theme
from moelab.viz.figures import (
    DASHED,
    GREY,
    ROUND,
    Points,
    Values,
    add_lines,
    add_points,
    add_reference,
    bar_look,
    finish,
    hover,
    interval,
    panels,
    point_look,
)
from moelab.viz.plotly_json import Figure
from moelab.zipmoe.entropy import FORMATS, entropy, marginals


def exponents(by_name: Mapping[str, ArrayLike]) -> Figure:
    """How often each power of two occurs: {"small": histogram [2^e], …}; the legend tells each
    entropy in bits."""
    counts = {name: np.asarray(values, dtype=float) for name, values in by_name.items()}
    used = np.flatnonzero(sum(values / values.sum() > 1e-4 for values in counts.values()))
    figure = Figure()
    for i, (name, values) in enumerate(counts.items()):
        kept = slice(used[0], used[-1] + 1)
        figure.add_bar(
            x=np.arange(len(values))[kept] - len(values) // 2 + 1,
            y=100 * values[kept] / values.sum(),
            name=f"{name}: {entropy(values):.2f} of {np.log2(len(values)):.0f} bits",
            marker=bar_look(i),
            hovertemplate="2^%{x}: %{y:.3f} % of the weights<extra></extra>",
        )
    return finish(
        figure,
        "exponent x of a weight of size 2ˣ … 2ˣ⁺¹",
        "share of weights (%)",
        showlegend=True,
        bargap=0.15,
        xaxis_dtick=2,
    )


def fractions(ours: Values, bound: float, paper: Values | None = None) -> Figure:
    """Compressed size over size of each codec, the entropy bound as the last row and a line;
    `paper`: published."""
    ours, paper = {**ours, "entropy bound": bound}, dict(paper or {})
    figure = Figure()
    figure.add_scatter(
        x=[100 * value for value in ours.values()],
        y=list(ours),
        mode="markers+text",
        name="here",
        text=[f"  {100 * value:.2f} %" for value in ours.values()],
        textposition="middle right",
        marker={"symbol": "circle", "size": 11, "color": theme.BLUE},
    )
    if paper:
        figure.add_scatter(
            x=[100 * value for value in paper.values()],
            y=list(paper),
            mode="markers+text",
            name="the paper, on its models",
            text=[f"{100 * value:g} %  " for value in paper.values()],
            textposition="middle left",
            textfont={"color": GREY},
            marker={"symbol": "diamond-open", "size": 11, "color": GREY, "line": {"width": 2}},
        )
    figure.add_vline(x=100 * bound, line=DASHED, layer="below")
    values = 100 * np.array([*ours.values(), *paper.values()])
    span = max(np.ptp(values), 1)
    figure.update_xaxes(range=[values.min() - 0.12 * span, values.max() + 0.17 * span])
    figure.update_yaxes(categoryorder="array", categoryarray=list(ours), autorange="reversed")
    return finish(figure, "compressed size (% of the weights' size)", "codec")


def trade(size: Values, seconds: Mapping[str, Sequence[float]], bound: float) -> Figure:
    """Time of a token's experts (ms; median, whiskers: p10, p90) against stored size over size, a
    point for each way of keeping them; the entropy bound as a line."""
    figure = Figure()
    for i, (name, samples) in enumerate(seconds.items()):
        milliseconds = 1e3 * np.array(samples)
        middle = float(np.median(milliseconds))
        figure.add_scatter(
            x=[100 * size[name]],
            y=[middle],
            name=name,
            mode="markers+text",
            text=[f"  {name}"],
            textposition="middle right",
            marker=point_look(i) | {"size": 12},
            error_y=interval([middle], *np.quantile(milliseconds, (0.1, 0.9))[:, None]),
            hovertemplate=hover("%{x:.1f} % of the size, %{y:.2f} ms", name),
        )
    figure.add_vline(
        x=100 * bound,
        line=DASHED,
        layer="below",
        annotation_text="entropy bound",
        annotation_position="bottom right",
    )
    figure.update_xaxes(range=[100 * bound - 3, 106])
    figure.update_yaxes(rangemode="tozero")
    return finish(
        figure,
        "stored size (% of the weights' size)",
        "a token's experts in one layer (ms)",
        showlegend=False,
    )


def rates(by_series: Mapping[str, Values], references: Values | None = None) -> Figure:
    """GB/s of each codec, a group of bars each, one bar a series: {"1 thread": {"huffman": 4.6, …},
    …}."""
    figure = Figure()
    for i, (name, values) in enumerate(by_series.items()):
        figure.add_bar(
            x=list(values),
            y=list(values.values()),
            name=name,
            marker=bar_look(i),
            textposition="outside",
            text=[f"{value:#.2g}" if value < 10 else f"{value:.0f}" for value in values.values()],
            cliponaxis=False,
            hovertemplate=hover("%{x}: %{y:.3f} GB/s", name),
        )
    for name, value in (references or {}).items():
        add_reference(figure, value, f"{name}: {value:.1f} GB/s")
    return finish(figure, "codec", "rate (GB of weights a second)", xaxis_showgrid=False)


def delivery(
    read_rates: ArrayLike,
    by_name: Mapping[str, ArrayLike],
    measured: Mapping[str, Points] | None = None,
) -> Figure:
    """GB of weights delivered a second against what the disk reads a second, a modelled curve a way
    of loading.

    measured : points (read rate, rate of delivery) by the name of their curve.
    """
    curves = {
        name: list(zip(np.asarray(read_rates), np.asarray(values)))
        for name, values in by_name.items()
    }
    figure = add_lines(Figure(), curves, mode="lines")
    for i, name in enumerate(by_name):
        if points := (measured or {}).get(name):
            add_points(
                figure, points, f"{name}, measured", i, "%{x:.2f}: %{y:.2f} GB/s", showlegend=False
            )
    figure.update_xaxes(type="log", tickvals=ROUND)
    figure.update_yaxes(type="log", tickvals=ROUND)
    return finish(
        figure,
        "read rate of the disk (GB of stored bytes a second)",
        "weights delivered (GB/s)",
        legend="lines: modelled<br>points: measured" if measured else "modelled",
    )


def timeline(rows: Mapping[str, Sequence[tuple[str, float, float]]]) -> Figure:
    """{"disk": [("read", begin, end), …], "thread 1": […]}, times in ms; a pattern a kind."""
    figure = Figure()
    for i, kind in enumerate(
        dict.fromkeys(kind for spans in rows.values() for kind, _, _ in spans)
    ):
        y, begin, end = zip(
            *((row, a, b) for row, spans in rows.items() for name, a, b in spans if name == kind)
        )
        figure.add_bar(
            y=y,
            base=begin,
            x=[b - a for a, b in zip(begin, end)],
            orientation="h",
            name=kind,
            marker=bar_look(i) | {"line": {"color": "white", "width": 1}},
            hovertemplate="%{y}, " + kind + ": %{x:.2f} ms from %{base:.2f} ms<extra></extra>",
        )
    figure.update_yaxes(
        categoryorder="array", categoryarray=list(rows), autorange="reversed", showgrid=False
    )
    return finish(figure, "time (ms)", barmode="overlay", showlegend=True, xaxis_rangemode="tozero")


def microscope(counts: np.ndarray, dtype: str = "BF16") -> Figure:
    """The bits of a tensor, from its joint histogram [65536]: signs, exponents and mantissas with
    their entropy."""
    fields = marginals(counts, dtype)
    _, e, m = FORMATS[dtype]
    titles = [
        f"{name}: {entropy(values):.3f} of {bits} bit{'s' * (bits > 1)}"
        for name, values, bits in zip(("sign", "exponent", "mantissa"), fields, (1, e, m))
    ]
    figure, places = panels(
        titles, y="share of weights (%)", column_widths=[0.2, 0.4, 0.4], horizontal_spacing=0.08
    )
    used = np.flatnonzero(fields[1])
    window = (used[0], used[-1] + 1) if len(used) else (0, len(fields[1]))
    labels = (["+", "−"], np.arange(*window) - len(fields[1]) // 2 + 1, np.arange(len(fields[2])))
    for at, x, values, name in zip(
        places,
        labels,
        (fields[0], fields[1][slice(*window)], fields[2]),
        ("sign of the weight", "exponent (power of two)", "mantissa bits"),
    ):
        figure.add_bar(
            x=x,
            y=100 * values / max(counts.sum(), 1),
            marker=bar_look(0),
            hovertemplate="%{x}: %{y:.2f} %<extra></extra>",
            **at,
        )
        figure.update_xaxes(title=name, showgrid=False, **at)
    return finish(figure, showlegend=False, bargap=0.05, height=320)
