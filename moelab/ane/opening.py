"""Opens a model whose prompts run through the packages of a converted folder, and which decodes on
the CPU: what `open_model(ane=…)` does (NPUMoE §3.1 "Runtime").

The experts on the CPU, those of the plan's cold groups and all of them for decoding, stay in the
checkpoint and its dtype. The offloading engine reads them when they are needed, within a budget:
where it holds all, they are read once, while the model is opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moelab.ane.backends import ConvertedBackend
from moelab.ane.coreml.converted import ConvertedModel
from moelab.ane.device.mac import Meter, on_mac
from moelab.ane.doctor import coreml_backend, diagnose
from moelab.ane.runtime import PlannedExperts, prefill_through
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.offloading.budget import RESERVE, available
from moelab.offloading.offload import Offloading, offload


def open_beside(
    converted: ConvertedModel, checkpoint: Checkpoint, memory: Any, how: Offloading
) -> Any:
    """The model of a checkpoint beside its packages; `memory` as of `offload`, and None or "auto" is
    what they leave.

    Raises ValueError: the packages are another model's, or take all memory; what `offload`
    raises."""
    converted.require_identity(checkpoint.identity, checkpoint.folder)
    if memory in (None, "auto"):
        takes = converted.plan.memory(converted.manifest["settings"]["context"], experts=0)
        memory = available() - RESERVE - sum(takes.values())
        if memory <= 0:
            told = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in takes.items() if size)
            raise ValueError(
                f"{converted.folder} takes more memory than there is ({available() / 1e9:.1f} GB): "
                f"{told}. Plan fewer experts for the Neural Engine (a larger cold share), or "
                "weights of fewer bits (--weights)"
            )
    return offload(checkpoint, memory, how)


def backend_for(converted: ConvertedModel) -> ConvertedBackend:
    """What runs packages here: Core ML on a Mac, elsewhere the evaluator, as good fp16 arithmetic
    would."""
    if on_mac():
        return coreml_backend(converted, diagnose(converted))
    name = "the evaluator in fp16, on the CPU, as Core ML runs on a Mac only"
    return ConvertedBackend(converted, "fp16", name=name)


@contextmanager
def prompts_through(
    model: Any, backend: ConvertedBackend, overflow: str, order: str
) -> Iterator[PlannedExperts]:
    """`prefill_through` on an opened model, whose session then has it as `planned`, and on a Mac
    reads energy."""
    with prefill_through(model, backend, overflow=overflow, order=order) as planned:
        model.moelab.planned = planned
        if on_mac():
            model.moelab.meter = Meter()
        yield planned
