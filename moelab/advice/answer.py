"""The answer of `advise`: what to do, what it will give, what would give more, and the commands
that do it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from moelab.advice.disk import fitting
from moelab.advice.model import AS_IS, DECODED, FORMS, Model
from moelab.advice.question import Question
from moelab.advice.ways import Way
from moelab.cache.policies import DEFAULT_POLICY
from moelab.offloading.budget import RESERVE, kv_bytes
from moelab.simulation.costs import MachineRates
from moelab.specs import DeviceSpec
from moelab.table import UNITS, duration, filled, head_and_rows, plain, size, text_table, unit_of

#: rows of the printed table
ROWS = 12


@dataclass(frozen=True)
class Advice:
    """The answer: `ways` that fit, best first; `more`: (what would give more, and then).

    elsewhere : ways in other memory.    loss : what is allowed, relative; infinity allows any.
    popularity : how often experts are taken to be chosen.    notes : what else there is to know.
    """

    model: Model
    device: DeviceSpec
    memory: int
    context: int
    batch: int
    loss: float
    ways: tuple[Way, ...]
    more: tuple[tuple[str, Way], ...] = field(repr=False)
    popularity: str = ""
    elsewhere: tuple[Way, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Way:
        """The fastest that loses no more than was allowed."""
        return next(way for way in self.ways if way.within(self.loss))

    @property
    def steps(self) -> list[tuple[str, list[str], dict[str, Any]]]:
        """(command, what it takes, options) of what to run, in this order."""
        way = self.best
        source = self.model.source
        options: dict[str, Any] = {
            "memory": "100%"
            if way.resident
            else f"{way.budget // 10**6}MB"
            if way.budget >= 10**8
            else f"{way.budget // 10**3}kB",
            "executor": way.executor,
        }
        if not way.resident:
            options |= {
                name: value
                for name, value, usual in (
                    ("cache", way.cache, DEFAULT_POLICY),
                    ("prefetch", way.prefetch or "none", "router"),
                    ("workers", way.workers, 1),
                )
                if value != usual
            }
        if way.form in ("bf12", DECODED):
            store = f"{Path(source).name}.{way.form}"
            return [
                ("convert", [source, store], {"codec": way.form}),
                ("generate", [store], options),
            ]
        if way.form in FORMS:
            return [("generate", [source], {"quantize": way.form} | options)]
        if way.resident and self.model.stored is None:
            del options["memory"]
        return [("generate", [source], options)]

    @property
    def commands(self) -> list[str]:
        """`steps` as a person types them; not the last if its pools cannot be said there."""
        return [
            " ".join(
                ["moelab", command]
                + [quote(name) for name in names]
                + [f"--{name} {value}" for name, value in given.items()]
            )
            for command, names, given in self.steps
            if command == "convert" or self.best.pools is None
        ]

    @property
    def python(self) -> str:
        """The last of `steps`, in Python; with the pools of compressed experts, which the command
        line cannot say."""
        _, (source,), given = self.steps[-1]
        plan = [f"plan=moelab.{self.best.pools}"] if self.best.pools else []
        options = [f"{name}={value!r}" for name, value in given.items()]
        return f"moelab.open_model({', '.join([repr(source), *options, *plan])})"

    def table(self) -> list[dict[str, Any]]:
        """A row a way, exact, in bytes and seconds: of each form the fastest, what was measured,
        and others; the fastest first."""
        firsts = {way.form: way for way in reversed(self.ways)}
        kept = [way for way in self.ways if way is firsts[way.form] or way.kind == "measured"]
        kept += [way for way in self.ways if way not in kept][: max(ROWS - len(kept), 0)]
        return [way.row(self.batch) for way in sorted(kept, key=lambda way: way.tpot)]

    def rounded(self) -> tuple[list[dict[str, Any]], str]:
        """The table as a person reads it, and a sentence of what is the same in all rows, which
        takes no column."""
        rows = in_units(self.table())
        same = {
            name: value
            for name, value in rows[0].items()
            if len(rows) > 1 and all(r[name] == value for r in rows)
        }
        told = "; ".join(
            " ".join([(parts := name.split(", "))[0], str(value), *parts[1:]])
            for name, value in same.items()
            if value != "–"
        )
        return [
            {name: value for name, value in row.items() if name not in same} for row in rows
        ], f"All rows: {told}." if told else ""

    @property
    def words(self) -> str:
        """What to do, what it gives, what gives more, and the commands."""
        way = self.best
        spec = self.model.spec
        device = self.device
        options = self.steps[-1][2]
        rates, (_, outside) = MachineRates.of(device), beyond(device)
        where = (
            "all of them in memory"
            if way.resident
            else f"{size(way.budget)} of their {size(way.experts)} in memory, the others {outside}"
        )
        form = (
            "Leave the checkpoint as it is"
            if way.form == AS_IS
            else f"Store the experts as {way.form}"
        )
        loss = way.loses if way.loss is not None else "its loss is unknown: --verify measures it"
        how = ", ".join(
            f"{name} {value}"
            for name, value in options.items()
            if name not in ("memory", "quantize")
        )
        more = "; ".join(
            f"{what}: {duration(other.tpot)} ({plain(way.tpot / other.tpot)}×)"
            for what, other in self.more
        )
        error = "" if way.error is None else f" ± {100 * way.error:.0f} %"
        expected = f", {duration(way.predicted)} expected" if way.predicted else ""
        return "\n".join(
            [
                f"{spec.name}: {spec.L} layers of {spec.E} experts, {spec.K} a token; experts "
                f"{size(spec.experts_bytes)}, other weights {size(self.model.others)} "
                f"({self.model.how}), KV cache "
                f"{size(kv_bytes(spec, self.context * self.batch))}, process {size(RESERVE)}",
                f"{device.name}: memory {size(rates.memory)}/s, experts {outside} arrive at "
                f"{size(rates.read)}/s; {size(self.memory)} may be used",
                "",
                f"Do: {form} ({loss}), {where}; {how}.",
                f"Gives: {duration(way.tpot)}{error} a token ({plain(self.batch / way.tpot)} "
                f"tokens/s), {duration(way.ttft)} to the first after a prompt of "
                f"{self.context:,} tokens; {way.kind}{expected}, limited by {way.limited_by}, "
                f"with experts chosen {self.popularity}.",
                f"More: {more or 'nothing that was tried here'}.",
                "",
                *(f"  {command}" for command in self.commands),
                f"  {self.python}",
            ]
        )

    def __str__(self) -> str:
        rows, common = self.rounded()
        return filled(
            "\n".join(
                [
                    self.words,
                    "",
                    text_table(*head_and_rows(rows)),
                    "",
                    *filter(None, (common, *self.notes)),
                ]
            )
        )


def in_units(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the same columns as a person reads them: numbers in three digits, and a column of
    bytes or seconds ("memory, B", "TPOT, s") in one unit, in which none but 0 is below 1 if there
    is one."""
    columns: dict[str, list[Any]] = {}
    for column in rows[0] if rows else ():
        values = [row[column] for row in rows]
        name, _, base = column.rpartition(", ")
        if base in UNITS:
            unit, of = unit_of(min(filter(None, values), default=0), base)
            column = f"{name}, {unit}"
            values = [value / of for value in values]
        columns[column] = [plain(value) if isinstance(value, float) else value for value in values]
    return [dict(zip(columns, cells)) for cells in zip(*columns.values())]


def beyond(device: DeviceSpec) -> tuple[str, str]:
    """(What experts come through that are not in memory, where they are.)"""
    return (
        ("host link", "in host memory")
        if "link_bandwidth_gbs" in device.figures
        else ("disk", "on disk")
    )


def conclude(
    asked: Question,
    ways: list[Way],
    changed: Callable[[Way], tuple[Way | None, Way | None]],
    elsewhere: Iterable[Way],
    notes: list[str],
) -> Advice:
    """The advice that follows from ways, the fastest first, and from what the disks hold.

    changed : of the best way, what it becomes with half as much memory again, and with a disk twice
        as fast. What gives more than the best does so by 2 % at least."""
    ways, short = (ways, []) if asked.on_card else fitting(asked.model, ways, asked.loss)
    best = next((way for way in ways if way.within(asked.loss)), None)
    if best is None:
        raise ValueError(
            f"nothing that fits {size(asked.memory)} is known to lose no more than "
            f"{asked.loss:.2%}: measure it (--verify), allow any loss, or give more memory"
        )
    more, faster = changed(best)
    few = next((way for way in ways if not way.within(asked.loss)), None)
    options = [
        (f"{size(1.5 * asked.memory)} of memory", more),
        (f"a {beyond(asked.device)[0]} twice as fast", faster),
        (few and f"{few.form} experts, {few.loses}", few),
    ]
    gain = [(what, way) for what, way in options if way and way.tpot < 0.98 * best.tpot]
    notes = [*notes, *short]
    if 0 < asked.loss < math.inf and not any(way.loss for way in ways):
        notes.append(
            "The loss that is allowed changes nothing, as that of few bits has not been measured "
            "of this model: --verify measures it, --loss any does without"
        )
    return Advice(
        asked.model,
        asked.device,
        asked.memory,
        asked.context,
        asked.batch,
        asked.loss,
        tuple(ways),
        tuple(sorted(gain, key=lambda one: one[1].tpot)),
        asked.popularity,
        tuple(elsewhere),
        tuple(notes),
    )
