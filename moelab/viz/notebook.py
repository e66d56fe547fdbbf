"""What notebooks display: figures, Markdown, tables and widgets."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from html import escape
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
    drawn = theme.to_json(fig)
    drawn |= {
        "data": theme.packed(drawn["data"]),
        "config": theme.CONFIG,
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

    shown : the cell has shown just that. In Jupyter it gives way to the controls, and is there again
        where the notebook is opened without them.
    """
    if not shown:
        function(**{name: control.value for name, control in controls.items()})
    _turn(function, controls, shown_again=True)


def _turn(
    function: Callable[..., Any], controls: Mapping[str, Any], shown_again: bool = False
) -> None:
    """Show controls, and below them what `function` shows when one is turned; shown_again : and
    at once, in the place of what the cell has shown."""
    text = f"[To be turned in JupyterLab: {', '.join(of.description for of in controls.values())}]"
    if os.environ.get("MOELAB_HEADLESS"):
        return display({"text/plain": text}, raw=True)
    shown = ipywidgets.Output()

    def turned(_: Any = None) -> None:
        shown.clear_output(wait=True)
        with shown:
            function(**{name: control.value for name, control in controls.items()})

    for control in controls.values():
        control.style.description_width, control.layout.width = LABEL, "auto"
        control.observe(turned, "value")
    box = ipywidgets.VBox([*controls.values(), shown])
    if shown_again:
        turned()
        box.add_class("moelab-turned")
    live(box, text)
    if shown_again:
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

    def again(**given: Any) -> None:
        with TemporaryDirectory() as folder:
            print("running", ", ".join(f"{name} = {value}" for name, value in given.items()), "…")
            kept = {of: copy(getattr(space["run"], of)) for of in ("metrics", "figures", "tables")}
            run = replace(space["run"], directory=Path(folder), takeaways=[], home=None, **kept)
            names = space | given | {"run": run}
            for cell in cells[first[-1] :]:
                exec(compile(cell, "<cell>", "exec"), names)

    _turn(again, controls)


def follow_the_theme() -> None:
    """From here on, what `show` shows is dark where JupyterLab is."""
    display({"text/html": DARK, "text/plain": ""}, raw=True)


def live(widget: ipywidgets.Widget, text: str) -> None:
    """Show a widget; `text` is what a reader sees where nothing is live."""
    display(widget._repr_mimebundle_() | {"text/plain": text}, raw=True)


class Still:
    """What a reader of the saved notebook sees in the place of a view: the last picture that the
    browser drew of each of its parts, which send a message {"png"}, and its words.

    tools : the view's toolbar, which hides this where it is itself shown. words : () → (caption, the
        picture in words).
    """

    def __init__(
        self,
        tools: Any,
        pictures: Iterable[ipywidgets.Widget],
        words: Callable[[], tuple[str, str]],
    ) -> None:
        self._name, self._words = f"moelab-still-{tools.model_id}", words
        self._pngs: dict[int, str] = {}
        self._handle = display(self._bundle(), raw=True, display_id=True)
        tools.still = self._name
        for i, picture in enumerate(pictures):
            picture.on_msg(partial(self._keep, i))

    def _bundle(self) -> dict[str, str]:
        caption, alt = map(escape, self._words())
        shown = "".join(
            f'<img alt="{alt}" style="max-width:100%" src="data:image/png;base64,{png}">'
            for _, png in sorted(self._pngs.items())
        )
        told = f"{FAILED}<div class={self._name}>{shown}<p><em>{caption}</em></p></div>"
        return {"text/html": told, "text/plain": ""}

    def _keep(self, i: int, _: Any, message: Mapping[str, Any], buffers: Sequence[Any]) -> None:
        if "png" in message:
            self._pngs[i] = b64encode(theme.in_few_colours(bytes(buffers[0]))).decode()
            self._handle.update(self._bundle(), raw=True)
