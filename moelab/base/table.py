"""Numbers as people read them, and tables as plain text or Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import zip_longest
from shutil import get_terminal_size
from textwrap import fill, wrap
from typing import Any


def format_value(value: Any) -> str:
    """A number with at most five significant digits and thousands separated; anything else as it
    is."""
    if value is None or value != value:  # not a number, of an interval of too few samples
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):  # samples
        return f"{format_value(min(value))} … {format_value(max(value))}" if value else "–"
    if isinstance(value, float):
        return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return str(value)


def percent(share: float | str, digits: int = 1) -> str:
    """A share from 0 to 1 in per cent; words that stand for one as they are."""
    return share if isinstance(share, str) else f"{100 * share:.{digits}f} %"


def ms(seconds: float) -> str:
    """Seconds as milliseconds with two decimals, without the unit."""
    return f"{1e3 * seconds:.2f}"


def plain(value: float) -> str:
    """A number in three significant digits, thousands separated, never with an exponent."""
    return f"{Decimal(f'{value:.3g}'):,f}"


#: units of bytes and seconds, the largest first
UNITS = {"B": (("GB", 1e9), ("MB", 1e6)), "s": (("s", 1.0), ("ms", 1e-3))}


def unit_of(least: float, base: str) -> tuple[str, float]:
    """(unit, its size in base units): the largest unit in which `least` is at least 1, else the
    smallest."""
    return next((one for one in UNITS[base] if least >= one[1]), UNITS[base][-1])


def size(nbytes: float) -> str:
    """Bytes in GB, or in MB below 1 GB."""
    unit, of = unit_of(nbytes, "B")
    return f"{plain(nbytes / of)} {unit}"


def duration(seconds: float) -> str:
    """Seconds in s, or in ms below 1 s."""
    unit, of = unit_of(seconds, "s")
    return f"{plain(seconds / of)} {unit}"


def span(low: float, high: float) -> str:
    """A range in three significant digits, or one number where both ends read the same."""
    low = f"{low:.3g}"
    high = f"{high:.3g}"
    return low if low == high else f"{low}–{high}"


def head_and_rows(dictionaries: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The columns of all dictionaries, by their first occurrence, and the rows of their cells or
    None."""
    dictionaries = list(dictionaries)
    head = list(dict.fromkeys(column for row in dictionaries for column in row))
    return head, [[row.get(column) for column in head] for row in dictionaries]


def terminal_width() -> int:
    """Columns of the terminal ($COLUMNS), or 100 where there is none."""
    return get_terminal_size((100, 24)).columns


def filled(text: str) -> str:
    """Prose within the terminal's width; lines that begin with a blank, as of tables and commands,
    stay as they are."""
    return "\n".join(
        line
        if line.startswith(" ")
        else fill(line, terminal_width(), break_on_hyphens=False, break_long_words=False)
        for line in text.split("\n")
    )


def text_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns aligned under their heads, the widest wrapped where they would be wider than the
    terminal; cells are written by `format_value`."""
    rows = [list(head), *([format_value(cell) for cell in row] for row in rows)]
    columns = list(zip(*rows))
    widths = [max(map(len, column)) for column in columns]
    for _ in range(sum(widths) + 2 * len(widths) - terminal_width()):
        widest = max(widths)
        widths[widths.index(widest)] -= widest > 24
    lines = []
    for row in rows:
        cells = [
            wrap(cell, width) if len(cell) > width else [cell] for cell, width in zip(row, widths)
        ]
        lines += zip_longest(*cells, fillvalue="")
        if row is rows[0]:
            lines.append(["-" * width for width in widths])
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
        for line in lines
    )


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; cells are written by `format_value`, and no line breaks between a number
    and its unit."""
    lines = (
        f"| {' | '.join(map(_markdown_cell, line))} |"
        for line in [head, ["---"] * len(head), *rows]
    )
    return re.sub(r"(?<=\d) (?=(?:%|×|W|ms|MB|GB)(?!\w))", "\u00a0", "\n".join(lines))


def _markdown_cell(value: Any) -> str:
    return " ".join(format_value(value).replace("|", "\\|").splitlines())
