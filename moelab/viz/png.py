"""`python -m moelab.viz.png FOLDER`: draws FOLDER/figures.json, a list of plotly figures, as 0.png, 1.png, …

A process of its own, so that `moelab.viz.theme.render_png` can end it together with its browser.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import plotly.graph_objects as go
import plotly.io as pio

WIDTH, HEIGHT = 800, 420


def main(folder: Path) -> None:
    figures = [go.Figure({"data": f["data"], "layout": f["layout"]})
               for f in json.loads((folder / "figures.json").read_text())]
    pio.write_images(figures, [folder / f"{i}.png" for i in range(len(figures))], format="png",
                     width=[fig.layout.width or WIDTH for fig in figures],
                     height=[fig.layout.height or HEIGHT for fig in figures])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
