"""Views that one plays with: functions of real objects (model, trace, run, plan) for any notebook.

from moelab.viz import views
views.budget(lm)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: view → the module that defines it, which has another name: it would hide the function
_HOMES = {
    "budget": "budgets",
    "scrubber": "scrub",
    "theatre": "stage",
    "arena": "standings",
    "model_map": "treemap",
    "claims": "verdicts",
}
__all__ = list(_HOMES)
_HOMES["chat"] = "dialog"  # which is no picture that a command could write


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"moelab.viz.views has no view {name!r}; it has {', '.join(_HOMES)}")
    return getattr(import_module(f"moelab.viz.views.{_HOMES[name]}"), name)
