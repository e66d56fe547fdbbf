"""Figures of the notebooks: arrays in, a plotly figure out.

Nothing is computed here beyond what drawing needs (shares, quantiles of what is drawn). Series differ in colour
*and* in dash and marker, colour scales are even in lightness, so each figure can be read in grey and by the
colour-blind. Reference lines from a paper are grey, dotted, and say that they are the paper's.

`L` MoE layers, `E` experts a layer; arrays may be tensors, numpy arrays or lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike

from moelab.viz import theme

GREY = "#555555"


def heatmap(counts: ArrayLike, sort: bool = False) -> go.Figure:
    """Who is popular: each expert's share of its layer's routings, layers down, experts across.

    `counts` is [L, E]; with `sort` the experts of every layer stand in order of popularity, so the columns are
    ranks instead of ids. 100 %/E everywhere would be perfect balance.
    """
    counts = np.asarray(counts, dtype=float)
    share = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    share = -np.sort(-share, axis=1) if sort else share
    column = "rank" if sort else "expert"
    figure = go.Figure(go.Heatmap(
        z=share, zmin=0, xgap=1, ygap=1, colorbar={"title": {"text": "share of<br>routings (%)"}},
        hovertemplate=f"layer %{{y}}, {column} %{{x}}: %{{z:.2f}} %<extra></extra>"))
    figure.update_xaxes(title="popularity rank of the expert (0 = busiest)" if sort else "expert", showgrid=False)
    figure.update_yaxes(title="MoE layer", autorange="reversed", dtick=_whole_steps(len(share)), showgrid=False)
    return _styled(figure)


def imbalance(by_phase: Mapping[str, ArrayLike]) -> go.Figure:
    """Imbalance ratio r_l by layer, one line a phase: {"prefill": [L], "decode": [L]}; 1 is perfect balance."""
    figure = _by_layer(by_phase)
    _reference(figure, 1, "perfect balance", "dash")
    figure.update_yaxes(title="busiest expert ÷ mean load", rangemode="tozero")
    return _styled(figure)


def overlap(by_name: Mapping[str, ArrayLike], paper: Mapping[str, float] | None = None,
            chance: Mapping[str, float] | None = None) -> go.Figure:
    """Overlap@K by layer, one line a comparison: {"top-4, code": [L], ...}, values from 0 to 1.

    `paper` holds the published values ({"Phi-3.5-MoE, top-4": 0.86}), `chance` what two random rankings would
    reach (k/E); both are drawn as labelled horizontal lines.
    """
    figure = _by_layer({name: 100 * np.asarray(values, dtype=float) for name, values in by_name.items()})
    for name, value in (chance or {}).items():
        _reference(figure, 100 * value, f"chance, {name}: {100 * value:.1f} %", "dash")
    for name, value in (paper or {}).items():
        _reference(figure, 100 * value, f"paper, {name}: {100 * value:.1f} %", "dot")
    figure.update_yaxes(title="Overlap@K (%)", range=[0, 104])
    return _styled(figure)


def agreement(values: ArrayLike, rows: Sequence[str], columns: Sequence[str]) -> go.Figure:
    """Overlap of many comparisons, each cell with its number: calibrated on `rows`, run on `columns`.

    `values` is [rows, columns], from 0 to 1.
    """
    figure = go.Figure(go.Heatmap(
        z=100 * np.asarray(values, dtype=float), x=list(columns), y=list(rows), zmin=0, zmax=100, xgap=2, ygap=2,
        texttemplate="%{z:.0f} %", colorbar={"title": {"text": "Overlap@K (%)"}},
        hovertemplate="calibrated on %{y}, run on %{x}: %{z:.1f} %<extra></extra>"))
    figure.update_xaxes(title="run on", showgrid=False)
    figure.update_yaxes(title="calibrated on", autorange="reversed", showgrid=False)
    return _styled(figure)


def load_distribution(loads: ArrayLike, capacities: Mapping[str, float] | None = None) -> go.Figure:
    """Tokens that each expert of one layer gets in a chunk, over many chunks, busiest expert first.

    `loads` is [chunks, E]. The band runs from the least to the most that the expert got in any chunk, the dark
    band over the middle half of the chunks, the line is the median. `capacities` are drawn across, labelled:
    what lies above such a line would overflow.
    """
    loads = np.asarray(loads)
    order = np.argsort(-loads.mean(0), kind="stable")
    low, q1, median, q3, high = np.quantile(loads[:, order], [0, 0.25, 0.5, 0.75, 1], axis=0)
    ranks = np.arange(loads.shape[1])
    figure = go.Figure()
    for name, bottom, top, opacity in (("all chunks", low, high, 0.25), ("middle half of the chunks", q1, q3, 0.5)):
        figure.add_scatter(x=np.r_[ranks, ranks[::-1]], y=np.r_[top, bottom[::-1]], fill="toself", name=name,
                           mode="lines", line={"width": 0}, fillcolor=f"rgba(0,114,178,{opacity})",
                           hoverinfo="skip")
    figure.add_scatter(x=ranks, y=median, name="median chunk", customdata=order, **_line(0),
                       hovertemplate="expert %{customdata} (rank %{x}): %{y:.0f} tokens<extra></extra>")
    shift, below = 0, -np.inf
    for name, tokens in sorted((capacities or {}).items(), key=lambda item: item[1]):
        shift = shift + 12 if tokens - below < 0.05 * high.max() else 0         # labels that would overlap move up
        _reference(figure, tokens, f"{name}: {tokens:.0f}", "dash", shift)
        below = tokens
    figure.update_xaxes(title="popularity rank of the expert (0 = busiest)")
    figure.update_yaxes(title="tokens in a chunk", rangemode="tozero")
    return _styled(figure)


def inclusion(by_name: Mapping[str, ArrayLike]) -> go.Figure:
    """Rank-based inclusion probabilities f_r, one curve a batch size: {"batch 1": [E], ...}."""
    figure = go.Figure()
    for i, (name, f) in enumerate(by_name.items()):
        figure.add_scatter(x=np.arange(len(f)), y=np.asarray(f), name=name, **_line(i))
    figure.update_xaxes(title="popularity rank of the expert (0 = busiest)")
    figure.update_yaxes(title="probability that a step needs it", range=[0, 1.02])
    return _styled(figure)


def _by_layer(series: Mapping[str, ArrayLike]) -> go.Figure:
    figure = go.Figure()
    for i, (name, values) in enumerate(series.items()):
        figure.add_scatter(x=np.arange(len(values)), y=np.asarray(values, dtype=float), name=name, **_line(i))
    figure.update_xaxes(title="MoE layer", dtick=_whole_steps(max(map(len, series.values()), default=1)))
    return figure


def _reference(figure: go.Figure, y: float, text: str, dash: str, shift: int = 0) -> None:
    """A grey horizontal line, labelled in the right margin, where it hides no data; the label `shift` pixels up."""
    figure.add_hline(y=y, line={"color": GREY, "dash": dash, "width": 1.5}, annotation_text=text,
                     annotation_position="right", annotation_font_size=11, annotation_yshift=shift)


def _line(i: int) -> dict:
    """How the i-th series is drawn: colour, dash and marker all differ."""
    look = [of[i % len(of)] for of in (theme.PALETTE, theme.DASHES, theme.MARKERS)]
    return {"mode": "lines+markers", "line": {"color": look[0], "dash": look[1]}, "marker": {"symbol": look[2]}}


def _whole_steps(n: int) -> int:
    """A tick distance that keeps the labels of n layers apart and whole."""
    return max(1, -(-n // 12))


def _styled(figure: go.Figure) -> go.Figure:
    longest = max((len(note.text) for note in figure.layout.annotations), default=0)
    return figure.update_layout(
        template="moelab", showlegend=len(figure.data) > 1,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        margin={"l": 72, "r": 20 + 6 * longest, "t": 40, "b": 50})      # plotly leaves no room for annotations
