"""What notebooks display: figures, Markdown, tables and widgets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ipywidgets
import plotly.graph_objects as go
from IPython.display import Markdown, display

from moelab.table import head_and_rows, markdown_table
from moelab.viz import theme

#: width of what stands before a control, so that all controls begin below one another
LABEL = "16em"
#: a dark JupyterLab shows figures in the opposite lightness, white as its #111, and the hues as they are
DARK = ('<style>[data-jp-theme-light="false"] .jp-RenderedPlotly '
        "{ filter: invert(0.93) hue-rotate(180deg); }</style>")


def show(fig: go.Figure, caption: str, alt: str, name: str | None = None) -> None:
    """Show a figure with its caption below; `alt` describes it in words, `name` is that under which a run keeps it."""
    config = {"displaylogo": False, "responsive": True}
    display({theme.PLOTLY: theme.to_json(fig) | {"config": config}, "text/plain": f"[Figure: {alt}]"}, raw=True,
            metadata={"moelab_figure": name} if name else {})
    if caption.strip():
        display({"text/markdown": f"*{caption.strip()}*", "text/plain": caption}, raw=True)


def say(text: str) -> None:
    """Show text as Markdown."""
    display(Markdown(text))


def table(first: Iterable[Mapping[str, Any]] | Sequence[str], *rows: Sequence[Any]) -> None:
    """Show a table: of dictionaries, column → cell, in which what is missing is a dash; or of a head and its rows."""
    say(markdown_table(first, rows) if rows else markdown_table(*head_and_rows(first)))


def interact(function: Callable[..., Any], **controls: ipywidgets.Widget) -> None:
    """Show controls, and below them what `function` shows for their values (argument name → widget).

    An exception appears in the output area, where the notebook runner looks for it.
    """
    for name, control in controls.items():
        if not getattr(control, "description", ""):
            raise ValueError(f"the control {name!r} has no description; name the quantity and its unit")
        control.style.description_width, control.layout.width = LABEL, "auto"
    output = ipywidgets.interactive_output(function, controls)
    live(ipywidgets.VBox([*controls.values(), output]),
         f"[To be turned in JupyterLab: {', '.join(control.description for control in controls.values())}]")


def follow_the_theme() -> None:
    """From here on, what `show` shows is dark where JupyterLab is."""
    display({"text/html": DARK, "text/plain": ""}, raw=True)


def live(widget: ipywidgets.Widget, text: str) -> None:
    """Show a widget; `text` is what a reader sees where nothing is live."""
    display(widget._repr_mimebundle_() | {"text/plain": text}, raw=True)
