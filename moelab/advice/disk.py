"""What a way needs of disks, beside what they have free: a download, and a store that is written.

A download goes to the hub client's cache ($HF_HOME), a rounded store to moelab's ($MOELAB_CACHE), a
lossless one to the working folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from moelab.advice.model import FORMS, Model
from moelab.advice.ways import Way
from moelab.files import absolute, cache_root, nearest
from moelab.table import size


def fitting(model: Model, ways: list[Way], loss: float) -> tuple[list[Way], list[str]]:
    """(The ways for which the disks have room, or all if none of these is within the loss; what is
    lacking for others)."""
    short = {way: words for way in ways if (words := lacking(model, way))}
    kept = [way for way in ways if way not in short]
    enough = any(way.within(loss) for way in kept)
    what = "Left out" if enough else "Disks are too small for all of it"
    told = dict.fromkeys(f"{way.form}: {words}" for way, words in short.items())
    return kept if enough else ways, [f"{what}: {'; '.join(told)}."] if told else []


def lacking(model: Model, way: Way) -> str:
    """What a way needs where less is free, in words; "" where all of it fits, or nobody can say."""
    from huggingface_hub.constants import HF_HUB_CACHE

    rounded = way.form in FORMS and not FORMS[way.form][1]
    wanted = [
        ("to download", model.download, Path(HF_HUB_CACHE)),
        ("of a new store", way.written, cache_root() if rounded else Path()),
    ]
    disks: dict[int, list[tuple[str, int, Path]]] = {}
    try:
        for what, nbytes, place in wanted:
            if nbytes:
                disks.setdefault((there := nearest(absolute(place))).stat().st_dev, []).append(
                    (what, nbytes, there)
                )
        for parts in disks.values():
            free = shutil.disk_usage(parts[0][2]).free
            needed = sum(nbytes for _, nbytes, _ in parts)
            if needed > free:
                return (
                    " and ".join(f"{size(nbytes)} {what}" for what, nbytes, _ in parts)
                    + f", {size(needed - free)} more than is free at {parts[0][2]}"
                )
    except OSError:  # the working folder was deleted, or a disk is gone
        pass
    return ""
