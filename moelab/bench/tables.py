"""Tables of README.md and docs/, written from results/bench between markers; nobody types them.

    <!-- table: resident -->
    <!-- end of table -->

`moelab tables` fills every such place, `moelab tables --check` says which differ from the results,
and which results are older than the code that they measured. A table is an entry of `TABLES`: a head,
and rows of cells, each found by its file, section, row and metric."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from moelab.bench import BENCHES
from moelab.bench.results import BenchFile, bench_file, older_than, sections_of
from moelab.files import CHECKOUT, read_json, results_root, write_text
from moelab.table import markdown_table

MARK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
MACHINES = {"Zen 4": "", "Zen 3": "_avx2"}  # → the end of its files' names
PEERS = ("3.06", "1.85")  # GB


class Table(NamedTuple):
    """files : that its numbers are from. rows : the cells of each."""

    files: tuple[str, ...]
    head: tuple[str, ...]
    rows: Callable[[], list[list[Any]]]


def find(file: str, section: str, row: str, metric: str, unit: float = 1.0) -> Any:
    """A value in units; None where it was not measured."""
    value = _sections(bench_file(file)).get(section, {}).get(row, {}).get(metric)
    return value if value is None or isinstance(value, str) else value / unit


@cache
def _sections(path: Path) -> Any:
    return sections_of(path)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _tpot(places: Sequence[tuple[str, str]], arms: Mapping[str, str]) -> list[list[Any]]:
    """Milliseconds a token of arms, what they are called → their row, at each file and section."""
    return [
        [name, *(_ms(find(file, section, arm, "TPOT s", 1e-3)) for file, section in places)]
        for name, arm in arms.items()
    ]


def _resident() -> list[list[Any]]:
    whole = "everything resident"
    few = "everything resident in few bits"
    arms: dict[str, Sequence[tuple[str, str] | None]] = {
        "moelab `fast`, `dense` in as many bits": (
            (whole, "moelab fast"),
            (whole, "moelab fast, bf12"),
            (few, "moelab fast, int8, dense too"),
            (few, "moelab fast, int4, dense too"),
        ),
        "llama.cpp: BF16, Q8_0, Q4_0": (
            (whole, "llama.cpp"),
            None,
            (few, "llama.cpp Q8_0"),
            (few, "llama.cpp Q4_0"),
        ),
        "moelab `exact`": ((whole, "moelab"), None, None, None),
        "transformers, eager experts": ((whole, "eager"), None, None, None),
    }

    def cell(file: str, place: tuple[str, str] | None) -> str:
        if place is None:
            return ""
        typical, least = (find(file, *place, name, 1e-3) for name in ("TPOT s", "undisturbed s"))
        return f"{_ms(typical)} ({_ms(least)})"

    return [
        [f"{machine}: {name}", *(cell(f"engine{end}", place) for place in places)]
        for machine, end in MACHINES.items()
        for name, places in arms.items()
    ]


def _budgets() -> list[list[Any]]:
    return _tpot(
        [("end_to_end_5GB", f"{of}% of experts, the disk as it is") for of in (25, 50, 100)],
        {
            "moelab, bf12 and `fast`": "bf12 + fast",
            "moelab, bf12 and `fast`, prefetching": "bf12 + fast + prefetch",
            "moelab, `exact`": "on demand",
            "llama.cpp BF16, mapped": "llama.cpp BF16 mmap",
            "LRU cache of experts": "LRU baseline",
            "transformers, mapped": "transformers mmap",
            "accelerate": "accelerate disk",
            "moelab, mxfp4 and `fast` (lossy)": "mxfp4 + fast",
            "llama.cpp Q8_0, mapped (lossy)": "llama.cpp Q8_0 mmap",
            "llama.cpp Q4_0, mapped (lossy)": "llama.cpp Q4_0 mmap",
        },
    )


def _peers() -> list[list[Any]]:
    return _tpot(
        [(f"engine{end}", f"peers in {gb} GB") for end in MACHINES.values() for gb in PEERS],
        {
            "moelab, `exact`": "moelab",
            "moelab, bf12 and `fast`, prefetching": "moelab, bf12, fast, prefetching",
            "moelab, int4, `dense` too (lossy)": "moelab, int4, dense too",
            "LRU cache of experts": "LRU baseline",
            "llama.cpp BF16, mapped": "llama.cpp BF16 mmap",
            "llama.cpp Q4_0, mapped (lossy)": "llama.cpp Q4_0 mmap",
            "accelerate": "accelerate disk",
        },
    )


def _beside() -> list[list[Any]]:
    """An engine a row: everything in memory, then the whole process in less, machine by machine."""
    whole, few = "everything resident", "everything resident in few bits"
    lossy, mapped = "moelab, int4, dense too", "llama.cpp {} mmap"
    arms = {
        "moelab `fast`, bf12": ((whole, "moelab fast, bf12"), "moelab, bf12, fast, prefetching"),
        "llama.cpp BF16": ((whole, "llama.cpp"), mapped.format("BF16")),
        "transformers": ((whole, "eager"), "transformers mmap"),
        "accelerate": ((whole, "accelerate"), "accelerate disk"),
        "moelab `fast`, int4 (lossy)": ((few, "moelab fast, int4, dense too"), lossy),
        "llama.cpp Q4_0 (lossy)": ((few, "llama.cpp Q4_0"), mapped.format("Q4_0")),
    }
    return [
        [
            name,
            *(
                _ms(find(f"engine{end}", *place, "TPOT s", 1e-3))
                for end in MACHINES.values()
                for place in (resident, *((f"peers in {gb} GB", arm) for gb in PEERS))
            ),
        ]
        for name, (resident, arm) in arms.items()
    ]


def _prompt() -> list[list[Any]]:
    """Seconds of the first prompt, everything in memory."""
    arms = {
        "moelab `fast`": "moelab fast",
        "moelab `exact`": "moelab",
        "transformers, eager experts": "eager",
        "llama.cpp BF16": "llama.cpp",
    }
    files = [f"engine{end}" for end in MACHINES.values()]
    return [
        [name, *(f"{find(file, 'everything resident', arm, 'TTFT s'):.1f}" for file in files)]
        for name, arm in arms.items()
    ]


def _gpu() -> list[list[Any]]:
    tokens = [f"{{}}, {share} on the GPU" for share in ("25%", "50%", "everything")]
    peers = [f"{{}} {n} of 4 layers on the GPU" for n in (1, 2, 4)]
    whole = "{}, everything on the GPU"
    arms: dict[str, tuple[str, list[tuple[str, str]]]] = {
        "moelab, `exact`": ("raw, exact", [("tokens", row) for row in tokens]),
        "moelab, `fast`": ("raw, fast", [("tokens", row) for row in tokens[:2]]),
        "moelab, bf12 and `fast`": ("bf12, fast", [("tokens", row) for row in tokens]),
        "accelerate; 100 %: transformers": ("accelerate,", [("peers", row) for row in peers[:2]]),
        "llama.cpp BF16, other layers' experts on the CPU": (
            "llama.cpp, experts of",
            [("peers", row) for row in peers],
        ),
    }

    def cell(section: str, row: str) -> str:
        token, prompt = (_ms(find("gpu", section, row, of)) for of in ("TPOT ms", "TTFT ms"))
        return token if token == "–" else f"{token} ({prompt})"

    rows = [
        [name, *(cell(section, row.format(arm)) for section, row in places)]
        for name, (arm, places) in arms.items()
    ]
    rows[1].append(cell("tokens", whole.format("fast")))
    rows[3].append(cell("tokens", whole.format("eager")))
    return rows


def _scale() -> list[list[Any]]:
    def cells(file: str, form: str) -> list[str]:
        def cell(metric: str, unit: float = 1.0, row: str = form) -> Any:
            return find(file, "14GB of experts in memory", row, metric, unit)

        return [
            _ms(cell("mean TPOT s", 1e-3)),
            _ms(cell("TPOT limit s", 1e-3)),
            f"{cell('TTFT s'):.1f}",
            f"{cell(f'÷ {form}', 1.0, f'{form}, prefetching'):.2f}",
            f"{cell('peak GB'):.1f}",
        ]

    return [
        [f"{machine}: {form}", *cells(f"scale{end}", form)]
        for machine, end in MACHINES.items()
        for form in ("bf12", "huffman", "int4")
    ]


def _prefetch() -> list[list[Any]]:
    section = "never slower (hint ÷ on demand)"
    rows = []
    for setting in _sections(bench_file("prefetch"))[section]:
        rows.append([setting])
        for end in MACHINES.values():
            ratio, low, high, verdict = (
                find(f"prefetch{end}", section, setting, f"64 tokens{of}")
                for of in ("", "_from", "_to", ": ≤ 1.01")
            )
            rows[-1] += [f"{ratio:.2f} [{low:.2f}, {high:.2f}]", verdict]
    return rows


def _advice() -> list[list[Any]]:
    return [[name, of] for name, of in _sections(bench_file("advise"))["summary"].items()]


MEMORY = ("25 %", "50 %", "100 %")
TABLES = {
    "resident": Table(
        ("engine", "engine_avx2"),
        ("ms a token; in brackets, undisturbed", "bf16", "bf12, lossless", "8 bits", "4 bits"),
        _resident,
    ),
    "budgets": Table(("end_to_end_5GB",), ("ms a token; memory for experts", *MEMORY), _budgets),
    "peers": Table(
        ("engine", "engine_avx2"),
        ("ms a token", *(f"{m}, {gb} GB" for m in MACHINES for gb in PEERS)),
        _peers,
    ),
    "beside": Table(
        ("engine", "engine_avx2"),
        (
            "ms a token",
            *(
                f"{machine}, {memory}"
                for machine in MACHINES
                for memory in ("all in memory", *(f"{gb} GB" for gb in PEERS))
            ),
        ),
        _beside,
    ),
    "prompt": Table(
        ("engine", "engine_avx2"), ("seconds of a prompt, 128 tokens", *MACHINES), _prompt
    ),
    "gpu": Table(
        ("gpu",),
        ("ms a token, in brackets of a prompt; experts in the GPU's memory", *MEMORY),
        _gpu,
    ),
    "scale": Table(
        ("scale", "scale_avx2"),
        ("", "ms a token", "limit, ms", "prompt, s", "prefetching ÷ on demand", "peak GB"),
        _scale,
    ),
    "prefetch": Table(
        ("prefetch", "prefetch_avx2"),
        ("hint ÷ on demand, 64 tokens", "Zen 4", "≤ 1.01", "Zen 3", "≤ 1.01"),
        _prefetch,
    ),
    "advice": Table(("advise",), ("settings of `moelab bench advise`", ""), _advice),
}


def source(file: str) -> str:
    """A file, and on what, at which commit and how calm a machine its runs were made."""
    said = []
    for run in read_json(bench_file(file), BenchFile)["runs"]:
        chip = run["device"] if run["device"] != "cpu" else run["cpu"]
        load = (run.get("load") or [None])[0]
        known = "load unknown" if load is None else f"load {load:.1f} before"
        quiet = {True: "quiet", False: f"BUSY, {known}", None: known}[run.get("quiet")]
        commit = (run["git"] or "unknown")[:8]
        said.append(f"{chip}, {run['cores']} cores, commit {commit}, {quiet}")
    return f"results/bench/{file}.json ({'; '.join(said)})"


def written(name: str) -> str:
    """A table in Markdown, and where its numbers are from."""
    if name not in TABLES:
        raise ValueError(f"there is no table {name}; there are {', '.join(TABLES)}")
    table = TABLES[name]
    sources = "; ".join(map(source, table.files))
    return f"{markdown_table(table.head, table.rows())}\n\n<sub>Measured: {sources}.</sub>\n"


def filled(text: str) -> str:
    """A page with every table between its markers as results have it."""
    return MARK.sub(lambda found: f"{found[1]}{written(found[2])}{found[4]}", text)


def pages() -> list[Path]:
    """README.md and docs/."""
    return [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))] if CHECKOUT else []


def stale() -> list[str]:
    """Results of tables that are older than what they measured, as benches declare it: `MEASURES`."""
    found = []
    for file in sorted({file for table in TABLES.values() for file in table.files}):
        bench = import_module(BENCHES[read_json(bench_file(file), BenchFile)["bench"]])
        found += older_than(bench_file(file), getattr(bench, "MEASURES", ("moelab",)))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; say what differs")


def main(args: argparse.Namespace) -> int:
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
