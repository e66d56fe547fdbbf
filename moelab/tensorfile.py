"""Tensors and what they are in one safetensors file: written whole or not at all, refused when it is something else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def save(path: str | Path, tensors: dict[str, Any], about: dict[str, str]) -> Path:
    """Write tensors and `about`, of which "format" says what the file is; returns the path."""
    from safetensors.torch import save_file
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, part, about)
    os.replace(part, path)
    return path


def load(path: str | Path, form: str, what: str, remedy: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(tensors, about) of a file of the format `form`.

    what, remedy : what the file should hold and what makes one, in words, for the errors.

    Raises
    ------
    FileNotFoundError, ValueError : no such file; not a whole file, or of another format.
    """
    from safetensors import SafetensorError, safe_open
    if not Path(path).is_file():
        raise FileNotFoundError(f"no {what} at {path}; {remedy} makes one")
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("format") != form:
                raise ValueError(f"{path} is a safetensors file but no {what} ({form})")
            return {name: file.get_tensor(name) for name in file.keys()}, about
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}); {remedy} makes another") from error
