"""Which configuration, for so much memory, such a disk and such a loss (notebook 08, and a page of the
site): the fastest of ours in the tables of `moelab bench end_to_end`, other engines beside it."""

from __future__ import annotations

from collections.abc import Mapping

from plotly.graph_objects import Figure

from moelab.base.records import Record
from moelab.viz.views.base import View, menu

from . import charts, end_to_end
from .choosing import ANY, LOSSLESS, allowed, fastest, ours

TICKS = [x * 10**n for n in range(4) for x in (1, 2, 3, 5, 7)]  # ms
#: what may be lost, in words → nats a token
LOSSES = {"none": LOSSLESS, "any": ANY}
ALT = "A point with its interval for each configuration and engine, the fastest above."


def pick(there: Mapping[str, end_to_end.Rows], memory: str, disk: str, loss: str) -> Record:
    """The fastest of ours, `best`, and all that ran, `rows`, the fastest first: other engines on the same
    memory, but on the disk as it is, as they cannot be throttled.

    there : tables by "memory, disk" (`end_to_end.titled`)."""
    mine = ours(allowed(there[f"{memory}, {disk}"], LOSSES[loss]))
    as_is = _parts(there)[1][-1]
    free = allowed(there[f"{memory}, {as_is}"], LOSSES[loss])
    rows = mine | {name: row for name, row in free.items() if name not in ours(free)}
    rows = dict(sorted(rows.items(), key=lambda one: one[1]["TPOT s"]))
    base = there[f"{memory}, {disk}"][end_to_end.BASE]
    return {"best": fastest(mine), "rows": rows, "base": base, "as it is": as_is}


def _parts(there: Mapping[str, end_to_end.Rows]) -> list[list[str]]:
    """The memories, and the disks, of which the last is as it is."""
    return [list(dict.fromkeys(title.split(", ")[i] for title in there)) for i in (0, 1)]


def draw(found: Record) -> list[Figure]:
    """The time of a token of each."""
    rows = found["rows"]
    kind = {name: "moelab" if end_to_end.names_us(name) else "other engines" for name in rows}
    times = {name: charts.quantiles(row["each token s"]) for name, row in rows.items()}
    figure = charts.intervals(
        times,
        "time of a token (ms, log)",
        series=kind | {found["best"]: "picked"},
        zero=None,
        log=True,
        margin_l=190,
    )
    return [figure.update_xaxes(tickvals=TICKS, ticktext=TICKS)]


def words(found: Record) -> tuple[str, str]:
    """What was picked, and why; llama.cpp beside it."""
    one, base = found["rows"][found["best"]], found["base"]
    said = (
        f"Pick {found['best']}: {1e3 * one['TPOT s']:.3g} ms a token (on demand "
        f"{1e3 * base['TPOT s']:.3g}), reading {one['MB a token']:.2f} MB a token (on demand "
        f"{base['MB a token']:.2f})."
    )
    for name, row in found["rows"].items():
        if name.startswith("llama.cpp"):
            said += f" {name}, on {found['as it is']}: {1e3 * row['TPOT s']:.3g} ms; ours takes "
            said += f"{one['TPOT s'] / row['TPOT s']:.2f} × that."
            break
    return f"{said} Measured; medians, whiskers p10 to p90.", ALT


def view(there: Mapping[str, end_to_end.Rows]) -> View:
    """Menus of memory, disk and loss, and what they pick; as a page, too."""
    memories, disks = _parts(there)
    controls = {
        "memory": menu("memory", memories[0], memories),
        "disk": menu("disk", disks[-1], disks),
        "loss": menu("loss", "none", LOSSES),
    }

    def rows(found: Record) -> list[Record]:
        return [
            {
                "configuration": name,
                "ms a token": 1e3 * row["TPOT s"],
                "MB a token": row["MB a token"],
            }
            for name, row in found["rows"].items()
        ]

    def compute(memory: str, disk: str, loss: str) -> Record:
        return pick(there, memory, disk, loss)

    def command(**_: str) -> str:
        return "moelab run 08"

    return View("picker", controls, compute, draw, rows, command, words, tuple(controls))
