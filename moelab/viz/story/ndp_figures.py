"""Figures of GPU-NDP: speedups by number of units, the balance conditions, agreement, design
space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from moelab.ndp.fit import CLAIMS
from moelab.ndp.sweep import SHORT, Spread, Sweep
from moelab.viz import theme
from moelab.viz.charts import (
    add_points,
    bars,
    finish,
    hover,
    interval,
    line_look,
    lines,
    panels,
    point_look,
)
from moelab.viz.plotly_json import Figure

SEEN = "modelled<br>whiskers: seeds"


def speedups(
    sweep: Sweep,
    systems: Mapping[str, str],
    over: str,
    what: str,
    *,
    columns: int = 2,
    means: Mapping[str, Spread] | None = None,
    title: str = "speedup over MoNDE (×)",
) -> Figure:
    """`bars` of a sweep, a panel a model: how much faster systems are, by number of units; whiskers
    run over the seeds.

    systems : label → name. over, what : as in `Sweep.gain`.
    means : name of a claim → (mean, least, most) over the seeds, for a panel "all" with these and
    the paper's."""
    panels = {
        SHORT[model]: {
            label: {str(N): sweep.gain(model, N, name, over, what) for N in sweep.units}
            for label, name in systems.items()
        }
        for model in sweep.models
    }
    paper = None
    if means:
        of = {label: f"{what.removeprefix('moe_')} {name}" for label, name in systems.items()}
        panels["all"] = {label: {"mean": means[claim]} for label, claim in of.items()}
        paper = {"all": {label: {"mean": [CLAIMS[claim].value]} for label, claim in of.items()}}
    return bars(
        panels, title, "NDP-DIMMs N", columns=columns, paper=paper, line=(1, over), kind=SEEN
    )


def by_phase(
    sweep: Sweep, model: str, label: str, system: str, means: Mapping[str, Spread]
) -> Figure:
    """`bars` of one model's experts over MoNDE, a panel a phase, with its mean and the paper's;
    Fig. 8.

    means : phase → (mean, least, most) of all units.
    """
    name = SHORT[model].split("-")[0]
    return bars(
        {
            phase: {
                label: {
                    str(N): sweep.gain(model, N, system, "MoNDE", f"moe_{phase}")
                    for N in sweep.units
                }
                | {"mean": mean}
            }
            for phase, mean in means.items()
        },
        "speedup over MoNDE (×)",
        "NDP-DIMMs N",
        line=(1, "MoNDE"),
        kind=SEEN,
        paper={phase: {label: {"mean": [CLAIMS[f"{name} {phase}"].value]}} for phase in means},
    )


def improvements(sweep: Sweep, systems: Sequence[str], phases: Mapping[str, str]) -> Figure:
    """`bars` of what the second of two systems gains over the first, a panel a phase: title →
    property of `Result`."""
    old, new = systems
    return bars(
        {
            title: {
                SHORT[model]: {str(N): sweep.gain(model, N, new, old, what) for N in sweep.units}
                for model in sweep.models
            }
            for title, what in phases.items()
        },
        "literal ÷ improved (×)",
        "NDP-DIMMs N",
        line=(1, "literal"),
        kind=SEEN,
    )


def additions(sweep: Sweep, systems: Mapping[str, str], over: str) -> Figure:
    """`lines` of what systems add to another one's decoding by number of units, a panel a model."""
    gained = {
        SHORT[model]: {
            label: [
                (N, gain[0])
                for N in sweep.units
                if (gain := sweep.gain(model, N, name, over, "moe_decode"))
            ]
            for label, name in systems.items()
        }
        for model in sweep.models
    }
    return lines(gained, "speedup over +TP alone (×)", "NDP-DIMMs N")


def machines(found: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Figure:
    """`lines` of seconds of a decode step, a panel a model, a line a machine: {model: {machine:
    {units: seconds}}}."""
    return lines(
        {
            SHORT[model]: {
                machine: [(N, 1e3 * seconds) for N, seconds in of.items()]
                for machine, of in by_machine.items()
            }
            for model, by_machine in found.items()
        },
        "decode step (ms)",
        "units N",
        log="xy",
    )


def balance(
    groups: Mapping[str, Mapping[str, tuple[ArrayLike, ArrayLike]]],
    solutions: Mapping[str, Mapping[str, tuple[float, float]]],
) -> Figure:
    """Both sides of a balance condition over the experts on the GPU, with its solutions, modelled;
    Eqs. 1 to 3.

    groups : {panel: {side: (experts, seconds)}}; NaN breaks a line. solutions : {panel: {what:
    (experts, seconds)}}."""
    figure, places = panels(
        groups, x="experts on the GPU", y="time of a layer's experts (ms)", horizontal_spacing=0.07
    )
    names = list(dict.fromkeys(name for of in groups.values() for name in of))
    marks = list(dict.fromkeys(name for of in solutions.values() for name in of))
    text = "%{x:.3f} experts: %{y:.3f} ms"
    for at, (panel, of) in zip(places, groups.items()):
        for name, (x, y) in of.items():
            add_points(
                figure,
                list(zip(x, 1e3 * np.asarray(y, dtype=float))),
                name,
                0,
                text,
                mode="lines",
                line=line_look(names.index(name))["line"],
                **at,
            )
        for name, (x, y) in solutions.get(panel, {}).items():
            i = marks.index(name)
            add_points(
                figure,
                [(x, 1e3 * y)],
                name,
                0,
                text,
                marker=point_look(len(names) + i, 15 - 3 * i),
                **at,
            )
    return finish(
        figure.update_xaxes(rangemode="tozero"),
        legend="modelled",
        height=440,
        legend_x=0,
        legend_y=-0.2,
        legend_orientation="h",
        margin_b=130,
    )


def agreement(
    groups: Mapping[str, Mapping[str, Spread]],
    bands: Mapping[str, tuple[float, float]],
    tolerance: float = 0.1,
) -> Figure:
    """How far from published figures: {group: {figure: (relative error, least, most over the
    seeds)}}.

    bands : figure → least and most relative error of all readings that fit, an open bar. Points
        outside the grey area of ± `tolerance` are labelled with their distance.
    """
    figure = Figure()
    wide = 100 * tolerance
    figure.add_shape(
        type="rect",
        x0=-wide,
        x1=wide,
        xref="x",
        y0=0,
        y1=1,
        yref="y domain",
        fillcolor="rgba(85,85,85,0.15)",
        line_width=0,
    )
    figure.add_vline(x=0, line={"color": theme.BLACK, "width": 1})
    low, high = 100 * np.array(list(bands.values()), float).reshape(-1, 2).T
    figure.add_bar(
        x=high - low,
        base=low,
        y=list(bands),
        orientation="h",
        width=0.55,
        name="all readings that fit",
        marker={"color": "white", "line": {"color": theme.BLACK, "width": 1}},
        customdata=high,
        hovertemplate=hover("%{y}: %{base:+.1f} to %{customdata:+.1f} %", "all that fit"),
    )
    figures = [name for rows in groups.values() for name in rows]
    for i, (group, rows) in enumerate(groups.items()):
        value, low, high = 100 * np.array(list(rows.values()), float).T
        add_points(
            figure,
            list(zip(value, rows)),
            group,
            i,
            "%{y}: %{x:+.1f} %",
            mode="markers+text",
            textposition="top center",
            text=[f"{v:+.0f} %" if abs(v) > wide else "" for v in value],
            error_x=interval(value, low, high, color="#333333"),
        )
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=figures)
    return finish(
        figure,
        "modelled against published (%)",
        legend=f"modelled<br>grey: ±{wide:g} %<br>whiskers: seeds",
        height=130 + 32 * len(figures),
        margin_l=220,
    )
