"""A saved Core ML package (`.mlpackage`) as plain data: functions, operations, shapes, constants,
weight bytes.

coremltools' MIL reader parses the file; what the linter and the evaluator need is copied into a few
records, so that they work without coremltools. In a shape an axis that may vary is a word ("is0").
Left out: neural-network (pre-2021) models, nested blocks (control flow), images."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Value:
    """A named tensor: its shape and its element type ("fp16", "fp32", "int32", "bool", "string"
    …)."""

    name: str
    shape: Shape
    dtype: str


@dataclass(frozen=True, eq=False)
class Op:
    """One operation."""

    type: str  # the MIL operation, e.g. "conv"
    name: str
    inputs: dict[
        str, str | tuple[str, ...]
    ]  # parameter → name of a value, or of each value of a list
    outputs: tuple[Value, ...]
    materialise: Callable[[], Any] | None = field(default=None, repr=False)

    @cached_property
    def constant(self) -> Any:
        """The value of a `const` or a `constexpr_…` operation (compressed weights are
        decompressed); else None."""
        return None if self.materialise is None else self.materialise()


@dataclass(frozen=True, eq=False)
class Function:
    """One function of a package."""

    name: str
    inputs: tuple[Value, ...]  # and what it keeps between calls
    outputs: tuple[str, ...]
    ops: tuple[Op, ...]
    flexible: frozenset[str]  # inputs of several shapes

    @cached_property
    def values(self) -> dict[str, Value]:
        """Every value by name: inputs and what the operations make."""
        made = (value for op in self.ops for value in op.outputs)
        return {value.name: value for value in (*self.inputs, *made)}

    @cached_property
    def constants(self) -> dict[str, Op]:
        """The operations that make constants, by the name of the value they make."""
        return {op.outputs[0].name: op for op in self.ops if op.materialise is not None}

    def constant(self, op: Op, parameter: str, default: Any = None) -> Any:
        """The constant that a parameter of an operation is given; `default` if it is not given or
        no constant."""
        name = op.inputs.get(parameter)
        return (
            self.constants[name].constant
            if isinstance(name, str) and name in self.constants
            else default
        )

    def counts(self) -> Counter[str]:
        """Operation type → how many, constants left out."""
        return Counter(op.type for op in self.ops if op.type != "const")


@dataclass(frozen=True, eq=False)
class Package:
    """A saved ML Program."""

    path: Path
    functions: dict[str, Function]
    weight_bytes: int  # of the weight file, shared by all functions

    def function(self) -> Function:
        """The only function, or "main"."""
        return self.functions.get("main") or next(iter(self.functions.values()))


def coremltools() -> Any:
    """The package coremltools, imported without its warnings of unknown versions; ImportError
    without it."""
    try:
        with quiet():
            import coremltools

            import_module("coremltools.optimize.coreml")  # which the package does not import
    except ImportError as error:
        raise ImportError(
            "Core ML packages are read and written with coremltools, which is not installed: "
            "pip install 'moelab[ane]' (it exists for macOS, and for Linux on x86-64; "
            "elsewhere the planning and the device model still work)"
        ) from error
    return coremltools


@contextmanager
def quiet():
    """Within the block, no warnings, and none of coremltools' progress bars."""
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def read_package(path: str | Path) -> Package:
    """Read a saved package; FileNotFoundError without one, ValueError if it is no ML Program,
    ImportError without coremltools."""
    path = Path(path)
    if not (path / "Manifest.json").is_file():
        raise FileNotFoundError(f"{path} is no .mlpackage folder (it has no Manifest.json)")
    ct = coremltools()
    from coremltools.converters.mil.frontend.milproto.load import load

    try:
        with quiet():
            model = ct.models.MLModel(str(path), skip_model_load=True)
            spec = model.get_spec()
            if spec.WhichOneof("Type") != "mlProgram":
                raise ValueError(f"it is a {spec.WhichOneof('Type')}, not an ML Program")
            program = load(
                spec,
                specification_version=spec.specificationVersion,
                file_weights_dir=model.weights_dir,
            )
    except (
        Exception
    ) as error:  # a damaged package fails in the protobuf, the blob reader or the type inference
        raise ValueError(f"{path} cannot be read as an ML Program: {error}") from error
    described = {f.name: f for f in spec.description.functions}
    functions = {
        name: _function(name, function, described.get(name, spec.description))
        for name, function in program.functions.items()
    }
    files = Path(model.weights_dir).glob("*") if model.weights_dir else ()
    return Package(path, functions, sum(file.stat().st_size for file in files))


def _function(name: str, function: Any, description: Any) -> Function:
    return Function(
        name,
        tuple(map(_value, function.inputs.values())),
        tuple(var.name for var in function.outputs),
        tuple(map(_op, function.operations)),
        frozenset(
            entry.name
            for entry in description.input
            if entry.type.multiArrayType.WhichOneof("ShapeFlexibility")
        ),
    )


def _op(op: Any) -> Op:
    inputs = {
        parameter: tuple(v.name for v in given) if isinstance(given, (list, tuple)) else given.name
        for parameter, given in op.inputs.items()
    }
    materialise = None
    if op.op_type == "const":
        materialise = partial(getattr, op.outputs[0], "val")
    elif op.op_type.startswith("constexpr_"):
        materialise = op.materialized_val_inference
    return Op(op.op_type, op.name, inputs, tuple(map(_value, op.outputs)), materialise)


def _value(var: Any) -> Value:
    from coremltools.converters.mil.mil import types

    try:
        dtype = types.builtin_to_string(var.dtype)
    except KeyError:  # lists and dictionaries have no element type
        dtype = str(var.sym_type)
    shape = (int(n) if isinstance(n, (int, np.integer)) else str(n) for n in var.shape or ())
    return Value(var.name, tuple(shape), dtype)
