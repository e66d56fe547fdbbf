"""Routers, executors of routed experts, quantization, and experts in parallel. Here: the registry of executors.

Adding an executor is a subclass of `moelab.experts.executor.Executor` and a line in `EXECUTORS`.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
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
    "fast": ("moelab.experts.choice", "Fast"),
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
    except TypeError as error:
        listed = ", ".join(str(option.replace(annotation=option.empty)) for option in takes.parameters.values())
        raise ValueError(f"executor {name!r}: {error}; it takes {listed or 'no options'} (see {module}.{kind})"
                         ) from None
    return made(**options)
