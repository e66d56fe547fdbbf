"""One way to write a number, and tables as plain text or Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from html import escape
from typing import Any


def format_value(value: Any) -> str:
    """A number with at most five significant digits and thousands separated; anything else as it is."""
    if value is None or value != value:     # not a number, of an interval of too few samples
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):             # samples
        return f"{format_value(min(value))} … {format_value(max(value))}" if value else "–"
    if isinstance(value, float):
        return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return str(value)


def percent(share: float | str, digits: int = 1) -> str:
    """A share from 0 to 1 in per cent; words that stand for one as they are."""
    return share if isinstance(share, str) else f"{100 * share:.{digits}f} %"


def ms(seconds: float) -> str:
    """Seconds in milliseconds, without the unit."""
    return f"{1e3 * seconds:.2f}"


def plain(value: float) -> str:
    """A number in three significant digits, thousands separated, never with an exponent."""
    return f"{Decimal(f'{value:.3g}'):,f}"


def size(nbytes: float) -> str:
    """Bytes in GB, or below one in MB."""
    return f"{plain(nbytes / 1e9)} GB" if nbytes >= 1e9 else f"{plain(nbytes / 1e6)} MB"


def duration(seconds: float) -> str:
    """Seconds, or below one milliseconds."""
    return f"{plain(seconds)} s" if seconds >= 1 else f"{plain(1e3 * seconds)} ms"


def span(low: float, high: float) -> str:
    """A range in three significant digits, or one number where both ends read the same."""
    low, high = f"{low:.3g}", f"{high:.3g}"
    return low if low == high else f"{low}–{high}"


def slug(name: str) -> str:
    """A name as part of a metric's: "groups of 8, prune" → "groups_of_8_prune"."""
    return "_".join(re.findall(r"[\w-]+", name))


def head_and_rows(dictionaries: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The columns of all dictionaries, by their first occurrence, and the rows of their cells or None."""
    dictionaries = list(dictionaries)
    head = list(dict.fromkeys(column for row in dictionaries for column in row))
    return head, [[row.get(column) for column in head] for row in dictionaries]


def text_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns aligned under their heads, for the terminal; cells are written by `format_value`."""
    rows = [list(map(format_value, row)) for row in rows]
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


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; cells are written by `format_value`, and no line breaks between a number and its unit."""
    lines = (f"| {' | '.join(map(format_value, line))} |" for line in [head, ["---"] * len(head), *rows])
    return re.sub(r"(?<=\d) (?=(?:%|×|W|ms|MB|GB)(?!\w))", "\u00a0", "\n".join(lines))
