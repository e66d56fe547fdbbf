"""Processes of their own with equal memory: a control group limits one and its page cache alike.

v1: `memory.limit_in_bytes`, v2: `memory.max`. Needs root and Linux; where it is unavailable, the
result says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelab.base.files import child_environment
from moelab.offloading.budget import ROOT, own_groups


@dataclass(frozen=True)
class Limit:
    """A control group: `procs` is the file by which a process joins; None if it could not be made,
    for a `reason`."""

    procs: Path | None
    reason: str


@contextmanager
def memory_limit(nbytes: int | None, root: Path = ROOT) -> Iterator[Limit]:
    """A new control group of so many bytes, removed at the end; None limits nothing. root : of all
    groups."""
    if nbytes is None:
        yield Limit(None, "no limit")
        return
    v1 = (root / "memory" / "memory.limit_in_bytes").exists()
    parent = root / "memory" if v1 else own_groups(root)[0]
    folder = parent / f"moelab-{os.getpid()}-{time.monotonic_ns()}"
    with ExitStack() as stack:
        try:
            if not v1 and not (root / "cgroup.controllers").exists():
                raise OSError(f"no control groups at {root}")
            folder.mkdir()
            stack.callback(_remove, folder)
            if not v1 and not (folder / "memory.max").exists():
                (parent / "cgroup.subtree_control").write_text("+memory")
            (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(nbytes))
            if (folder / "memory.swap.max").exists():
                (folder / "memory.swap.max").write_text("0")
            limit = Limit(
                folder / "cgroup.procs", f"control group v{1 if v1 else 2} of {nbytes / 1e9:.2f} GB"
            )
        except OSError as error:
            limit = Limit(
                None,
                f"no control group can be made here ({error.strerror or error}): nothing was limited",
            )
        yield limit


def _remove(folder: Path) -> None:
    for _ in range(50):  # a process that has just ended still counts for a moment
        try:
            if (folder / "memory.force_empty").exists():
                (folder / "memory.force_empty").write_text("0")
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def in_process(
    words: Sequence[str], limit: int | None = None, python: str | None = None, timeout: float = 1800
) -> dict[str, Any]:
    """The JSON object that a Python process prints as its last line, and "limit": whether the
    process and its page cache had so many bytes of memory, in words. RuntimeError with its last
    words if it fails or takes more than `timeout` seconds."""
    with memory_limit(limit) as group:
        join = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.procs)]
        try:
            done = subprocess.run(
                [*(join if group.procs else []), python or sys.executable, *words],
                capture_output=True,
                text=True,
                timeout=timeout,
                env=child_environment(),
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"gave up after {timeout / 60:.0f} minutes") from None
    if done.returncode:
        last = (done.stderr.strip() or "it died without a word").splitlines()[-1]
        killed = "killed; it took more than its memory?"
        raise RuntimeError(killed if done.returncode == -signal.SIGKILL else last)
    return json.loads(done.stdout.strip().splitlines()[-1]) | {"limit": group.reason}


def drop_cached(folder: Path) -> None:
    """Ask the system to drop its cache of all files below a folder."""
    if hasattr(os, "posix_fadvise"):
        os.sync()  # unwritten pages cannot be dropped
        for path in folder.rglob("*"):
            if path.is_file():
                with open(path, "rb") as f:
                    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
