"""Core ML's runtime classes as a Mac would have them, made of the evaluator; as a script, `probe`'s
other process.

The compute plan is built from coremltools' own records. `FAKE` in the environment says how the Mac
behaves: which operations fall back to the CPU ("softmax,matmul"), or "crash", "hang", "wrong"
(outputs that are off)."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import coremltools as ct
import numpy as np
from coremltools.models import compute_plan as cp
from coremltools.models.compute_device import MLCPUComputeDevice, MLNeuralEngineComputeDevice

from moelab.ane.coreml.evaluator import Evaluator
from moelab.ane.coreml.package import read_package
from moelab.ane.device import mac

behaviour = os.environ.get("FAKE", "")


def compile_model(model, destination_path):
    """A folder that says which package it was made of, in place of Core ML's compiler."""
    os.mkdir(destination_path)
    Path(destination_path, "package").write_text(model)
    return destination_path


def package_of(path):
    return Path(path, "package").read_text()


class Model:
    """A CompiledMLModel that predicts off a Mac."""

    def __init__(self, path, compute_units=None):
        assert compute_units in ct.ComputeUnit
        self.evaluator = Evaluator(package_of(path), mode="fp16")

    def predict(self, data):
        if behaviour == "crash":
            os.kill(os.getpid(), 11)
        if behaviour == "hang":
            time.sleep(60)
        assert all(value.dtype == np.float32 for value in data.values())
        out = self.evaluator(data)
        return {
            name: (1.2 if behaviour == "wrong" else 1.0) * value.numpy()
            for name, value in out.items()
        }


class Plan:
    """MLComputePlan of a package, whose operations named in `behaviour` go to the CPU."""

    def __init__(self, path):
        function = read_package(package_of(path)).function
        ops = [
            cp.MLModelStructureProgramOperation(
                {},
                f"ios18.{op.op_type}",
                [cp.MLModelStructureProgramNamedValueType(v.name, None) for v in op.outputs],
                [],
                None,
            )
            for op in function.operations
        ]
        block = cp.MLModelStructureProgramBlock([], ops, [v.name for v in function.outputs])
        functions = {"main": cp.MLModelStructureProgramFunction([], block)}
        self.model_structure = cp.MLModelStructure(
            None, cp.MLModelStructureProgram(functions), None
        )

    @classmethod
    def load_from_path(cls, path, compute_units=ct.ComputeUnit.ALL):
        assert compute_units is ct.ComputeUnit.CPU_AND_NE
        return cls(path)

    def get_compute_device_usage_for_mlprogram_operation(self, operation):
        kind = operation.operator_name.split(".")[1]
        if kind == "const":
            return None
        cpu, ane = (cls.__new__(cls) for cls in (MLCPUComputeDevice, MLNeuralEngineComputeDevice))
        falls = kind in behaviour.split(",")
        return cp.MLComputePlanDeviceUsage(cpu if falls else ane, [cpu] if falls else [cpu, ane])


class Monitor:
    """ZeusMonitor on a Mac: every window took 600 mJ."""

    soc_is_present = True

    def __init__(self, gpu_indices=None, cpu_indices=None):
        self.open = set()

    def begin_window(self, key, sync_execution=True, restart=False):
        assert key not in self.open and not sync_execution
        self.open.add(key)

    def end_window(self, key, sync_execution=True, cancel=False):
        self.open.remove(key)
        return SimpleNamespace(
            soc_energy=SimpleNamespace(ane_mj=400, cpu_total_mj=150, gpu_mj=None, dram_mj=50)
        )


def install(patch=setattr):
    """Put them where moelab looks for them."""
    patch(ct.models, "CompiledMLModel", Model)
    patch(ct.models.utils, "compile_model", compile_model)
    patch(cp, "MLComputePlan", Plan)


if __name__ == "__main__":
    install()
    mac.main(sys.argv[1:])
