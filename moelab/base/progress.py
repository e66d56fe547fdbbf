"""Progress of long work, by tqdm: a bar on a terminal and in a notebook, gone when done; elsewhere a
line every ten seconds."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

EVERY = 10.0  # seconds between two lines


class Bar(tqdm):
    """A bar that people watch; `note` shows the current state (a loss, a rate) beside it."""

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


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


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
    watched = not os.environ.get("MOELAB_HEADLESS") and (sys.stderr.isatty() or _in_notebook())
    if watched:
        return Bar(items, desc, dynamic_ncols=True, leave=False, **about)
    return Lines(items, desc, ncols=0, mininterval=EVERY, delay=EVERY, **about)
