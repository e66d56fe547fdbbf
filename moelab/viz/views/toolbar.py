"""The buttons of a view: CSV, PNG, HTML, copy what reproduces it; and whether Jupyter is dark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anywidget
import traitlets


class Toolbar(anywidget.AnyWidget):
    """A row of buttons; files are made here when they are asked for, pictures and copies in the browser."""

    _esm = Path(__file__).with_name("toolbar.js")
    name = traitlets.Unicode().tag(sync=True)
    shell = traitlets.Unicode().tag(sync=True)
    python = traitlets.Unicode().tag(sync=True)
    dark = traitlets.Bool(False).tag(sync=True)


def toolbar(view: Any) -> Toolbar:
    """The toolbar of a `moelab.viz.views.base.View`."""
    made = Toolbar(name=view.name)
    contents = {"csv": (view.csv, "text/csv"), "html": (view.html, "text/html")}

    def asked(_: Any, message: Mapping[str, str], __: Any) -> None:
        def answer() -> None:
            content, kind = contents[message["file"]]
            made.send({"name": f"{view.name}.{message['file']}", "type": kind}, buffers=[content().encode()])
        view.guarded(answer)
    made.on_msg(asked)
    return made
