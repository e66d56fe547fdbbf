"""Interleaved timing, and processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from moelab.base.progress import progress
from moelab.bench.memory_limit import memory_limit

T = TypeVar("T")


def turns(
    arms: Sequence[T], rounds: int, title: str, unit: str = "rounds"
) -> Iterator[tuple[int, T]]:
    """(round, arm): all arms in each round, in reverse order in every second one."""
    for i in progress(range(rounds), title, unit=unit):
        for arm in arms[::-1] if i % 2 else arms:
            yield i, arm


@contextmanager
def working(folder: str | Path | None) -> Iterator[Path]:
    """The folder that was given, absolute; a temporary one within the block where none was."""
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(folder or temporary).expanduser().resolve()


def in_process(
    words: Sequence[str], limit: int | None = None, python: str | None = None, timeout: float = 1800
) -> dict[str, Any]:
    """The JSON object that a Python process prints as its last line, and "limit": whether the
    process and its page cache had so many bytes of memory, in words. RuntimeError with its last
    words if it fails or takes more than `timeout` seconds."""
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    with memory_limit(limit) as group:
        join = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.procs)]
        try:
            done = subprocess.run(
                [*(join if group.procs else []), python or sys.executable, *words],
                capture_output=True,
                text=True,
                timeout=timeout,
                env=os.environ | {"PYTHONPATH": path},
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"gave up after {timeout / 60:.0f} minutes") from None
    if done.returncode:
        last = (done.stderr.strip() or "it died without a word").splitlines()[-1]
        killed = "killed; it took more than its memory?"
        raise RuntimeError(killed if done.returncode == -signal.SIGKILL else last)
    return json.loads(done.stdout.strip().splitlines()[-1]) | {"limit": group.reason}
