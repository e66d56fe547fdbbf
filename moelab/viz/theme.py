"""The look of every figure: a plotly template that is readable in grey and by the colour-blind.

It lies in `theme.toml`. Every figure carries a copy of the template, so it is small: 1
KB."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import plotly.io as pio
from PIL import Image

from moelab.base.files import beside
from moelab.base.records import Record

_LOOK = beside(__file__)
TEMPLATE, CONFIG = _LOOK["template"], _LOOK["config"]
DASHES, MARKERS, PATTERNS = _LOOK["dashes"], _LOOK["markers"], _LOOK["patterns"]
PALETTE = TEMPLATE["layout"]["colorway"]
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, BLACK, YELLOW = PALETTE
SCALE = TEMPLATE["layout"]["colorscale"]["sequential"]
PLOTLY = "application/vnd.plotly.v1+json"


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
