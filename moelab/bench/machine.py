"""Equal conditions for engines: one limit on memory, page cache included, and one file system.

A control group limits a process and its page cache alike (v1: `memory.limit_in_bytes`, v2: `memory.max`). A file system
on a loop device has the usual read-ahead of 128 KB: with megabytes, every page fault of a mapped file reads megabytes,
which would decide any comparison. Both need root and Linux; where one is unavailable, the result says why.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

READ_AHEAD = 128                        # KB


@dataclass(frozen=True)
class Limit:
    """A control group: `procs` is the file by which a process joins; None if it could not be made, for a `reason`."""

    procs: Path | None
    reason: str

    @property
    def peak_bytes(self) -> int | None:
        """The most that the group has used, page cache included; None where the system does not tell."""
        for name in ("memory.max_usage_in_bytes", "memory.peak") if self.procs else ():
            if (self.procs.parent / name).exists():
                return int((self.procs.parent / name).read_text())
        return None


@contextmanager
def memory_limit(nbytes: int | None, root: Path = Path("/sys/fs/cgroup")) -> Iterator[Limit]:
    """A new control group of so many bytes, removed at the end; None limits nothing. root : of all groups."""
    if nbytes is None:
        yield Limit(None, "no limit")
        return
    v1 = (root / "memory" / "memory.limit_in_bytes").exists()
    parent = root / "memory" if v1 else root / _own_group()
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
            limit = Limit(folder / "cgroup.procs", f"control group v{1 if v1 else 2} of {nbytes / 1e9:.2f} GB")
        except OSError as error:
            limit = Limit(None, f"no control group can be made here ({error.strerror or error}): nothing was limited")
        yield limit


def _own_group() -> str:
    try:
        return re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.M)[1]
    except (OSError, TypeError):
        return ""


def _remove(folder: Path) -> None:
    for _ in range(50):                 # a process that has just ended still counts for a moment
        try:
            if (folder / "memory.force_empty").exists():
                (folder / "memory.force_empty").write_text("0")
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)


@contextmanager
def disk(folder: Path, nbytes: float) -> Iterator[tuple[Path, str]]:
    """(a folder on a file system with a read-ahead of 128 KB, a description); or `folder` itself, and why.

    `folder/disk.ext4` of at most `nbytes` is kept for the next time. The loop device reads past the system's cache,
    which would otherwise hold everything twice and outside of the limit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    image, mount = folder / "disk.ext4", folder / "disk"
    new = not image.exists()
    with ExitStack() as stack:
        try:
            if new:
                with open(image, "wb") as f:
                    f.truncate(int(nbytes))
            device = _command("losetup", "--find", "--show", "--direct-io=on", str(image))
            stack.callback(_command, "losetup", "--detach", device)
            if new:
                _command("mkfs.ext4", "-q", "-E", "lazy_itable_init=0", device)
            _command("blockdev", "--setra", str(2 * READ_AHEAD), device)
            mount.mkdir(exist_ok=True)
            _command("mount", "-o", "noatime", device, str(mount))
            stack.callback(_unmount, mount)
            direct = Path(f"/sys/block/{Path(device).name}/loop/dio")
            found = mount, f"ext4 on a loop device, read-ahead {read_ahead(mount)} KB"
            if not direct.exists() or direct.read_text().strip() != "1":
                found = mount, f"{found[1]}, cached below: reads look too fast"
        except OSError as error:
            stack.close()
            if new:
                image.unlink(missing_ok=True)
            found = folder, f"no separate file system ({error}); read-ahead {read_ahead(folder)} KB"
        yield found


def _unmount(mount: Path) -> None:
    try:
        _command("umount", str(mount))
    except OSError:                             # a file is still open: unmounted once it is closed
        _command("umount", "--lazy", str(mount))


def _command(*words: str) -> str:
    """Run a command for its output; OSError with its own words if it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{words[0]}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    return done.stdout.strip()


def read_ahead(path: Path) -> int | None:
    """KB that the system reads ahead on the device that `path` lies on; None where it doesn't tell."""
    number = os.stat(path).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}") if hasattr(os, "major") else Path()
    for queue in (device / "queue", device.resolve().parent / "queue"):       # a partition has its disk's
        if (queue / "read_ahead_kb").exists():
            return int((queue / "read_ahead_kb").read_text())
    return None


def drop_cached(folder: Path) -> None:
    """Ask the system to drop its cache of all files below a folder."""
    if hasattr(os, "posix_fadvise"):
        os.sync()                       # unwritten pages cannot be dropped
        for path in folder.rglob("*"):
            if path.is_file():
                with open(path, "rb") as f:
                    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
