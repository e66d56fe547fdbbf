"""Core ML on a Mac: running packages, asking the compute plan where each operation really goes, and
reading the energy counters.

Written against coremltools 9 and macOS 15, the first with what these packages need. Core ML says
nothing when it falls back to the CPU; only its compute plan tells. A package that a driver cannot
take may kill the process that loads it, so `probe` loads it, and predicts once, in a process of its
own with a time limit."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.ane.coreml.evaluator import Evaluator
from moelab.ane.coreml.package import coremltools
from moelab.base.files import atomic, child_environment
from moelab.base.records import Record

#: operation, "ane", "cpu" or "gpu", or "unknown" where the compute plan does not say, and how many
Placed = list[str | int]
#: class of a compute device in coremltools → what it is called here
DEVICES = {
    "MLNeuralEngineComputeDevice": "ane",
    "MLCPUComputeDevice": "cpu",
    "MLGPUComputeDevice": "gpu",
}


def on_mac() -> bool:
    """Whether this is a Mac with Apple silicon and macOS 15 or later."""
    version = platform.mac_ver()[0].split(".")[0]
    here = platform.system(), platform.machine()
    return here == ("Darwin", "arm64") and int(version or 0) >= 15


def require_mac(what: str) -> None:
    """RuntimeError, which says what it would take, but `on_mac`."""
    if on_mac():
        return
    version, system = platform.mac_ver()[0], platform.system()
    here = f"macOS {version} on {platform.machine()}" if system == "Darwin" else system
    raise RuntimeError(
        f"{what} needs a Mac with Apple silicon and macOS 15 or later, and this is {here}. It "
        "would take: copying the converted folder and the checkpoint there, pip install "
        "'moelab[ane]' 'zeus[apple]' (zeus for energy), and this same command. Without a "
        "Mac, `moelab ane lint` predicts what the Neural Engine refuses and `moelab ane "
        "parity` checks the numbers"
    )


def compiled(package: Path, checksum: str) -> Path:
    """A package as Core ML loads it, compiled once and kept beside it under its checksum."""
    kept = package.with_name(f"{package.stem}-{checksum[:16]}.mlmodelc")
    if not kept.exists():
        with atomic(kept) as part:
            coremltools().models.utils.compile_model(str(package), str(part))
    return kept


class CoreMLRunner:
    """A package, loaded by Core ML for some `ComputeUnit`, the CPU and the Neural Engine unless
    said otherwise.

    Called like an `Evaluator`: inputs by name → outputs by name, in float32.
    """

    dtype = torch.float32

    def __init__(self, package: Path, checksum: str, units: str = "CPU_AND_NE") -> None:
        models, self.units = coremltools().models, coremltools().ComputeUnit[units]
        self.path = str(compiled(package, checksum))
        self.model = models.CompiledMLModel(self.path, compute_units=self.units)

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        arrays = {
            name: np.ascontiguousarray(value, dtype=np.float32) for name, value in inputs.items()
        }
        out = self.model.predict(arrays)
        return {
            name: torch.from_numpy(np.array(value, dtype=np.float32)) for name, value in out.items()
        }


def placements(runner: CoreMLRunner) -> list[Placed]:
    """Where the compute plan puts each kind of operation, constants left out."""
    from coremltools.models.compute_plan import MLComputePlan

    plan = MLComputePlan.load_from_path(runner.path, compute_units=runner.units)
    (function,) = plan.model_structure.program.functions.values()
    found = Counter()
    for op in function.block.operations:
        kind = op.operator_name.rpartition(".")[2]  # "ios18.conv"
        if kind != "const" and not kind.startswith("constexpr"):
            usage = plan.get_compute_device_usage_for_mlprogram_operation(op)
            device = type(usage.preferred_compute_device).__name__ if usage else ""
            found[kind, DEVICES.get(device, "unknown")] += 1
    return [[*where, n] for where, n in found.items()]


def examine(package: Path, checksum: str) -> Record:
    """Load a package and predict once: {"placed": as of `placements`, "difference": the largest
    relative RMS difference of an output from the evaluator's in fp16, None for no number}."""
    rng, runner = np.random.default_rng(0), CoreMLRunner(package, checksum)
    evaluate = Evaluator(package, "fp16")
    inputs = {
        name: (0.25 * rng.standard_normal(value.shape)).astype(np.float16).astype(np.float32)
        for name, value in evaluate.package.function.inputs.items()
    }
    outputs, off = runner(inputs), 0.0
    for name, wanted in evaluate(inputs).items():
        error = (outputs[name].double() - wanted.double()).square().mean()
        off = max(
            off, float((error / wanted.double().square().mean()).sqrt().nan_to_num(torch.inf))
        )
    return {"placed": placements(runner), "difference": off if off < torch.inf else None}


def probe(
    package: Path,
    checksum: str,
    timeout: float = 300.0,
    command: Sequence[str] = (sys.executable, "-m", "moelab.ane.device.mac"),
) -> Record:
    """`examine` in a process of its own, which may crash or be ended after `timeout` seconds: then
    {"error": what went wrong, in words}."""
    try:
        done = subprocess.run(
            [*command, str(package.resolve()), checksum],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=True,
            env=child_environment(),
        )
    except subprocess.TimeoutExpired:
        return {"error": f"did not load and predict within {timeout:g} s"}
    except subprocess.CalledProcessError as failed:
        said = failed.stderr.strip().splitlines() or ["it said nothing"]
        return {"error": f"ended its process with status {failed.returncode}: {said[-1]}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(arguments: Sequence[str]) -> None:
    """The other process: PACKAGE CHECKSUM; prints one line of JSON."""
    package, checksum = arguments
    print(json.dumps(examine(Path(package), checksum)))


#: part of the chip → field of zeus' AppleSiliconMeasurement, in mJ
FIELDS = {"ane": "ane_mj", "cpu": "cpu_total_mj", "gpu": "gpu_mj", "dram": "dram_mj"}


class Meter:
    """Reads energy counters (NPUMoE §5.1, by Zeus); `why` is "", or says why it cannot and windows
    stay empty."""

    def __init__(self) -> None:
        self._monitor, self.why = None, ""
        try:
            from zeus.monitor import ZeusMonitor
        except ImportError:
            self.why = "no energy: pip install 'zeus[apple]'"
            return
        self._monitor = ZeusMonitor(gpu_indices=[], cpu_indices=[])
        if not self._monitor.soc_is_present:
            self._monitor = None
            self.why = "no energy: zeus finds no Apple chip that it can read here"

    @contextmanager
    def window(self) -> Iterator[dict[str, float]]:
        """Yields a dictionary that holds mJ by part after the block; parts that the chip does not
        report are absent."""
        found: dict[str, float] = {}
        if self._monitor is None:
            yield found
            return
        self._monitor.begin_window("moelab", sync_execution=False)
        try:
            yield found
        finally:
            soc = self._monitor.end_window("moelab", sync_execution=False).soc_energy
            found |= {
                part: float(value)
                for part, field in FIELDS.items()
                if (value := getattr(soc, field, None)) is not None
            }


if __name__ == "__main__":
    main(sys.argv[1:])
