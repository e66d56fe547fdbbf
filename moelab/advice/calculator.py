"""The calculator: a page that answers without Python what `advise` answers by arithmetic.

The page, calculator.html, computes in JavaScript as `moelab.advice.question` does, from what that
computes with: bytes, and how many experts each text of the assumed routing finds in memory. So its
numbers are `advise`'s, of a CPU and a disk, for any memory, rates and context."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from moelab import __version__
from moelab.advice.assumed import SHARES, TEXTS
from moelab.advice.gpu import is_gpu
from moelab.advice.model import AS_IS, LOSSLESS
from moelab.advice.question import PARTS, Question
from moelab.base.progress import progress
from moelab.base.records import Record
from moelab.base.specs import DeviceSpec
from moelab.cards import DEVICES, load_device
from moelab.offloading.budget import RESERVE, kv_bytes

#: field of the page → the figures that it may be, the first that a device has
FIGURES = {
    "memory": ("memory_gb",),
    "disk": ("storage_read_gbs",),
    "busy": ("storage_busy_gbs",),
    "bandwidth": ("memory_bandwidth_gbs",),
    "tflops": ("bf16_tflops", "fp16_tflops", "fp32_tflops"),
}


def page(asked: Sequence[Question]) -> str:
    """The page of questions of the same batch, which begins with the first: their models, their
    machines, and all cards that have a disk. ValueError: one is of a GPU."""
    first, cards = asked[0], map(load_device, DEVICES)
    if is_gpu(first.device):
        raise ValueError(
            f"the page is of a CPU with a disk, and {first.device.name} is a GPU; give another --device"
        )
    disks = [card for card in cards if "storage_read_gbs" in card.figures]
    machines = {one.name: _figures(one) for one in [*(of.device for of in asked), *disks]}
    data = {
        "models": [_facts(one) for one in progress(asked, "playing texts", unit="models")],
        "machines": [*machines.values()],
        "memory": first.memory / 1e9,
        "context": first.context,
        "batch": first.batch,
        "reserve": RESERVE,
        "shares": SHARES,
        "texts": TEXTS,
        "parts": PARTS,
        "lossless": LOSSLESS,
        "as_is": AS_IS,
        "made": f"moelab {__version__}, {time.strftime('%Y-%m-%d')}.",
    }
    text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return text.replace("DATA", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"), 1)


def _figures(device: DeviceSpec) -> Record:
    """Name, and (value, kind) of each field that is known."""
    found = {
        field: next(filter(None, map(device.figures.get, of)), None)
        for field, of in FIGURES.items()
    }
    return {"name": device.name} | {
        field: (figure.value, figure.kind) for field, figure in found.items() if figure
    }


def _facts(asked: Question) -> Record:
    """What the page computes with, of a model and the routing that is assumed of it."""
    model, routing = asked.model, asked.assumed
    return {
        "name": model.spec.name,
        "source": model.source,
        "stored": model.stored,
        "L": model.spec.L,
        "E": model.spec.E,
        "K": model.spec.K,
        "others": model.others,
        "how": model.how,
        "dense": model.dense,
        "multiplied": model.multiplied,
        "kv": kv_bytes(model.spec, 1),
        "most": model.most,
        "staging": asked.staging,
        "forms": {form: model.expert_bytes(form) for form in model.forms()},
        "words": routing.words,
        "distinct": routing.distinct,
        "margin": routing.margin,
        "curves": routing.curves,
    }
