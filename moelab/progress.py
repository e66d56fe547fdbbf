"""One helper for long work: a bar on a terminal or in a notebook, plain lines where nobody can see a bar move.

Headless runs (papermill, CI, a pipe) get one line every few seconds instead of carriage returns or widgets,
because both would fill logs and executed notebooks with rubbish.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any


class _Lines:
    """The part of tqdm's interface that is used here, printed as plain lines at most every `every` seconds."""

    def __init__(self, total: float | None, desc: str, unit: str, initial: float = 0, every: float = 10.0) -> None:
        self.total, self.desc, self.unit, self.every = total, desc, unit, every
        self.n = self._first = initial
        self._start = self._said = time.monotonic()
        self._note = ""

    def update(self, n: float = 1) -> None:
        self.n += n
        if time.monotonic() - self._said >= self.every:
            self._say()

    def set_postfix_str(self, text: str) -> None:
        self._note = text

    def close(self) -> None:
        if self._said > self._start:        # short work needs no line at all
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        seconds = max(self._said - self._start, 1e-9)
        rate = (self.n - self._first) / seconds
        parts = [f"{self.desc}: {self.n:,.0f}" + (f" of {self.total:,.0f}" if self.total else "") + f" {self.unit}"]
        if self.total and rate:
            parts.append(f"{max(self.total - self.n, 0) / rate:,.0f} s left")
        parts += [f"{rate:,.1f} {self.unit}/s"] + ([self._note] if self._note else [])
        print(", ".join(parts), file=sys.stderr, flush=True)


class progress:
    """Progress of long work, as an iterator or as a context whose `update(n)` is called.

    >>> for layer in progress(range(48), "calibrating", unit="layer"): ...
    >>> with progress(total=size, desc="writing", unit="B") as bar: bar.update(4096)

    `bar.note(text)` shows a word of the current state (a loss, a rate) beside the bar.
    """

    def __init__(self, items: Iterable | None = None, desc: str = "", *, total: float | None = None,
                 unit: str = "it", initial: float = 0) -> None:
        self.items = items
        total = len(items) if total is None and hasattr(items, "__len__") else total
        if os.environ.get("MOELAB_HEADLESS") or not (sys.stderr.isatty() or _in_notebook()):
            self.bar: Any = _Lines(total, desc, unit, initial)
        else:
            from tqdm.auto import tqdm
            self.bar = tqdm(total=total, desc=desc, unit=unit, initial=initial, unit_scale=unit == "B",
                            dynamic_ncols=True)

    def note(self, text: str) -> None:
        self.bar.set_postfix_str(text)

    def update(self, n: float = 1) -> None:
        self.bar.update(n)

    def __iter__(self) -> Iterator:
        with self:
            for item in self.items or ():
                yield item
                self.update()

    def __enter__(self) -> progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")
