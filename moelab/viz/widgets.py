"""Widgets: a function, the controls of its arguments, and its output below them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets


def interact(function: Callable[..., Any], **controls: ipywidgets.Widget) -> None:
    """Show controls, and below them whatever `function` shows for their values.

    Parameters
    ----------
    function : called with one keyword argument a control; it should answer within 100 ms.
    controls : argument name → widget with a `value`; its description names the quantity and its unit.

    An exception of the function appears in the output area; the notebook runner looks for it there.
    """
    for name, control in controls.items():
        if not getattr(control, "description", ""):
            raise ValueError(f"the control {name!r} has no description; name the quantity and its unit")
        control.style.description_width = "initial"
    output = ipywidgets.interactive_output(function, controls)
    from IPython.display import display
    display(ipywidgets.VBox([*controls.values(), output]))
