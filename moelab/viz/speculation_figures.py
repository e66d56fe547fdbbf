"""Figures of speculation: signals and recall by layer, training, time, and the timeline of a token.

A layer on an axis, "0→1", is the one that predicts and the one that is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import ArrayLike

from moelab.bench.predictors import Learned
from moelab.bench.prefetch import ARMS, Taken, hideable
from moelab.bench.prefetch import by_layer as by_layers
from moelab.evaluation.intervals import Interval, interval
from moelab.evaluation.predictors import Score
from moelab.specs import Event
from moelab.viz import theme
from moelab.viz.engine_figures import AHEAD, gantt
from moelab.viz.figures import (
    DASHED,
    EDGE,
    NOTE,
    Values,
    add_lines,
    bars,
    differences,
    finish,
    hover,
    label_ends,
    line_look,
    panels,
    quantiles,
)
from moelab.viz.plotly_json import Figure

READS = "disk", "link"  # resources that experts are read from, or sent over

#: predictor of `moelab.bench.predictors` → how figures call it
LABEL = {
    "router": "next router on s",
    "quasi": "next router on q",
    "frequency": "frequent in the prompt",
    "previous": "previous token",
    "static": "popular",
    "random": "random",
    "residual": "residual estimator",
    "residual_hybrid": "residual hybrid",
    "estimator": "appendix A",
    "estimator_early": "appendix A, a quarter",
    "hybrid_early": "hybrid of the quarter",
}


def by_layer(
    groups: Mapping[str, Mapping[str, ArrayLike]],
    title: str,
    *,
    errors: Mapping[str, Mapping[str, ArrayLike]] | None = None,
    chance: float | None = None,
    percent: bool = True,
) -> Figure:
    """Values by predicting layer, a line a series, panels side by side with a common scale (Figs.
    3, 4, 5 and 10).

    groups : {panel: {series: [L − 1]}}, NaN where there is nothing; the last panel has all series,
        named at their ends.
    title : of the vertical axis.
    errors : of the same shape, half of each error bar (`Score.margin`); series without have none.
    chance : a dashed line across. percent : values from 0 to 1 are drawn in per cent.
    """
    scale, names = (
        100 if percent else 1,
        list(dict.fromkeys(name for of in groups.values() for name in of)),
    )
    figure, places = panels(
        groups, x="layer → layer", y=title, shared_yaxes=True, horizontal_spacing=0.03
    )
    for at, (panel, series) in zip(places, groups.items()):
        for name, values in series.items():
            error = (errors or {}).get(panel, {}).get(name)
            figure.add_scatter(
                x=[f"{l}→{l + 1}" for l in range(len(values))],
                y=scale * np.asarray(values, dtype=float),
                name=name,
                error_y=None
                if error is None
                else {
                    "array": scale * np.asarray(error, dtype=float),
                    "thickness": 1.2,
                    "width": 3,
                },
                hovertemplate=hover("layer %{x}: %{y:.2f}" + " %" * percent, name),
                **line_look(names.index(name)),
                **at,
            )
        if chance is not None:
            figure.add_hline(y=scale * chance, line=DASHED, **at)
    if chance is not None:
        figure.add_annotation(
            x=0,
            xref="paper",
            y=scale * chance,
            xanchor="left",
            yanchor="top",
            showarrow=False,
            text=f"chance: {scale * chance:.3g}" + " %" * percent,
            font=NOTE,
        )
    figure.update_xaxes(type="category", showgrid=False).update_yaxes(range=[0, scale * 1.02])
    return label_ends(finish(figure), scale, 400)


def recall(found: Mapping[str, Mapping[str, Score]], chance: float) -> Figure:
    """`by_layer` of scores, {panel: {predictor: score}}, with 95 % intervals over prompts; the last
    panel has all."""
    shares, errors = (
        {
            panel: {LABEL[name]: getattr(score, what) for name, score in of.items()}
            for panel, of in found.items()
        }
        for what in ("recall", "margin")
    )
    return by_layer(shares, "recall@K (%, exact counts)", errors=errors, chance=chance)


def learning_curves(learned: Learned) -> dict[str, list[tuple[float, ...]]]:
    """Of `training`: a line a kind of estimator, with intervals over seeds."""
    return {
        LABEL.get(kind, "appendix A"): [(n, *interval(rates)) for n, rates in of.items()]
        for kind, of in learned.items()
    }


def costs(
    found: Mapping[str, Mapping[str, Interval]], title: Mapping[str, str], limits: Values
) -> Figure:
    """`differences` of executing predictions; the controls' loss, which is off the scale, is left
    out."""
    controls = [] if len(found["loss"]) < 3 else list(found["loss"])[-2:]
    return differences(
        {
            task: {
                LABEL[name]: (np.nan,) * 3 if task == "loss" and name in controls else of
                for name, of in rows.items()
            }
            for task, rows in found.items()
        },
        title,
        limits,
    )


def told(costs: Mapping[str, Interval]) -> str:
    """Differences in per cent, in words."""
    return ", ".join(
        f"**{of[0]:+.2f} %** [{of[1]:+.2f}, {of[2]:+.2f}] ({LABEL[name]})"
        for name, of in costs.items()
    )


def misses(over: Mapping[float, Mapping[str, Interval]]) -> Figure:
    """Misses of policies over LRU's, {share of the experts: {policy: ratio}}, exact counts."""
    return differences(
        {
            f"memory for {share:.0%}": {
                name: tuple(100 * (x - 1) for x in of) for name, of in rows.items() if name != "LRU"
            }
            for share, rows in over.items()
        },
        "misses against LRU (%)",
    )


def training(series: Mapping[str, Sequence[tuple[float, ...]]], references: Values) -> Figure:
    """Recall against tokens trained on, measured: {estimator: [(tokens, 0 to 1), …]}, with low and
    high or without; Fig. 9.

    references : {name: 0 to 1}, what needs no training, drawn across.
    """
    lines = {
        name: [(tokens / 1e3, *(100 * rate for rate in rates)) for tokens, *rates in of]
        for name, of in series.items()
    }
    figure = add_lines(Figure(), lines, "%{x:.1f} thousand tokens: %{y:.1f} %")
    for i, (name, value) in enumerate(sorted(references.items(), key=lambda item: item[1])):
        figure.add_hline(
            y=100 * value,
            line=DASHED,
            annotation_text=f"{name}: {100 * value:.1f} %",
            annotation_position="top right" if i else "bottom right",  # neighbours may be close
            annotation_font=NOTE,
            annotation_yshift=12 * max(0, i - 1),
        )
    figure.update_xaxes(rangemode="tozero").update_yaxes(range=[0, 102])
    return finish(figure, "training tokens seen (thousands)", "recall@K (%)", "measured")


def tpot(found: Mapping[str, Mapping[str, Sequence[float]]], bounds: Values, title: str) -> Figure:
    """Median TPOT of each mode, measured: {setting: {mode: its samples, seconds}}; whiskers: p10,
    p90; Fig. 8.

    bounds : {setting: seconds}, the least that eq. (1) allows. title : of the horizontal axis, the
    settings."""
    modes = dict.fromkeys(mode for of in found.values() for mode in of)
    figure = bars(
        {
            "": {
                mode: {setting: quantiles(of[mode]) for setting, of in found.items() if mode in of}
                for mode in modes
            }
        },
        "TPOT (ms)",
        title,
        columns=1,
        kind="measured",
    )
    figure.add_scatter(
        x=list(bounds),
        y=[1e3 * value for value in bounds.values()],
        mode="markers",
        name="eq. (1): no less",
        hovertemplate=hover("%{x}: %{y:.2f} ms", "eq. (1)"),
        marker={"symbol": "line-ew", "size": 90, "color": theme.BLACK, "line": EDGE | {"width": 3}},
    )
    return figure.update_layout(scattermode="overlay")


def tpot_of(found: Mapping[float, Mapping[str, Sequence[Taken]]], title: str) -> Figure:
    """`tpot` of tokens, {setting: {mode: tokens}}, with what the layers of "copy, then compute"
    allow at the least."""
    serial = {f"{setting:g}": of[ARMS[0]] for setting, of in found.items()}
    return tpot(
        {
            f"{setting:g}": {arm: [one.seconds for one in taken] for arm, taken in of.items()}
            for setting, of in found.items()
        },
        {
            setting: fmean(one.seconds - hideable(by_layers(one)) for one in taken)
            for setting, taken in serial.items()
        },
        title,
    )


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
