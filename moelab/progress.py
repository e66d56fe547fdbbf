"""Progress of long work: a bar on a terminal or in a notebook, gone when done; elsewhere a line
every ten seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

EVERY = 10.0  # seconds between two lines
DRAWN = 0.2  # and between two pictures of a notebook's bar


class _Lines:
    """The part of tqdm's interface that is used here, as plain lines; work that is shorter needs
    none."""

    @property
    def every(self) -> float:
        return EVERY

    def __init__(self, total: float | None, desc: str, unit: str, initial: float) -> None:
        self.total, self.desc, self.unit = total, desc, unit
        self.n = self._first = initial
        self._start = self._printed = time.monotonic()
        self._note = ""

    def update(self, n: float = 1) -> None:
        self.n += n
        if time.monotonic() - self._printed >= self.every:
            self._print()

    def set_postfix_str(self, text: str) -> None:
        self._note = text

    def close(self) -> None:
        if self._printed > self._start:
            self._print()

    def _print(self) -> None:
        print(self._line(), file=sys.stderr, flush=True)

    def _line(self) -> str:
        self._printed = time.monotonic()
        rate = (self.n - self._first) / max(self._printed - self._start, 1e-9)
        parts = [
            f"{self.desc}: {self.n:,.0f}"
            + (f" of {self.total:,.0f}" if self.total else "")
            + f" {self.unit}",
            f"{max(self.total - self.n, 0) / rate:,.0f} s left" if self.total and rate else "",
            f"{rate:,.1f} {self.unit}/s",
            self._note,
        ]
        return ", ".join(filter(None, parts))


class _Element(_Lines):
    """In a notebook: an HTML element. Not a widget, as tqdm has: one closed before it is drawn is
    an error there."""

    every = DRAWN

    def __init__(self, *args: Any) -> None:
        from IPython.display import display

        super().__init__(*args)
        self._handle = display(self._drawn(), raw=True, display_id=True)

    def _drawn(self) -> dict[str, str]:
        part = f" value={self.n} max={self.total}" if self.total else ""
        return {
            "text/html": f"<progress{part}></progress> {escape(self._line())}",
            "text/plain": "",
        }

    def _print(self) -> None:
        self._handle.update(self._drawn(), raw=True)

    def close(self) -> None:
        self._handle.update({"text/html": "", "text/plain": ""}, raw=True)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return not os.environ.get("MOELAB_HEADLESS") and hasattr(
        ipython.get_ipython() if ipython else None, "kernel"
    )


class Notice:
    """A text while something takes long that has no end to count to: in a notebook an element that
    is there meanwhile, as what is on stderr is red there; elsewhere a line, once."""

    def __init__(self, text: str) -> None:
        self.text, self._told, self._handle = text, False, None

    def begin(self) -> None:
        if not self._told and not _in_notebook():
            print(self.text, file=sys.stderr, flush=True)
        elif not self._told:
            from IPython.display import display

            self._handle = display(self._drawn(self.text), raw=True, display_id=True)
        elif self._handle:
            self._handle.update(self._drawn(self.text), raw=True)
        self._told = True

    def end(self) -> None:
        if self._handle:
            self._handle.update(self._drawn(""), raw=True)

    def _drawn(self, text: str) -> dict[str, str]:
        return {"text/html": escape(text), "text/plain": ""}


class progress:  # noqa: N801
    """Progress as an iterator, or as a context whose `update(n)` is called.

    >>> for layer in progress(range(48), "calibrating", unit="layer"): ...
    >>> with progress(total=size, desc="writing", unit="B") as bar: bar.update(4096)

    `bar.note(text)` shows the current state (a loss, a rate) beside the bar.
    """

    def __init__(
        self,
        items: Iterable | None = None,
        desc: str = "",
        *,
        total: float | None = None,
        unit: str = "it",
        initial: float = 0,
    ) -> None:
        self.items = items
        total = len(items) if total is None and hasattr(items, "__len__") else total
        if _in_notebook():
            self.bar: Any = _Element(total, desc, unit, initial)
        elif os.environ.get("MOELAB_HEADLESS") or not sys.stderr.isatty():
            self.bar = _Lines(total, desc, unit, initial)
        else:
            from tqdm import tqdm

            self.bar = tqdm(
                total=total,
                desc=desc,
                unit=unit,
                initial=initial,
                unit_scale=unit == "B",
                dynamic_ncols=True,
                leave=False,
            )
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
