"""The folder of a conversion that is not finished, and the journal that says which of its packages are whole.

A package is made beside its place, checked, moved there, and only then entered in the journal; a run that was cut off
leaves at most one package that nothing vouches for, which is made again. The folder gets its name when all is there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moelab.ane.converted import MANIFEST, checksum


class Work:
    """The folder of a conversion that is not finished, and its journal.

    done : file → {"file", "weight_bytes", "checksum", "difference"} of each package that is whole.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.journal = folder, folder / "journal.jsonl"
        wanted, written = json.dumps(about, sort_keys=True), folder / "settings.json"
        folder.mkdir(parents=True, exist_ok=True)
        if written.exists() and written.read_text(encoding="utf-8") != wanted:
            raise FileExistsError(f"{folder} holds an unfinished conversion of another model, plan or settings; "
                                  f"delete it to start over")
        part = folder / "settings.json.part"
        part.write_text(wanted, encoding="utf-8")
        os.replace(part, written)
        self.done = {entry["file"]: entry for entry in self._entries()
                     if (folder / entry["file"]).is_dir() and checksum(folder / entry["file"]) == entry["checksum"]}

    def _entries(self) -> Iterator[dict[str, Any]]:
        if self.journal.exists():
            for line in self.journal.read_text(encoding="utf-8").splitlines():
                try:
                    yield json.loads(line)
                except ValueError:          # the run was killed while it wrote this line
                    return

    def add(self, name: str, make: Callable[[Path], None], check: Callable[[Path], float] | None) -> None:
        """Make a package beside its place, check it, move it there, and only then enter it in the journal."""
        place = self.folder / name
        building = self.folder / "building" / place.name
        for path in (building, place):
            shutil.rmtree(path, ignore_errors=True)
            path.parent.mkdir(parents=True, exist_ok=True)
        make(building)
        difference = check(building) if check else None
        weights = sum(path.stat().st_size for path in building.rglob("weights/*"))
        entry = {"file": name, "weight_bytes": weights, "checksum": checksum(building), "difference": difference}
        os.rename(building, place)
        self._forget_torn_line()
        with open(self.journal, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.done[name] = entry

    def _forget_torn_line(self) -> None:
        """Cut off a last line without its end, or what is written after it could not be read."""
        if self.journal.exists():
            text = self.journal.read_bytes()
            if not text.endswith(b"\n"):
                with open(self.journal, "r+b") as file:
                    file.truncate(text.rfind(b"\n") + 1)

    def publish(self, manifest: dict[str, Any], destination: Path) -> Path:
        """Write the manifest and give the folder its name."""
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        shutil.rmtree(self.folder / "building", ignore_errors=True)
        for name in ("journal.jsonl", "settings.json"):
            (self.folder / name).unlink(missing_ok=True)
        os.rename(self.folder, destination)
        return destination
