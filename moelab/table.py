"""Plain text tables for the terminal, and one way to write a number."""

from __future__ import annotations

from html import escape
from typing import Any


def format_value(value: Any) -> str:
    """A number with at most five significant digits and thousands separated; anything else as it is."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return str(value)


def text_table(head: list[str], rows: list[list[str]]) -> str:
    """Columns aligned under their heads."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
                     for line in lines)


def html_table(caption: str, rows: dict[str, str]) -> str:
    """A table of two columns, name and text, for `_repr_html_`."""
    left = "style='text-align:left'"
    cells = "".join(f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(text)}</td></tr>"
                    for name, text in rows.items())
    return f"<table><caption>{escape(caption)}</caption>{cells}</table>"
