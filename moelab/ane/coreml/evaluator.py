"""Runs the graphs of a converted model on any machine, operation by operation: to check a
conversion without a Mac.

    "double"   fp64 arithmetic on the values of the fp16 weights: equals torch in fp64, so any
               difference is a mistake
    "fp16"     every operation's result rounded to its declared type, sums in fp32: what a good fp16
               device would give

It knows the operations of `ffn_graph` and `attention_graph`, as coremltools defines them (opset iOS
18); a program with another one, or with an option that is not computed here, is refused by its
name. Every result must have the shape and the type that the file declares for it. What neither mode
knows: which unit runs an operation, how it accumulates inside products, and what one chip or another
does with values that fp16 holds (reports tell of products above 32752 and slices above 4094)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moelab.ane.coreml.package import constant, dtype, fixed, read_package
from moelab.base.registry import require

MODES = ("double", "fp16")
FLOATS = ("fp16", "fp32", "fp64")


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    pad_type: str = "valid",
    pad: Any = None,
    **ones: Any,
) -> Tensor:
    """A 1×1 convolution [N, Cin, *space] → [N, Cout, *space] as a product over rows of channels, so
    that a result does not depend on the layout. Of one weight a channel, nothing is padded but by
    "custom", and nothing dilated."""
    sizes = (*weight.shape[2:], *(n for of in ones.values() for n in np.ravel(of)))
    if pad_type not in ("valid", "same", "same_lower") or any(n != 1 for n in sizes):
        raise ValueError("only 1×1 convolutions are, without strides, groups and custom padding")
    last = x.movedim(1, -1)
    rows = F.linear(last.reshape(-1, x.shape[1]).contiguous(), weight.flatten(1), bias)
    return rows.view(*last.shape[:-1], -1).movedim(-1, 1).contiguous()


def _matmul(x: Tensor, y: Tensor, transpose_x: Any = False, transpose_y: Any = False) -> Tensor:
    x = x.mT if transpose_x else x
    y = y.mT if transpose_y else y
    return torch.matmul(x.contiguous(), y.contiguous())


#: mode of the operation gelu → what torch calls it
GELU = {"EXACT": "none", "TANH_APPROXIMATION": "tanh"}


def _concat(values: list[Tensor], axis: Any, interleave: Any = False) -> Tensor:
    if interleave:
        raise ValueError("interleave is true; only concatenation one after the other is")
    return torch.cat(values, int(axis))


#: MIL operation → what it computes of the operation's parameters by name: floats as tensors, the
#: others as they are
OPS: dict[str, Callable[..., Any]] = {
    "conv": _conv,
    "matmul": _matmul,
    "split": lambda x, axis, num_splits: list(x.chunk(int(num_splits), int(axis))),
    "gelu": lambda x, mode="EXACT": F.gelu(x, approximate=GELU[mode]),
    "concat": _concat,
    "reshape": lambda x, shape: x.reshape([int(n) for n in shape]),
    "softmax": lambda x, axis=-1: torch.softmax(x, int(axis)),
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "minimum": lambda x, y: torch.minimum(x, y),
    "relu": lambda x: torch.relu(x),
    "sigmoid": lambda x: torch.sigmoid(x),
    "silu": lambda x: F.silu(x),
    "clip": lambda x, alpha, beta: x.clamp(float(alpha), float(beta)),
    "rsqrt": lambda x, epsilon=1e-12: 1 / torch.sqrt(x + epsilon),
    "reduce_mean": lambda x, axes, keep_dims: x.mean(tuple(axes), keepdim=bool(keep_dims)),
    "reduce_max": lambda x, axes, keep_dims: x.amax(tuple(axes), keepdim=bool(keep_dims)),
}


class Evaluator:
    """The function of a package, ready to be called; mode as above.

    Raises ValueError: an unknown mode; an operation that is not evaluated, named.
    """

    def __init__(self, path: str | Path, mode: str = "double") -> None:
        require("mode", mode, MODES)
        self.path, self.mode, self.package = path, mode, read_package(path)
        self.dtype = torch.float64 if mode == "double" else torch.float32
        if unknown := [op for op in self.package.ops if op.op_type not in OPS]:
            raise ValueError(
                f"{self.path}: the operation {unknown[0].op_type!r} ({unknown[0].name}) is not "
                "evaluated; it takes a line in OPS of moelab/ane/coreml/evaluator.py"
            )

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Inputs by name → outputs by name, in fp64 or, rounded to fp16, in fp32."""
        function = self.package.function
        shapes = {name: tuple(np.shape(value)) for name, value in inputs.items()}
        wanted = {name: value.shape for name, value in function.inputs.items()}
        if shapes != wanted:
            raise ValueError(f"{self.path} takes the inputs {wanted}; got {shapes}")
        values = {
            name: self._declared(torch.as_tensor(inputs[name]).contiguous(), value, "input")
            for name, value in function.inputs.items()
        }

        def found(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return list(map(found, value))
            if not fixed(value):
                return values[value.name]
            kept = constant(value)
            # floats are widened for one operation: all would be four times the file
            is_float = dtype(value) in FLOATS
            return torch.from_numpy(np.array(kept)).to(self.dtype) if is_float else kept

        for op in self.package.ops:
            try:
                made = OPS[op.op_type](**{name: found(of) for name, of in op.inputs.items()})
                made = made if isinstance(made, list) else [made]
                results = list(zip(op.outputs, made, strict=True))
            except (RuntimeError, ValueError, TypeError, LookupError) as error:
                raise ValueError(
                    f"{self.path}: the {op.op_type} {op.name} is not evaluated: {error}"
                ) from error
            for value, tensor in results:
                values[value.name] = self._declared(tensor, value, f"{op.op_type} {op.name}")
        return {value.name: found(value) for value in function.outputs}

    def _declared(self, tensor: Tensor, value: Any, what: str) -> Tensor:
        """What an operation made, as the file declares it."""
        if tuple(tensor.shape) != value.shape or dtype(value) not in FLOATS:
            raise ValueError(
                f"{self.path}: the {what} makes {value.name} of shape {tuple(tensor.shape)} and a "
                f"floating-point type, and the file declares {value.shape} {dtype(value)}"
            )
        tensor = tensor.to(self.dtype)
        return tensor.half().float() if self.mode == "fp16" and dtype(value) == "fp16" else tensor
