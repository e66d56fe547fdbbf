"""The calculator: a page that answers without Python what `advise` answers by arithmetic.

The page, calculator.html, computes in JavaScript as `moelab.advice.question` does, from what that
computes with: bytes, and how many experts each text of the assumed routing finds in memory. So its
numbers are `advise`'s, of a CPU and a disk, for any memory, rates and context."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from moelab.advice.assumed import SHARES, TEXTS
from moelab.advice.gpu import is_gpu
from moelab.advice.model import AS_IS, LOSSLESS
from moelab.advice.question import PARTS, Question
from moelab.base.progress import progress
from moelab.base.records import Record
from moelab.cards import DEVICES, load_device
from moelab.offloading.budget import RESERVE, kv_bytes


def page(asked: Sequence[Question]) -> str:
    """The page of questions, which begins as the first: their models, its machine, and all cards that
    have a disk. ValueError: it is of a GPU."""
    first = asked[0]
    if is_gpu(first.device):
        raise ValueError(
            f"the page is of a CPU with a disk, and {first.device.name} is a GPU; give another --device"
        )
    devices = [first.device, *map(load_device, DEVICES)]
    data = {
        "models": [_facts(one) for one in progress(asked, "playing texts", unit="models")],
        "machines": [asdict(one) for one in devices if "storage_read_gbs" in one.figures],
        "begins": (first.memory, first.context, first.batch),
        "constants": (RESERVE, SHARES, TEXTS, PARTS, LOSSLESS, AS_IS),
        "made": time.strftime("%Y-%m-%d"),
    }
    text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    packed = json.dumps(data, separators=(",", ":"), default=str).replace("<", "\\u003c")
    return text.replace("DATA", packed, 1)


def _facts(asked: Question) -> Record:
    """What the page computes with, of a model and the routing that is assumed of it."""
    model, routing = asked.model, asked.assumed
    return asdict(model) | {
        "dense": model.dense,
        "multiplied": model.multiplied,
        "kv": kv_bytes(model.spec, 1),
        "staging": asked.staging,
        "forms": {form: model.expert_bytes(form) for form in model.forms()},
        "words": routing.words,
        "distinct": routing.distinct,
        "margin": routing.margin,
        "curves": routing.curves,
    }
