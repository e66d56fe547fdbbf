"""A view as a page of its own, which plays without a kernel and without a network, light or dark as
the reader's system is.

All that the controls named by `View.plays` can show is computed for it. A page holds plotly.js, 1.9
MB packed; parts of figures that are the same are in it once. The scrubber's player needs no plotly."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from moelab.base.table import format_value, head_and_rows
from moelab.bench.results import environment
from moelab.viz import theme

FOLDER = Path(__file__).parent
#: rows of the table in a page
ROWS = 500
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>moelab: {title}</title>
<style>
:root {{ color-scheme: light dark; --jp-ui-font-color1: light-dark(#222, #ddd); }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 1400px; margin: 1em auto; padding: 0 1em;
  color: light-dark(#222, #ddd); background: light-dark(#fff, #111); }}
#controls label {{ display: flex; gap: 1em; align-items: center; margin: 0.3em 0; }}
#controls input {{ flex: 1; max-width: 40em; }}
.note {{ color: light-dark(#555, #b5b5b5); font-size: 14px; }}
pre {{ white-space: pre-wrap; padding: 0.5em; background: light-dark(#f3f3f3, #222); }}
table {{ border-collapse: collapse; font-size: 14px; line-height: 1.4; }}
td, th {{ padding: 0.1em 0.6em; text-align: left; vertical-align: top; }}
@media (prefers-color-scheme: dark) {{
.js-plotly-plot {{ filter: invert(0.93) hue-rotate(180deg); }}
.js-plotly-plot :is(.heatmaplayer, .treemaplayer, .cbfills) {{ filter: invert(1) hue-rotate(180deg); }} }}
</style></head>
<body><h1>{title}</h1>
<div id="controls"></div><p id="caption">{caption}</p>
<div id="view"></div>
<pre id="command">{command}</pre>
<p class="note">Made by moelab, {made}.</p>
<div id="numbers"></div>
{packed}
<script type="module">
{script}
</script></body></html>
"""


def of_charts(view: Any) -> str:
    """The page of a `moelab.viz.views.base.View`."""
    played = {name: _steps(view, name) for name in view.plays if len(view.controls[name].steps) > 1}
    parts: dict[str, int] = {}
    every = product(*(steps.values() for steps in played.values()))
    frames = [_frame(view, dict(zip(played, at)), parts) for at in every]
    content = {
        "controls": [
            {
                "label": view.controls[name].label,
                "steps": [*steps],
                "at": [*steps.values()].index(view.values[name]),
                "slides": view.controls[name].slides,
            }
            for name, steps in played.items()
        ],
        "config": theme.CONFIG,
        "parts": [json.loads(part) for part in parts],
        "frames": frames,
        "table": html_rows(
            *head_and_rows(view.rows()[:ROWS]), "the numbers of the picture at first"
        ),
    }
    packed = {"frames": json.dumps(content), "plotly": get_plotlyjs()}
    return whole(view, packed, (FOLDER / "page.js").read_text(encoding="utf-8"))


def _steps(view: Any, name: str) -> dict[str, Any]:
    """What a control can show in the page: its steps and, between them, the value that it has."""
    steps, value = view.controls[name].steps, view.values[name]
    if value in steps.values():
        return dict(steps)
    return dict(sorted([*steps.items(), (f"{value:g}", value)], key=lambda item: item[1]))


def _frame(view: Any, values: dict[str, Any], parts: dict[str, int]) -> dict[str, Any]:
    """What is shown at some values; a figure is the places of its layout and traces among the
    parts."""
    values = view.values | values
    data = view.compute(**values)
    caption, alt = view.words_of(data)
    figures = [
        [
            parts.setdefault(json.dumps(part), len(parts))
            for part in (found["layout"], *found["data"])
        ]
        for found in map(theme.to_json, view.draw(data))
    ]
    command = view.command(**values)
    return {"caption": caption, "alt": alt, "command": command, "figures": figures}


def whole(view: Any, packed: dict[str, str], script: str) -> str:
    """A page: its heading, what it says, the command, who made it when; `packed`, texts that the
    script unpacks."""
    on = environment()
    caption, _ = view.words
    return PAGE.format(
        title=escape(view.name.replace("_", " ").capitalize()),
        caption=escape(caption),
        command=escape(view.command(**view.values)),
        made=escape(
            f"{on['date'][:16].replace('T', ' ')} UTC, on {on['cpu']}, {on['cores']} cores"
        ),
        packed="\n".join(
            f'<script type="text/plain" id="{name}">{_packed(text)}</script>'
            for name, text in packed.items()
        ),
        script=script,
    )


def _packed(text: str) -> str:
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def html_rows(head: Sequence[str], rows: Iterable[Sequence[Any]], summary: str) -> str:
    """A table as HTML, folded under a summary."""

    def line(kind: str, cells: Sequence[Any]) -> str:
        told = (f"<{kind}>{escape(format_value(cell))}</{kind}>" for cell in cells)
        return f"<tr>{''.join(told)}</tr>"

    body = "".join(line("td", row) for row in rows)
    table = f"<table><thead>{line('th', head)}</thead><tbody>{body}</tbody></table>"
    return f"<details><summary>{escape(summary)}</summary>{table}</details>"
