"""What notebooks display: figures, Markdown, tables and widgets."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ipywidgets
from IPython.display import DisplayHandle, Markdown, clear_output, display

from moelab.table import head_and_rows, markdown_table
from moelab.viz import theme
from moelab.viz.plotly_json import Figure

WIDGET = "application/vnd.jupyter.widget-view+json"
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


def show(fig: Figure, caption: str, alt: str, name: str | None = None) -> None:
    """Show a figure with its caption below; `alt` describes it in words, `name` is that under which
    a run keeps it."""
    drawn = theme.to_json(fig)
    drawn |= {
        "data": theme.packed(drawn["data"]),
        "config": {"displaylogo": False, "responsive": True},
    }
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

    shown : the cell has shown just that; in Jupyter it gives way to the controls.
    """
    for name, control in controls.items():
        if not getattr(control, "description", ""):
            raise ValueError(
                f"the control {name!r} has no description; name the quantity and its unit"
            )
        control.style.description_width = LABEL
        control.layout.width = "auto"
    text = (
        "[To be turned in JupyterLab: "
        f"{', '.join(control.description for control in controls.values())}]"
    )
    if os.environ.get("MOELAB_HEADLESS"):
        if not shown:
            function(**{name: control.value for name, control in controls.items()})
        return display({"text/plain": text}, raw=True)
    if shown:
        clear_output(wait=True)
    live(
        ipywidgets.VBox([*controls.values(), ipywidgets.interactive_output(function, controls)]),
        text,
    )


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
    shown = ipywidgets.Output()
    controls = {}
    for name, values in choices.items():
        values = sorted({*values, space[name]})
        controls[name] = ipywidgets.SelectionSlider(
            options=values, value=space[name], description=name, continuous_update=False
        )
        controls[name].style.description_width, controls[name].layout.width = LABEL, "auto"

    def turned(_: Any) -> None:
        given = {name: control.value for name, control in controls.items()}
        shown.clear_output(wait=True)
        with shown, TemporaryDirectory() as folder:
            print("running", ", ".join(f"{name} = {value}" for name, value in given.items()), "…")
            kept = {of: copy(getattr(space["run"], of)) for of in ("metrics", "figures", "tables")}
            run = replace(space["run"], directory=Path(folder), takeaways=[], home=None, **kept)
            again = space | given | {"run": run}
            for cell in cells[first[-1] :]:
                exec(compile(cell, "<cell>", "exec"), again)

    text = f"[To be turned in JupyterLab: {', '.join(controls)}]"
    if os.environ.get("MOELAB_HEADLESS"):
        return display({"text/plain": text}, raw=True)
    for control in controls.values():
        control.observe(turned, "value")
    live(ipywidgets.VBox([*controls.values(), shown]), text)


def follow_the_theme() -> None:
    """From here on, what `show` shows is dark where JupyterLab is."""
    display({"text/html": DARK, "text/plain": ""}, raw=True)


def live(widget: ipywidgets.Widget, text: str, pictures: Iterable[ipywidgets.Widget] = ()) -> None:
    """Show a widget; `text` is what a reader sees where nothing is live, and what the browser first
    draws of each of `pictures`, parts of it, which send a message {"png"}.

    Jupyter hides an output that names no widget; what shows no widgets shows its PNG.
    """
    display(widget._repr_mimebundle_() | {"text/plain": text}, raw=True)
    for picture in pictures:
        nothing = {
            WIDGET: {"version_major": 2, "version_minor": 0, "model_id": ""},
            "text/plain": "",
        }
        picture.on_msg(partial(_keep, display(nothing, raw=True, display_id=True), nothing))


def _keep(
    handle: DisplayHandle,
    nothing: Mapping[str, Any],
    _: Any,
    message: Mapping[str, Any],
    buffers: Sequence[Any],
) -> None:
    if "png" in message:
        handle.update(
            nothing | {"image/png": b64encode(theme.in_few_colours(bytes(buffers[0]))).decode()},
            raw=True,
        )
