"""Which configuration, for so much memory, such a disk and such a loss (notebook 08, and a page of the
site): the fastest of ours that was measured, other engines beside it.

All is from records: times of `moelab bench end_to_end` (0.5 GB of experts in bf16, also from slowed-down
disks) and `moelab bench llama_cpp` (one GGUF file, 5 GB in bf16), what a format loses from `moelab bench
rounding`, on the trained model of which most formats were measured. What nobody has measured is no
option: it is said."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from plotly.graph_objects import Figure

from moelab.base.records import Numbers, Record
from moelab.bench.results import bench_file, sections_of
from moelab.viz.views.base import View, menu

from . import charts, end_to_end
from .choosing import ANY, LOSSLESS, allowed
from .end_to_end import Rows

TICKS = [x * 10**n for n in range(4) for x in (1, 2, 3, 5, 7)]  # ms
#: what may be lost, nats a token
LOSSES = {"none": 0.0, "0.0005": 5e-4, "0.001": 1e-3, "any": ANY}
#: kind of a GGUF file → its row among formats; of Q4_K_M, most matrices are in Q4_K, the others in more
GGUF = {of: f"{of.removesuffix('_M')}, llama.cpp" for of in ("Q8_0", "Q6_K", "Q4_0", "Q4_K_M")}
FILE = re.compile(r"(\S+), \d+% of the file, prompt 128")
ALT = "A point with its interval for each configuration and engine, the fastest above."


def recorded(folder: Path | None = None) -> dict[str, Rows]:
    """Tables of the records that there are, by "memory, disk"; `folder` : of the records."""
    files = {name: bench_file(name) for name in ("end_to_end", "llama_cpp", "rounding")}
    if folder is not None:
        files = {name: folder / path.name for name, path in files.items()}
    kept = {name: sections_of(path) if path.exists() else {} for name, path in files.items()}
    losses = losses_of(kept["rounding"])
    small = {
        title.replace(" of experts", " of 0.5 GB of experts"): rows
        for title, rows in end_to_end.titled(kept["end_to_end"]).items()
    }
    return told(small, losses) | told(of_files(kept["llama_cpp"]), losses)


def losses_of(sections: Mapping[str, Rows]) -> Numbers:
    """Format, and how it is rounded → the language loss that it adds at most, nats a token: the upper end
    of the 95 % interval; of the model that has most formats."""
    found = [rows for title, rows in sections.items() if "formats" in title]
    return {
        name: max(0.0, row["loss increase, high"])
        for name, row in max(found, key=len, default={}).items()
    }


def of_files(sections: Mapping[str, Rows]) -> dict[str, Rows]:
    """Of each limit of a whole process, what ran in it or in less, by engine and kind."""
    ran = [
        (float(re.search(r"([\d.]+) GB", row["result"])[1]), f"{arm}, {kind[1]}", row)
        for title, rows in sections.items()
        if (kind := FILE.fullmatch(title))
        for arm, row in rows.items()
        if "undisturbed s" in row
    ]
    tables = {}
    for limit in sorted({limit for limit, *_ in ran}):
        rows: Rows = {}
        for less, name, row in ran:
            took = {"TPOT s": row["undisturbed s"], "each token s": row["TPOT s"]}
            if less <= limit and took["TPOT s"] < rows.get(name, {"TPOT s": ANY})["TPOT s"]:
                rows[name] = row | took | {"ran in": f"{less:.2f} GB"}
        tables[f"{limit:.2f} GB for a file of 5 GB in bf16, the disk as it is"] = rows
    return tables


def told(tables: Mapping[str, Rows], losses: Numbers) -> dict[str, Rows]:
    """The tables of what ran within its memory, each row with its "loss", nats a token: None where none
    was measured, 0 of what computes with the source's own weights."""
    return {
        title: {name: row | {"loss": _loss(name, row, losses)} for name, row in rows.items()}
        for title, given in tables.items()
        if (rows := allowed(given, ANY))
    }


def _loss(name: str, row: Record, losses: Numbers) -> float | None:
    kinds = [kind for kind in GGUF if re.search(rf"\b{kind}\b", name)]
    if kinds:
        return losses.get(GGUF[kinds[0]])
    if allowed({name: row}, LOSSLESS) or name.endswith(", BF16"):
        return 0.0
    if not end_to_end.names_us(name):
        return row.get("KL")
    return losses.get(f"{end_to_end.options_of(name)['codec']}, to nearest")


def is_ours(name: str) -> bool:
    return end_to_end.names_us(name) or name.startswith("moelab")


def pick(there: Mapping[str, Rows], memory: str, disk: str, loss: str) -> Record:
    """The fastest of ours, `best`, None if nothing was measured, and all that ran, `rows`, the fastest
    first: other engines on the same memory, but on the disk as it is, as they cannot be throttled.

    there : tables by "memory, disk" (`recorded`)."""
    as_is = _parts(there)[1][-1]

    def may(title: str, mine: bool) -> Rows:
        return {
            name: row
            for name, row in there.get(title, {}).items()
            if is_ours(name) == mine
            and (LOSSES[loss] == ANY or (row["loss"] is not None and row["loss"] <= LOSSES[loss]))
        }

    mine, others = may(f"{memory}, {disk}", True), may(f"{memory}, {as_is}", False)
    rows = sorted((mine | others).items(), key=lambda one: one[1]["TPOT s"])
    best = min(mine, key=lambda name: mine[name]["TPOT s"], default=None)
    family = memory.partition(" ")[2]
    known = {
        name
        for title, of in there.items()
        if title.split(", ")[0].partition(" ")[2] == family
        for name in filter(is_ours, of)
    }
    return {
        "best": best,
        "rows": dict(rows),
        "as it is": as_is,
        "asked": f"{memory}, {disk}, loss {loss}",
        "memory": memory,
        "missing": sorted(known - there.get(f"{memory}, {disk}", {}).keys()),
    }


def _parts(there: Mapping[str, Rows]) -> list[list[str]]:
    """The memories, and the disks, of which the last is as it is."""
    memories, disks = (list(dict.fromkeys(title.split(", ")[i] for title in there)) for i in (0, 1))
    return [memories, sorted(disks, key=lambda disk: "as it is" in disk)]


def draw(found: Record) -> list[Figure]:
    """The time of a token of each."""
    rows = found["rows"]
    if not rows:
        return [Figure().add_annotation(text="not measured", showarrow=False)]
    kind = {name: "moelab" if is_ours(name) else "other engines" for name in rows}
    times = {name: charts.quantiles(row["each token s"]) for name, row in rows.items()}
    figure = charts.intervals(
        times,
        "time of a token (ms, log)",
        series=kind | ({found["best"]: "picked"} if found["best"] else {}),
        zero=None,
        log=True,
        margin_l=190,
    )
    return [figure.update_xaxes(tickvals=TICKS, ticktext=TICKS)]


def words(found: Record) -> tuple[str, str]:
    """What was picked, and why; the fastest other engine, and llama.cpp, beside it."""
    rows, best = found["rows"], found["best"]
    if best is None:
        return f"Not measured: moelab within {found['asked']}. Choose another of them.", ALT
    one = rows[best]
    loss = "loss not measured" if one["loss"] is None else f"loss at most {one['loss']:.1g} nats"
    said = (
        f"Pick {best}: {1e3 * one['TPOT s']:.3g} ms a token, reading {one['MB a token']:.3g} MB, "
    )
    said += loss if one["loss"] != 0 else "without loss"
    less = one.get("ran in", found["memory"])
    said += ". " if found["memory"].startswith(less) else f"; it ran in {less}. "
    slower = [name for name in rows if is_ours(name) and name != best]
    if slower:
        next_best = rows[slower[0]]
        said += f"Next of ours: {slower[0]}, {next_best['TPOT s'] / one['TPOT s']:.2f} × as long, "
        said += f"reading {next_best['MB a token']:.3g} MB. "
    others = [name for name in rows if not is_ours(name)]
    beside = [*others[:1], *[name for name in others[1:] if name.startswith("llama.cpp")][:1]]
    if beside and found["as it is"] not in found["asked"]:
        said += f"Others, on {found['as it is']}: "
    for name in beside:
        ratio = one["TPOT s"] / rows[name]["TPOT s"]
        said += f"{name}: {1e3 * rows[name]['TPOT s']:.3g} ms; ours takes {ratio:.2f} × that. "
    if not beside:
        said += "Other engines: not measured so. "
    if found["missing"]:
        said += f"Not measured in so little memory: {'; '.join(found['missing'])}. "
    return f"{said}Measured; medians, whiskers p10 to p90.", ALT


def view(there: Mapping[str, Rows]) -> View:
    """Menus of memory, disk and loss, and what they pick; as a page, too."""
    memories, disks = _parts(there)
    controls = {
        "memory": menu("memory", memories[len(memories) // 2], memories),
        "disk": menu("disk", disks[-1], disks),
        "loss": menu("loss, nats a token", "0.001", LOSSES),
    }

    def rows(found: Record) -> list[Record]:
        return [
            {
                "configuration": name,
                "ms a token": 1e3 * row["TPOT s"],
                "MB a token": row["MB a token"],
                "loss, nats a token": row["loss"],
            }
            for name, row in found["rows"].items()
        ]

    def compute(memory: str, disk: str, loss: str) -> Record:
        return pick(there, memory, disk, loss)

    def command(**_: str) -> str:
        return "moelab run 08"

    return View("picker", controls, compute, draw, rows, command, words, tuple(controls))
