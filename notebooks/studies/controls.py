"""Controls of the notebooks: a cell shows something else, or the cells run again with other
parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ipywidgets
from IPython.display import display

from moelab.viz.notebook import FAILED, LABEL, live


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
