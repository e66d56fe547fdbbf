"""Equal memory for processes that are compared: a control group that limits one and its page cache
alike.

v1: `memory.limit_in_bytes`, v2: `memory.max`. Needs root and Linux; where it is unavailable, the
result says why."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

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


def drop_cached(folder: Path) -> None:
    """Ask the system to drop its cache of all files below a folder."""
    if hasattr(os, "posix_fadvise"):
        os.sync()  # unwritten pages cannot be dropped
        for path in folder.rglob("*"):
            if path.is_file():
                with open(path, "rb") as f:
                    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
