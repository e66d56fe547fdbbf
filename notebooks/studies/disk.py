"""Equal conditions for engines: one file system (for one limit on memory, see
`moelab.bench.memory_limit`).

A file system on a loop device has the usual read-ahead of 128 KB: with megabytes, every page fault
of a mapped file reads megabytes, which would decide any comparison. It needs root and Linux; where
it is unavailable, the result says why."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from moelab.advice.doctor import read_ahead

READ_AHEAD = 128  # KB


@contextmanager
def disk(folder: Path, nbytes: float) -> Iterator[tuple[Path, str]]:
    """(a folder on a file system with a read-ahead of 128 KB, a description); or `folder` itself,
    and why.

    `folder/disk.ext4` of at most `nbytes` is kept for the next time. The loop device reads past the
    system's cache, which would otherwise hold everything twice and outside of the limit."""
    folder.mkdir(parents=True, exist_ok=True)
    image = folder / "disk.ext4"
    mount = folder / "disk"
    new = not image.exists()
    with ExitStack() as stack:
        try:
            if new:
                with open(image, "wb") as f:
                    f.truncate(int(nbytes))
            if mount.is_mount():  # of a process that was killed
                _unmount(mount)
            for left in _command(
                "losetup", "--noheadings", "--output", "NAME", "--associated", str(image)
            ).split():
                _command("losetup", "--detach", left)
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
    except OSError:  # a file is still open: unmounted once it is closed
        _command("umount", "--lazy", str(mount))


def _command(*words: str) -> str:
    """Run a command for its output; OSError with its own words if it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{words[0]}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    return done.stdout.strip()
