"""A converted model: the manifest of the folder that `convert` writes, and its packages.

Everything is checked: the manifest by its seal when it is read, a package by its checksum before it
is first used (always through `ConvertedModel.package`), the checkpoint that the CPU's parts come
from by its identity."""

from __future__ import annotations

import json
from functools import cached_property
from hashlib import file_digest, sha256
from pathlib import Path

from moelab.ane.plan import ANEPlan
from moelab.base.files import absolute
from moelab.base.records import Record
from moelab.base.schema import naming, parse_json, typed
from moelab.checkpoint.checkpoint import Checkpoint

FORMAT = "moelab.ane.converted/5"
MANIFEST = "manifest.json"


class ConvertedModel:
    """A folder that `convert_model` wrote.

    layers : the manifest's entries, one a decoder layer.

    Raises FileNotFoundError without a manifest or a package that it names, ValueError for another
    format or damage."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = absolute(folder)
        path = self.folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(
                f"{self.folder} has no {MANIFEST}, so it is no converted model (an interrupted "
                f"conversion ends in .part; the same call resumes it)"
            )
        with naming(path, "manifest of a converted model", "`moelab ane convert`"):
            self.manifest = typed(parse_json(path.read_bytes()), Record)
            if self.manifest.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            if sealed(self.manifest) != self.manifest:
                raise ValueError(
                    "it is damaged or was edited: its seal is not that of what it says"
                )
            self.layers: list[Record] = self.manifest["layers"]
        for entry in self.packages:
            path = (self.folder / entry["file"]).resolve()
            if not path.is_dir() or not path.is_relative_to(self.folder.resolve()):
                raise FileNotFoundError(
                    f"{self.folder} lacks {entry['file']}, which its manifest names; convert again"
                )
        self._checked: set[str] = set()

    @cached_property
    def plan(self) -> ANEPlan:
        """The plan by which the model was converted."""
        return ANEPlan.from_dict(self.manifest["plan"])

    @property
    def packages(self) -> list[Record]:
        """The manifest's entries of all packages."""
        return [
            entry
            for layer in self.layers
            for entry in (layer["attention"], *layer["groups"])
            if "file" in entry
        ]

    def package(self, entry: Record) -> Path:
        """Where the package of an entry of `packages` is; ValueError unless its checksum is the
        manifest's."""
        path = self.folder / entry["file"]
        if entry["file"] not in self._checked:
            if checksum(path) != entry["checksum"]:
                raise ValueError(
                    f"{path} is damaged: its checksum is not the manifest's; convert the "
                    "model again"
                )
            self._checked.add(entry["file"])
        return path

    def checkpoint(self, folder: str | Path | None = None) -> Checkpoint:
        """The checkpoint whose other parts run on the CPU: the manifest's, or where it is now."""
        place = Checkpoint.at(folder or self.manifest["checkpoint"])
        self.require_identity(place.identity, place.folder)
        return place

    def require_identity(self, found: str, where: str | Path) -> None:
        """ValueError unless this was converted from the model of that identity."""
        if found != (wanted := self.manifest["fingerprint"]):
            raise ValueError(
                f"{where} is not the checkpoint that {self.folder} was converted from (identity "
                f"{found}, not {wanted})"
            )


def sealed(manifest: Record) -> Record:
    """A manifest with the SHA-256 of all it says but the seal."""
    said = {name: value for name, value in manifest.items() if name != "seal"}
    return said | {"seal": sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()}


def checksum(package: Path) -> str:
    """SHA-256 of all files of a package, their names and sizes included, as 64 hex digits."""
    digest = sha256()
    for path in sorted(p for p in package.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(package).as_posix()}\0{path.stat().st_size}\0".encode())
        with open(path, "rb") as file:
            file_digest(file, lambda: digest)
    return digest.hexdigest()
