"""Runs the graphs of a converted model on any machine, operation by operation: to check a
conversion without a Mac.

    "double"   fp64 arithmetic on the values of the fp16 weights: equals torch in fp64, so any
               difference is a mistake
    "fp16"     every operation's result rounded to its declared type, sums in fp32: what a good fp16
               device would give

It knows the operations of `ffn_graph` and `attention_graph`, as coremltools defines them (opset iOS
18); a program with another one, or with an option that is not computed here, is refused by its
name. Every result must have the shape and the type that the file declares for it. In fp16 mode
alarms tell where real chips went wrong for others: inputs and results that fp16 cannot hold, sums
inside a mean that it cannot (a unit may add in fp16), matrix products above 32752 (inf on one chip)
and slices above 4094 (clamped on another). What neither mode knows: which unit runs an operation,
and how it accumulates inside products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moelab.ane.coreml.package import Op, Package, Value, read_package

MODES = ("double", "fp16")
#: results above which one chip or another went wrong, by operation: reports of users, not Apple's
#: figures
FP16_MAX = 65504.0
PRODUCT_LIMIT = 32752.0
SLICE_LIMIT = 4094.0
LIMITS = {"conv": PRODUCT_LIMIT, "matmul": PRODUCT_LIMIT, "split": SLICE_LIMIT}
FLOATS = ("fp16", "fp32", "fp64")


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strides: Any = 1,
    pad_type: str = "valid",
    groups: Any = 1,
    pad: Any = None,
    dilations: Any = None,
) -> Tensor:
    """A 1×1 convolution [N, Cin, *space] → [N, Cout, *space] as a product over rows of channels, so
    that a result does not depend on the layout. Of one weight a channel, nothing is padded but by
    "custom", and nothing dilated."""
    sizes = (*weight.shape[2:], *np.ravel(strides), int(groups))
    if pad_type not in ("valid", "same", "same_lower") or any(n != 1 for n in sizes):
        raise ValueError("only 1×1 convolutions are, without strides, groups and custom padding")
    last = x.movedim(1, -1)
    rows = F.linear(last.reshape(-1, x.shape[1]).contiguous(), weight.flatten(1), bias)
    return rows.view(*last.shape[:-1], -1).movedim(-1, 1).contiguous()


def _matmul(x: Tensor, y: Tensor, transpose_x: Any = False, transpose_y: Any = False) -> Tensor:
    x = x.mT if transpose_x else x
    y = y.mT if transpose_y else y
    return torch.matmul(x.contiguous(), y.contiguous())


def _split(x: Tensor, axis: Any, num_splits: Any = None, split_sizes: Any = None) -> list[Tensor]:
    if split_sizes is None:
        split_sizes = [x.shape[int(axis)] // int(num_splits)] * int(num_splits)
    return [part.contiguous() for part in x.split([int(n) for n in split_sizes], int(axis))]


#: mode of the operation gelu → what it computes
GELU: dict[str, Callable[[Tensor], Tensor]] = {
    "EXACT": F.gelu,
    "TANH_APPROXIMATION": lambda x: F.gelu(x, approximate="tanh"),
    "SIGMOID_APPROXIMATION": lambda x: x * torch.sigmoid(1.702 * x),
}


def _gelu(x: Tensor, mode: str = "EXACT") -> Tensor:
    if mode not in GELU:
        raise ValueError(f"mode is {mode}; it can be {', '.join(GELU)}")
    return GELU[mode](x)


def _concat(values: list[Tensor], axis: Any, interleave: Any = False) -> Tensor:
    if interleave:
        raise ValueError("interleave is true; only concatenation one after the other is")
    return torch.cat(values, int(axis))


def _axes(x: Tensor, axes: Any) -> list[int]:
    """Those of a reduction: all of them by default."""
    return list(range(x.dim())) if axes is None else [int(axis) for axis in axes]


#: MIL operation → what it computes of the operation's parameters by name: floats as tensors, the
#: others as they are
OPS: dict[str, Callable[..., Any]] = {
    "conv": _conv,
    "matmul": _matmul,
    "split": _split,
    "gelu": _gelu,
    "concat": _concat,
    "reshape": lambda x, shape: x.reshape([int(n) for n in shape]),
    "softmax": lambda x, axis=-1: torch.softmax(x, int(axis)),
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "minimum": lambda x, y: torch.minimum(x, y),
    "relu": lambda x: torch.relu(x),
    "sigmoid": lambda x: torch.sigmoid(x),
    "silu": lambda x: F.silu(x),
    "clip": lambda x, alpha, beta: x.clamp(float(alpha), float(beta)),
    "rsqrt": lambda x, epsilon=1e-12: 1 / torch.sqrt(x + epsilon),
    "reduce_mean": lambda x, axes=None, keep_dims=False: x.mean(
        _axes(x, axes), keepdim=bool(keep_dims)
    ),
    "reduce_max": lambda x, axes=None, keep_dims=False: x.amax(
        _axes(x, axes), keepdim=bool(keep_dims)
    ),
}


class Alarm(NamedTuple):
    """A value that a real chip may not compute."""

    op: str
    type: str  # of the operation; "input" for an input of the program
    # "overflow", "nan", "saturation", or "sum": beyond fp16 when added up inside the operation
    kind: str
    value: float


class Evaluator:
    """One function (None: the only one or "main") of a package or its path, ready to be called;
    mode as above.

    Raises ValueError: an unknown mode or function; an operation that is not evaluated, named.
    """

    def __init__(
        self, package: Package | str | Path, function: str | None = None, mode: str = "double"
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
        package = package if isinstance(package, Package) else read_package(package)
        self.path, self.function, self.mode = package.path, package.function(function), mode
        self.dtype = torch.float64 if mode == "double" else torch.float32
        self._steps = [op for op in self.function.ops if op.materialise is None]
        for op in self._steps:
            if op.type not in OPS:
                raise ValueError(
                    f"{self.path}: the operation {op.type!r} ({op.name}) is not evaluated; it "
                    "takes a line in OPS of moelab/ane/coreml/evaluator.py"
                )
        last = {
            name: step
            for step, op in enumerate(self._steps)
            for names in op.inputs.values()
            for name in (names if isinstance(names, tuple) else (names,))
        }
        self._last_use = [
            {name for name in last.keys() - set(self.function.outputs) if last[name] == step}
            for step in range(len(self._steps))
        ]
        self._alarms: dict[tuple[str, str], Alarm] = {}

    @property
    def alarms(self) -> list[Alarm]:
        """What fp16 mode has met so far, the worst of each operation and kind."""
        return list(self._alarms.values())

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Inputs by name → outputs by name, in fp64 or, rounded to fp16, in fp32."""
        values = self._inputs(inputs)
        constants = self.function.constants

        def found(
            name: str,
        ) -> Any:  # weights are widened for one operation: all would be four times the file
            return self._constant(constants[name]) if name in constants else values.get(name)

        for op, last_used in zip(self._steps, self._last_use):
            given = {
                parameter: list(map(found, names)) if isinstance(names, tuple) else found(names)
                for parameter, names in op.inputs.items()
            }
            try:
                made = OPS[op.type](**given)
                made = made if isinstance(made, list) else [made]
                if len(made) != len(op.outputs):
                    raise ValueError(
                        f"it makes {len(made)} results, and the file declares {len(op.outputs)}"
                    )
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                raise ValueError(
                    f"{self.path}: the {op.type} {op.name} is not evaluated: {error}"
                ) from error
            if self.mode == "fp16" and op.type == "reduce_mean" and op.outputs[0].dtype == "fp16":
                axes = _axes(given["x"], given.get("axes"))
                self._look(given["x"].abs().sum(axes), op.name, op.type, FP16_MAX, "sum")
            for value, tensor in zip(op.outputs, made):
                values[value.name] = self._declared(tensor, value, op.type, op.name)
            for name in last_used & values.keys():
                del values[name]
        return {name: found(name) for name in self.function.outputs}

    def _declared(self, tensor: Tensor, value: Value, kind: str, name: str) -> Tensor:
        """What the operation `name` made, as the file declares it."""
        if tuple(tensor.shape) != value.shape or value.dtype not in FLOATS:
            raise ValueError(
                f"{self.path}: the {kind} {name} makes {value.name} of shape "
                f"{tuple(tensor.shape)} and a floating-point type, and the file declares "
                f"{value.shape} {value.dtype}"
            )
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
        """Floats as tensors in the working precision, all else as it is."""
        if op.outputs[0].dtype not in FLOATS:
            return op.constant
        return torch.from_numpy(
            np.array(op.constant, dtype=np.float64 if self.mode == "double" else np.float32)
        )

    def _inputs(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        expected = {value.name: value for value in self.function.inputs}
        if set(inputs) != set(expected):
            raise ValueError(
                f"{self.path} takes the inputs {', '.join(expected)}; got "
                f"{', '.join(inputs) or 'none'}"
            )
        tensors = {name: torch.as_tensor(given) for name, given in inputs.items()}
        for name, value in expected.items():
            if tuple(tensors[name].shape) != value.shape:
                raise ValueError(
                    f"{self.path}: the input {name} has shape {tuple(tensors[name].shape)}; "
                    f"it must be {value.shape}"
                )
        return {
            name: self._declared(tensor.to(self.dtype).contiguous(), expected[name], "input", name)
            for name, tensor in tensors.items()
        }
