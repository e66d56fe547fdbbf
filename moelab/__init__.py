"""moelab: a research workbench for mixture-of-experts models on machines too small for them.

Names are loaded on first use, so that `import moelab` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

#: public name → the module that defines it
_HOMES = {
    "MoESpec": "moelab.specs", "DeviceSpec": "moelab.specs", "ExpertKey": "moelab.specs",
    "open_model": "moelab.models", "prompts": "moelab.datasets", "record": "moelab.recording",
    "convert": "moelab.models.convert", "restore": "moelab.models.restore", "ExpertStore": "moelab.store.layout",
    "StoreExperts": "moelab.store.reader", "offload": "moelab.offloading.offload", "Pools": "moelab.cache.pools",
    "profile": "moelab.offloading.profile", "simulate": "moelab.offloading.simulator",
    "RoutingTrace": "moelab.trace", "calibrate": "moelab.calibration", "Calibration": "moelab.calibration",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    try:
        return import_module(f"moelab.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"moelab.{name}":
            raise
        raise AttributeError(f"module 'moelab' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted(__all__)
