"""The look of every figure: a small plotly template that is readable in grey and by the colour-blind.

Colours are those of Okabe and Ito; lines also differ in dash, points in marker and bars in pattern, so nothing
depends on colour alone. The template is about 2 KB where plotly's own is 7, because every figure carries a copy.
Axis titles state their unit; captions and descriptions are not optional.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, BLACK, YELLOW = PALETTE = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#F0E442")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
MARKERS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star", "triangle-down")
PATTERNS = ("", "/", "x", ".", "\\", "-", "+", "|")
#: cividis in nine steps: even in lightness, the same to every kind of colour vision
SEQUENTIAL = ("#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#fee838")
PLOTLY = "application/vnd.plotly.v1+json"


def _template() -> go.layout.Template:
    axis = {"showgrid": True, "gridcolor": "#e5e5e5", "linecolor": "#444", "ticks": "outside", "zeroline": False,
            "title": {"standoff": 8}, "automargin": True}
    scale = [[i / (len(SEQUENTIAL) - 1), colour] for i, colour in enumerate(SEQUENTIAL)]
    layout = {"colorway": PALETTE, "font": {"family": "system-ui, Helvetica, Arial, sans-serif", "size": 14,
              "color": "#222"}, "title": {"font": {"size": 16}, "x": 0, "xref": "paper"},
              "paper_bgcolor": "white", "plot_bgcolor": "white", "xaxis": axis, "yaxis": axis,
              "colorscale": {"sequential": scale}, "hovermode": "closest",
              "legend": {"bgcolor": "rgba(255,255,255,0.8)"}, "margin": {"l": 64, "r": 24, "t": 48, "b": 56}}
    lines = [{"line": {"dash": dash, "width": 2}, "marker": {"symbol": symbol, "size": 7}}
             for dash, symbol in zip(DASHES, MARKERS)]
    # overlay: otherwise the bar's own colour is left out and the white pattern lies on white
    bars = [{"marker": {"pattern": {"shape": shape, "fillmode": "overlay", "fgcolor": "white", "size": 6}}}
            for shape in PATTERNS]
    return go.layout.Template(layout=layout, data={
        "scatter": lines, "bar": bars, "histogram": bars, "heatmap": [{"colorscale": scale}]})


pio.templates["moelab"] = _template()


def themed(fig: go.Figure) -> go.Figure:
    """A copy of the figure in moelab's look; what the figure sets itself stays."""
    return go.Figure(fig).update_layout(template="moelab")


def to_json(fig: go.Figure) -> dict[str, Any]:
    """The themed figure as plain JSON: {"data": …, "layout": …}."""
    return json.loads(themed(fig).to_json())


def show(fig: go.Figure, caption: str, alt: str, name: str | None = None) -> None:
    """Show a figure in a notebook, with its caption below and its description as text for who sees no figure.

    Parameters
    ----------
    fig : the figure; it is not changed.
    caption : what it shows, with units and the kind of its numbers.
    alt : the figure in words.
    name : the name under which a run keeps it.
    """
    from IPython.display import display
    config = {"displaylogo": False, "responsive": True}
    display({PLOTLY: to_json(fig) | {"config": config}, "text/plain": f"[Figure: {alt}]"}, raw=True,
            metadata={"moelab_figure": name} if name else {})
    display({"text/markdown": f"*{caption}*", "text/plain": caption}, raw=True)


def render_png(figures: list[dict[str, Any]], seconds: float = 30.0) -> list[bytes]:
    """PNG pictures of figures given as plotly JSON; [] where kaleido or its browser is missing, or takes too long.

    A picture is a convenience for viewers that run no scripts, so no failure to draw one is an error, and a
    browser that hangs must hold nobody up: one process, with a limit, draws them all.
    """
    with tempfile.TemporaryDirectory(prefix="moelab-png-") as folder:
        (Path(folder) / "figures.json").write_text(json.dumps(figures))
        try:
            subprocess.run([sys.executable, "-m", "moelab.viz.png", folder], cwd=Path(__file__).parents[2], check=True,
                           timeout=seconds + len(figures), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError):
            return []
        return [(Path(folder) / f"{i}.png").read_bytes() for i in range(len(figures))]


def plotly_js() -> str:
    """The source of plotly.js, for a page that works without a network."""
    from plotly.offline import get_plotlyjs
    return get_plotlyjs()
