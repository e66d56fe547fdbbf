"""A plotly figure as a widget: what it shows is one value, so the last change always wins.

plotly's own `FigureWidget` is not used: each one brings plotly.js (5 MB) to the page again, and changes come as a
sequence of events that checks every property.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from moelab.viz.theme import plotly_js


class Library(ipywidgets.Widget):
    """plotly.js, for all charts of a kernel."""

    code = traitlets.Unicode().tag(sync=True)


class Chart(anywidget.AnyWidget):
    """`figure`, plotly's JSON {"data": …, "layout": …}, as wide as there is room."""

    _esm = Path(__file__).with_name("chart.js")
    figure = traitlets.Dict().tag(sync=True)
    library = traitlets.Instance(Library).tag(sync=True, **ipywidgets.widget_serialization)

    def on_click(self, function: Callable[[Mapping[str, Any]], None]) -> None:
        """Call a function with what was clicked: {"curve": its trace, "point": its place there, "data": customdata}."""
        self.on_msg(lambda _, message, __: function(message) if "curve" in message else None)


_library: list[Library] = []


def chart(figure: Mapping[str, Any]) -> Chart:
    """A chart that shows a figure."""
    if not _library or _library[0].comm is None:            # none yet, or somebody closed all widgets
        _library[:] = [Library(code=plotly_js())]
    return Chart(figure=figure, library=_library[0])
