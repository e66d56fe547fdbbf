"""The picture of a model that is larger than the machine, from what `moelab bench scale` has
printed last.

python -m moelab.viz.scale_figure results/bench/scale.json results/bench/scale.png
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moelab.files import atomic
from moelab.results import sections_of
from moelab.viz import theme
from moelab.viz.figures import Values, add_points, bar_look, finish, hover, panels, point_look
from moelab.viz.plotly_json import Figure


def beside_memory(
    conditions: Mapping[str, Any],
    rows: Mapping[str, Mapping[str, Any]],
    limits: Mapping[str, Values],
) -> Figure:
    """Two panels: the whole model in each form beside the machine's memory and what the process
    took of it; the mean time of a token on demand beside the limit of the same tokens. Arms that
    failed are left out; ValueError if all are."""
    names = sorted(limits, key=lambda name: -limits[name]["stored fraction"])
    if not names:
        raise ValueError(
            "no arm has run, so there is nothing to draw: "
            + "; ".join(f"{name}: {row['result']}" for name, row in rows.items())
        )
    figure, (left, right) = panels(
        ["the whole model", f"a token, executor {conditions['executor']}"],
        2,
        horizontal_spacing=0.14,
    )
    _add_sizes(figure, names, conditions, rows, limits, left)
    _add_times(figure, names, limits, right)
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(title="GB", **left)
    figure.update_yaxes(title="TPOT (ms)", **right)
    return finish(figure, height=460, width=900, bargap=0.3).update_layout(
        legend_y=1.1, margin={"t": 90}
    )


def _add_sizes(
    figure: Figure,
    names: Sequence[str],
    conditions: Mapping[str, Any],
    rows: Mapping[str, Mapping[str, Any]],
    limits: Mapping[str, Values],
    left: Mapping[str, Any],
) -> None:
    """The model in each form, the peak of the process, and the machine's memory."""
    others = limits[names[0]]["other weights GB"]
    sizes = {"bf16": others + conditions["experts in bf16 GB"]} | {
        name: others + conditions["experts in bf16 GB"] * limits[name]["stored fraction"]
        for name in names
    }
    figure.add_bar(
        x=list(sizes),
        y=list(sizes.values()),
        name="weights",
        marker=bar_look(0),
        cliponaxis=False,
        **left,
        text=[f"{size:.0f}" for size in sizes.values()],
        textposition="inside",
        insidetextanchor="start",
        hovertemplate=hover("%{x}: %{y:.1f} GB", "weights"),
    )
    figure.add_scatter(
        x=names,
        y=[rows[name]["peak GB"] for name in names],
        name="peak of the process",
        mode="markers",
        marker=point_look(1, 13),
        **left,
        hovertemplate=hover("%{x}: %{y:.1f} GB", "peak of the process"),
    )
    figure.add_scatter(
        x=list(sizes),
        y=[conditions["memory GB"]] * len(sizes),
        name="this machine's memory",
        mode="lines",
        line={"color": theme.BLACK, "dash": "dash", "width": 2},
        **left,
        hovertemplate=hover("%{y:.1f} GB", "this machine's memory"),
    )


def _add_times(
    figure: Figure,
    names: Sequence[str],
    limits: Mapping[str, Values],
    right: Mapping[str, Any],
) -> None:
    """The mean time of a token, and the limit of the same tokens."""
    times = [1e3 * limits[name]["mean TPOT s"] for name in names]
    figure.add_bar(
        x=names,
        y=times,
        name="on demand",
        marker=bar_look(2),
        cliponaxis=False,
        textposition="outside",
        text=[f"{time:.0f}" for time in times],
        **right,
        hovertemplate=hover("%{x}: %{y:.1f} ms", "on demand"),
    )
    add_points(
        figure,
        [(name, 1e3 * limits[name]["limit s"]) for name in names],
        "limit on demand",
        6,
        "%{x}: %{y:.1f} ms",
        **right,
    )


def main(source: str, destination: str) -> int:
    conditions, rows, limits, *_ = sections_of(Path(source)).values()
    pictures = theme.render_png([theme.to_json(beside_memory(conditions, rows, limits))])
    for picture in pictures:
        with atomic(destination) as path:
            path.write_bytes(picture)
    return 0 if pictures else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
