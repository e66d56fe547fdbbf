"""Core ML on a Mac: running packages, and asking the compute plan where each operation really goes.

Written against coremltools 9 and macOS 15, the first with what these packages need. Core ML says
nothing when it falls back to the CPU; only its compute plan tells. A package that a driver cannot
take may kill the process that loads it, so `probe` loads it, and predicts once, in a process of its
own with a time limit."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moelab.ane.coreml.package import Function, coremltools

#: class of a compute device in coremltools → what it is called here
DEVICES = {
    "MLNeuralEngineComputeDevice": "ane",
    "MLCPUComputeDevice": "cpu",
    "MLGPUComputeDevice": "gpu",
}


def require_mac(what: str) -> None:
    """RuntimeError, which says what it would take, but on a Mac with Apple silicon and macOS 15."""
    version = platform.mac_ver()[0]
    system = platform.system()
    if (
        system == "Darwin"
        and platform.machine() == "arm64"
        and int(version.split(".")[0] or 0) >= 15
    ):
        return
    here = f"macOS {version} on {platform.machine()}" if system == "Darwin" else system
    raise RuntimeError(
        f"{what} needs a Mac with Apple silicon and macOS 15 or later, and this is {here}. It "
        "would take: copying the converted folder and the checkpoint there, pip install "
        "'moelab[ane]' 'zeus[apple]' (zeus for energy), and this same command. Without a "
        "Mac, `moelab ane lint` predicts what the Neural Engine refuses and `moelab ane "
        "parity` checks the numbers"
    )


class CoreMLRunner:
    """A package, loaded by Core ML for the CPU and the Neural Engine.

    Called like an `Evaluator`: inputs by name → outputs by name, in float32.
    """

    dtype = torch.float32

    def __init__(self, path: str | Path) -> None:
        ct = coremltools()
        self.units = ct.ComputeUnit.CPU_AND_NE
        self.model = ct.models.MLModel(str(path), compute_units=self.units)

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        arrays = {
            name: np.ascontiguousarray(np.asarray(value, dtype=np.float32))
            for name, value in inputs.items()
        }
        out = self.model.predict(arrays)
        return {
            name: torch.from_numpy(np.array(value, dtype=np.float32)) for name, value in out.items()
        }


class OpPlacement(NamedTuple):
    """Where the compute plan puts one operation."""

    type: str
    name: str
    device: str  # "ane", "cpu" or "gpu"; "unknown" where the plan does not say


def placements(runner: CoreMLRunner) -> list[OpPlacement]:
    """One placement an operation, constants left out."""
    from coremltools.models.compute_plan import MLComputePlan

    plan = MLComputePlan.load_from_path(
        runner.model.get_compiled_model_path(), compute_units=runner.units
    )
    (function,) = plan.model_structure.program.functions.values()
    found = []
    for op in function.block.operations:
        kind = op.operator_name.rpartition(".")[2]  # "ios18.conv"
        if kind == "const" or kind.startswith("constexpr"):
            continue
        usage = plan.get_compute_device_usage_for_mlprogram_operation(op)
        device = type(usage.preferred_compute_device).__name__ if usage else ""
        found.append(
            OpPlacement(
                kind,
                op.outputs[0].name if op.outputs else "",
                DEVICES.get(device, "unknown"),
            )
        )
    return found


class PackageProbe(NamedTuple):
    """What a package did in a process of its own."""

    error: str = ""  # what went wrong, in words
    placements: Sequence[OpPlacement] = ()
    outputs: Mapping[str, np.ndarray] | None = None

    @property
    def devices(self) -> Counter[str]:
        """Operations by the device on which Core ML places them."""
        return Counter(p.device for p in self.placements)


def probe(
    package: Path,
    inputs: Mapping[str, np.ndarray],
    timeout: float = 300.0,
    command: Sequence[str] = (sys.executable, "-m", "moelab.ane.device.mac"),
) -> PackageProbe:
    """Load a package and predict once in a process of its own, which may crash or be ended after
    `timeout` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        given, taken = Path(folder) / "inputs.npz", Path(folder) / "outputs.npz"
        np.savez(given, **inputs)
        # Where this process imports moelab from, the other must, too.
        paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]
        try:
            done = subprocess.run(
                [*command, str(package.resolve()), str(given), str(taken)],
                capture_output=True,
                text=True,
                timeout=timeout,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
        except subprocess.TimeoutExpired:
            return PackageProbe(f"did not load and predict within {timeout:g} s")
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            how = (
                f"was ended by {signal.Signals(-done.returncode).name}"
                if done.returncode < 0
                else f"failed with status {done.returncode}"
            )
            return PackageProbe(f"{how}: {last}")
        placed = json.loads(done.stdout.strip().splitlines()[-1])
        with np.load(taken) as outputs:
            return PackageProbe("", [OpPlacement(*one) for one in placed], dict(outputs))


def main(arguments: Sequence[str]) -> None:
    """The other process: PACKAGE INPUTS OUTPUTS; prints one line of JSON."""
    package, given, taken = arguments
    with np.load(given) as file:
        inputs = dict(file)
    runner = CoreMLRunner(package)
    np.savez(taken, **{name: value.numpy() for name, value in runner(inputs).items()})
    print(json.dumps(placements(runner)))


def sample_inputs(function: Function) -> dict[str, np.ndarray]:
    """Normal random inputs for a package's function, rounded to fp16, as float32."""
    rng = np.random.default_rng(0)
    return {
        value.name: (0.25 * rng.standard_normal(value.shape)).astype(np.float16).astype(np.float32)
        for value in function.inputs
    }


if __name__ == "__main__":
    main(sys.argv[1:])
