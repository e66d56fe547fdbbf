"""What notebooks display: figures, Markdown, tables and widgets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ipywidgets
from IPython.display import Markdown, display
from plotly.graph_objects import Figure

from moelab.base.table import head_and_rows, markdown_table
from moelab.viz import theme

#: width of what stands before a control, so that all controls begin below one another
LABEL = "16em"
#: a dark JupyterLab shows figures in the opposite lightness, white as its #111, and the hues as
#: they are
DARK = (
    '<style>[data-jp-theme-light="false"] .jp-RenderedPlotly '
    "{ filter: invert(0.93) hue-rotate(180deg); } "
    # but in a map of values light stays light
    '[data-jp-theme-light="false"] .jp-RenderedPlotly :is(.heatmaplayer, .cbfills) '
    "{ filter: invert(1) hue-rotate(180deg); }</style>"
)


#: in the place of a widget whose kernel is gone, JupyterLab says that its model is not found
FAILED = (
    "<style>.jp-OutputArea-output.jupyter-widgets:not(:has(*)) { display: none; } "
    # and what a cell has shown first gives way to controls that turn it
    ".jp-OutputArea-child:has(~ .jp-OutputArea-child .moelab-turned) { display: none; }</style>"
)


def show(fig: Figure, caption: str, alt: str, name: str | None = None) -> None:
    """Show a figure with its caption below; `alt` describes it in words, `name` is that under which
    a run keeps it."""
    drawn = theme.to_json(fig) | {"config": theme.CONFIG}
    display(
        {theme.PLOTLY: drawn, "text/plain": f"[Figure: {alt}]"},
        raw=True,
        metadata={"moelab_figure": name} if name else {},
    )
    if caption.strip():
        display({"text/markdown": inert(f"*{caption.strip()}*"), "text/plain": caption}, raw=True)


def say(text: str) -> None:
    """Show text as Markdown."""
    display(Markdown(inert(text)))


def inert(markdown: str) -> str:
    """Markdown in which nothing that is told, such as the name of a folder, is HTML, a link or a
    picture."""
    return re.sub(r"(?<=\])[(\[:]|<(?=[A-Za-z/!?])", lambda found: f"&#{ord(found[0])};", markdown)


def table(first: Iterable[Mapping[str, Any]] | Sequence[str], *rows: Sequence[Any]) -> None:
    """Show a table: of dictionaries, column → cell, in which what is missing is a dash; or of a
    head and its rows."""
    say(markdown_table(first, rows) if rows else markdown_table(*head_and_rows(first)))


def follow_the_theme() -> None:
    """From here on, what `show` shows is dark where JupyterLab is."""
    display({"text/html": DARK, "text/plain": ""}, raw=True)


def live(widget: ipywidgets.Widget, text: str) -> None:
    """Show a widget; `text` is what a reader sees where nothing is live."""
    display(widget._repr_mimebundle_() | {"text/plain": text}, raw=True)
