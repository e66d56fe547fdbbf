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
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.ane.coreml.package import COMPUTE_UNITS, Function, coremltools

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
    """One function (None: the default) of a package, loaded by Core ML for `units`, a key of
    `COMPUTE_UNITS`.

    Called like an `Evaluator`: inputs by name → outputs by name, in float32.
    """

    dtype = torch.float32

    def __init__(
        self, path: str | Path, function: str | None = None, units: str = "cpuAndNeuralEngine"
    ) -> None:
        ct = coremltools()
        self.path = Path(path)
        self.function = function
        self.units = ct.ComputeUnit[COMPUTE_UNITS[units]]
        self.model = ct.models.MLModel(str(path), compute_units=self.units, function_name=function)

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        arrays = {
            name: np.ascontiguousarray(np.asarray(value, dtype=np.float32))
            for name, value in inputs.items()
        }
        out = self.model.predict(arrays)
        return {
            name: torch.from_numpy(np.array(value, dtype=np.float32)) for name, value in out.items()
        }


@dataclass(frozen=True)
class OpPlacement:
    """Where the compute plan puts one operation."""

    type: str
    name: str
    device: str  # "ane", "cpu" or "gpu"; "unknown" where the plan does not say
    can: tuple[str, ...] = ()  # the devices that support it
    cost: float | None = (
        None  # share of the function's estimated work, no time; None where the plan does not say
    )


def placements(runner: CoreMLRunner) -> list[OpPlacement]:
    """One placement an operation, constants left out."""
    from coremltools.models.compute_plan import MLComputePlan

    def device(one: Any) -> str:
        return DEVICES.get(type(one).__name__, "unknown")

    plan = MLComputePlan.load_from_path(
        runner.model.get_compiled_model_path(), compute_units=runner.units
    )
    functions = plan.model_structure.program.functions
    name = runner.function or ("main" if "main" in functions else next(iter(functions)))
    found = []
    for op in functions[name].block.operations:
        kind = op.operator_name.rpartition(".")[2]  # "ios18.conv"
        if kind == "const" or kind.startswith("constexpr"):
            continue
        usage = plan.get_compute_device_usage_for_mlprogram_operation(op)
        cost = plan.get_estimated_cost_for_mlprogram_operation(op)
        found.append(
            OpPlacement(
                kind,
                op.outputs[0].name if op.outputs else "",
                "unknown" if usage is None else device(usage.preferred_compute_device),
                () if usage is None else tuple(map(device, usage.supported_compute_devices)),
                None if cost is None else float(cost.weight),
            )
        )
    return found


@dataclass(frozen=True, eq=False)
class PackageProbe:
    """What a package did in a process of its own."""

    package: Path
    error: str = ""  # what went wrong, in words
    load_s: float = 0.0  # compilation included
    predict_s: float = 0.0  # of the first prediction
    placements: tuple[OpPlacement, ...] = ()
    outputs: Mapping[str, np.ndarray] | None = None

    @property
    def devices(self) -> Counter[str]:
        """Operations by the device on which Core ML places them."""
        return Counter(p.device for p in self.placements)

    @property
    def on_ane(self) -> bool:
        """Whether the compute plan puts every operation on the Neural Engine."""
        return not self.error and set(self.devices) == {"ane"}


def probe(
    package: str | Path,
    inputs: Mapping[str, np.ndarray],
    function: str | None = None,
    units: str = "cpuAndNeuralEngine",
    timeout: float = 300.0,
    command: Sequence[str] = (sys.executable, "-m", "moelab.ane.device.mac"),
) -> PackageProbe:
    """Load a package and predict once in a process of its own, which may crash or be ended after
    `timeout` seconds."""
    package = Path(package)
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "inputs.npz"
        taken = Path(folder) / "outputs.npz"
        np.savez(given, **inputs)
        arguments = [
            *command,
            str(package.resolve()),
            function or "",
            units,
            str(given),
            str(taken),
        ]
        try:
            # Where this process imports moelab from, the other must, too.
            path = os.pathsep.join(
                filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")])
            )
            done = subprocess.run(
                arguments,
                capture_output=True,
                text=True,
                timeout=timeout,
                env=os.environ | {"PYTHONPATH": path},
            )
        except subprocess.TimeoutExpired:
            return PackageProbe(package, f"did not load and predict within {timeout:g} s")
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            how = (
                f"was ended by {signal.Signals(-done.returncode).name}"
                if done.returncode < 0
                else f"failed with status {done.returncode}"
            )
            return PackageProbe(package, f"{how}: {last}")
        said = json.loads(done.stdout.strip().splitlines()[-1])
        with np.load(taken) as outputs:
            return PackageProbe(
                package,
                "",
                said["load_s"],
                said["predict_s"],
                tuple(
                    OpPlacement(**entry | {"can": tuple(entry["can"])})
                    for entry in said["placements"]
                ),
                dict(outputs),
            )


def main(arguments: Sequence[str]) -> None:
    """The other process: PACKAGE FUNCTION UNITS INPUTS OUTPUTS; prints one line of JSON."""
    package, function, units, given, taken = arguments
    start = time.perf_counter()
    runner = CoreMLRunner(package, function or None, units)
    loaded = time.perf_counter()
    with np.load(given) as file:
        inputs = dict(file)
    predicting = time.perf_counter()
    outputs = runner(inputs)
    predicted = time.perf_counter()
    np.savez(taken, **{name: value.numpy() for name, value in outputs.items()})
    print(
        json.dumps(
            {
                "load_s": loaded - start,
                "predict_s": predicted - predicting,
                "placements": [vars(p) for p in placements(runner)],
            }
        )
    )


def sample_inputs(function: Function) -> dict[str, np.ndarray]:
    """Normal random inputs for a package's function, rounded to fp16, as float32."""
    rng = np.random.default_rng(0)
    return {
        value.name: (0.25 * rng.standard_normal(value.shape)).astype(np.float16).astype(np.float32)
        for value in function.inputs
    }


if __name__ == "__main__":
    main(sys.argv[1:])
