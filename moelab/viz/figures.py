"""Figures that are more than one chart of `moelab.viz.charts`: what memory buys, what takes it,
the load of a chunk, the bits of a tensor, one token's timeline.

Sizes come in bytes and are drawn in GB of 10⁹ bytes, or in MB."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from moelab.specs import Event
from moelab.viz import theme
from moelab.viz.charts import (
    AHEAD,
    DASHED,
    EDGE,
    NOTE,
    Values,
    bar_look,
    finish,
    gantt,
    hover,
    label_right,
    line_look,
    lines,
    panels,
    pattern,
)
from moelab.viz.plotly_json import Figure
from moelab.zipmoe.entropy import FORMATS, entropy, marginals

READS = "disk", "link"  # resources that experts are read from, or sent over


def budget_curve(
    curves: Mapping[str, Sequence[Sequence[float]]],
    optimum: Sequence[Sequence[float]] = (),
    marks: Values | None = None,
    measured: Sequence[tuple[str, Sequence[float]]] = (),
    target: tuple[float, str] | None = None,
) -> Figure:
    """TPOT and hit rate against the memory for experts, simulated, a line a policy.

    curves : {policy: [(bytes, TPOT in seconds, hit rate from 0 to 1, …), …]}. optimum : the same of
        Belady's rule. marks : {name: bytes}, vertical lines. measured : [(policy, as of `curves`),
        …], points. target : (seconds, what it is), a horizontal line.
    """
    scale, unit = _unit(point[0] for points in curves.values() for point in points)
    drawn = {name: sorted(points) for name, points in curves.items()}
    best = {"Belady, whole experts": sorted(optimum)} if optimum else {}
    stars = {"measured": [point for _, point in measured]} if measured else {}
    shown = {
        title: {
            name: [(point[0] / scale, factor * point[place]) for point in points]
            for name, points in (drawn | best | stars).items()
        }
        for place, factor, title in ((1, 1e3, "TPOT (ms)"), (2, 100, "hit rate (%)"))
    }
    figure = lines(
        shown, dict(zip(shown, shown)), f"memory for experts ({unit})", kind="policies: simulated"
    )
    for trace in figure.traces:
        if trace["name"] in best:
            look = {"width": 3, "color": theme.BLACK, "dash": "solid"}
            trace |= {"mode": "lines", "line": look}
        if trace["name"] in stars:
            star = {"symbol": "star", "size": 15, "color": theme.VERMILLION, "line": EDGE}
            trace |= {"mode": "markers", "text": [name for name, _ in measured], "marker": star}
    upper = {"row": 1, "col": 1}
    if target is not None:
        note = {"annotation_position": "top right", "annotation_font": NOTE}
        dotted = DASHED | {"dash": "dot"}
        figure.add_hline(y=1e3 * target[0], line=dotted, annotation_text=target[1], **note, **upper)
    for i, (name, memory) in enumerate((marks or {}).items()):
        figure.add_vline(x=memory / scale, line=DASHED)
        look = {"yref": "paper", "yanchor": "bottom", "yshift": 13 * (i % 2), "font": NOTE}
        # neighbours may be close
        figure.add_annotation(x=memory / scale, y=1, text=name, showarrow=False, **look)
    return figure.update_yaxes(range=[0, 104], row=2).update_layout(height=560)


def memory_bar(parts: Values, on_disk: str) -> Figure:
    """What takes memory, {part: bytes}, stacked; a line where memory ends and the part `on_disk`
    begins, hatched."""
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
    end = sum(nbytes for name, nbytes in parts.items() if name != on_disk) / scale
    look = {"yref": "paper", "yanchor": "bottom", "showarrow": False, "font": NOTE}
    figure.add_vline(x=end, line={"color": theme.BLACK, "width": 3})
    figure.add_annotation(x=end, y=1, text=f"in memory: {end:.3g} {unit}", **look)
    figure.update_yaxes(showgrid=False, showticklabels=False)
    finish(figure, f"memory ({unit})", legend="exact", barmode="stack", height=250)
    return figure.update_layout(legend_traceorder="normal")


def load_distribution(loads: ArrayLike, capacities: Values | None = None) -> Figure:
    """Tokens of each expert of one layer in a chunk, `loads` [chunks, E], busiest expert first.

    Bands: all chunks, and the middle half of them; line: the median; `capacities` are drawn across.
    """
    loads = np.asarray(loads)
    order = np.argsort(-loads.mean(0), kind="stable")
    low, q1, median, q3, high = np.quantile(loads[:, order], [0, 0.25, 0.5, 0.75, 1], axis=0)
    ranks = np.arange(loads.shape[1])
    figure = Figure()
    bands = {"all chunks": (low, high, 0.25), "middle half of the chunks": (q1, q3, 0.5)}
    for name, (below, above, opacity) in bands.items():
        figure.add_scatter(
            x=np.r_[ranks, ranks[::-1]],
            y=np.r_[above, below[::-1]],
            fill="toself",
            name=name,
            mode="lines",
            line={"width": 0},
            fillcolor=f"rgba(0,114,178,{opacity})",  # blue
            hoverinfo="skip",
        )
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
        # labels that would overlap move up
        shift = shift + 12 if tokens - below < 0.05 * high.max() else 0
        figure.add_hline(y=tokens, line=DASHED)
        label_right(figure, tokens, f"{name}: {tokens:.0f}", shift)
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
    used = np.flatnonzero(fields[1])
    first, end = (used[0], used[-1] + 1) if len(used) else (0, len(fields[1]))
    exponents = np.arange(first, end) - len(fields[1]) // 2 + 1
    shown = (("+", "−"), fields[0]), (exponents, fields[1][first:end]), (None, fields[2])
    figure, places = panels(titles, y="share of weights (%)", column_widths=[0.2, 0.4, 0.4])
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
