"""Figures of experts: padding, dropping, tiers, executors, selective loading, exchange and balance
between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from moelab.bench.static import NO_EXPERTS, DropCosts, Ran
from moelab.static.blocks import Padding
from moelab.viz import theme
from moelab.viz.figures import (
    DASHED,
    EDGE,
    NOTE,
    Points,
    Values,
    add_lines,
    add_points,
    add_ranges,
    bar_look,
    differences,
    finish,
    hover,
    line_look,
    panels,
    power_ticks,
    quantiles,
    whole_steps,
)
from moelab.viz.plotly_json import Figure


def padding(series: Mapping[str, Points]) -> Figure:
    """Padded share of the computed slots against the block size: {skew: [(B, 0 to 1), …]}."""
    lines = {
        name: [(B, 100 * share) for B, share in sorted(points)] for name, points in series.items()
    }
    figure = add_lines(Figure(), lines, "B = %{x}: %{y:.1f} % padding")
    power_ticks(figure, [B for points in series.values() for B, _ in points])
    return finish(
        figure,
        "block size B (tokens, log scale)",
        "padding (% of the computed slots)",
        "exact",
        yaxis_range=[0, 102],
    )


def block_sizes(made: Mapping[int, Padding]) -> Figure:
    """`padding` of one routing, by block size: of the filled blocks, and of all that are
    provided."""
    return padding(
        {
            "filled blocks": [(B, 1 - p.pairs / (p.needed * B)) for B, p in made.items()],
            "all N blocks": [(B, p.padded / p.slots) for B, p in made.items()],
        }
    )


def dropping(
    by_title: Mapping[str, Mapping[str, Sequence[tuple[float, float, float, float]]]],
) -> Figure:
    """What is dropped and what that costs: {vertical title: {series: [(capacity factor, value, low,
    high), …]}}."""
    figure, places = panels(
        [""] * len(by_title), 1, "capacity factor", shared_xaxes=True, vertical_spacing=0.06
    )
    names = list(dict.fromkeys(name for of in by_title.values() for name in of))
    for at, (title, of) in zip(places, by_title.items()):
        add_lines(
            figure,
            {name: sorted(points) for name, points in of.items()},
            "%{x:g}: %{y:.1f}",
            names,
            **at,
        )
        figure.update_yaxes(title=title, **at)
    return finish(figure, legend="measured", height=140 + 190 * len(by_title))


def capacity(costs: DropCosts) -> Figure:
    """`dropping` of ways named by their capacity factor, e.g. of
    `moelab.bench.static.capacity_factors`."""
    tasks = [task for task in costs.scores if task != "loss"]

    def over_factors(
        values: Callable[[str], Sequence[float]],
    ) -> list[tuple[float, float, float, float]]:
        return [(float(way), *values(way)) for way in costs.tallies]

    return dropping(
        {
            "of choices or slots (%)": {
                "dropped": over_factors(lambda way: [100 * costs.tally(way).drop_rate] * 3),
                "padding": over_factors(lambda way: [100 * costs.tally(way).padded_fraction] * 3),
            },
            "language loss (% more)": {"language loss": over_factors(costs.loss)},
            "right answers<br>(points, difference)": {
                task: over_factors(lambda way, task=task: costs.points(task, way)) for task in tasks
            },
        }
    )


def drop_orders(costs: DropCosts) -> Figure:
    """What each order of dropping costs in language loss and right answers; no experts at all in
    the latter only."""
    tasks = [task for task in costs.scores if task != "loss"]
    loss = {way: costs.loss(way) for way in costs.tallies if way != NO_EXPERTS}
    return differences(
        {"language loss": loss}
        | {task: {way: costs.points(task, way) for way in costs.tallies} for task in tasks},
        {"language loss": "% more"} | dict.fromkeys(tasks, "points"),
    )


def plans(ran: Mapping[str, Ran], paper: Mapping[str, tuple[float, float]]) -> Figure:
    """Dropped choices and padded slots of every layer, a line a way of running tiers but the
    literal, which drop most.

    paper : {name: (dropped, padded)}, published averages from 0 to 1, drawn across.
    """
    figure, places = panels([""] * 2, 1, "MoE layer", shared_xaxes=True, vertical_spacing=0.07)
    shown = {name: of.by_layer for name, of in ran.items() if "literal" not in name}
    dropped = {
        name: [layer.drop_rate for layer in of]
        for name, of in shown.items()
        if not name.endswith("pad")
    }
    padded = {name: [layer.padded_fraction for layer in of] for name, of in shown.items()}
    for row, (at, values) in enumerate(zip(places, (dropped, padded))):
        add_lines(
            figure,
            {name: [(l, 100 * share) for l, share in enumerate(of)] for name, of in values.items()},
            "layer %{x}: %{y:.1f} %",
            shown,
            **at,
        )
        for i, (name, pair) in enumerate(paper.items()):
            figure.add_hline(
                y=100 * pair[row],
                **at,
                annotation_text=f"paper, {name}",
                line=DASHED | {"dash": ("dot", "dash", "dashdot", "longdash")[i % 4]},
                annotation_position="top left" if i % 2 else "top right",
                annotation_font=NOTE,
            )
        figure.update_yaxes(title=("dropped (% of choices)", "padding (% of slots)")[row], **at)
    figure.update_xaxes(dtick=whole_steps(max(map(len, padded.values()), default=1)))
    return finish(figure, legend="plan (exact)", height=540)


def executors(
    found: Mapping[str, Mapping[str, Sequence[float]]], limits: Mapping[str, Values]
) -> Figure:
    """Time of each executor, a panel a phase: {"prefill, 512 tokens": {executor: its samples, s}};
    whiskers: p10, p90.

    limits : {panel: {what limits: seconds}}, lines that no executor can be left of.
    """
    names = list(dict.fromkeys(name for of in found.values() for name in of))
    figure, places = panels(found, shared_yaxes=True, horizontal_spacing=0.08)
    for at, (panel, of) in zip(places, found.items()):
        add_ranges(
            figure,
            {name: quantiles(samples) for name, samples in of.items()},
            panel,
            "%{y}: %{x:.2f} ms",
            **at,
        )
        for i, (name, seconds) in enumerate(limits.get(panel, {}).items()):
            label = f"{panel.split(',')[0]}: {name}, {1e3 * seconds:.2g} ms"
            figure.add_scatter(
                x=[1e3 * seconds] * len(names),
                y=names,
                mode="lines",
                name=label,
                **at,
                line={
                    "color": theme.VERMILLION,
                    "dash": ("dash", "dot", "dashdot")[i % 3],
                    "width": 2,
                },
                hovertemplate=hover("", label),
            )
    figure.update_xaxes(type="log", dtick=1)
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1])
    return finish(
        figure,
        "time of a layer's experts (ms)",
        height=210 + 34 * len(names),
        margin_l=130,
        legend_yref="container",
        legend_y=0,
        legend_yanchor="bottom",
        margin_b=110,
    )


def selective(measured: Mapping[str, Points], expected: Mapping[str, Points], E: int) -> Figure:
    """Unique experts of a step against the batch size, measured as points and expected as lines.

    measured, expected : {series: [(batch, unique experts), …]}. E : drawn across.
    """
    figure = add_lines(
        Figure(),
        {name: sorted(points) for name, points in expected.items()},
        "batch %{x}: %{y:.1f} experts",
        ["", *expected],
        mode="lines",
    )  # "": the measured points' look
    for i, (name, points) in enumerate(measured.items()):
        add_points(figure, points, name, i, "batch %{x}: %{y:.1f} experts")
    figure.add_hline(y=E, line=DASHED, annotation_text=f"all {E}", annotation_font=NOTE)
    power_ticks(
        figure, [x for points in (*measured.values(), *expected.values()) for x, _ in points]
    )
    return finish(
        figure,
        "sequences in the batch (tokens a step, log scale)",
        "experts needed (of a layer)",
        "",
        yaxis_range=[0, 1.08 * E],
    )


def volumes(
    formula: Mapping[str, Points],
    measured: Mapping[str, Points],
    title: str = "sent and received (bytes a token)",
) -> Figure:
    """Bytes that each way of parallel execution exchanges, by formula as lines: {way: [(ranks,
    bytes), …]}."""
    figure = Figure()
    for i, way in enumerate(dict.fromkeys([*formula, *measured])):
        for what, of, look in (
            ("formula", formula, {"mode": "lines", "line": line_look(i)["line"]}),
            ("measured", measured, {}),
        ):
            if way in of:
                add_points(
                    figure, sorted(of[way]), f"{way}: {what}", i, "%{x} ranks: %{y:,.0f}", **look
                )
    power_ticks(
        figure, [x for points in (*formula.values(), *measured.values()) for x, _ in points]
    )
    return finish(figure, "ranks (processes, log scale)", title, "")


def balance(loads: Mapping[str, ArrayLike]) -> Figure:
    """Load of every rank relative to the mean, a group of bars a placement: {"no spare experts": [N
    ranks]}."""
    figure = Figure()
    for i, (name, of) in enumerate(loads.items()):
        share = np.asarray(of, dtype=float) / np.mean(np.asarray(of, dtype=float))
        figure.add_bar(
            x=np.arange(len(share)),
            y=share,
            name=f"{name}: max/mean {share.max():.3f}",
            hovertemplate=hover("rank %{x}: %{y:.3f} of the mean", name),
            marker=bar_look(i) | {"line": EDGE},
        )
    figure.add_hline(y=1, line=DASHED).update_xaxes(dtick=1, showgrid=False)
    return finish(
        figure, "rank", "load (× the mean of the ranks)", "exact", barmode="group", bargap=0.2
    )
