"""What every way of storing experts costs, in bytes and in language loss: the lossless codecs and the few-bit formats.

One model in memory runs on its own weights and on what each format leaves of them (`moelab.store.fewbit`), over the
same windows of text, so differences are paired. Bytes are of all routed experts as a store holds them, without
alignment; tensors that a format does not fit keep their bits. Routers, attention and shared experts stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from moelab import registry
from moelab.evaluation import accuracy
from moelab.models import plug, plugged, unplug
from moelab.progress import progress
from moelab.store import fewbit
from moelab.store.codecs import compress_tensor

CODECS = ("raw", "bf12", "huffman")


class Rounded:
    """The experts of layers behind the seam as a format leaves them, as a source for the seam, all in memory.

    nbytes : of all experts in the format.
    """

    def __init__(self, layers: Sequence[Any], form: str) -> None:
        self.nbytes, self._tensors = 0, {}
        for layer in progress(layers, f"rounding to {form}", unit="layers"):
            name = form + ".T" * bool(layer.experts.is_transposed)
            for expert in range(layer.E):
                kept = self._tensors[layer.index, expert] = {
                    key: w.detach().clone() for key, w in layer.experts.weights(expert).items()}
                for w in kept.values():
                    blob = fewbit.pack(name, w)
                    self.nbytes += w.nbytes if blob is None else len(blob)
                    if blob is not None:
                        fewbit.unpack(name, blob, w)

    def __call__(self, layer: int, expert: int) -> dict[str, Tensor]:
        return self._tensors[layer, expert]


def compare_formats(model: Any, tasks: Sequence[str] = ("loss",), **how: Any) -> dict[str, dict[str, Any]]:
    """Codec or format → "bytes" of all experts, "bits a weight", "of raw", "TASK: score" and the rest of a row of
    `accuracy.compare`, whose other options are `how`; a codec changes no bit and so no score."""
    formats, layers = registry.names("format"), plug(model)
    own = [w for layer in layers for e in range(layer.E) for w in layer.experts.weights(e).values()]
    raw, count = sum(w.nbytes for w in own), sum(w.numel() for w in own)
    sources = {name: Rounded(layers, name) for name in formats}
    size = {name: sum(compress_tensor(w.contiguous(), name).nbytes for w in own) for name in CODECS}
    size |= {name: source.nbytes for name, source in sources.items()}
    found = accuracy.compare(model, {"raw": nullcontext} | {
        name: partial(plugged, model, source=source) for name, source in sources.items()}, tasks, **how)["scores"]
    unplug(model)
    return {name: {"bytes": n, "bits a weight": 8 * n / count, "of raw": n / raw} | {
        f"{task}: {key}": value for task, by_mode in found.items()
        for key, value in by_mode[name if name in formats else "raw"].items()
        if key not in ("unit", "n")} for name, n in size.items()}
