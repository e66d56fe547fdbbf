"""moelab: a research workbench for mixture-of-experts models on machines too small for them.

A map of the package, lower rooms first; no room imports one above it.

    base, cards                     what a model and a machine are; small things that all use
    kernels                         everything compiled
    store                           codecs and the expert store: its format, reading, writing
    models                          the seam: how transformers' call of a layer's experts gets here
    checkpoint                      headers → config → plan → model; converting, restoring
    experts, fast                   who computes experts; fused decoding of single tokens
    speculate                       predictors of the next layer's experts
    offloading, cache               the engine: steps, loads in flight, memory, eviction
    simulation                      the engine's decisions in simulated time
    zipmoe, static, parallel        what belongs to one source: planning; static shapes; ranks
    ane, ndp                        Apple Neural Engine; memory that computes
    api                             open_model, using
    evaluation, bench, advice       accuracy; measurements; what to do on a machine, or on AWS Neuron
    conversation, chat              turns that keep the KV cache; the command that talks
    viz, lab                        figures and views; notebooks

docs/how_a_checkpoint_is_opened.md and docs/how_a_token_flows.md walk the two paths that matter.
Names are loaded on first use, so that `import moelab` costs nothing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

#: public name → the module that defines it, and its name there if that is another
_HOMES = {
    "advise": "moelab.viz.advice",
    "open_model": "moelab.api",
    "using": "moelab.api",
    "Conversation": "moelab.conversation",
    "prompts": "moelab.evaluation.questions",
    "record": "moelab.recording",
    "calibrate": "moelab.calibration",
    "convert": "moelab.checkpoint.convert",
    "kept_store": "moelab.checkpoint.convert",
    "restore": "moelab.checkpoint.restore",
    "simulate": "moelab.simulation.simulator:replay",
    "profile": "moelab.bench.profile",
    "names": "moelab.base.registry",
    "describe": "moelab.base.registry",
    "MoESpec": "moelab.base.specs",
    "DeviceSpec": "moelab.base.specs",
    "ExpertKey": "moelab.base.specs",
    "ExpertStore": "moelab.store.layout",
    "StoreExperts": "moelab.store.reader",
    "Pools": "moelab.cache.pools",
    "RoutingTrace": "moelab.trace",
    "Calibration": "moelab.calibration",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module, _, there = _HOMES[name].partition(":")
        return getattr(import_module(module), there or name)
    try:
        return import_module(f"moelab.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"moelab.{name}":
            raise
        raise AttributeError(f"module 'moelab' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted(__all__)
