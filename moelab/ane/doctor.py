"""Is a converted model really on the Neural Engine of this Mac, and does it compute what it should?

Each package is loaded in a process of its own, its compute plan read operation by operation, and its outputs of random
inputs compared with the evaluator's in fp16. A package is well if it loads and predicts, every operation is on the
unit that it was converted for, and the outputs agree within `TOLERANCE`; every other finding is named. Whole prefills
are compared by `moelab.ane.parity`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moelab.ane.coreml.converted import ConvertedModel
from moelab.ane.coreml.evaluator import Evaluator
from moelab.ane.device.mac import Probe, entries, probe, require_mac, sample_inputs
from moelab.progress import progress
from moelab.table import text_table

#: relative RMS difference between a device and the evaluator in fp16: rounding per operation alone makes 5e-4
TOLERANCE = 5e-3


@dataclass(frozen=True, eq=False)
class Checkup:
    """One function of a package: what its probe said, and the largest relative RMS difference of its outputs (nan
    without any)."""

    package: str
    probe: Probe
    difference: float

    @property
    def complaints(self) -> list[str]:
        """What is wrong, in words; empty if the package is well."""
        if self.probe.error:
            return [self.probe.error]
        found = []
        if not self.probe.on_ane:
            elsewhere = Counter(f"{p.type} on the {p.device}" if p.device != "unknown" else f"{p.type} (not said where)"
                                for p in self.probe.placements if p.device != "ane")
            found.append("not on the ANE: " + ", ".join(f"{n} × {what}" for what, n in elsewhere.most_common())
                         if elsewhere else "the compute plan lists no operation")
        if not self.difference <= TOLERANCE:
            found.append(f"differs from the evaluator by {self.difference:.2g}, more than {TOLERANCE:g}")
        return found


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """All packages of a converted model."""

    checkups: tuple[Checkup, ...]

    @property
    def well(self) -> bool:
        return not any(checkup.complaints for checkup in self.checkups)

    def table(self) -> str:
        rows = []
        for c in self.checkups:
            devices = c.probe.devices
            cost = [p.cost for p in c.probe.placements if p.device == "ane" and p.cost is not None]
            rows.append([c.package, f"{devices['ane']} of {devices.total()}",
                         f"{100 * sum(cost):.0f} %" if cost else "–", f"{c.probe.load_s:.2f}",
                         f"{1e3 * c.probe.predict_s:.1f}", f"{c.difference:.1e}", "; ".join(c.complaints) or "well"])
        return text_table(["package", "operations on the ANE", "of the estimated work", "load, s", "first predict, ms",
                           "difference", "verdict"], rows)

    def to_dict(self) -> dict[str, Any]:
        return {"format": "moelab.ane.doctor/1", "kind": "measured", "well": self.well, "packages": [
            {"package": c.package, "error": c.probe.error, "load_s": c.probe.load_s, "predict_s": c.probe.predict_s,
             "difference": None if np.isnan(c.difference) else c.difference, "complaints": c.complaints,
             "placements": [vars(p) for p in c.probe.placements]} for c in self.checkups]}


def diagnose(converted: ConvertedModel | str | Path, timeout: float = 300.0, **options: Any) -> Diagnosis:
    """Check every package; `options` go to `mac.probe`.

    Raises
    ------
    RuntimeError : not on a Mac. FileNotFoundError, ValueError : no converted model there, or a damaged one.
    """
    require_mac("ane doctor")
    converted = converted if isinstance(converted, ConvertedModel) else ConvertedModel(converted)
    units, checkups = converted.manifest["settings"]["compute_units"], []
    for path, function in progress(entries(converted), "examining", unit="package"):
        inputs = sample_inputs(function)
        found = probe(path, inputs, function.name, units, timeout, **options)
        off = float("nan") if found.error else difference(path, function.name, inputs, found.outputs)
        name = path.relative_to(converted.folder).as_posix()
        checkups.append(Checkup(name if function.name == "main" else f"{name} {function.name}", found, off))
    return Diagnosis(tuple(checkups))


def difference(path: Path, function: str, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> float:
    """The largest relative RMS difference of an output from the evaluator's in fp16; nan where a device made one."""
    evaluator = Evaluator(path, function, mode="fp16")
    expected = evaluator(inputs, evaluator.make_state() if evaluator.function.states else None)
    errors = []
    for name, wanted in expected.items():
        got, wanted = torch.as_tensor(outputs[name]).double(), wanted.double()
        errors.append(float((got - wanted).square().mean().sqrt() / wanted.square().mean().sqrt().clamp_min(1e-30)))
    return max(errors, key=lambda e: np.inf if np.isnan(e) else e)
