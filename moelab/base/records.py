"""Shapes of JSON that many modules pass on: rows and records."""

from __future__ import annotations

from typing import Any

Value = float | str | bool
#: a row of a table: column → cell; an object of JSON
Record = dict[str, Any]
Rows = list[Record]
#: rows by name, as in a section of a bench's results
Records = dict[str, Record]
#: a row of numbers
Numbers = dict[str, float]
