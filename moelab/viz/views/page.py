"""A view as a page of its own, which plays without a kernel and without a network, light or dark as
the reader's system is, or as one likes.

All that the controls named by `View.plays` can show is computed for it, by the functions that the
widget calls, and what figures have in common is in it once. Its own script draws them: plotly.js
has 4 MB."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from functools import cache
from html import escape
from itertools import product
from pathlib import Path
from string import Template
from typing import Any

import pandas

from moelab.base.records import Record
from moelab.base.table import format_value
from moelab.bench.results import environment
from moelab.viz import theme

#: rows of the table in a page
ROWS = 100
#: bytes of a page; one that would be larger has every second place of its sliders, or every fourth …
MOST = 300_000
THINNER = 1, 2, 4, 8, 16
SCRIPTS = "player.js", "figures.js", "page.js"


def of_charts(view: Any) -> str:
    """The page of a `moelab.viz.views.base.View`."""

    @cache
    def shown(*at: Any) -> tuple[Any, ...]:
        values = view.values | dict(zip(view.plays, at))
        data = view.compute(**values)
        return *view.words_of(data), view.command(**values), [*map(theme.to_json, view.draw(data))]

    for every in THINNER:
        parts: dict[str, int] = {}

        def places(of: Record) -> dict[str, int]:
            return {name: parts.setdefault(json.dumps(of[name]), len(parts)) for name in of}

        steps = [_steps(view.controls[name], view.values[name], every) for name in view.plays]
        controls = [
            {"label": view.controls[name].label, "at": view.values[name], "steps": of}
            for name, of in zip(view.plays, steps)
        ]
        frames = []
        for at in product(*steps):
            *words, figures = shown(*at)
            frames.append(
                [*words, [[places(of["layout"]), *map(places, of["data"])] for of in figures]]
            )
        # as many digits as a picture shows
        known = [
            json.loads(part, parse_float=lambda number: float(f"{float(number):.5}"))
            for part in parts
        ]
        page = whole(view, {"controls": controls, "parts": known, "frames": frames})
        if len(page) <= MOST:
            break
    return page


def _steps(control: Any, value: Any, every: int) -> list[Any]:
    """What a control can show in the page: of a slider every so many steps, and where it is."""
    if isinstance(value, str):
        return control.steps
    steps = enumerate(sorted({*control.steps, value}))
    return [step for i, step in steps if step == value or i % every == 0]


def whole(view: Any, content: Record) -> str:
    """A page: its heading, what it says, the command, who made it when, and what its script plays."""
    on = environment()
    words = {
        "title": view.name.replace("_", " "),
        "caption": view.words[0],
        "alt": view.words[1],
        "command": view.command(**view.values),
        "made": f"{on['date']}, on {on['cpu']}, {on['cores']} cores",
    }
    packed = gzip.compress(json.dumps(content).encode())
    with pandas.option_context("display.max_colwidth", None):
        numbers = pandas.DataFrame(view.rows()[:ROWS]).map(format_value).to_html(index=False)
    script = "\n".join(map(_file, SCRIPTS)).replace("export default { render };", "")
    return Template(_file("page.html")).substitute(
        {name: escape(text) for name, text in words.items()},
        numbers=numbers,
        packed=b64encode(packed).decode(),
        script=script,
    )


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
