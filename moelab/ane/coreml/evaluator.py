"""Runs a saved ML Program on any machine, operation by operation: to check a conversion without a Mac.

    "double"   fp64 arithmetic on the values of the fp16 weights: equals torch in fp64, so any difference is a mistake
    "fp16"     every operation's result rounded to its declared type, sums in fp32: what a good fp16 device would give

Every result must have the shape and the type that the file declares for it, else the program is refused. In fp16 mode
alarms tell where real chips went wrong for others: inputs and results that fp16 cannot hold, sums inside a reduction or
a norm that it cannot (a unit may add in fp16), matrix products above 32752 (inf on one chip) and slices above 4094
(clamped on another). What neither mode knows: which unit runs an operation, and how it accumulates inside products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.ane.coreml.evaluator_ops import INTEGERS, OPS, SUMS
from moelab.ane.coreml.package import Function, Op, Package, Value, read_package

MODES = ("double", "fp16")
#: results above which one chip or another went wrong, by operation: reports of users, not Apple's figures
FP16_MAX, PRODUCT_LIMIT, SLICE_LIMIT = 65504.0, 32752.0, 4094.0
LIMITS = {"conv": PRODUCT_LIMIT, "linear": PRODUCT_LIMIT, "matmul": PRODUCT_LIMIT, "slice_by_index": SLICE_LIMIT,
          "slice_by_size": SLICE_LIMIT, "slice_update": SLICE_LIMIT, "split": SLICE_LIMIT}
STATES = ("read_state", "coreml_update_state", "write_state")
FLOATS = ("fp16", "fp32", "fp64")


@dataclass(frozen=True)
class Alarm:
    """A value that a real chip may not compute."""

    op: str
    type: str           # of the operation; "input" for an input of the program
    kind: str           # "overflow", "nan", "saturation", or "sum": beyond fp16 when added up inside the operation
    value: float


class Evaluator:
    """One function (None: the only one or "main") of a package or its path, ready to be called; mode as above.

    Raises ValueError: an unknown mode or function; an operation that is not evaluated, named.
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
                                 f"moelab/ane/coreml/evaluator_ops.py takes a line for it")
        self._constants = {name: self._constant(op) for name, op in self.function.constants.items()}
        self._alarms: dict[tuple[str, str], Alarm] = {}

    @property
    def alarms(self) -> list[Alarm]:
        """What fp16 mode has met so far, the worst of each operation and kind."""
        return list(self._alarms.values())

    def make_state(self) -> dict[str, Tensor]:
        """Zeros for each state of the function, for calls that share it."""
        return {state.name: torch.zeros(state.shape, dtype=self.dtype) for state in self.function.states}

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Any], state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Inputs by name → outputs by name, in fp64 or, rounded to fp16, in fp32.

        state : from `make_state`, needed if the function has states; changed in place.
        """
        states = {value.name: value for value in self.function.states}
        if states and state is None:
            raise ValueError(f"{self.path}: this function keeps {', '.join(states)}; pass state=evaluator.make_state()")
        if states and set(state) != set(states):
            raise ValueError(f"{self.path} keeps {', '.join(states)}, and the state has "
                             f"{', '.join(state) or 'nothing'}")
        sizes: dict[str, int] = {}                          # what the words in flexible shapes stand for in this call
        values = dict(self._constants) | self._inputs(inputs, sizes)
        for op in self._steps:
            given = {parameter: [values[n] for n in names] if isinstance(names, tuple) else values.get(names)
                     for parameter, names in op.inputs.items()}
            try:
                made = self._state(op, values, state) if op.type in STATES else OPS[op.type](**given)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                raise ValueError(f"{self.path}: the {op.type} {op.name} is not evaluated: {error}") from error
            if self.mode == "fp16" and op.type in SUMS and op.outputs[0].dtype == "fp16":
                self._look(SUMS[op.type](**given), op.name, op.type, FP16_MAX, "sum")
            made = made if isinstance(made, list) else [made]
            if len(made) != len(op.outputs):
                raise ValueError(f"{self.path}: the {op.type} {op.name} makes {len(made)} values, and the file "
                                 f"declares {len(op.outputs)}")
            for value, tensor in zip(op.outputs, made):
                values[value.name] = self._declared(tensor, value, op.type, op.name, sizes)
        return {name: values[name] for name in self.function.outputs}

    def _state(self, op: Op, values: dict[str, Any], state: dict[str, Tensor]) -> Tensor | list[Tensor]:
        if op.type == "read_state":
            return state[op.inputs["input"]]
        name = op.inputs["state" if "state" in op.inputs else "input"]
        state[name] = values[op.inputs["value" if "value" in op.inputs else "data"]]
        return [state[name]] if op.outputs else []

    def _declared(self, tensor: Tensor, value: Value, kind: str, name: str, sizes: dict[str, int]) -> Tensor:
        """What the operation `name` made, as the file declares it; sizes : of flexible axes, so far."""
        wanted = tuple(sizes.setdefault(n, found) if isinstance(n, str) else n
                       for n, found in zip(value.shape, tensor.shape)) + value.shape[tensor.dim():]
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"{self.path}: the {kind} {name} makes {value.name} of shape {tuple(tensor.shape)}, and "
                             f"the file declares {wanted}")
        if not (tensor.is_floating_point() if value.dtype in FLOATS else tensor.dtype == INTEGERS.get(value.dtype)):
            raise ValueError(f"{self.path}: the {kind} {name} makes {value.name} of type {tensor.dtype}, and the file "
                             f"declares {value.dtype}")
        if value.dtype not in FLOATS:
            return tensor
        tensor = tensor.to(self.dtype)
        if self.mode == "fp16" and value.dtype == "fp16":
            tensor = tensor.half().float()
            self._look(tensor, name, kind, LIMITS.get(kind, FP16_MAX), "saturation")
        return tensor

    def _look(self, tensor: Tensor, name: str, type: str, limit: float, kind: str) -> None:
        """Raise the alarm `kind`, or "nan" or "overflow", if a tensor exceeds a limit."""
        top = float(tensor.abs().max()) if tensor.numel() else 0.0
        if not top <= limit:
            if kind != "sum":
                kind = "nan" if np.isnan(top) else "overflow" if np.isinf(top) else kind
            known = self._alarms.get((name, kind))
            if known is None or top > known.value:
                self._alarms[name, kind] = Alarm(name, type, kind, top)

    def _constant(self, op: Op) -> Any:
        """Floats as tensors in the working precision, integers and flags in their own type, words as they are."""
        dtype = op.outputs[0].dtype
        if dtype in FLOATS:
            return torch.as_tensor(np.asarray(op.constant, dtype=np.float64)).to(self.dtype)
        return torch.as_tensor(np.asarray(op.constant)).to(INTEGERS[dtype]) if dtype in INTEGERS else op.constant

    def _inputs(self, inputs: Mapping[str, Any], sizes: dict[str, int]) -> dict[str, Tensor]:
        expected = {value.name: value for value in self.function.inputs}
        if set(inputs) != set(expected):
            raise ValueError(f"{self.path} takes the inputs {', '.join(expected)}; got {', '.join(inputs) or 'none'}")
        checked = {}
        for name, value in expected.items():
            tensor = torch.as_tensor(inputs[name])
            if not fits(tuple(tensor.shape), value, self.function):
                wanted = self.function.flexible.get(name, value.shape)
                raise ValueError(f"{self.path}: the input {name} has shape {tuple(tensor.shape)}; it must be {wanted}")
            if value.dtype in FLOATS:
                tensor = tensor.to(self.dtype)
            elif value.dtype in INTEGERS and bool((tensor.to(INTEGERS[value.dtype]) == tensor).all()):
                tensor = tensor.to(INTEGERS[value.dtype])
            checked[name] = self._declared(tensor.contiguous(), value, "input", name, sizes)
        return checked


def fits(shape: tuple[int, ...], value: Value, function: Function) -> bool:
    """Whether a function takes an input of this shape."""
    kind, allowed = function.flexible.get(value.name, ("", []))
    if kind == "enumerated":
        return shape in allowed
    if kind == "range":
        return len(shape) == len(allowed) and all(low <= n <= high for n, (low, high) in zip(shape, allowed))
    return shape == value.shape
