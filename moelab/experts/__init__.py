"""Routers, executors of routed experts, quantization, and experts in parallel. Here: the registry of executors.

Adding an executor is a subclass of `moelab.experts.executor.Executor` and a line in `EXECUTORS`.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from math import isfinite
from typing import Any

#: name → (module, class); imported when it is made
EXECUTORS = {
    "reference": ("moelab.experts.reference", "Reference"),
    "sorted": ("moelab.experts.sorting", "Sorted"),
    "grouped_mm": ("moelab.experts.grouped_mm", "GroupedMM"),
    "packed": ("moelab.experts.packed", "Packed"),
    "gemv": ("moelab.experts.gemv", "GEMV"),
    "gemv_planes": ("moelab.experts.gemv", "PlanesGEMV"),
    "all_experts": ("moelab.experts.all_experts", "AllExperts"),
    "selective": ("moelab.experts.selective", "Selective"),
    "blockwise": ("moelab.experts.blockwise", "Blockwise"),
    "capacity": ("moelab.experts.capacity", "CapacityFactor"),
    "tiered": ("moelab.experts.tiered", "Tiered"),
    "grouped": ("moelab.experts.grouped", "Grouped"),
    "neuron": ("moelab.experts.neuron_rule", "NeuronRule"),
    "int8": ("moelab.experts.int8", "Int8"),
    "fast": ("moelab.experts.fast", "Fast"),
}


def make(name: str, **options: Any) -> Any:
    """An executor by its name; options are those of its class.

    Raises
    ------
    ValueError : there is no executor of that name, or it needs other options; the message says which there are.
    """
    if name not in EXECUTORS:
        raise ValueError(f"there is no executor {name!r}; there are: {', '.join(EXECUTORS)}")
    module, kind = EXECUTORS[name]
    made = getattr(import_module(module), kind)
    takes = signature(made)
    try:
        takes.bind(**options)
        for option, value in options.items():
            _check(option, value, str(takes.parameters[option].annotation))
    except TypeError as error:
        listed = ", ".join(str(option.replace(annotation=option.empty)) for option in takes.parameters.values())
        raise ValueError(f"executor {name!r}: {error}; it takes {listed or 'no options'} (see {module}.{kind})"
                         ) from None
    return made(**options)


def _check(option: str, value: Any, annotation: str) -> None:
    """TypeError unless a value is what a plain annotation ("int", "float | None", …) says; others are not looked at."""
    kinds = {"int": int, "float": (int, float), "bool": bool, "str": str, "None": type(None)}
    wanted = [part.strip() for part in annotation.split("|")]
    if not set(wanted) <= kinds.keys():
        return
    fits = any(isinstance(value, kinds[one]) and (one == "bool" or not isinstance(value, bool)) for one in wanted)
    if not fits or isinstance(value, float) and not isfinite(value):
        raise TypeError(f"{option}={value!r} is not of type {annotation}")
