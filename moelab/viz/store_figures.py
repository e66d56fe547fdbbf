"""Figures of lossless compression: what the bits of a weight are worth, sizes, rates, reading beside decoding.

As in `moelab.viz.figures`, nothing is computed beyond what drawing needs, and nothing depends on colour alone:
bars differ in pattern, points in shape, a paper's values are open diamonds that say so. Rates are GB of weights,
10⁹ bytes, a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike
from plotly.subplots import make_subplots

from moelab.store.entropy import FORMATS, entropy, marginals
from moelab.viz import theme
from moelab.viz.figures import GREY, _line, _reference, _styled


def exponents(by_name: Mapping[str, ArrayLike]) -> go.Figure:
    """How often each power of two occurs: {"small": histogram [2^e], …}; the legend tells each entropy in bits."""
    counts = {name: np.asarray(values, dtype=float) for name, values in by_name.items()}
    used = np.flatnonzero(sum(values / values.sum() > 1e-4 for values in counts.values()))
    figure = go.Figure()
    for i, (name, values) in enumerate(counts.items()):
        kept = slice(used[0], used[-1] + 1)
        figure.add_bar(x=np.arange(len(values))[kept] - len(values) // 2 + 1, y=100 * values[kept] / values.sum(),
                       name=f"{name}: {entropy(values):.2f} of {np.log2(len(values)):.0f} bits", marker=_bar(i),
                       hovertemplate="2^%{x}: %{y:.3f} % of the weights<extra></extra>")
    figure.update_xaxes(title="exponent x of a weight of size 2ˣ … 2ˣ⁺¹", dtick=2)
    figure.update_yaxes(title="share of weights (%)")
    return _styled(figure).update_layout(showlegend=True, bargap=0.15)


def fractions(ours: Mapping[str, float], bound: float, paper: Mapping[str, float] | None = None) -> go.Figure:
    """Compressed size over size, from 0 to 1, of each codec, with the entropy bound as the last row and as a line.

    `paper` holds published values by the name of a codec or "entropy bound".
    """
    ours, paper = {**ours, "entropy bound": bound}, dict(paper or {})
    figure = go.Figure()
    figure.add_scatter(x=[100 * value for value in ours.values()], y=list(ours), mode="markers+text", name="here",
                       text=[f"{100 * value:.2f} %" for value in ours.values()], textposition="middle right",
                       marker={"symbol": "circle", "size": 11, "color": theme.BLUE})
    if paper:
        figure.add_scatter(x=[100 * value for value in paper.values()], y=list(paper), mode="markers+text",
                           name="the paper, on its models", text=[f"{100 * value:g} %" for value in paper.values()],
                           textposition="middle left", textfont={"color": GREY},
                           marker={"symbol": "diamond-open", "size": 11, "color": GREY, "line": {"width": 2}})
    figure.add_vline(x=100 * bound, line={"color": theme.BLACK, "dash": "dash", "width": 1.5}, layer="below")
    values = 100 * np.array([*ours.values(), *paper.values()])
    span = max(np.ptp(values), 1)
    figure.update_xaxes(title="compressed size (% of the weights' size)",
                        range=[values.min() - 0.12 * span, values.max() + 0.17 * span])
    figure.update_yaxes(title="codec", categoryorder="array", categoryarray=list(ours), autorange="reversed")
    return _styled(figure)


def rates(by_series: Mapping[str, Mapping[str, float]], references: Mapping[str, float] | None = None,
          title: str = "rate (GB of weights a second)") -> go.Figure:
    """GB/s of each codec, a group of bars each, one bar a series: {"1 thread": {"huffman": 4.6, …}, …}."""
    figure = go.Figure()
    for i, (name, values) in enumerate(by_series.items()):
        figure.add_bar(x=list(values), y=list(values.values()), name=name, marker=_bar(i), textposition="outside",
                       text=[f"{value:#.2g}" if value < 10 else f"{value:.0f}" for value in values.values()],
                       cliponaxis=False, hovertemplate="%{x}: %{y:.3f} GB/s<extra>" + name + "</extra>")
    for name, value in (references or {}).items():
        _reference(figure, value, f"{name}: {value:.1f} GB/s", "dash")
    figure.update_xaxes(title="codec", showgrid=False)
    figure.update_yaxes(title=title, rangemode="tozero")
    return _styled(figure)


def delivery(read_rates: ArrayLike, by_name: Mapping[str, ArrayLike],
             measured: Mapping[str, Sequence[tuple[float, float]]] | None = None) -> go.Figure:
    """GB of weights that arrive a second against what the disk reads a second, one curve a way of loading.

    The curves are modelled; `measured` holds points (read rate, rate of arrival) by the name of their curve.
    """
    figure = go.Figure()
    for i, (name, values) in enumerate(by_name.items()):
        look = _line(i)
        figure.add_scatter(x=np.asarray(read_rates), y=np.asarray(values), name=name, **look | {"mode": "lines"})
        if points := (measured or {}).get(name):
            x, y = zip(*points)
            figure.add_scatter(x=x, y=y, name=f"{name}, measured", mode="markers", showlegend=False,
                               marker=look["marker"] | {"color": theme.PALETTE[i], "size": 10})
    marks = [digit * 10.0 ** power for power in range(-2, 3) for digit in (1, 2, 5)]
    figure.update_xaxes(title="read rate of the disk (GB of stored bytes a second)", type="log", tickvals=marks)
    figure.update_yaxes(title="weights that arrive (GB/s)", type="log", tickvals=marks)
    told = "lines: modelled<br>points: measured" if measured else "modelled"
    return _styled(figure).update_layout(legend={"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top",
                                                 "title": {"text": told, "font": {"size": 13}}})


def timeline(rows: Mapping[str, Sequence[tuple[str, float, float]]]) -> go.Figure:
    """What happens when: {"disk": [("read", begin, end), …], "thread 1": […]}, times in ms; a pattern a kind."""
    kinds = list(dict.fromkeys(kind for spans in rows.values() for kind, _, _ in spans))
    figure = go.Figure()
    for i, kind in enumerate(kinds):
        spans = [(row, begin, end) for row, found in rows.items() for name, begin, end in found if name == kind]
        figure.add_bar(y=[row for row, _, _ in spans], base=[begin for _, begin, _ in spans], orientation="h",
                       x=[end - begin for _, begin, end in spans], name=kind,
                       marker=_bar(i) | {"line": {"color": "white", "width": 1}},
                       hovertemplate="%{y}, " + kind + ": %{x:.2f} ms from %{base:.2f} ms<extra></extra>")
    figure.update_xaxes(title="time (ms)", rangemode="tozero")
    figure.update_yaxes(title="", categoryorder="array", categoryarray=list(rows), autorange="reversed",
                        showgrid=False)
    return _styled(figure).update_layout(barmode="overlay", showlegend=True)


def microscope(counts: np.ndarray, dtype: str = "BF16") -> go.Figure:
    """The bits of a tensor, from its joint histogram [65536]: signs, exponents and mantissas with their entropy."""
    fields = marginals(counts, dtype)
    _, e, m = FORMATS[dtype]
    titles = [f"{name}: {entropy(values):.3f} of {bits} bit{'s' * (bits > 1)}"
              for name, values, bits in zip(("sign", "exponent", "mantissa"), fields, (1, e, m))]
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, column_widths=[0.2, 0.4, 0.4],
                           horizontal_spacing=0.08)
    used = np.flatnonzero(fields[1])
    window = (used[0], used[-1] + 1) if len(used) else (0, len(fields[1]))
    labels = (["+", "−"], np.arange(*window) - len(fields[1]) // 2 + 1, np.arange(len(fields[2])))
    for i, (x, values, name) in enumerate(zip(labels, (fields[0], fields[1][slice(*window)], fields[2]),
                                              ("sign of the weight", "exponent (power of two)", "mantissa bits"))):
        figure.add_bar(x=x, y=100 * values / max(counts.sum(), 1), marker=_bar(0), row=1, col=i + 1,
                       hovertemplate="%{x}: %{y:.2f} %<extra></extra>")
        figure.update_xaxes(title=name, row=1, col=i + 1, showgrid=False)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title="share of weights (%)", row=1, col=1)
    figure.update_annotations(font_size=13)
    return figure.update_layout(template="moelab", showlegend=False, bargap=0.05, height=320,
                                margin={"l": 64, "r": 16, "t": 40, "b": 50})


def _bar(i: int) -> dict:
    """How the i-th series of bars is drawn: colour and pattern differ."""
    return {"color": theme.PALETTE[i % len(theme.PALETTE)],
            "pattern": {"shape": theme.PATTERNS[i % len(theme.PATTERNS)], "fgcolor": "white", "size": 6,
                        "fillmode": "overlay"}}
