"""What a way needs of disks, beside what they have free: a download, and a store that is written.

A download goes to the hub client's cache ($HF_HOME), a rounded store to moelab's ($MOELAB_CACHE), a
lossless one to the working folder."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from moelab.advice.model import LOSSLESS, Model
from moelab.advice.ways import Way
from moelab.base.files import absolute, cache_root, nearest
from moelab.base.table import size


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
    """What a way needs more than is free, in words; "" where all of it fits, or nobody can say."""
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
