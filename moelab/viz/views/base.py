"""The frame of every view: controls, a picture that is changed in place, exports, the command, a
place for errors.

A view is made of plain functions, so all that it shows can be had, and tested, without a widget:

    values ─ compute ─▶ data ─ draw ─▶ figures;  rows(data) is their table, command(values) what
                                                 reproduces them

Nothing is a widget before a view is displayed in Jupyter, whose notebook keeps the picture that the
browser first drew; executed headlessly, it shows the figure alone, which the runner gives its PNG.
"""

from __future__ import annotations

import csv
import io
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from moelab.comparison import are_numbers
from moelab.schema import Must
from moelab.table import head_and_rows
from moelab.viz import theme
from moelab.viz.notebook import LABEL, live, show
from moelab.viz.plotly_json import Figure

FOLDER = Path(__file__).parent


class Control(NamedTuple):
    """A value that a person turns: what it is at first, the widget that shows it, and what it must
    be."""

    value: Any
    build: Callable[[], Any]
    must: Must


def _wide(kind: str, label: str, **how: Any) -> Any:
    """An ipywidget over the full width; it tells its value when it is let go, not while it
    moves."""
    import ipywidgets

    if "continuous_update" in getattr(ipywidgets, kind).class_trait_names():
        how["continuous_update"] = False
    return getattr(ipywidgets, kind)(
        description=label, style={"description_width": LABEL}, layout={"width": "auto"}, **how
    )


def slider(
    label: str,
    value: float,
    low: float,
    high: float,
    step: float = 0.0,
    log: bool = False,
    beyond: float | None = None,
) -> Control:
    """A number from low to high; `label` says the quantity and its unit. Whole where value and step
    are.

    beyond : what may be set, by a command, beside what the slider reaches: from 1 / beyond to
    beyond."""
    if not low <= value <= high or log and low <= 0:
        raise ValueError(f"{label}: {value} is not from {low} to {high}" + " > 0" * log)
    ends = (1 / beyond, beyond) if beyond else (low, high)
    must = Must(
        lambda value: are_numbers(value) and ends[0] <= value <= ends[1],
        f"from {ends[0]:g} to {ends[1]:g}",
    )
    if log:
        scale = {
            "min": math.log10(low),
            "max": math.log10(high),
            "step": step or math.log10(high / low) / 100 or 0.01,
            "readout_format": ".3g",
        }
        return Control(value, partial(_wide, "FloatLogSlider", label, **scale), must)
    kind = "IntSlider" if isinstance(value, int) and float(step).is_integer() else "FloatSlider"
    step = step or (1 if kind == "IntSlider" else (high - low) / 100)
    return Control(
        value, partial(_wide, kind, label, min=low, max=high, step=type(value)(step)), must
    )


def menu(label: str, value: Any, options: Sequence[Any] | Mapping[str, Any]) -> Control:
    """One of several; a mapping is label → value."""
    known = list(options.values() if isinstance(options, Mapping) else options)
    return Control(
        value,
        partial(
            _wide,
            "Dropdown",
            label,
            options=list(options.items() if isinstance(options, Mapping) else options),
        ),
        Must(lambda value: value in known, f"one of {', '.join(map(repr, known))}"),
    )


def several(label: str, values: Sequence[str], options: Sequence[str]) -> Control:
    """Any of several, at least one."""
    return Control(
        tuple(values),
        partial(_wide, "SelectMultiple", label, options=list(options), rows=min(6, len(options))),
        Must(
            lambda values: values and set(values) <= set(options), f"some of {', '.join(options)}"
        ),
    )


class View:
    """A picture that one plays with.

    name : of files that are saved.
    controls : argument of `compute` → its `Control`.
    compute : values → data.   draw : data → a plotly figure, or several, one below the other.
    rows : data → dictionaries, one a row of the CSV.
    command : values → (a line for a shell, Python) that give the same data.
    words : data → (caption, the picture in words).
    below : what makes further widgets of the view, below the picture; it may call `set` and
        `refresh`.
    ahead : does what may be asked for later, a step at a time, while nobody turns anything; it ends
        at a step that takes longer than one would wait for.

    Raises what `compute` and `draw` raise at the first values: an error must not hide in a widget.
    """

    #: whether its controls are widgets; else the picture has its own
    controls_shown = True

    def __init__(
        self,
        name: str,
        controls: Mapping[str, Control],
        compute: Callable[..., Any],
        draw: Callable[[Any], Figure | Iterable[Figure]],
        rows: Callable[[Any], list[Mapping[str, Any]]],
        command: Callable[..., tuple[str, str]],
        words: Callable[[Any], tuple[str, str]],
        below: Callable[[View], Sequence[Any]] = lambda view: (),
        ahead: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self.name, self.controls, self._below, self._ahead = name, dict(controls), below, ahead
        self._compute = compute
        self._draw = draw
        self._rows = rows
        self._command = command
        self._words = words
        self.values = {name: control.value for name, control in controls.items()}
        self._dark, self._turn = False, threading.RLock()
        self._check(self.values)
        self.refresh()

    def __repr__(self) -> str:
        return (
            f"<view {self.name}: "
            f"{', '.join(f'{name}={value!r}' for name, value in self.values.items())}>"
        )

    def _check(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if not (must := self.controls[name].must).test(value):
                raise ValueError(
                    f"the view {self.name} has {name}={value!r}; it must be {must.words}"
                )

    def set(self, **values: Any) -> View:
        """Turn controls; ValueError for one that there is not, or a value that it cannot have. What
        is displayed changes in place."""
        if unknown := values.keys() - self.controls.keys():
            raise ValueError(
                f"the view {self.name} has no control {', '.join(sorted(unknown))}; it has "
                f"{', '.join(self.controls) or 'none'}"
            )
        self._check(values)
        if "widget" in self.__dict__:
            moved = [
                name
                for name, value in values.items()
                if name in self._built and self._built[name].value != value
            ]
            self._quiet = True
            try:
                for name in moved:
                    self._built[name].value = values[name]
            finally:
                self._quiet = False
        self.values |= values
        self.refresh()
        return self

    def refresh(self) -> None:
        """Compute and draw again, with the same values; the browser draws a figure while the next
        one is made."""
        with self._turn:
            data = self._compute(**self.values)
            figures = []
            live = "widget" in self.__dict__
            drawn = self._draw(data)
            for i, figure in enumerate([drawn] if hasattr(drawn, "to_json") else drawn):
                figures.append(figure)
                if live:
                    self._show(i, figure)
            self.data = data
            self.figures = figures
            if live:
                self._tell()

    @property
    def figure(self) -> Figure:
        """The first, or only, figure."""
        return self.figures[0]

    picture = property(lambda self: self.pictures[0])

    @property
    def commands(self) -> tuple[str, str]:
        """(a line for a shell, Python) that reproduce what is seen."""
        return self._command(**self.values)

    @property
    def words(self) -> tuple[str, str]:
        """The caption, and the picture in words."""
        return self._words(self.data)

    def csv(self) -> str:
        """The numbers of the picture as text with commas."""
        (head, cells), file = head_and_rows(self._rows(self.data)), io.StringIO()
        csv.writer(file).writerows([head, *cells])
        return file.getvalue()

    def html(self) -> str:
        """The pictures as a page that works without a network."""
        import plotly.graph_objects as go

        parts = [
            go.Figure(theme.to_json(figure)).to_html(include_plotlyjs=not i, full_html=False)
            for i, figure in enumerate(self.figures)
        ]
        return (
            f'<!doctype html><meta charset="utf-8"><title>{escape(self.name)}</title>\n'
            + "\n".join([*parts, f"<p>{escape(self.words[0])}</p>"])
        )

    def _ipython_display_(self) -> None:
        if os.environ.get("MOELAB_HEADLESS"):
            for figure in self.figures[:-1]:
                show(figure, "", self.words[1])
            show(self.figures[-1], *self.words)
        else:
            caption, alt = self.words
            live(self.widget, f"[To be played with in JupyterLab. {alt}] {caption}", self.pictures)
            threading.Thread(target=self._prepare, daemon=True).start()

    # ---- in Jupyter

    @cached_property
    def widget(self) -> Any:
        """The view as one ipywidget, made when it is first asked for."""
        import ipywidgets

        from moelab.viz.views.widgets import toolbar

        self._quiet = True
        self._built = {
            name: control.build() for name, control in self.controls.items() if self.controls_shown
        }
        for name, built in self._built.items():
            built.value = self.values[name]
        self._quiet = False
        for name, built in self._built.items():
            built.observe(partial(self._turned, name), "value")
        self.pictures = self._pictures()
        self.errors, self._caption = ipywidgets.Output(), ipywidgets.HTML()
        self._tools = toolbar(self)
        self._tools.observe(lambda change: self._recolour(change["new"]), "dark")
        box = ipywidgets.VBox(
            [
                *self._built.values(),
                *self.pictures,
                self._caption,
                self._tools,
                self.errors,
                *self._below(self),
            ],
            layout={"width": "100%"},
        )
        box.add_class("moelab-view")
        self._tell()
        return box

    def _prepare(self) -> None:
        steps = iter(self._ahead())
        begun = time.thread_time()
        with suppress(Exception):  # it is told to whoever asks for it
            while time.thread_time() - begun < 0.1:
                time.sleep(0.005)  # a control that was turned is first
                with self._turn:
                    begun = time.thread_time()
                    if next(steps, steps) is steps:
                        return

    def _pictures(self) -> list[Any]:
        from moelab.viz.views.widgets import chart

        return [chart(self._json(figure)) for figure in self.figures]

    def _json(self, figure: Figure) -> dict[str, Any]:
        return theme.darkened(theme.to_json(figure)) if self._dark else theme.to_json(figure)

    def _turned(self, name: str, change: Mapping[str, Any]) -> None:
        if self._quiet:
            return
        self.values[name] = change["new"]
        self.guarded(self.refresh)

    def guarded(self, function: Callable[[], Any]) -> None:
        """Call a function; what it raises is shown below the picture, where the notebook runner
        finds it too. Works in any thread, and what was shown before stays."""
        with self._turn:
            try:
                function()
                told = ()
            except Exception as error:
                told = (
                    {
                        "output_type": "error",
                        "ename": type(error).__name__,
                        "evalue": str(error),
                        "traceback": traceback.format_exception(error),
                    },
                )
            if self.errors.outputs != told:
                self.errors.outputs = told

    def _recolour(self, dark: bool) -> None:
        def again() -> None:
            for i, figure in enumerate(self.figures):
                self._show(i, figure)
            self._tell()

        self._dark = dark
        self.guarded(again)

    def _show(self, i: int, figure: Figure) -> None:
        self.pictures[i].figure = self._json(figure)

    def _tell(self) -> None:
        caption, alt = self.words
        self._caption.value = (
            f'<div role="note" aria-label="{escape(alt)}"><em>{escape(caption)}</em></div>'
        )
        with self._tools.hold_sync():
            self._tools.shell, self._tools.python = self.commands
