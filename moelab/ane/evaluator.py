"""Runs a saved ML Program on any machine, operation by operation: to check a conversion without a Mac.

Source: Core ML's programs as coremltools reads them back (`moelab.ane.package`). Nothing off a Mac executes them, so
the saved file, not the graph it was meant to be, is walked here in one of two ways:

    "double"   fp64 arithmetic on the values of the fp16 weights: equals torch in fp64, so any difference is a mistake
    "fp16"     every operation's result rounded to its declared type, sums in fp32: what a good fp16 device would give

In fp16 mode alarms tell where real chips went wrong for others: results that fp16 cannot hold, matrix products above
32752 (inf on one chip) and slices above 4094 (clamped on another). What neither mode knows: which unit runs an
operation, and how that unit accumulates. See `moelab.ane.evaluator_ops` for the operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.ane.evaluator_ops import OPS
from moelab.ane.package import Function, Op, Package, Value, read_package

MODES = ("double", "fp16")
#: results above which one chip or another went wrong, by operation: reports of users, not Apple's figures
PRODUCT_LIMIT, SLICE_LIMIT = 32752.0, 4094.0
LIMITS = {"conv": PRODUCT_LIMIT, "linear": PRODUCT_LIMIT, "matmul": PRODUCT_LIMIT, "slice_by_index": SLICE_LIMIT,
          "slice_by_size": SLICE_LIMIT, "slice_update": SLICE_LIMIT, "split": SLICE_LIMIT}
STATES = ("read_state", "coreml_update_state", "write_state")


@dataclass(frozen=True)
class Alarm:
    """A value that a real chip may not compute: kind is "overflow", "nan" or "saturation"."""

    op: str
    type: str
    kind: str
    value: float


class Evaluator:
    """One function of a package, ready to be called.

    Parameters
    ----------
    package : a package or the path of one.
    function : which function; without a name the only one or "main".
    mode : "double" or "fp16".

    Attributes
    ----------
    alarms : what fp16 mode has met so far, the worst of each operation and kind.

    Raises
    ------
    ValueError : an unknown mode or function; an operation that is not evaluated, named.
    """

    def __init__(self, package: Package | str | Path, function: str | None = None, mode: str = "double") -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
        package = package if isinstance(package, Package) else read_package(package)
        self.path, self.function, self.mode = package.path, package.function(function), mode
        self.dtype = torch.float64 if mode == "double" else torch.float32
        self._steps = [op for op in self.function.ops if op.materialise is None]
        for op in self._steps:
            if op.type not in OPS and op.type not in STATES:
                raise ValueError(f"{self.path}: the operation {op.type!r} ({op.name}) is not evaluated; "
                                 f"moelab/ane/evaluator_ops.py takes a line for it")
        self._constants = {name: self._constant(op) for name, op in self.function.constants.items()}
        self._alarms: dict[tuple[str, str], Alarm] = {}

    @property
    def alarms(self) -> list[Alarm]:
        return list(self._alarms.values())

    def make_state(self) -> dict[str, Tensor]:
        """Zeros for each state of the function, to be handed to calls that shall share it."""
        return {state.name: torch.zeros([int(n) for n in state.shape], dtype=self.dtype)
                for state in self.function.states}

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Any], state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Evaluate: inputs by name → outputs by name, in fp64 or, rounded to fp16, in fp32.

        state : from `make_state`; changed in place. Needed if the function has states.

        Raises
        ------
        ValueError : a missing, unknown or misshapen input; no state where one is needed.
        """
        values = dict(self._constants) | self._checked(inputs)
        if self.function.states and state is None:
            raise ValueError(f"{self.path}: this function keeps {', '.join(s.name for s in self.function.states)}; "
                             f"pass state=evaluator.make_state()")
        for op in self._steps:
            if op.type in STATES:
                made = self._state(op, values, state)
            else:
                made = OPS[op.type](**{parameter: [values[n] for n in given] if isinstance(given, tuple) else
                                       values[given] for parameter, given in op.inputs.items()})
            made = made if isinstance(made, list) else [made]
            for value, tensor in zip(op.outputs, made, strict=True):
                values[value.name] = self._rounded(tensor, value, op)
        return {name: values[name] for name in self.function.outputs}

    def _state(self, op: Op, values: dict[str, Any], state: dict[str, Tensor]) -> Tensor | list[Tensor]:
        if op.type == "read_state":
            return state[op.inputs["input"]]
        name = op.inputs["state" if "state" in op.inputs else "input"]
        state[name] = values[op.inputs["value" if "value" in op.inputs else "data"]]
        return [state[name]] if op.outputs else []

    def _rounded(self, tensor: Tensor, value: Value, op: Op) -> Tensor:
        """A result in the working precision, rounded to its declared type in fp16 mode, and looked at for alarms."""
        if not tensor.is_floating_point():
            return tensor
        tensor = tensor.to(self.dtype)
        if self.mode == "double" or value.dtype != "fp16":
            return tensor
        tensor = tensor.half().float()
        top = float(tensor.abs().max()) if tensor.numel() else 0.0
        if not top <= LIMITS.get(op.type, 65504.0):
            kind = "nan" if np.isnan(top) else "overflow" if np.isinf(top) else "saturation"
            known = self._alarms.get((op.name, kind))
            if known is None or top > known.value:
                self._alarms[op.name, kind] = Alarm(op.name, op.type, kind, top)
        return tensor

    def _constant(self, op: Op) -> Any:
        """Float constants as tensors in the working precision; axes, shapes, flags and modes as they are."""
        constant = op.constant
        if op.outputs[0].dtype in ("fp16", "fp32", "fp64"):
            return torch.as_tensor(np.asarray(constant, dtype=np.float64)).to(self.dtype)
        return constant.item() if isinstance(constant, np.generic) else constant

    def _checked(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        expected = {value.name: value for value in self.function.inputs}
        if set(inputs) != set(expected):
            raise ValueError(f"{self.path} takes the inputs {', '.join(expected)}; got {', '.join(inputs) or 'none'}")
        checked = {}
        for name, value in expected.items():
            tensor = torch.as_tensor(inputs[name])
            if not fits(tuple(tensor.shape), value, self.function):
                wanted = self.function.flexible.get(name, value.shape)
                raise ValueError(f"{self.path}: the input {name} has shape {tuple(tensor.shape)}; it must be {wanted}")
            if tensor.is_floating_point():
                tensor = tensor.to(self.dtype)
                tensor = tensor.half().float() if self.mode == "fp16" and value.dtype == "fp16" else tensor
            checked[name] = tensor.contiguous()
        return checked


def fits(shape: tuple[int, ...], value: Value, function: Function) -> bool:
    """Whether a function takes an input of this shape."""
    kind, allowed = function.flexible.get(value.name, ("", []))
    if kind == "enumerated":
        return shape in allowed
    if kind == "range":
        return len(shape) == len(allowed) and all(low <= n <= high for n, (low, high) in zip(shape, allowed))
    return shape == value.shape
