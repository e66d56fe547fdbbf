"""Tables of README.md and docs/, written from results/bench between markers; nobody types them.

    <!-- table: resident -->
    <!-- end of table -->

`python docs/tables.py` fills every such place, and with --check says which differ from the results, and
which results are older than the code that they measured. What a table shows is an entry of
docs/tables.toml, which says how to write one."""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from moelab.base.files import CHECKOUT, read_json, results_root, write_text
from moelab.base.records import Record
from moelab.base.table import format_value, markdown_table
from moelab.bench import module_of
from moelab.bench.results import BenchFile, bench_file, git, sections_of

MARK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


@cache
def tables() -> dict[str, Record]:
    """docs/tables.toml; nothing without the repository."""
    if CHECKOUT is None:
        return {}
    return tomllib.loads((CHECKOUT / "docs" / "tables.toml").read_text(encoding="utf-8"))


_sections = cache(sections_of)


def _rows(table: Record) -> dict[str, list[str]]:
    """Name of a row → what it gives to the columns."""
    if isinstance(table["rows"], dict):
        return table["rows"]
    file, section = table["rows"].split(" | ")
    return {row: [row] for row in _sections(bench_file(file))[section]}


def places(table: Record) -> Iterator[list[list[str]]]:
    """Of each row, the (file, section, row, cell) of its columns."""
    for given in _rows(table).values():
        yield [
            re.sub(r"\$(\d)", lambda found, given=given: given[int(found[1])], column).split(" | ")
            for column in table["columns"]
        ]


def cell(file: str, section: str, row: str, form: str) -> str:
    """What the values of a row say in a form."""
    if not row:
        return ""
    found = _sections(bench_file(file)).get(section, {}).get(row)
    values = found if isinstance(found, dict) else {"": found}
    try:
        return re.sub(r"{([^{}]*):([^:{}]*)}", lambda of: _said(values[of[1]], of[2]), form)
    except KeyError:
        return "–"


def _said(value: Any, form: str) -> str:
    if form in ("ms", "3"):
        value *= 1e3 if form == "ms" else 1
        return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
    return format(value, form) if form else format_value(value)


def source(file: str) -> str:
    """A file, and on what, how calm a machine and at which commits its runs were made; of what was
    computed, the commit."""
    found = read_json(bench_file(file), BenchFile)
    if not is_measured(file):
        commits = ", ".join((run["git"] or "unknown")[:8] for run in found["runs"])
        return f"results/bench/{file}.json (commit {commits})"
    commits: dict[str, dict[str, None]] = {}
    for run in found["runs"]:
        chip = run["device"] if run["device"] != "cpu" else run["cpu"]
        load = (run.get("load") or [None])[0]
        known = "load unknown" if load is None else f"load {load:.1f} before"
        quiet = {True: "quiet", False: f"BUSY, {known}", None: known}[run.get("quiet")]
        where = f"{chip}, {run['cores']} cores, {quiet}"
        commits.setdefault(where, {})[(run["git"] or "unknown")[:8]] = None
    said = (f"{where}, commit {', '.join(of)}" for where, of in commits.items())
    return f"results/bench/{file}.json ({'; '.join(said)})"


def is_measured(file: str) -> bool:
    """Whether any of a file's numbers depends on the machine."""
    records = read_json(bench_file(file), BenchFile)["records"]
    return any(of["kind"] == "measured" for of in records)


def written(name: str) -> str:
    """A table in Markdown, and where its numbers are from."""
    if name not in tables():
        raise ValueError(f"there is no table {name}; there are {', '.join(tables())}")
    table = tables()[name]
    rows = [[cell(*place) for place in row] for row in places(table)]
    lines = [[row, *cells] for row, cells in zip(_rows(table), rows)]
    sources = "; ".join(map(source, files(table)))
    how = "Measured" if any(map(is_measured, files(table))) else "Computed"
    return f"{markdown_table(table['head'], lines)}\n\n<sub>{how}: {sources}.</sub>\n"


def files(table: Record) -> list[str]:
    """Where a table's numbers are from."""
    return list(dict.fromkeys(place[0] for row in places(table) for place in row))


def filled(text: str) -> str:
    """A page with every table between its markers as results have it."""
    return MARK.sub(lambda found: f"{found[1]}{written(found[2])}{found[4]}", text)


def pages() -> list[Path]:
    """README.md and docs/."""
    return [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))] if CHECKOUT else []


def older_than(path: Path, measured: Iterable[str]) -> list[str]:
    """Of each run in a file that is older than the code which it measured, why: files and folders,
    below the repository. Without git, nothing is known."""
    said = []
    for run in read_json(path, BenchFile)["runs"]:
        commit = (run["git"] or "").removesuffix("+changes")
        if not commit:
            said.append(f"{path.name}: measured at an unknown commit")
            continue
        count = git("rev-list", "--count", f"{commit}..HEAD", "--", *measured)
        if count and count != "0":
            said.append(
                f"{path.name}: {count} commits have changed what was measured at {commit[:8]}"
            )
    return said


def stale() -> list[str]:
    """Results of tables that are older than what they measured, as benches declare it: `MEASURES`."""
    found = []
    for file in sorted({file for table in tables().values() for file in files(table)}):
        bench = module_of(read_json(bench_file(file), BenchFile)["bench"])
        found += older_than(bench_file(file), getattr(bench, "MEASURES", ("moelab",)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="write nothing; say what differs")
    args = parser.parse_args()
    differ = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            differ += 1
            print(
                f"{page.name} {'differs from' if args.check else 'written from'} {results_root()}"
            )
            if not args.check:
                write_text(page, new)
    print("\n".join(stale()))
    return int(args.check and differ > 0)


if __name__ == "__main__":
    sys.exit(main())
