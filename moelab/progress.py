"""Progress of long work, by tqdm: a bar on a terminal and an element in a notebook, both gone when
done; elsewhere a line every ten seconds."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from html import escape
from typing import Any

from tqdm import tqdm

EVERY = 10.0  # seconds between two lines


class Bar(tqdm):
    """A bar on a terminal; `note` shows the current state (a loss, a rate) beside it."""

    monitor_interval = 0  # no thread

    def note(self, text: str) -> None:
        """Show a text beside the bar."""
        self.set_postfix_str(text, refresh=False)


Bar.set_lock(threading.RLock())  # tqdm's own is shared by processes, which a fork would copy


class Lines(Bar):
    """A line now and then; none of what is done before the first is due."""

    def display(self, *_: Any) -> None:
        print(self, file=sys.stderr, flush=True)

    def close(self) -> None:
        if not self.disable and self.last_print_t > self.start_t:
            self.display()
        self.disable = True


class Element(Bar):
    """HTML below a notebook's cell. Not a widget, as tqdm has: one that is closed before it is
    drawn is an error there."""

    handle: Any = None

    def display(self, *_: Any) -> None:
        part = f" value={self.n} max={self.total}" if self.total else ""
        self.show(f"<progress{part}></progress> {escape(str(self))}")

    def show(self, html: str) -> None:
        from IPython.display import display

        data = {"text/html": html, "text/plain": ""}
        if self.handle is None:
            self.handle = display(data, raw=True, display_id=True)
        else:
            self.handle.update(data, raw=True)

    def close(self) -> None:
        if not self.disable:
            self.show("")
        self.disable = True


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return not os.environ.get("MOELAB_HEADLESS") and hasattr(shell, "kernel")


def progress(
    items: Iterable | None = None,
    desc: str = "",
    *,
    total: float | None = None,
    unit: str = "it",
    initial: float = 0,
) -> Bar:
    """Progress as an iterator, or as a context whose `update(n)` is called.

    >>> for layer in progress(range(48), "calibrating", unit="layer"): ...
    >>> with progress(total=size, desc="writing", unit="B") as bar: bar.update(4096)
    """
    about = {"total": total, "initial": initial, "unit_scale": unit == "B", "miniters": 0}
    about["unit"] = unit if unit == "B" else f" {unit}"
    if _in_notebook():
        return Element(items, desc, ncols=0, mininterval=0.2, **about)
    if os.environ.get("MOELAB_HEADLESS") or not sys.stderr.isatty():
        return Lines(items, desc, ncols=0, mininterval=EVERY, delay=EVERY, **about)
    return Bar(items, desc, dynamic_ncols=True, leave=False, **about)
