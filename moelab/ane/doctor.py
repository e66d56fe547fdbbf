"""A converted model on a Mac: is it really on the Neural Engine, does it compute what it should?
How fast it is: `notebooks/studies/ane_mac.py`.

A package is well if it loads and predicts in a process of its own, its compute plan puts every
operation on the ANE, and its outputs of random inputs agree with the evaluator's in fp16 within
`TOLERANCE`; every other finding is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from moelab.ane.backends import ConvertedBackend
from moelab.ane.coreml.converted import ConvertedModel
from moelab.ane.coreml.evaluator import Evaluator
from moelab.ane.coreml.package import read_package
from moelab.ane.device.mac import CoreMLRunner, PackageProbe, probe, require_mac, sample_inputs
from moelab.base.progress import progress
from moelab.base.table import head_and_rows, text_table

#: relative RMS difference between a device and the evaluator in fp16: rounding per operation alone
#: makes 5e-4
TOLERANCE = 5e-3


class Checkup(NamedTuple):
    """A package: its probe, and the largest relative RMS difference of its outputs (nan: none)."""

    package: str
    probe: PackageProbe
    difference: float

    @property
    def complaints(self) -> list[str]:
        """What is wrong, in words; empty if the package is well."""
        if self.probe.error:
            return [self.probe.error]
        found = []
        elsewhere = Counter(
            f"{p.type} on the {p.device}" for p in self.probe.placements if p.device != "ane"
        )
        if elsewhere or not self.probe.placements:
            told = ", ".join(f"{n} × {what}" for what, n in elsewhere.most_common())
            found.append(f"not on the ANE: {told or 'the compute plan lists no operation'}")
        if not self.difference <= TOLERANCE:
            found.append(
                f"differs from the evaluator by {self.difference:.2g}, more than {TOLERANCE:g}"
            )
        return found


def table(checkups: Sequence[Checkup]) -> str:
    """A row for each package, as text, with what is wrong with it."""
    rows = []
    for c in checkups:
        devices = c.probe.devices
        rows.append(
            {
                "package": c.package,
                "operations on the ANE": f"{devices['ane']} of {devices.total()}",
                "difference": f"{c.difference:.1e}",
                "verdict": "; ".join(c.complaints) or "well",
            }
        )
    return text_table(*head_and_rows(rows))


def diagnose(converted: ConvertedModel, timeout: float = 300.0) -> list[Checkup]:
    """Check every package, within `timeout` seconds each; RuntimeError if not on a Mac."""
    require_mac("ane doctor")
    checkups = []
    for entry in progress(converted.packages, "probing", unit="package"):
        path = converted.package(entry)
        inputs = sample_inputs(read_package(path).function())
        found = probe(path, inputs, timeout)
        off = float("nan") if found.error else difference(path, inputs, found.outputs)
        checkups.append(Checkup(entry["file"], found, off))
    return checkups


def difference(
    path: Path, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> float:
    """The largest relative RMS difference of an output from the evaluator's in fp16; nan where a
    device made one."""
    errors = [
        relative_rms(torch.as_tensor(outputs[name]), wanted)
        for name, wanted in Evaluator(path, mode="fp16")(inputs).items()
    ]
    return max(errors, key=lambda e: np.inf if np.isnan(e) else e)


def relative_rms(found: torch.Tensor, wanted: torch.Tensor) -> float:
    error = (found.double() - wanted.double()).square().mean() / wanted.double().square().mean()
    return float(error.sqrt())


def coreml_backend(converted: ConvertedModel, checkups: Sequence[Checkup]) -> ConvertedBackend:
    """A backend that runs a converted model's packages by Core ML, named by how many operations are
    on the ANE; RuntimeError: a package that cannot be loaded, crashes or takes too long."""
    devices: Counter[str] = Counter()
    for package, found, _ in checkups:
        if found.error:
            raise RuntimeError(
                f"{package} {found.error}; plan this part for the CPU, or convert it in smaller "
                "groups"
            )
        devices += found.devices
    name = (
        f"Core ML, {devices['ane']} of {devices.total()} operations on the ANE by the compute plan"
    )
    return ConvertedBackend(converted, runner=CoreMLRunner, name=name)
