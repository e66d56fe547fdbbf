"""The answer of `advise`: what to do, what it will give, what would give more, and the commands
that do it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from moelab.advice.gpu import OnGpu
from moelab.advice.model import AS_IS, LOSSLESS, Model
from moelab.advice.question import Question
from moelab.advice.ways import Way
from moelab.base.files import absolute, cache_root, nearest
from moelab.base.specs import DeviceSpec
from moelab.base.table import duration, filled, head_and_rows, plain, size, text_table
from moelab.cache.policies import DEFAULT_POLICY
from moelab.offloading.budget import RESERVE
from moelab.simulation.costs import MachineRates

#: rows of the printed table
ROWS = 12


@dataclass(frozen=True)
class Advice:
    """The answer: `ways` that fit, best first; `more`: (what would give more, and then).

    elsewhere : ways in other memory.    notes : what else there is to know.
    """

    asked: Question = field(repr=False)
    ways: tuple[Way, ...]
    more: tuple[tuple[str, Way], ...] = field(repr=False)
    elsewhere: tuple[Way, ...] = field(repr=False)
    notes: tuple[str, ...]

    @property
    def model(self) -> Model:
        """What was asked about."""
        return self.asked.model

    @property
    def best(self) -> Way:
        """The fastest that loses no more than was allowed."""
        return next(way for way in self.ways if way.within(self.asked.loss))

    @property
    def steps(self) -> list[tuple[str, list[str], dict[str, Any]]]:
        """(command, what it takes, options) of what to run, in this order."""
        way, source = self.best, self.model.source
        usual = ("cache", DEFAULT_POLICY), ("prefetch", "router")
        options = dict(one for one in way.options(self.model.stored).items() if one not in usual)
        if way.form == "bf12":
            store = f"{Path(source).name}.bf12"
            return [
                ("convert", [source, store], {"codec": "bf12"}),
                ("generate", [store], options),
            ]
        rounded = {} if way.form == AS_IS else {"quantize": way.form}
        return [("generate", [source], rounded | options)]

    @property
    def commands(self) -> list[str]:
        """`steps` as a person types them."""
        return [
            " ".join(
                ["moelab", command, *map(quote, names)]
                + [f"--{name} {value}" for name, value in given.items()]
            )
            for command, names, given in self.steps
        ]

    @property
    def python(self) -> str:
        """The last of `steps`, in Python."""
        _, (source,), given = self.steps[-1]
        options = [f"{name}={value!r}" for name, value in given.items()]
        return f"moelab.open_model({', '.join([repr(source), *options])})"

    def table(self) -> list[dict[str, str]]:
        """A row a way: of each form the fastest, what was measured, and others; the fastest
        first. What is the same in all rows, which `words` tells, takes no column."""
        firsts = {way.form: way for way in reversed(self.ways)}
        kept = sorted(
            self.ways, key=lambda way: way is not firsts[way.form] and way.kind != "measured"
        )
        shown = sorted(kept[:ROWS], key=lambda way: way.tpot)
        rows = [way.row(self.asked.batch) for way in shown]
        told = [name for name in rows[0] if len(rows) > 1 and len({row[name] for row in rows}) == 1]
        return [{name: of for name, of in row.items() if name not in told} for row in rows]

    @property
    def words(self) -> str:
        """What to do, what it gives, what gives more, and the commands."""
        way, asked = self.best, self.asked
        spec, device, rates = asked.model.spec, asked.device, MachineRates.of(asked.device)
        _, outside = beyond(device)
        inside, beside = "memory", ""
        if isinstance(asked, OnGpu):
            inside = "the GPU's memory"
            beside = (
                f", and {size(asked.host)} of the CPU's memory, which is read at "
                f"{size(rates.host)}/s"
            )
        where = f"all of them in {inside}"
        if not way.resident:
            where = f"{size(way.budget)} of their {size(way.experts)} in {inside}, others {outside}"
        form = (
            "Leave the checkpoint as it is"
            if way.form == AS_IS
            else f"Store the experts as {way.form}"
        )
        unknown = ", --verify measures it" if way.loss is None else ""
        options = self.steps[-1][2]
        how = [f"{name} {of}" for name, of in options.items() if name != "memory"]  # said as bytes
        more = "; ".join(
            f"{what}: {duration(other.tpot)} ({plain(way.tpot / other.tpot)}×)"
            for what, other in self.more
        )
        expected = f", {duration(way.predicted)} expected" if way.predicted else ""
        return f"""\
{spec.name}: {spec.L} layers of {spec.E} experts, {spec.K} a token; experts \
{size(spec.experts_bytes)}, other weights {size(self.model.others)} ({self.model.how}), KV cache \
{size(asked.kv)}, process {size(RESERVE)}
{device.name}: memory {size(rates.memory)}/s, experts {outside} arrive at {size(rates.read)}/s; \
{size(asked.memory)} may be used{beside}

Do: {form} ({way.loses}{unknown}), {where}; {", ".join(how)}.
Gives: {duration(way.tpot)}{way.range} a token ({plain(asked.batch / way.tpot)} tokens/s), \
{duration(way.ttft)} to the first after a prompt of {asked.context:,} tokens; {way.kind}{expected}, \
limited by {way.limited_by}, with routing {asked.assumed.words}.
More: {more or "nothing that was tried here"}.

""" + "\n".join(f"  {command}" for command in (*self.commands, self.python))

    def __str__(self) -> str:
        rows = text_table(*head_and_rows(self.table()))
        return filled("\n".join([self.words, "", rows, "", *self.notes]))


def beyond(device: DeviceSpec) -> tuple[str, str]:
    """(What experts come through that are not in memory, where they are.)"""
    return (
        ("host link", "in the CPU's memory")
        if "link_bandwidth_gbs" in device.figures
        else ("disk", "on disk")
    )


def fitting(model: Model, ways: list[Way], loss: float) -> tuple[list[Way], list[str]]:
    """(The ways for which the disks have room, or all if none of these is within the loss; a note
    of what is lacking for others)."""
    short = {way: words for way in ways if (words := lacking(model, way))}
    if not short:
        return ways, []
    kept = [way for way in ways if way not in short]
    enough = any(way.within(loss) for way in kept)
    what = "Left out, as the disks are too small" if enough else "The disks are too small"
    first = next((way for way in short if way.within(loss)), next(iter(short)))
    forms = ", ".join(dict.fromkeys(way.form for way in short))
    return kept if enough else ways, [f"{what}: {forms} ({first.form} needs {short[first]})"]


def lacking(model: Model, way: Way) -> str:
    """What a way needs of disks more than is free, in words; "" where all of it fits, or nobody
    can say. A download goes to the hub client's cache ($HF_HOME), a rounded store to moelab's
    ($MOELAB_CACHE), a lossless one to the working folder."""
    from huggingface_hub.constants import HF_HUB_CACHE

    store = Path() if way.form in LOSSLESS else cache_root()
    needed: dict[int, int] = {}
    places: dict[int, Path] = {}
    with suppress(OSError):  # the working folder was deleted, or a disk is gone
        for nbytes, place in ((way.written, store), (model.download, Path(HF_HUB_CACHE))):
            there = nearest(absolute(place))
            disk = there.stat().st_dev
            needed[disk] = needed.get(disk, -shutil.disk_usage(there).free) + nbytes
            places[disk] = there
    return " and ".join(
        f"{size(more)} more at {places[disk]}" for disk, more in needed.items() if more > 0
    )


def conclude(
    asked: Question,
    ways: Iterable[Way],
    faster: Callable[[Way], Way],
    elsewhere: Sequence[Way],
    notes: list[str],
) -> Advice:
    """The advice that follows from ways and from what the disks hold.

    faster : what the best way becomes with a disk twice as fast.    elsewhere : ways in `PARTS` of
        the memory. What gives more than the best does so by 2 % at least."""
    ways = sorted(ways, key=lambda way: (way.tpot, not way.lossless))
    ways, short = (ways, []) if asked.on_card else fitting(asked.model, ways, asked.loss)
    allowed = [way for way in ways if way.within(asked.loss)]
    if not allowed:
        raise asked.refusal()
    best, forms = allowed[0], {way.form for way in allowed}
    few = [way for way in ways if way not in allowed][:1]
    richer = [way for way in elsewhere if way.form in forms and way.memory > asked.memory]
    options = [
        *[
            (f"{size(way.memory)} of memory", way)
            for way in sorted(richer, key=lambda way: way.tpot)[:1]
        ],
        (f"a {beyond(asked.device)[0]} twice as fast", faster(best)),
        *[(f"{way.form} experts, {way.loses}", way) for way in few],
    ]
    gain = [(what, way) for what, way in options if way.tpot < 0.98 * best.tpot]
    notes = [*notes, *short]
    if 0 < asked.loss < math.inf and not any(way.loss for way in ways):
        notes.append(
            "The loss that is allowed changes nothing, as that of few bits has not been measured "
            "of this model: --verify measures it, --loss any does without"
        )
    if asked.batch == 1 and best.device == "cpu":
        notes.append(asked.drafts(best))
    gain.sort(key=lambda one: one[1].tpot)
    return Advice(asked, tuple(ways), tuple(gain), tuple(elsewhere), tuple(notes))
