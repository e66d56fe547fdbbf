"""The look of every figure: a plotly template that is readable in grey and by the colour-blind.

Colours are those of Okabe and Ito. Every figure carries a copy of the template, so it is small: 1
KB."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from base64 import b64decode, b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

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


def _template() -> Record:
    axis = {
        "showgrid": True,
        "gridcolor": "#e5e5e5",
        "linecolor": "#444",
        "ticks": "outside",
        "zeroline": False,
        "title": {"standoff": 8},
        "automargin": True,
    }
    layout = {
        "colorway": PALETTE,
        "font": {"family": "system-ui, Helvetica, Arial, sans-serif", "size": 14, "color": "#222"},
        "title": {"font": {"size": 16}, "x": 0, "xref": "paper"},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "xaxis": axis,
        "yaxis": axis | {"rangemode": "tozero"},
        "colorscale": {"sequential": SCALE},
        "hovermode": "closest",
        "legend": {"bgcolor": "rgba(255,255,255,0.8)"},
        "margin": {"l": 64, "r": 24, "t": 48, "b": 56},
    }
    return {"layout": layout, "data": {"heatmap": [{"colorscale": SCALE}]}}


TEMPLATE = json.loads(json.dumps(_template()))  # no tuples


def to_json(fig: Any) -> Record:
    """A plotly figure in moelab's look as plain JSON, {"data": …, "layout": …}; what it sets itself
    stays, and NaN is null."""
    found = json.loads(fig.to_json(), parse_constant=lambda _: None, object_hook=_listed)
    found["layout"]["template"] = TEMPLATE
    return found


def _listed(part: Record) -> Any:
    """An array that plotly has packed as a list."""
    if "bdata" not in part:
        return part
    shape = [int(n) for n in part.get("shape", "-1").split(",")]
    values = np.frombuffer(b64decode(part["bdata"]), part["dtype"]).reshape(shape)
    return np.where(np.isfinite(values), values, None).tolist()


def packed(part: Any, name: str = "") -> Any:
    """The traces of a figure with long arrays of numbers as plotly's base64, of seven digits: a
    line in a notebook, which has a line a number else. `name` is the part's own."""
    if isinstance(part, dict):
        return {key: packed(value, key) for key, value in part.items()}
    if not isinstance(part, list):
        return part
    try:
        array = np.array([np.nan if value is None else value for value in part])
    except ValueError:  # lists that differ in length
        array = np.array([])
    # what a text shows as it is keeps its digits
    if (
        array.size < 6
        or array.ndim > 2
        or array.dtype.kind not in ("i" if name == "customdata" else "if")
    ):
        return [packed(value, name) for value in part]
    with np.errstate(all="ignore"):
        kind = "f4" if np.allclose(array.astype("f4"), array, 1e-6, 0, equal_nan=True) else "f8"
    return {
        "dtype": kind,
        "bdata": b64encode(array.astype(kind).tobytes()).decode(),
        **({"shape": f"{len(array)}, {len(array[0])}"} if array.ndim == 2 else {}),
    }


def render_png(figures: list[Record], seconds: float = 30.0) -> list[bytes]:
    """PNG pictures of figures given as plotly JSON; [] where kaleido or its browser is missing, or
    takes too long.

    A process of its own draws them all, so that it can be ended together with its browser.
    """
    with tempfile.TemporaryDirectory(prefix="moelab-png-") as folder:
        (Path(folder) / "figures.json").write_text(json.dumps(figures))
        try:
            subprocess.run(
                [sys.executable, "-m", "moelab.viz.theme", folder],
                cwd=Path(__file__).parents[2],
                check=True,
                timeout=seconds + len(figures),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except (OSError, subprocess.SubprocessError):
            return []
        return [
            in_few_colours((Path(folder) / f"{i}.png").read_bytes()) for i in range(len(figures))
        ]


def in_few_colours(png: bytes) -> bytes:
    """A browser's PNG with a palette of at most 256 colours, a third of the size; another kind
    comes back as it is."""
    from PIL import Image

    picture = Image.open(BytesIO(png))
    made = BytesIO()
    if picture.mode != "RGBA":
        return png
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(made, "PNG", optimize=True)
    return made.getvalue()


def _write_png(folder: Path) -> None:
    """Draw the plotly figures of FOLDER/figures.json as 0.png, 1.png, …"""
    import plotly.io as pio

    figures = [
        {"data": of["data"], "layout": of["layout"]}
        for of in json.loads((folder / "figures.json").read_text())
    ]
    pio.write_images(
        figures,
        [folder / f"{i}.png" for i in range(len(figures))],
        format="png",
        width=[of["layout"].get("width", 800) for of in figures],
        height=[of["layout"].get("height", 420) for of in figures],
    )


def in_script(value: Any) -> str:
    """JSON inside a <script>, which nothing in it can end or turn into a comment."""
    return json.dumps(value).translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"})


if __name__ == "__main__":
    _write_png(Path(sys.argv[1]))
