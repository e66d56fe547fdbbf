"""The folder of a conversion that is not finished, and the journal that says which of its packages are whole.

A package is made beside its place, checked, moved there, and only then entered in the journal; a run that was cut off
leaves at most one package that nothing vouches for, which is made again. The folder gets its name when all is there.
Whoever works in it holds its journal locked, and everything temporary lies in `building`, so nothing outlives a kill.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moelab.ane.coreml.converted import MANIFEST, checksum, sealed

try:
    import fcntl
except ImportError:         # no file locks: two conversions into one folder are not noticed
    fcntl = None

#: what a package of a conversion may be called, and what the journal says of it
FILE = re.compile(r"layers/\d{3,}/(attention|group\d{2,})\.mlpackage")
FIELDS = {"file", "weight_bytes", "checksum", "difference"}


class Work:
    """The folder of a conversion that is not finished, and its journal, which is locked until `close` or `publish`.

    done : file → {"file", "weight_bytes", "checksum", "difference"} of each package that is whole.

    Raises
    ------
    FileExistsError : another process works there, or what lies there is another conversion's.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.journal, self.building = folder, folder / "journal.jsonl", folder / "building"
        wanted, written = json.dumps(about, sort_keys=True), folder / "settings.json"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._locked()
        try:
            if written.exists() and written.read_text(encoding="utf-8") != wanted:
                raise FileExistsError(f"{folder} holds an unfinished conversion of another model, plan or settings; "
                                      f"delete it to start over")
            part = folder / "settings.json.part"
            part.write_text(wanted, encoding="utf-8")
            os.replace(part, written)
            shutil.rmtree(self.building, ignore_errors=True)
            self.done = {entry["file"]: entry for entry in self._entries()
                         if (folder / entry["file"]).is_dir() and checksum(folder / entry["file"]) == entry["checksum"]}
        except BaseException:
            self.close()
            raise

    def _locked(self) -> Any:
        file = open(self.journal, "a+b")
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino != self.journal.stat().st_ino:
                raise FileNotFoundError                         # it was published while the lock was waited for
        except OSError:
            file.close()
            raise FileExistsError(f"another process converts into {self.folder}: wait for it, or give another "
                                  f"destination") from None
        return file

    def _entries(self) -> Iterator[dict[str, Any]]:
        """The journal's lines; one without its end is cut off, or what is written after it could not be read."""
        self._file.seek(0)
        text = self._file.read()
        self._file.truncate(text.rfind(b"\n") + 1)
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                whole = FILE.fullmatch(entry["file"]) and FIELDS <= entry.keys()
            except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
                return                      # what is damaged, and all after it, is made again
            if not whole:
                return
            yield entry

    def close(self) -> None:
        """Let others work here."""
        self._file.close()

    def add(self, name: str, make: Callable[[Path], None], check: Callable[[Path], float] | None) -> None:
        """Make a package beside its place, check it, move it there, and only then enter it in the journal."""
        place = self.folder / name
        building = self.building / place.name
        shutil.rmtree(self.building, ignore_errors=True)
        shutil.rmtree(place, ignore_errors=True)
        for path in (building, place):
            path.parent.mkdir(parents=True, exist_ok=True)
        make(building)
        difference = check(building) if check else None
        weights = sum(path.stat().st_size for path in building.rglob("weights/*"))
        entry = {"file": name, "weight_bytes": weights, "checksum": checksum(building), "difference": difference}
        os.rename(building, place)
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done[name] = entry

    def publish(self, manifest: dict[str, Any], destination: Path) -> Path:
        """Write the manifest and give the folder its name."""
        (self.folder / MANIFEST).write_text(json.dumps(sealed(manifest), indent=1), encoding="utf-8")
        shutil.rmtree(self.building, ignore_errors=True)
        for name in ("journal.jsonl", "settings.json"):
            (self.folder / name).unlink(missing_ok=True)
        os.rename(self.folder, destination)
        self.close()
        return destination
