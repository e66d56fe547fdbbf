"""Progress of long work: a bar on a terminal or in a notebook, gone when done; elsewhere a line every ten seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

EVERY = 10.0        # seconds between two lines


class _Lines:
    """The part of tqdm's interface that is used here, as plain lines; work that is shorter needs none."""

    def __init__(self, total: float | None, desc: str, unit: str, initial: float) -> None:
        self.total, self.desc, self.unit = total, desc, unit
        self.n = self._first = initial
        self._start = self._printed = time.monotonic()
        self._note = ""

    def update(self, n: float = 1) -> None:
        self.n += n
        if time.monotonic() - self._printed >= EVERY:
            self._print()

    def set_postfix_str(self, text: str) -> None:
        self._note = text

    def close(self) -> None:
        if self._printed > self._start:
            self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        rate = (self.n - self._first) / max(self._printed - self._start, 1e-9)
        parts = [f"{self.desc}: {self.n:,.0f}" + (f" of {self.total:,.0f}" if self.total else "") + f" {self.unit}",
                 f"{max(self.total - self.n, 0) / rate:,.0f} s left" if self.total and rate else "",
                 f"{rate:,.1f} {self.unit}/s", self._note]
        print(", ".join(filter(None, parts)), file=sys.stderr, flush=True)


class progress:
    """Progress as an iterator, or as a context whose `update(n)` is called.

    >>> for layer in progress(range(48), "calibrating", unit="layer"): ...
    >>> with progress(total=size, desc="writing", unit="B") as bar: bar.update(4096)

    `bar.note(text)` shows the current state (a loss, a rate) beside the bar.
    """

    def __init__(self, items: Iterable | None = None, desc: str = "", *, total: float | None = None,
                 unit: str = "it", initial: float = 0) -> None:
        self.items = items
        total = len(items) if total is None and hasattr(items, "__len__") else total
        ipython = sys.modules.get("IPython")
        in_notebook = hasattr(ipython.get_ipython() if ipython else None, "kernel")
        if os.environ.get("MOELAB_HEADLESS") or not (sys.stderr.isatty() or in_notebook):
            self.bar: Any = _Lines(total, desc, unit, initial)
        else:
            from tqdm.auto import tqdm
            self.bar = tqdm(total=total, desc=desc, unit=unit, initial=initial, unit_scale=unit == "B",
                            dynamic_ncols=True, leave=False)
        self.note, self.update = self.bar.set_postfix_str, self.bar.update

    def __iter__(self) -> Iterator:
        with self:
            for item in self.items or ():
                yield item
                self.update(1)

    def __enter__(self) -> progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
