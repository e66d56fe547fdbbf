"""Figures that are more than one chart of `moelab.viz.charts`: what memory buys, what takes it,
the load of a chunk, the bits of a tensor, one token's timeline.

Sizes come in bytes and are drawn in GB of 10⁹ bytes, or in MB."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from moelab.specs import Event
from moelab.viz import theme
from moelab.viz.charts import (
    AHEAD,
    DASHED,
    EDGE,
    GREY,
    NOTE,
    Points,
    Values,
    add_band,
    add_reference,
    bar_look,
    finish,
    gantt,
    hover,
    line_look,
    panels,
    pattern,
)
from moelab.viz.plotly_json import Figure
from moelab.zipmoe.entropy import FORMATS, entropy, marginals

READS = "disk", "link"  # resources that experts are read from, or sent over


def budget_curve(
    curves: Mapping[str, Sequence[Sequence[float]]],
    ceiling: Sequence[Sequence[float]] = (),
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
    scale, unit = _unit(point[0] for points in curves.values() for point in points)
    figure, (upper, lower) = panels(
        [""] * 2,
        1,
        f"memory for experts ({unit})",
        shared_xaxes=True,
        vertical_spacing=0.07,
        row_heights=[0.55, 0.45],
    )
    halves = (upper, 1, 1e3, "ms"), (lower, 2, 100, "%")
    add = partial(_add_half, figure, scale, unit)
    optimum = {"mode": "lines", "line": {"color": theme.BLACK, "width": 3, "dash": "solid"}}
    looks = [(name, of, line_look(i)) for i, (name, of) in enumerate(curves.items())]
    for name, points, look in [*looks, ("Belady, whole experts", ceiling, optimum)]:
        for half in halves if points else ():
            add(name, sorted(points), half, **look)
    grey = {"color": GREY, "width": 2}
    for i, (name, points) in enumerate((limits or {}).items()):
        dash = ("dot", "dashdot", "longdash")[i % 3]
        add(f"limit: {name}", sorted(points), halves[0], mode="lines", line=grey | {"dash": dash})
    if most_hits:
        hits = [(size, 0, share) for size, share in sorted(most_hits)]
        look = {"mode": "lines", "line": grey | {"dash": "longdashdot"}}
        add("limit: hits of any cache", hits, halves[1], **look)
    star = {"symbol": "star", "size": 15, "color": theme.VERMILLION, "line": EDGE}
    for half in halves if measured else ():
        names = [name for name, _ in measured]
        add("measured", [of for _, of in measured], half, mode="markers", text=names, marker=star)
    if target is not None:
        note = {"annotation_position": "top right", "annotation_font": NOTE}
        dotted = DASHED | {"dash": "dot"}
        figure.add_hline(y=1e3 * target[0], line=dotted, annotation_text=target[1], **note, **upper)
    _add_marks(figure, marks or {}, scale)
    figure.update_yaxes(title="TPOT (ms)", **upper)
    figure.update_yaxes(title="hit rate (%)", range=[0, 104], **lower)
    return finish(figure, legend="policies: simulated", height=560)


def _add_half(
    figure: Figure,
    scale: float,
    unit: str,
    name: str,
    points: Sequence[Sequence[float]],
    half: tuple[Mapping[str, int], int, float, str],
    **look: Any,
) -> None:
    """A series in one panel of the budget curve: (where it is, which number of a point, its factor,
    its unit)."""
    at, place, factor, what = half
    figure.add_scatter(
        x=[point[0] / scale for point in points],
        y=[factor * point[place] for point in points],
        name=name,
        hovertemplate=hover("%{x:.2f} " + unit + ": %{y:.1f} " + what, name),
        **look,
        **at,
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
    shift = 0
    below = -np.inf
    for name, tokens in sorted((capacities or {}).items(), key=lambda item: item[1]):
        shift = (
            shift + 12 if tokens - below < 0.05 * high.max() else 0
        )  # labels that would overlap move up
        add_reference(figure, tokens, f"{name}: {tokens:.0f}", shift=shift)
        below = tokens
    return finish(figure, "popularity rank of the expert (0 = busiest)", "tokens in a chunk")


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


def token_timeline(runs: Mapping[str, Sequence[Event]]) -> Figure:
    """One token in each mode, measured: {mode: the events of one token}; numbers in bars are
    layers."""
    return gantt(
        {
            mode: [
                e._replace(
                    resource="copy" if e.resource in READS else e.resource, kind=kind_of(e, events)
                )
                for e in events
                if e.resource in (*READS, "compute")
            ]
            for mode, events in runs.items()
        },
        "layers",
        "measured",
    )


def kind_of(event: Event, events: Sequence[Event]) -> str:
    """The kind of an event; a read that begins before its layer's router ends is a prefetch."""
    if event.resource not in READS:
        return event.kind
    routed = min(
        (e.end for e in events if e.kind == "other" and e.layer == event.layer), default=event.start
    )
    return AHEAD if event.start < routed else "read"


def _unit(sizes: Iterable[float]) -> tuple[float, str]:
    """Bytes of the unit in which the largest size reads well, and its name."""
    return (1e9, "GB") if max(sizes, default=0) >= 0.5e9 else (1e6, "MB")
