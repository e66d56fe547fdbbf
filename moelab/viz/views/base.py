"""The frame of every view: controls, what it says, a picture that is changed in place, exports, the
command, a place for errors.

A view is made of plain functions, so all that it shows can be had, and tested, without a widget:

    values ─ compute ─▶ data ─ draw ─▶ figures;  rows(data) is their table, command(values) what
                                                 reproduces them

Nothing is a widget before a view is displayed in Jupyter, whose notebook keeps the last picture that
the browser drew; executed headlessly, it shows the figure alone, which
the runner gives its PNG. `html` is a page whose controls turn without a kernel
(`moelab.viz.views.page`)."""

from __future__ import annotations

import math
import os
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from typing import Any, NamedTuple

from IPython.display import display
from pandas import DataFrame
from plotly.graph_objects import Figure

from moelab.base.registry import require
from moelab.base.schema import Must
from moelab.comparison import are_numbers
from moelab.viz import theme
from moelab.viz.notebook import FAILED, LABEL, live, show
from moelab.viz.views import page

#: places of a slider in a page
STEPS = 20
#: a slider tells its value when it is let go, not while it moves
LET_GO = {"continuous_update": False}


class Control(NamedTuple):
    """A value that a person turns: its label, what it is at first, the widget that shows it, what it
    must be, and values that a page has."""

    label: str
    value: Any
    build: Callable[[], Any]
    must: Must
    steps: Sequence[Any] = ()


def _wide(kind: str, label: str, **how: Any) -> Any:
    """An ipywidget over the full width."""
    import ipywidgets

    return getattr(ipywidgets, kind)(
        description=label, style={"description_width": LABEL}, layout={"width": "auto"}, **how
    )


def slider(
    label: str,
    value: float,
    low: float,
    high: float,
    log: bool = False,
    steps: Sequence[float] = (),
) -> Control:
    """A number from low to high, whole where `value` is; `label` says the quantity and its unit.

    log : with a logarithmic scale, and any number above 0 may be set, by a command.
    steps : what a page has; else the slider's own places, evenly.
    """
    if log:
        must = Must(lambda value: are_numbers(value) and 0 < value < math.inf, "above 0")
        ends = [math.log10(low), math.log10(high)]
        scale = LET_GO | {"min": ends[0], "max": ends[1], "readout_format": ".3g"}
        build = partial(
            _wide, "FloatLogSlider", label, step=(ends[1] - ends[0]) / 100 or 0.01, **scale
        )
        return Control(label, value, build, must)
    must = Must(lambda value: are_numbers(value) and low <= value <= high, f"{low:g} to {high:g}")
    kind = "IntSlider" if isinstance(value, int) else "FloatSlider"
    every = max(1, round((high - low) / STEPS))
    return Control(
        label,
        value,
        partial(_wide, kind, label, min=low, max=high, step=1, **LET_GO),
        must,
        steps or range(math.ceil(low), int(high) + 1, every),
    )


def menu(label: str, value: Any, options: Iterable[Any]) -> Control:
    """One of several."""
    known = [*options]
    return Control(
        label,
        value,
        partial(_wide, "Dropdown", label, options=known),
        Must(lambda value: value in known, f"one of {', '.join(map(repr, known))}"),
        known,
    )


def several(label: str, values: Sequence[str], options: Sequence[str]) -> Control:
    """Any of several, or none."""
    return Control(
        label,
        tuple(values),
        partial(_wide, "SelectMultiple", label, options=options, rows=min(6, len(options))),
        Must(lambda values: {*values} <= {*options}, f"some of {', '.join(options)}"),
    )


@dataclass(eq=False, repr=False)
class View:
    """A picture that one plays with.

    name : of files that are saved.
    controls : argument of `compute` → its `Control`.
    compute : values → data.   draw : data → plotly figures, one below the other.
    rows_of : data → dictionaries, one a row of the CSV.
    command : values → the line for a shell that gives the same data.
    words_of : data → (caption, the picture in words).
    plays : controls that a page has, too: all that their values show is computed for it.

    Raises what `compute` and `draw` raise at the first values: an error must not hide in a widget.
    """

    #: whether its controls are widgets; else the picture has its own
    controls_shown = True

    name: str
    controls: Mapping[str, Control]
    compute: Callable[..., Any]
    draw: Callable[[Any], Iterable[Figure]]
    rows_of: Callable[[Any], list[Mapping[str, Any]]]
    command: Callable[..., str]
    words_of: Callable[[Any], tuple[str, str]]
    plays: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._quiet = False
        self.values: dict[str, Any] = {}
        self.set(**{name: control.value for name, control in self.controls.items()})

    def set(self, **values: Any) -> View:
        """Turn controls; ValueError for one that there is not, or a value that it cannot have. What
        is displayed changes in place; the browser draws a figure while the next one is made."""
        for name, value in values.items():
            require("control", name, self.controls)
            if isinstance(value, float):
                values[name] = value = float(f"{value:.4g}")  # as a command is to carry it
            if not (must := self.controls[name].must).test(value):
                raise ValueError(
                    f"the view {self.name} has {name}={value!r}; it must be {must.words}"
                )
        self.values |= values
        shown = "widget" in self.__dict__
        if shown:
            self._quiet = True
            for name in values.keys() & self._built.keys():
                self._built[name].value = values[name]
            self._quiet = False
        data, figures = self.compute(**self.values), []
        for i, figure in enumerate(self.draw(data)):
            figures.append(figure)
            if shown:
                self._show(i, figure)
        self.data, self.figures = data, figures
        if shown:
            self._tell()
        return self

    @property
    def words(self) -> tuple[str, str]:
        """The caption, and the picture in words."""
        return self.words_of(self.data)

    def rows(self) -> list[Mapping[str, Any]]:
        """The numbers of the picture."""
        return self.rows_of(self.data)

    def csv(self) -> str:
        """The numbers of the picture as text with commas."""
        return DataFrame(self.rows()).to_csv(index=False)

    def html(self) -> str:
        """The view as a page that works without a network and a kernel."""
        return page.of_charts(self)

    def _ipython_display_(self) -> None:
        caption, alt = self.words
        if os.environ.get("MOELAB_HEADLESS"):
            for figure in self.figures[:-1]:
                show(figure, "", alt)
            show(self.figures[-1], caption, alt)
        else:
            live(self.widget, f"[To be played with in JupyterLab. {alt}] {caption}")
            self._pngs: dict[int, str] = {}
            self._still = display(self._pictures_kept(), raw=True, display_id=True)
            self._tools.still = self._kept
            for i, picture in enumerate(self.pictures):
                picture.on_msg(partial(self._keep, i))

    # ---- in Jupyter

    @property
    def _kept(self) -> str:
        """The class of what the toolbar hides where it is itself shown."""
        return f"moelab-still-{self._tools.model_id}"

    def _pictures_kept(self) -> dict[str, str]:
        """What a reader of the saved notebook sees in the place of the view: its last pictures and
        its words."""
        caption, alt = map(escape, self.words)
        shown = "".join(
            f'<img alt="{alt}" style="max-width:100%" src="data:image/png;base64,{png}">'
            for _, png in sorted(self._pngs.items())
        )
        told = f"{FAILED}<div class={self._kept}>{shown}<p><em>{caption}</em></p></div>"
        return {"text/html": told, "text/plain": ""}

    def _keep(self, i: int, _: Any, message: Mapping[str, Any], buffers: Sequence[Any]) -> None:
        """Keep the i-th picture, which the browser has drawn."""
        if "png" in message:
            self._pngs[i] = b64encode(theme.in_few_colours(bytes(buffers[0]))).decode()
            self._still.update(self._pictures_kept(), raw=True)

    @cached_property
    def widget(self) -> Any:
        """The view as one ipywidget, made when it is first asked for."""
        import ipywidgets

        from moelab.viz.views.widgets import toolbar

        self._built = {
            name: control.build() for name, control in self.controls.items() if self.controls_shown
        }
        for name, built in self._built.items():
            built.value = self.values[name]
            built.observe(partial(self._turned, name), "value")
        self.pictures = self._pictures()
        self.errors, self._caption = ipywidgets.Output(), ipywidgets.HTML()
        self._tools = toolbar(self)
        parts = [*self._built.values(), self._caption, *self.pictures, self._tools, self.errors]
        box = ipywidgets.VBox(parts, layout={"width": "100%"})
        box.add_class("moelab-view")
        self._tell()
        return box

    def _pictures(self) -> list[Any]:
        from moelab.viz.views.widgets import chart

        return [chart(theme.to_json(figure)) for figure in self.figures]

    def _turned(self, name: str, change: Mapping[str, Any]) -> None:
        if not self._quiet:
            self.guarded(lambda: self.set(**{name: change["new"]}))

    def guarded(self, function: Callable[[], Any]) -> None:
        """Call a function; what it raises is shown below the picture, where the notebook runner
        finds it too, and what was shown before stays."""
        self.errors.outputs = ()
        try:
            function()
        except Exception as error:
            self.errors.outputs = (
                {
                    "output_type": "error",
                    "ename": type(error).__name__,
                    "evalue": str(error),
                    "traceback": traceback.format_exception(error),
                },
            )

    def _show(self, i: int, figure: Figure) -> None:
        self.pictures[i].figure = theme.to_json(figure)

    def _tell(self) -> None:
        caption, alt = self.words
        self._caption.value = (
            f'<p role="note" aria-label="{escape(alt)}"><em>{escape(caption)}</em></p>'
        )
        self._tools.shell = self.command(**self.values)
