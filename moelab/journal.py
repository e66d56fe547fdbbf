"""A journal of a conversion: lines of JSON that are on the disk when `append` returns, read again after a kill."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:         # no file locks: two writers at once are not noticed
    fcntl = None


class Journal:
    """The journal at `path`, created if there is none and locked until it is closed; `fresh` empties it.

    lines : its records up to the first damaged one, by the CRC-32 that ends each; what follows is truncated.

    Raises FileExistsError: another process has it open.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path, self.lines, good = path, [], 0
        self._file = open(path, "a+b")
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._file.close()
                raise FileExistsError(f"another process is writing {path.with_suffix('')}; wait for it") from None
        self._file.seek(0)
        for line in () if fresh else self._file.read().splitlines(keepends=True):
            text, _, check = line.rpartition(b"\t")
            if check != b"%08x\n" % zlib.crc32(text):
                break
            try:
                self.lines.append(json.loads(text))
            except (ValueError, RecursionError):
                break
            good += len(line)
        self._file.truncate(good)

    def append(self, records: list[Any]) -> None:
        """Add a line for each record and wait until they are on the disk."""
        for record in records:
            text = json.dumps(record, separators=(",", ":")).encode()
            self._file.write(b"%s\t%08x\n" % (text, zlib.crc32(text)))
        self._file.flush()
        os.fsync(self._file.fileno())

    def restart(self, records: list[Any]) -> None:
        self._file.truncate(0)
        self.append(records)

    def remove(self) -> None:
        self.close()
        self.path.unlink()

    def close(self) -> None:
        self._file.close()
