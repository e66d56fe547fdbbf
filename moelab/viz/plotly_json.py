"""A plotly figure as plain JSON: drawn without plotly, whose own objects check every property, 40
ms a picture.

The methods are plotly's, as far as figures here need them. What is asked of a figure beside them
(`data`, `layout`, `to_html`, how Jupyter shows it) is asked of plotly's figure of the same content,
which does check."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partialmethod
from typing import Any

import numpy as np

from moelab.viz import theme


class Figure:
    """traces : dictionaries.   frame : what plotly calls the layout.
    columns : of panels, from the top left."""

    def __init__(
        self,
        traces: Iterable[Mapping[str, Any]] = (),
        frame: Mapping[str, Any] | None = None,
        columns: int = 1,
    ) -> None:
        self.traces, self.frame, self.columns = [*traces], deepcopy(dict(frame or {})), columns

    def __getattr__(self, name: str) -> Any:
        # a copy of a figure asks before it has anything; and what would change plotly's figure
        # would be lost
        if name.startswith(("__", "add_", "update_", "for_each_")) or name in (
            "traces",
            "frame",
            "columns",
        ):
            raise AttributeError(f"a figure has no {name}")
        import plotly.graph_objects as go

        return getattr(go.Figure(self._all()), name)

    def to_json(self) -> str:
        """{"data": …, "layout": …}; NaN is written as such."""
        return json.dumps(self._all(), default=_plain)

    def _all(self) -> dict[str, Any]:
        return {"data": self.traces, "layout": self.frame | {"template": theme.TEMPLATE}}

    def add(
        self, type: str, row: int | None = None, col: int | None = None, **properties: Any
    ) -> Figure:
        """Add a trace, to a panel if it is told which."""
        for n in self._panels(row, col) if row else ():
            properties |= {"xaxis": f"x{n}", "yaxis": f"y{n}"}
        self.traces.append(merged({"type": type}, properties))
        return self

    add_scatter = partialmethod(add, "scatter")
    add_bar = partialmethod(add, "bar")
    add_heatmap = partialmethod(add, "heatmap")
    add_treemap = partialmethod(add, "treemap")

    def update_layout(self, **properties: Any) -> Figure:
        self.frame = merged(self.frame, properties)
        return self

    def update_annotations(self, **properties: Any) -> Figure:
        for i, note in enumerate(notes := self.frame.get("annotations", [])):
            notes[i] = merged(note, properties)
        return self

    def _update_axes(
        self, axis: str, row: int | None = None, col: int | None = None, **properties: Any
    ) -> Figure:
        for n in self._panels(row, col):
            self.frame[f"{axis}axis{n}"] = merged(self.frame.get(f"{axis}axis{n}", {}), properties)
        return self

    update_xaxes = partialmethod(_update_axes, "x")
    update_yaxes = partialmethod(_update_axes, "y")

    def add_annotation(self, **properties: Any) -> Figure:
        self.frame.setdefault("annotations", []).append(merged({}, properties))
        return self

    def _across(
        self, axis: str, row: int | None = None, col: int | None = None, **look: Any
    ) -> Figure:
        """A line at a value of an axis, through a panel or all; an `annotation_text` is above its right
        end, or below at an `annotation_position` "bottom right"; of a vertical one right of its
        top."""
        value = look.pop(axis)
        line = merged({}, look)
        note = line.pop("annotation", {})
        below = note.pop("position", "") == "bottom right"
        other, at = "y", {"x": value, "y": 1, "xanchor": "left", "yanchor": "top"}
        if axis == "y":
            other, at = "x", {"x": 1, "y": value, "xanchor": "right"}
            at["yanchor"] = "top" if below else "bottom"
        ends = {f"{axis}0": value, f"{axis}1": value, f"{other}0": 0, f"{other}1": 1}
        for n in self._panels(row, col):
            of = {f"{axis}ref": f"{axis}{n}", f"{other}ref": f"{other}{n} domain"}
            self.frame.setdefault("shapes", []).append({"type": "line", **ends, **of, **line})
            if note:
                self.add_annotation(showarrow=False, **at, **of, **note)
        return self

    add_hline = partialmethod(_across, "y")
    add_vline = partialmethod(_across, "x")

    def _panels(self, row: int | None, col: int | None) -> Iterator[str]:
        """What the names of axes end with: of a panel, a row, a column or all."""
        for i in range(max(1, sum(name.startswith("xaxis") for name in self.frame))):
            if row in (None, i // self.columns + 1) and col in (None, i % self.columns + 1):
                yield str(i + 1) if i else ""


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`new` over `old`, part by part: "margin_l" is the part l of margin, a title may be its text,
    None takes away."""
    found = dict(old)
    for key, value in new.items():
        head, _, rest = key.partition("_")
        if rest and head != "error":
            key = head
            value = {rest: value}
        if key == "title" and isinstance(value, str):
            value = {"text": value}
        if isinstance(value, Mapping):
            value = merged(found.get(key, {}), value)
        if value is None:
            found.pop(key, None)
        else:
            found[key] = value
    return found


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else list(value)
