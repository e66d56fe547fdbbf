"""Routing traces that a notebook is given, of whatever program."""

from __future__ import annotations

from pathlib import Path

from moelab.trace import RoutingTrace, load


def given(paths: str, model: str = "") -> dict[str, RoutingTrace]:
    """Name → trace, of files by commas; `model` : whose they are, see `moelab.trace.load`. {}
    without a path.

    Raises ValueError: traces of different geometries, or two of one name."""
    found: dict[str, RoutingTrace] = {}
    for path in filter(None, map(str.strip, paths.split(","))):
        if (name := Path(path).stem) in found:
            raise ValueError(f"two traces are called {name!r}: rename the file {path}")
        found[name] = load(path, model or None)
    if len({trace.spec.fingerprint() for trace in found.values()}) > 1:
        raise ValueError(
            f"the traces {', '.join(found)} are of different models, whose experts cannot be "
            "compared: give those of one"
        )
    return found
