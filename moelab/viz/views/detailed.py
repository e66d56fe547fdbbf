"""A view of many things of which one is looked at closely: chosen in a menu or by a click on the
picture.

What is told of a thing is a plain function too, so `view.detail(name)` needs no widget. The traces
of the picture carry the names in `customdata`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from plotly.graph_objects import Figure

from moelab.base.registry import require
from moelab.viz.notebook import LABEL
from moelab.viz.theme import to_json
from moelab.viz.views.base import View
from moelab.viz.views.page import html_rows as html_rows


class Detail(NamedTuple):
    """What is told of one thing: HTML, and a figure or None."""

    html: str
    figure: Figure | None = None


class Detailed(View):
    """A view with a menu of things below it.

    label : what the things are. names : data → their names. tell : (data, name) → `Detail`.
    """

    def __init__(
        self,
        *args: Any,
        label: str,
        names: Callable[[Any], Sequence[str]],
        tell: Callable[[Any, str], Detail],
        **how: Any,
    ) -> None:
        self._label = label
        self._names = names
        self._of = tell
        super().__init__(*args, **how, below=Detailed._build)

    def detail(self, name: str) -> Detail:
        """What is told of the thing of that name; ValueError: there is none."""
        require(self._label, name, self._names(self.data))
        return self._of(self.data, name)

    # ---- in Jupyter

    def _build(self) -> list[Any]:
        import ipywidgets

        from moelab.viz.views.widgets import chart

        self._menu = ipywidgets.Combobox(
            description=self._label,
            ensure_option=True,
            continuous_update=False,
            placeholder="type to find, or click in the picture",
            style={"description_width": LABEL},
            layout={"width": "auto"},
        )
        self._menu.observe(lambda change: self.guarded(self._look), "value")
        self._text, self._close = ipywidgets.HTML(), chart({"data": [], "layout": {}})
        self._text.add_class("moelab-details")
        self.picture.on_click(self._clicked)
        return [self._menu, self._text, self._close]

    def _look(self) -> None:
        chosen = self._menu.value
        found = self.detail(chosen) if chosen in self._menu.options else Detail("")
        self._text.value = found.html
        self._close.layout.display = "none" if found.figure is None else None
        if found.figure is not None:
            self._close.figure = to_json(found.figure)

    def _clicked(self, clicked: Mapping[str, Any]) -> None:
        name = clicked["data"][0] if isinstance(clicked["data"], list) else clicked["data"]
        if name in self._menu.options:  # not all of a large checkpoint are
            self._menu.value = name

    def _tell(self) -> None:
        super()._tell()
        names = self._menu.options = list(self._names(self.data))
        if self._menu.value not in names:
            self._menu.value = ""
        self._look()
