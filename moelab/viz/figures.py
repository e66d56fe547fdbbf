"""Figures that are more than one chart of `moelab.viz.charts`: what memory buys, what takes it,
the timeline of a token.

Sizes come in bytes and are drawn in the largest unit of which there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from plotly.graph_objects import Figure

from moelab.base.specs import Event
from moelab.base.table import unit_of
from moelab.viz.charts import (
    AHEAD,
    DASHED,
    EDGE,
    LOOKS,
    Values,
    bar_look,
    finish,
    hover,
    line_look,
    panels,
)

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
    unit, scale = unit_of(max(point[0] for points in curves.values() for point in points), "B")
    every = {
        name: np.array([point[:3] for point in sorted(of)]).T
        for name, of in {**curves, BELADY: optimum}.items()
        if of
    }
    shown = {"TPOT (ms)": (1, 1e3), "hit rate (%)": (2, 100)}
    figure, places = panels(shown, 1, f"memory for experts ({unit})", vertical_spacing=0.1)
    for place, (column, factor) in zip(places, shown.values()):
        for i, (name, points) in enumerate(every.items()):
            figure.add_scatter(
                x=points[0] / scale,
                y=factor * points[column],
                name=name,
                hovertemplate=hover("%{x:g}: %{y:.3g}", name),
                **line_look(i) | (LOOKS["optimum"] if name == BELADY else {}),
                **place,
            )
    finish(figure, legend="policies: simulated", height=560, margin_t=64)
    figure.update_annotations(x=0, xanchor="left")
    for i, (name, memory) in enumerate((marks or {}).items()):
        figure.add_vline(x=memory / scale, line=DASHED)
        figure.add_annotation(
            LOOKS["mark"],
            x=memory / scale,
            yshift=16 + 13 * (i % 2),  # above the title; neighbours may be close
            text=name,
        )
    figure.update_xaxes(matches="x2", showticklabels=False, row=1)
    return figure.update_yaxes(range=[0, 104], row=2)


def memory_bar(parts: Values, on_disk: str) -> Figure:
    """What takes memory, {part: bytes}, stacked; the part `on_disk`, which is not in memory, is
    hatched."""
    unit, scale = unit_of(sum(parts.values()), "B")
    figure = Figure()
    for i, (name, nbytes) in enumerate(parts.items()):
        figure.add_bar(
            y=["memory"],
            x=[nbytes / scale],
            name=f"{name}: {nbytes / scale:.3g} {unit}",
            orientation="h",
            marker=(LOOKS["on_disk"] if name == on_disk else bar_look(i)) | {"line": EDGE},
            hovertemplate=hover("%{x:.3g} " + unit, name),
        )
    return finish(figure, f"memory ({unit})", legend="exact", **LOOKS["memory"])


def kind_of(event: Event, events: Sequence[Event]) -> str:
    """The kind of an event; a read that begins before its layer's router ends is a prefetch."""
    if event.resource not in READS:
        return event.kind
    routed = min(
        (e.end for e in events if e.kind == "other" and e.layer == event.layer), default=event.start
    )
    return AHEAD if event.start < routed else "read"
