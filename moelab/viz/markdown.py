"""Text that a notebook computes: tables and sentences as Markdown, and short ways to write numbers in them.

A table is a list of rows, each a dictionary from the head of a column to its cell; what a row has no cell for is a
dash. `moelab.viz.expert_tables`, `ane_tables` and `ndp_tables` make such rows of what was found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from moelab.table import format_value

Rows = Iterable[Mapping[str, Any]]


def table(rows: Rows) -> None:
    """Show rows as a Markdown table; numbers as `moelab.table.format_value` writes them, text as it is."""
    say(lines(rows))


def lines(rows: Rows) -> str:
    """The Markdown of a table; the columns are those of all rows, in the order in which they first occur."""
    rows = list(rows)
    heads = list(dict.fromkeys(head for row in rows for head in row))
    cells = [heads, ["---"] * len(heads), *([format_value(row.get(head)) for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def say(text: str) -> None:
    """Show text as Markdown."""
    from IPython.display import Markdown, display
    display(Markdown(text))


def slug(name: str) -> str:
    """A name as part of a metric's: "groups of 8, prune" → "groups_of_8_prune"."""
    return "_".join(re.findall(r"[\w-]+", name))


def percent(share: float | str, digits: int = 1) -> str:
    """A share from 0 to 1 in per cent; words that stand for one (`moelab.bench.measure.share`) as they are."""
    return share if isinstance(share, str) else f"{100 * share:.{digits}f} %"


def ms(seconds: float) -> str:
    """Seconds in milliseconds, without the unit."""
    return f"{1e3 * seconds:.2f}"


def span(low: float, high: float) -> str:
    """A range in three significant digits, or one number where both ends read the same."""
    low, high = f"{low:.3g}", f"{high:.3g}"
    return low if low == high else f"{low}–{high}"
