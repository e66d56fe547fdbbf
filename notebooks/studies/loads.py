"""The tokens of each expert in a chunk, as a picture, beside notebooks 01 and 06."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike
from plotly.graph_objects import Figure

from moelab.viz.charts import DASHED, finish, line_look

from .charts import label_right


def load_distribution(loads: ArrayLike, capacities: Mapping[str, float] | None = None) -> Figure:
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
    finish(figure, "popularity rank of the expert (0 = busiest)", "tokens in a chunk")
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"})
    shift = 0
    below = -np.inf
    for name, tokens in sorted((capacities or {}).items(), key=lambda item: item[1]):
        # labels that would overlap move up
        shift = shift + 12 if tokens - below < 0.05 * high.max() else 0
        figure.add_hline(y=tokens, line=DASHED)
        label_right(figure, tokens, f"{name}: {tokens:.0f}", shift)
        below = tokens
    return figure
