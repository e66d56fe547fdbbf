"""The bits of a tensor's weights."""

from __future__ import annotations

import numpy as np
from plotly.graph_objects import Figure

from moelab.viz.charts import bar_look, finish, panels

from .entropy import FORMATS, entropy, marginals


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
