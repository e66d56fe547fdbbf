"""Ctrl-C while an offloaded model runs: remembered, and raised between two layers.

So a layer's step is never left halfway: what is in memory stays as the step has decided it, and the
next generation goes on from there. A layer is short; a second Ctrl-C within it waits, too."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_waiting: list[int] = []  # signals that have come and have not been raised


@contextmanager
def deferred() -> Iterator[None]:
    """Within the block SIGINT is remembered, and raised by `raise_waiting`, or at its end.

    Only the main thread gets signals: in others nothing changes, nor within another such block, nor
    where the program has a handler of its own."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _waiting.clear()
    signal.signal(signal.SIGINT, lambda number, _: _waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    raise_waiting()


def raise_waiting() -> None:
    """KeyboardInterrupt in the main thread if SIGINT has come."""
    if _waiting and threading.current_thread() is threading.main_thread():
        _waiting.clear()
        raise KeyboardInterrupt
