"""A view as a page of its own, which plays without a kernel and without a network, light or dark as
the reader's system is or as one likes.

All that the controls named by `View.plays` can show is computed for it, by the functions that the
widget calls; what figures have in common is in it once. It draws them itself: plotly.js has 4 MB."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from itertools import product
from pathlib import Path
from string import Template
from typing import Any

from moelab.base.table import format_value, head_and_rows
from moelab.bench.results import environment
from moelab.viz import theme

#: rows of the table in a page
ROWS = 200
#: bytes of a page: a slider has fewer places rather than more
MOST = 300_000
SCRIPTS = "player.js", "figures.js", "page.js"


def of_charts(view: Any) -> str:
    """The page of a `moelab.viz.views.base.View`."""
    played = {name: _steps(view, name) for name in view.plays if len(view.controls[name].steps) > 1}

    @cache
    def shown(*at: Any) -> tuple[Any, ...]:
        values = view.values | dict(zip(played, at))
        data = view.compute(**values)
        return *view.words_of(data), view.command(**values), [*map(theme.to_json, view.draw(data))]

    for every in (1, 2, 4, 8, 16):
        steps = {
            name: {
                text: value
                for i, (text, value) in enumerate(of.items())
                if not (view.controls[name].slides and i % every) or value == view.values[name]
            }
            for name, of in played.items()
        }
        parts: dict[str, int] = {}
        every_at = product(*(of.values() for of in steps.values()))
        frames = [_frame(*shown(*at), parts) for at in every_at]
        controls = [
            {
                "label": view.controls[name].label,
                "steps": [*of],
                "at": [*of.values()].index(view.values[name]),
                "slides": view.controls[name].slides,
            }
            for name, of in steps.items()
        ]
        known = [json.loads(part, parse_float=_rounded) for part in parts]
        page = whole(view, {"controls": controls, "parts": known, "frames": frames})
        if len(page) <= MOST:
            break
    return page


def _steps(view: Any, name: str) -> dict[str, Any]:
    """What a control can show in the page: its steps and, between them, the value that it has."""
    steps, value = view.controls[name].steps, view.values[name]
    if value in steps.values():
        return dict(steps)
    return dict(sorted([*steps.items(), (f"{value:g}", value)], key=lambda item: item[1]))


def _frame(
    caption: str, alt: str, command: str, figures: list[Any], parts: dict[str, int]
) -> dict[str, Any]:
    """What is shown at some values; a layout or a trace is the places of its values among the
    parts."""

    def places(of: dict[str, Any]) -> dict[str, int]:
        return {name: parts.setdefault(json.dumps(of[name]), len(parts)) for name in of}

    figures = [[*map(places, (of["layout"], *of["data"]))] for of in figures]
    return {"caption": caption, "alt": alt, "command": command, "figures": figures}


def whole(view: Any, content: dict[str, Any]) -> str:
    """A page: its heading, what it says, the command, who made it when, and what its script plays."""
    on = environment()
    caption, alt = view.words
    packed = gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)
    return Template(_file("page.html")).substitute(
        title=escape(view.name.replace("_", " ").capitalize()),
        caption=escape(caption),
        alt=escape(alt),
        command=escape(view.command(**view.values)),
        made=escape(
            f"{on['date'][:16].replace('T', ' ')} UTC, on {on['cpu']}, {on['cores']} cores"
        ),
        table=html_rows(*head_and_rows(view.rows()[:ROWS]), "the numbers of the picture at first"),
        packed=b64encode(packed).decode(),
        script="\n".join(map(_file, SCRIPTS)).replace("export default { render };", ""),
    )


def _rounded(number: str) -> float:
    """As many digits as a picture shows."""
    return float(f"{float(number):.5g}")


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def html_rows(head: Sequence[str], rows: Iterable[Sequence[Any]], summary: str) -> str:
    """A table as HTML, folded under a summary."""

    def line(kind: str, cells: Sequence[Any]) -> str:
        told = (f"<{kind}>{escape(format_value(cell))}</{kind}>" for cell in cells)
        return f"<tr>{''.join(told)}</tr>"

    body = "".join(line("td", row) for row in rows)
    table = f"<table><thead>{line('th', head)}</thead><tbody>{body}</tbody></table>"
    return f"<details><summary>{escape(summary)}</summary>{table}</details>"
