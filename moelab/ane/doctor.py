"""A converted model on a Mac: is it really on the Neural Engine, does it compute what it should,
how fast is it?

A package is well if it loads and predicts in a process of its own, its compute plan puts every
operation on the ANE, and its outputs of random inputs agree with the evaluator's in fp16 within
`TOLERANCE`; every other finding is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from moelab.ane.backends import Backend, ConvertedBackend
from moelab.ane.coreml.converted import ConvertedModel
from moelab.ane.coreml.evaluator import Evaluator
from moelab.ane.coreml.package import Function, read_package
from moelab.ane.device.mac import CoreMLRunner, PackageProbe, probe, require_mac, sample_inputs
from moelab.ane.device.timing import Meter, measure
from moelab.ane.runtime import prefill_through
from moelab.progress import progress
from moelab.records import Rows
from moelab.table import text_table

#: relative RMS difference between a device and the evaluator in fp16: rounding per operation alone
#: makes 5e-4
TOLERANCE = 5e-3


class Checkup(NamedTuple):
    """One function of a package: its probe, and the largest relative RMS difference of its outputs
    (nan: none)."""

    package: str
    probe: PackageProbe
    difference: float

    @property
    def complaints(self) -> list[str]:
        """What is wrong, in words; empty if the package is well."""
        if self.probe.error:
            return [self.probe.error]
        found = []
        if not self.probe.on_ane:
            elsewhere = Counter(
                f"{p.type} on the {p.device}"
                if p.device != "unknown"
                else f"{p.type} (not said where)"
                for p in self.probe.placements
                if p.device != "ane"
            )
            found.append(
                "not on the ANE: "
                + ", ".join(f"{n} × {what}" for what, n in elsewhere.most_common())
                if elsewhere
                else "the compute plan lists no operation"
            )
        if not self.difference <= TOLERANCE:
            found.append(
                f"differs from the evaluator by {self.difference:.2g}, more than {TOLERANCE:g}"
            )
        return found


class Diagnosis(NamedTuple):
    """All packages of a converted model."""

    checkups: tuple[Checkup, ...]

    @property
    def well(self) -> bool:
        """Whether nothing is wrong with any package."""
        return not any(checkup.complaints for checkup in self.checkups)

    def table(self) -> str:
        """A row for each package, as text, with what is wrong with it."""
        rows = []
        for c in self.checkups:
            devices = c.probe.devices
            cost = [p.cost for p in c.probe.placements if p.device == "ane" and p.cost is not None]
            rows.append(
                [
                    c.package,
                    f"{devices['ane']} of {devices.total()}",
                    f"{100 * sum(cost):.0f} %" if cost else "–",
                    f"{c.probe.load_s:.2f}",
                    f"{1e3 * c.probe.predict_s:.1f}",
                    f"{c.difference:.1e}",
                    "; ".join(c.complaints) or "well",
                ]
            )
        return text_table(
            [
                "package",
                "operations on the ANE",
                "of the estimated work",
                "load, s",
                "first predict, ms",
                "difference",
                "verdict",
            ],
            rows,
        )

    def to_dict(self) -> dict[str, Any]:
        """All that was found, as JSON has it."""
        return {
            "format": "moelab.ane.doctor/1",
            "kind": "measured",
            "well": self.well,
            "packages": [
                {
                    "package": c.package,
                    "error": c.probe.error,
                    "load_s": c.probe.load_s,
                    "predict_s": c.probe.predict_s,
                    "difference": None if np.isnan(c.difference) else c.difference,
                    "complaints": c.complaints,
                    "placements": [vars(p) for p in c.probe.placements],
                }
                for c in self.checkups
            ],
        }


def diagnose(converted: ConvertedModel | str | Path, timeout: float = 300.0) -> Diagnosis:
    """Check every function of every package, within `timeout` seconds each; RuntimeError if not on
    a Mac."""
    require_mac("ane doctor")
    converted = converted if isinstance(converted, ConvertedModel) else ConvertedModel(converted)
    checkups = []
    for path, function, inputs, found in _probed(converted, timeout):
        off = (
            float("nan") if found.error else difference(path, function.name, inputs, found.outputs)
        )
        name = path.relative_to(converted.folder).as_posix()
        checkups.append(
            Checkup(name if function.name == "main" else f"{name} {function.name}", found, off)
        )
    return Diagnosis(tuple(checkups))


def difference(
    path: Path, function: str, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> float:
    """The largest relative RMS difference of an output from the evaluator's in fp16; nan where a
    device made one."""
    errors = []
    for name, wanted in Evaluator(path, function, mode="fp16")(inputs).items():
        got = torch.as_tensor(outputs[name]).double()
        wanted = wanted.double()
        errors.append(
            float(
                (got - wanted).square().mean().sqrt()
                / wanted.square().mean().sqrt().clamp_min(1e-30)
            )
        )
    return max(errors, key=lambda e: np.inf if np.isnan(e) else e)


def coreml_backend(
    converted: ConvertedModel | str | Path, timeout: float = 300.0
) -> ConvertedBackend:
    """A backend that runs a converted model's packages by Core ML, named by how many operations are
    on the ANE.

    Raises RuntimeError: not on a Mac; a package that cannot be loaded, crashes or takes too long.
    """
    require_mac("running packages by Core ML")
    converted = converted if isinstance(converted, ConvertedModel) else ConvertedModel(converted)
    devices: Counter[str] = Counter()
    for path, _, _, found in _probed(converted, timeout):
        if found.error:
            raise RuntimeError(
                f"{path} {found.error}; plan this part for the CPU, or convert it in smaller groups"
            )
        devices += found.devices
    name = (
        f"Core ML, {devices['ane']} of {devices.total()} operations on the ANE by the compute plan"
    )
    units = converted.manifest["settings"]["compute_units"]
    return ConvertedBackend(
        converted, runner=lambda path, function: CoreMLRunner(path, function, units), name=name
    )


def _probed(
    converted: ConvertedModel, timeout: float
) -> Iterator[tuple[Path, Function, dict[str, np.ndarray], PackageProbe]]:
    """(path, function, inputs, probe) of every function of every package."""
    units = converted.manifest["settings"]["compute_units"]
    for entry in progress(converted.packages, "probing", unit="package"):
        package = read_package(converted.package(entry))
        for function in package.functions.values():
            inputs = sample_inputs(function)
            yield (
                package.path,
                function,
                inputs,
                probe(package.path, inputs, function.name, units, timeout),
            )


def time_prefill(
    model: Any,
    backend: Backend,
    prompts: Sequence[int],
    repeats: int = 5,
    meter: Meter | None = None,
) -> Rows:
    """Prefills of random tokens, one row a prompt length: TTFT, ms a chunk, mJ a token by part,
    drops and launches."""
    meter = meter or Meter()
    rows = []
    for length in progress(list(prompts), "measuring", unit="prompt"):
        ids = torch.randint(
            0, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)
        )
        with torch.no_grad(), prefill_through(model, backend=backend) as ane:
            timing = measure(lambda: model(ids, use_cache=False, logits_to_keep=1), repeats, meter)
        total = ane.total
        chunks = -(-length // backend.plan.chunk)
        rows.append(
            {
                "chunk": backend.plan.chunk,
                "prompt": length,
                "TTFT, s": timing.median,
                "fastest, s": min(timing.seconds),
                "slowest, s": max(timing.seconds),
                "ms a chunk": 1e3 * timing.median / chunks,
                **{f"{part}, mJ a token": value / length for part, value in timing.mj.items()},
                "dropped": total.drop_rate,
                "padded": total.padded_fraction,
                "launches a chunk": total.launches / (repeats + 1) / chunks,
            }
        )
    return rows
