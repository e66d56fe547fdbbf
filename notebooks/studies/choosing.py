"""Which configuration to choose, of the tables of `moelab bench end_to_end` (notebook 08)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

from moelab.base.records import Record
from moelab.store import fewbit

from .end_to_end import RESIDENT, Rows, Sections, names_us, options_of, over

LOSSLESS = 1e-3  # nats a token, below which rounding is no loss: fast ≠ eager in the last bits
ANY = inf
BUDGETED = ("LRU baseline",)  # keeps to a number of bytes itself
NORMALISES = (
    "llama.cpp BF16 mmap"  # routing weights, whatever the model does: other logits at the same cost
)


def allowed(rows: Rows, loss: float) -> Rows:
    """What ran, within the memory, and loses no more than `loss` nats."""
    return {
        name: row for name, row in rows.items() if _fits(name, row) and _loses(name, row) <= loss
    }


def _fits(name: str, row: Record) -> bool:
    limited = names_us(name) or name in BUDGETED or "nothing was limited" not in row["result"]
    return "TPOT s" in row and limited and name != RESIDENT


def _loses(name: str, row: Record) -> float:
    """Nats a token. Of weights in few bits any: a random model's KL does not tell."""
    if names_us(name) and options_of(name)["codec"] in fewbit.FORMATS:
        return ANY
    return 0.0 if name == NORMALISES else row.get("KL", 0.0)


def ours(rows: Rows) -> Rows:
    """Without other engines."""
    return {name: row for name, row in rows.items() if names_us(name)}


def fastest(rows: Mapping[str, Record]) -> str:
    """The name of the row with the least time of a token."""
    return min(rows, key=lambda name: rows[name]["TPOT s"])


def duels(sections: Sections) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(title, the fastest other lossless engine, the fastest of ours over it) of each table that
    has one."""
    for title, rows in sections.items():
        among = allowed(rows, LOSSLESS)
        mine = ours(among)
        if others := {name: row for name, row in among.items() if name not in mine}:
            best = fastest(others)
            yield title, best, over(mine[fastest(mine)], others[best], "ours ÷ others")


def foretold(sections: Sections) -> Rows:
    """What was simulated, beside what was measured."""
    return {
        f"{name}; {title}": {
            key: row[key] for key in ("TPOT s", "simulated TPOT s", "simulated ÷ measured")
        }
        for title, rows in sections.items()
        for name, row in rows.items()
        if "simulated ÷ measured" in row
    }
