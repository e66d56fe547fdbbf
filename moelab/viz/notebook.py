"""What notebooks display: figures, Markdown, tables and widgets."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
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


def interact(
    function: Callable[..., Any], shown: bool = False, **controls: ipywidgets.Widget
) -> None:
    """Show controls, and below them what `function` shows for their values (argument name →
    widget); headless, what it shows for the first ones.

    shown : the cell has shown just that. In Jupyter it gives way to the controls, and is there again
        where the notebook is opened without them.
    """
    if not shown:
        function(**{name: control.value for name, control in controls.items()})
    _live(controls, function)


def _live(controls: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Show controls, and below them what `function` shows for their values, in the place of what
    the cell has shown; headless, what they are of."""
    text = f"[To be turned in JupyterLab: {', '.join(of.description for of in controls.values())}]"
    if os.environ.get("MOELAB_HEADLESS"):
        return display({"text/plain": text}, raw=True)
    for control in controls.values():
        control.style.description_width, control.layout.width = LABEL, "auto"
    shown = ipywidgets.interactive_output(function, controls)
    live(ipywidgets.VBox([*controls.values(), shown]).add_class("moelab-turned"), text)
    display({"text/html": FAILED, "text/plain": ""}, raw=True)


def knobs(space: dict[str, Any], since: str, **choices: Sequence[Any]) -> None:
    """Show controls of the notebook's own parameters (name → values to choose from; its own is one
    of them). A change runs the cells again from the last one that contains `since` to the one
    before this, and shows below what they show; headless, nothing happens.

    space : the notebook's `globals()`. The cells run on a copy of it, with a run that is thrown
        away, so that what is saved stays what the notebook found. ValueError: no cell contains
        `since`.
    """
    cells = space["In"][:-1]
    first = [i for i, cell in enumerate(cells) if since in cell]
    if not first:
        raise ValueError(f"no cell that has run contains {since!r}; run all cells first")
    controls = {}
    for name, values in choices.items():
        values = sorted({*values, space[name]})
        controls[name] = ipywidgets.SelectionSlider(
            options=values, value=space[name], description=name, continuous_update=False
        )

    own = {name: space[name] for name in choices}

    def again(**given: Any) -> None:
        if given == own:
            return
        with TemporaryDirectory() as folder:
            print("running", ", ".join(f"{name} = {value}" for name, value in given.items()), "…")
            kept = {of: copy(getattr(space["run"], of)) for of in ("metrics", "figures", "tables")}
            run = replace(space["run"], directory=Path(folder), takeaways=[], home=None, **kept)
            names = space | given | {"run": run}
            for cell in cells[first[-1] :]:
                exec(compile(cell, "<cell>", "exec"), names)

    _live(controls, again)


def follow_the_theme() -> None:
    """From here on, what `show` shows is dark where JupyterLab is."""
    display({"text/html": DARK, "text/plain": ""}, raw=True)


def live(widget: ipywidgets.Widget, text: str) -> None:
    """Show a widget; `text` is what a reader sees where nothing is live."""
    display(widget._repr_mimebundle_() | {"text/plain": text}, raw=True)
