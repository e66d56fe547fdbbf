"""Where moelab's own files are, and JSON that is written atomically."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
#: the clone of the repository that this package runs from; None once it is installed without one
CHECKOUT = _ROOT if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "notebooks").is_dir() else None


def small_model() -> Path:
    """The folder of the shipped small model: `data/small` of a clone, or where an installation has put it."""
    if CHECKOUT is None:
        try:
            installed = metadata.files("moelab") or ()
        except metadata.PackageNotFoundError:
            installed = ()
        for file in installed:
            if file.parts[-4:] == ("share", "moelab", "small", "config.json"):
                return Path(file.locate()).resolve().parent
    return _ROOT / "data" / "small"


def results_root(results: str | Path | None = None) -> Path:
    """Where results lie: the argument, else $MOELAB_RESULTS, else `results/` of the clone or the working folder."""
    return Path(results or os.environ.get("MOELAB_RESULTS") or (CHECKOUT or Path.cwd()) / "results").resolve()


def write_json(path: Path, content: Any) -> Path:
    """Write JSON atomically; returns the path. ValueError for NaN and infinities, which are no JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)
    return path


def read_json(path: Path) -> Any:
    """The content of a JSON file; what cannot be read is named in a ValueError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it or make it again") from error
