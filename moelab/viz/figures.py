"""Figures that are more than one chart of `moelab.viz.charts`: what memory buys, what takes it,
the load of a chunk, the bits of a tensor, one token's timeline.

Sizes come in bytes and are drawn in GB of 10⁹ bytes, or in MB."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from plotly.graph_objects import Figure

from moelab.base.specs import Event
from moelab.viz import theme
from moelab.viz.charts import (
    AHEAD,
    DASHED,
    EDGE,
    NOTE,
    Values,
    bar_look,
    finish,
    hover,
    lines,
    panels,
    pattern,
)
from moelab.zipmoe.entropy import FORMATS, entropy, marginals

BELADY = "Belady, whole experts"
READS = "disk", "link"  # resources that experts are read from, or sent over


def budget_curve(
    curves: Mapping[str, Sequence[Sequence[float]]],
    optimum: Sequence[Sequence[float]] = (),
    marks: Values | None = None,
) -> Figure:
    """TPOT and hit rate against the memory for experts, simulated, a line a policy.

    curves : {policy: [(bytes, TPOT in seconds, hit rate from 0 to 1, …), …]}. optimum : the same of
        Belady's rule. marks : {name: bytes}, vertical lines.
    """
    scale, unit = _unit(point[0] for points in curves.values() for point in points)
    every = {name: sorted(of) for name, of in {**curves, BELADY: optimum}.items() if of}
    figure = lines(
        {
            title: {n: [(of[0] / scale, factor * of[i]) for of in every[n]] for n in every}
            for i, factor, title in ((1, 1e3, "TPOT (ms)"), (2, 100, "hit rate (%)"))
        },
        "",
        f"memory for experts ({unit})",
        columns=1,
        kind="policies: simulated",
        height=560,
        margin_t=64,
    ).update_annotations(x=0, xanchor="left")
    thick = {"width": 3, "color": theme.BLACK, "dash": "solid"}
    figure.update_traces(mode="lines", line=thick, selector={"name": BELADY})
    for i, (name, memory) in enumerate((marks or {}).items()):
        figure.add_vline(x=memory / scale, line=DASHED)
        figure.add_annotation(
            x=memory / scale,
            y=1,
            yref="paper",
            yanchor="bottom",
            yshift=16 + 13 * (i % 2),  # above the title; neighbours may be close
            text=name,
            font=NOTE,
            showarrow=False,
        )
    figure.update_xaxes(matches="x2", showticklabels=False, row=1)
    return figure.update_yaxes(range=[0, 104], row=2)


def memory_bar(parts: Values, on_disk: str) -> Figure:
    """What takes memory, {part: bytes}, stacked; the part `on_disk`, which is not in memory, is
    hatched."""
    scale, unit = _unit([sum(parts.values())])
    grey = {"color": "#d0d0d0", "pattern": pattern("x", "#888888", size=6)}
    figure = Figure()
    for i, (name, nbytes) in enumerate(parts.items()):
        figure.add_bar(
            y=["memory"],
            x=[nbytes / scale],
            name=f"{name}: {nbytes / scale:.3g} {unit}",
            orientation="h",
            marker=(grey if name == on_disk else bar_look(i)) | {"line": EDGE},
            hovertemplate=hover("%{x:.3g} " + unit, name),
        )
    figure.update_yaxes(showgrid=False, showticklabels=False)
    finish(figure, f"memory ({unit})", legend="exact", barmode="stack", height=250)
    return figure.update_layout(legend_traceorder="normal")


def microscope(counts: np.ndarray, dtype: str = "BF16") -> Figure:
    """The bits of a tensor, from its joint histogram [65536]: signs, exponents and mantissas with
    their entropy."""
    fields = marginals(counts, dtype)
    _, e, m = FORMATS[dtype]
    titles = [
        f"{name}: {entropy(values):.3f} of {bits} bit{'s' * (bits > 1)}"
        for name, values, bits in zip(("sign", "exponent", "mantissa"), fields, (1, e, m))
    ]
    used = np.flatnonzero(fields[1])
    first, end = (used[0], used[-1] + 1) if len(used) else (0, len(fields[1]))
    exponents = np.arange(first, end) - len(fields[1]) // 2 + 1
    shown = (("+", "−"), fields[0]), (exponents, fields[1][first:end]), (None, fields[2])
    figure, places = panels(titles, y="share of weights (%)", column_widths=(0.2, 0.4, 0.4))
    names = "sign of the weight", "exponent (power of two)", "mantissa bits"
    for at, (x, values), name in zip(places, shown, names):
        figure.add_bar(
            x=np.arange(len(values)) if x is None else x,
            y=100 * values / max(counts.sum(), 1),
            marker=bar_look(0),
            hovertemplate="%{x}: %{y:.2f} %<extra></extra>",
            **at,
        )
        figure.update_xaxes(title=name, showgrid=False, **at)
    return finish(figure, showlegend=False, bargap=0.05, height=320)


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
