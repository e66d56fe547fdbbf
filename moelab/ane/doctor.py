"""A converted model on a Mac: is it really on the Neural Engine, does it compute what it should?
How fast it is: `notebooks/studies/ane_mac.py`.

A package is well if it loads and predicts in a process of its own, its compute plan puts every
operation on the ANE, and its outputs of random inputs agree with the evaluator's in fp16 within
`TOLERANCE`; every other finding is named."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import NamedTuple

from moelab.ane.backends import ConvertedBackend
from moelab.ane.coreml.converted import ConvertedModel
from moelab.ane.device.mac import CoreMLRunner, Placed, probe, require_mac
from moelab.base.files import read_json, write_json
from moelab.base.progress import progress
from moelab.base.table import head_and_rows, text_table

#: relative RMS difference between a device and the evaluator in fp16: rounding per operation alone
#: makes 5e-4
TOLERANCE = 5e-3
#: in the converted folder: what was found there
KEPT = "doctor.json"


class Checkup(NamedTuple):
    """A package: what went wrong with it, or else what `mac.examine` found."""

    package: str
    error: str = ""
    placed: Sequence[Placed] = ()
    difference: float | None = None

    @property
    def on_ane(self) -> int:
        """Operations that the compute plan puts on the ANE."""
        return sum(n for _, device, n in self.placed if device == "ane")

    @property
    def complaints(self) -> list[str]:
        """What is wrong, in words; empty if the package is well."""
        if self.error:
            return [self.error]
        found, off = [], self.difference
        others = [placed for placed in self.placed if placed[1] != "ane"]
        if others or not self.placed:
            told = ", ".join(f"{n} × {op} on the {device}" for op, device, n in others)
            found.append(f"not on the ANE: {told or 'the compute plan lists no operation'}")
        if off is None or off > TOLERANCE:
            by = "without end" if off is None else f"by {off:.2g}"
            found.append(f"differs from the evaluator {by}, more than {TOLERANCE:g}")
        return found


def table(checkups: Sequence[Checkup]) -> str:
    """A row for each package, as text, with what is wrong with it."""
    rows = (
        {
            "package": c.package,
            "operations on the ANE": f"{c.on_ane} of {sum(n for *_, n in c.placed)}",
            "difference": "–" if c.difference is None else f"{c.difference:.1e}",
            "verdict": "; ".join(c.complaints) or "well",
        }
        for c in checkups
    )
    return text_table(*head_and_rows(rows))


def diagnose(converted: ConvertedModel, timeout: float = 300.0) -> list[Checkup]:
    """Check every package, within `timeout` seconds each, and keep what was found in `KEPT` of its
    folder, for this Mac and package; what fails is tried again. RuntimeError if not on a Mac."""
    require_mac("ane doctor")
    here = f"{platform.node()}, macOS {platform.mac_ver()[0]}"
    place = converted.folder / KEPT
    known = read_json(place, dict).get(here, {}) if place.exists() else {}
    checkups = []
    for entry in progress(converted.packages, "probing", unit="package"):
        path, key = converted.package(entry), entry["checksum"]
        found = known.get(key) or probe(path, key, timeout)
        if key not in known and "error" not in found:
            known[key] = found
            write_json(place, {here: known})
        checkups.append(Checkup(entry["file"], **found))
    return checkups


def coreml_backend(
    converted: ConvertedModel, checkups: Sequence[Checkup], units: str = "CPU_AND_NE"
) -> ConvertedBackend:
    """A backend that runs a converted model's packages by Core ML, named by how many operations are
    on the ANE; RuntimeError: a package that cannot be loaded, crashes or takes too long."""
    for checkup in checkups:
        if checkup.error:
            raise RuntimeError(
                f"{checkup.package} {checkup.error}; plan this part for the CPU, or convert it in "
                "smaller groups"
            )
    on_ane, total = sum(c.on_ane for c in checkups), sum(n for c in checkups for *_, n in c.placed)
    sums = {converted.folder / entry["file"]: entry["checksum"] for entry in converted.packages}
    return ConvertedBackend(
        converted,
        runner=lambda path: CoreMLRunner(path, sums[path], units),
        name=f"Core ML, {on_ane} of {total} operations on the ANE by the compute plan",
    )
