"""A saved Core ML package (`.mlpackage`): the function that coremltools' MIL reader makes of it, as
it is, and the size of its weights.

In a shape an axis that may vary is a symbol. Left out: neural-network (pre-2021) models, packages
of several functions, nested blocks (control flow), images."""

from __future__ import annotations

import logging
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple


class Package(NamedTuple):
    """A saved ML Program."""

    function: Any  # coremltools': `inputs` by name, `operations`, `outputs`
    weight_bytes: int

    @property
    def ops(self) -> list[Any]:
        """The operations, but those that make constants."""
        return [op for op in self.function.operations if not fixed(op.outputs[0])]


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
    """Read a saved package; FileNotFoundError without one, ValueError if it is no ML Program of one
    function, ImportError without coremltools."""
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
            (function,) = program.functions.values()
    except (
        Exception
    ) as error:  # a damaged package fails in the protobuf, the blob reader or the type inference
        raise ValueError(f"{path} cannot be read as an ML Program: {error}") from error
    files = Path(model.weights_dir).glob("*") if model.weights_dir else ()
    return Package(function, sum(file.stat().st_size for file in files))


def fixed(value: Any) -> bool:
    """Whether a value is a constant, compressed ones included."""
    return value.op is not None and value.op.op_type.startswith("const")


def constant(value: Any) -> Any:
    """What a constant is (compressed weights are decompressed); None for another value."""
    if value is None or not fixed(value):
        return None
    return value.val if value.op.op_type == "const" else value.op.materialized_val_inference()


def dtype(value: Any) -> str:
    """The element type: "fp16", "fp32", "int32", "bool", "string" …; "" of lists and dictionaries,
    which have none."""
    from coremltools.converters.mil.mil import types

    try:
        return types.builtin_to_string(value.dtype)
    except KeyError:
        return ""
