"""An append-only journal of JSON records, with which interrupted work is resumed.

Records are on the disk when `append` returns (fsync). Each line ends with the CRC-32 of its JSON,
so a torn or damaged line costs that record alone."""

from __future__ import annotations

import fcntl
import json
import os
import warnings
import zlib
from pathlib import Path
from typing import Any

HEADER = b"moelab journal\n\n"


class Journal:
    """The journal at `path`: created if it does not exist, and locked until it is closed.

    lines : its records. Damaged ones are left out, with a warning; an incomplete last line is
        truncated.

    Raises FileExistsError: another process has it open. ValueError: the file is not a journal; it
    is not changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = []
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no file, and a journal is to be kept there; remove it")
        self._file = open(path, "a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.seek(0)
            self._read(self._file.read())
        except BaseException as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                words = f"another process is writing {path.with_suffix('')}; wait for it"
                raise FileExistsError(words) from None
            raise

    def _read(self, raw: bytes) -> None:
        damaged = 0
        for line in raw.split(b"\n")[:-1]:
            text, _, check = line.rpartition(b"\t")
            try:
                if check != b"%08x" % zlib.crc32(text):
                    raise ValueError
                self.lines.append(json.loads(text))
            except (ValueError, RecursionError):
                damaged += line not in (b"", HEADER.strip())
        if not self.lines and not HEADER.startswith(raw[: len(HEADER)]):
            raise ValueError(
                f"{self.path} is no journal of moelab's, or nothing of it can be read, so it "
                "is not written to; move it, or give another name"
            )
        if not self.lines and len(raw) < len(HEADER):
            self.restart([])
        else:
            self._file.truncate(raw.rfind(b"\n") + 1)
        if damaged:
            warnings.warn(
                f"{damaged} records in {self.path} are damaged and left out", stacklevel=4
            )

    def append(self, records: list[Any]) -> None:
        """Append records; returns when they are on the disk."""
        texts = [json.dumps(record, separators=(",", ":")).encode() for record in records]
        self._write(
            b"".join(b"%s\t%08x\n\n" % (text, zlib.crc32(text)) for text in texts)
        )  # two line ends, as one may be damaged

    def _write(self, content: bytes) -> None:
        before = os.fstat(self._file.fileno()).st_size
        try:
            while content:
                content = content[self._file.write(content) :]
            os.fsync(self._file.fileno())
        except BaseException:
            self._file.truncate(before)  # the next record begins a line of its own
            raise

    def restart(self, records: list[Any]) -> None:
        """Replace all records by these."""
        self.lines = []
        self._file.truncate(0)
        self._write(HEADER)
        self.append(records)

    def remove(self) -> None:
        """Close it and remove its file."""
        self.close()
        self.path.unlink()

    def close(self) -> None:
        """Close the file, which lets go of the lock."""
        self._file.close()
