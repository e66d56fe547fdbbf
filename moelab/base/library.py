"""Text that every Python has: the sources and the manual of its standard library, in two splits that
share no file and no page."""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

#: text → number of tokens
Count = Callable[[str], int]
#: folders of the standard library that are no text to read
SKIPPED_FOLDERS = [
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "__pycache__",
]


def in_split(name: str, split: str, share: int = 10) -> bool:
    """Whether `name` (a file, a page, a key) is in `split`, "train" or "test": about one in `share`
    is in the test split."""
    held_out = hashlib.sha1(name.encode()).digest()[0] % share == 0
    return held_out == (split == "test")


@lru_cache(maxsize=4)
def library(kind: str, split: str) -> tuple[str, ...]:
    """The sources ("code") or manual pages ("prose") of one split, without blank lines."""
    from pydoc_data.topics import topics

    pages = (text for name, text in sorted(topics.items()) if in_split(name, split, share=5))
    texts = _sources(split) if kind == "code" else pages
    tidy = (
        "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) for text in texts
    )
    return tuple(text for text in tidy if text.count("\n") >= 8)


def _sources(split: str) -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return [
        path.read_text(encoding="utf-8", errors="ignore")
        for path in sorted(files)
        if path.name != "topics.py" and in_split(path.relative_to(root).as_posix(), split)
    ]


def budget(room: int, count: Count) -> Callable[[str], bool]:
    """A test that says yes to each text in turn until together they are longer than `room`
    tokens."""

    def fits(text: str) -> bool:
        nonlocal room
        room -= count(text)
        return room >= 0

    return fits


def passage(rng: random.Random, kind: str, split: str, fits: Callable[[str], bool]) -> list[str]:
    """Lines from random places on, each with its leading newline, as many as `fits` lets in."""
    taken = []
    while True:
        lines = rng.choice(library(kind, split)).split("\n")
        for line in lines[rng.randrange(len(lines)) :]:
            if not fits("\n" + line):
                return taken
            taken.append("\n" + line)


def passages(kind: str, n: int, tokens: int, count: Count) -> list[str]:
    """`n` passages of at most `tokens` from the test split, always the same."""
    rngs = (random.Random(f"{kind}/test/0/{i}") for i in range(n))
    return ["".join(passage(rng, kind, "test", budget(tokens, count))) for rng in rngs]


@lru_cache(maxsize=1)
def token_count(tokenizer: Any) -> Count:
    """text → number of tokens, special ones aside, of a model's own tokenizer; ValueError if the
    model has none."""
    if tokenizer is None:
        raise ValueError(
            "the model has no tokenizer, so no prompts can be made for it; put one beside its weights"
        )
    return lru_cache(maxsize=200_000)(
        lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
    )
