"""What views show in a browser: charts, whose figure is one value, so that the last change always
wins; their buttons; and the token scrubber's player.

plotly's own `FigureWidget` is not used: each one brings plotly.js (5 MB) to the page again, and
changes come as a sequence of events that checks every property."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets
from plotly.offline import get_plotlyjs


class Library(ipywidgets.Widget):
    """plotly.js, for all charts of a kernel."""

    code = traitlets.Unicode().tag(sync=True)


class Chart(anywidget.AnyWidget):
    """`figure`, plotly's JSON {"data": …, "layout": …}, as wide as there is room."""

    _esm = Path(__file__).with_name("chart.js")
    figure = traitlets.Dict().tag(sync=True)
    library = traitlets.Instance(Library).tag(sync=True, **ipywidgets.widget_serialization)

    def on_click(self, function: Callable[[Mapping[str, Any]], None]) -> None:
        """Call a function with what was clicked: {"curve": its trace, "point": its place there,
        "data": customdata}."""
        self.on_msg(lambda _, message, __: function(message) if "curve" in message else None)


_library: list[Library] = []


def chart(figure: Mapping[str, Any]) -> Chart:
    """A chart that shows a figure."""
    if not _library or _library[0].comm is None:  # none yet, or somebody closed all widgets
        _library[:] = [Library(code=get_plotlyjs())]
    return Chart(figure=figure, library=_library[0])


class Toolbar(anywidget.AnyWidget):
    """A row of buttons; files are made here when they are asked for, pictures and copies in the
    browser."""

    _esm = Path(__file__).with_name("toolbar.js")
    name = traitlets.Unicode().tag(sync=True)
    shell = traitlets.Unicode().tag(sync=True)
    #: class of what is hidden where the toolbar is shown
    still = traitlets.Unicode().tag(sync=True)


def toolbar(view: Any) -> Toolbar:
    """The toolbar of a `moelab.viz.views.base.View`."""
    made = Toolbar(name=view.name)
    contents = {"csv": view.csv, "html": view.html}

    def asked(_: Any, message: Mapping[str, str], __: Any) -> None:
        def answer() -> None:
            kind = message["file"]
            made.send({"name": f"{view.name}.{kind}"}, buffers=[contents[kind]().encode()])

        view.guarded(answer)

    made.on_msg(asked)
    return made


class Player(anywidget.AnyWidget):
    """The text, the grid of experts and the buttons; `token` is the forward pass that is shown."""

    _esm = Path(__file__).with_name("player.js")
    data = traitlets.Dict().tag(sync=True)
    token = traitlets.Int().tag(sync=True)
