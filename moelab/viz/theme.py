"""The look of every figure: a plotly template that is readable in grey and by the colour-blind.

Colours are those of Okabe and Ito. Every figure carries a copy of the template, so it is small: 1
KB."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import plotly.io as pio
from PIL import Image

from moelab.base.records import Record

BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, BLACK, YELLOW = PALETTE = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#000000",
    "#F0E442",
)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
MARKERS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star", "triangle-down")
PATTERNS = ("", "/", "x", ".", "\\", "-", "+", "|")
#: cividis in nine steps: even in lightness, the same to every kind of colour vision
SEQUENTIAL = (
    "#00224e",
    "#123570",
    "#3b496c",
    "#575d6d",
    "#707173",
    "#8a8678",
    "#a59c74",
    "#c3b369",
    "#fee838",
)
SCALE = [[i / (len(SEQUENTIAL) - 1), colour] for i, colour in enumerate(SEQUENTIAL)]
PLOTLY = "application/vnd.plotly.v1+json"
#: of plotly: what its bar of buttons does, which is there while the mouse is over a figure: few, so
#: that it covers no legend
CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtons": [["toImage", "resetScale2d"]],
}


AXIS = {
    "showgrid": True,
    "gridcolor": "#e5e5e5",
    "linecolor": "#444",
    "ticks": "outside",
    "zeroline": False,
    "title": {"standoff": 8},
    "automargin": True,
}
LAYOUT = {
    "colorway": PALETTE,
    "font": {"family": "system-ui, Helvetica, Arial, sans-serif", "size": 14, "color": "#222"},
    "title": {"font": {"size": 16}, "x": 0, "xref": "paper"},
    "paper_bgcolor": "white",
    "plot_bgcolor": "white",
    "xaxis": AXIS,
    "yaxis": AXIS | {"rangemode": "tozero"},
    "colorscale": {"sequential": SCALE},
    "hovermode": "closest",
    "legend": {"bgcolor": "rgba(255,255,255,0.8)"},
    "margin": {"l": 64, "r": 24, "t": 48, "b": 56},
}
TEMPLATE = {"layout": LAYOUT, "data": {"heatmap": [{"colorscale": SCALE}]}}


def to_json(fig: Any) -> Record:
    """A plotly figure in moelab's look as plain JSON, {"data": …, "layout": …}; what it sets itself
    stays."""
    found = json.loads(fig.to_json())
    found["layout"]["template"] = TEMPLATE
    return found


def render_png(fig: Any) -> bytes:
    """A figure as a PNG picture; ValueError, RuntimeError: kaleido or its browser is missing."""
    drawn = to_json(fig)
    size = {"width": 800, "height": 420} | drawn["layout"]
    return in_few_colours(pio.to_image(drawn, "png", width=size["width"], height=size["height"]))


def in_few_colours(png: bytes) -> bytes:
    """A PNG with a palette of at most 256 colours, a third of the size."""
    picture, made = Image.open(BytesIO(png)).convert("RGB"), BytesIO()
    picture.quantize(256, dither=Image.Dither.NONE).save(made, "PNG", optimize=True)
    return made.getvalue()
