"""A second place that computes: all experts in the CPU's memory, as they are stored, and threads that
compute some of them there, while others are sent over a link (`hybrid`).

On a machine without a GPU both places are groups of threads of one CPU, and the link is a copy from
memory to memory, throttled to `bandwidth`: so a scheduler for two devices runs, and is measured, on
what people have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from moelab.base.registry import make
from moelab.models.experts import SeamExperts
from moelab.offloading.loading import Loader, fill
from moelab.offloading.slots import Slots
from moelab.offloading.threads import alone
from moelab.store.reader import cast


class Host:
    """All experts of a store in memory, and `threads` that compute there.

    loader : of a slot for each expert; it is done when this is made.
    dtype : of the hidden states."""

    def __init__(self, loader: Loader, threads: int) -> None:
        fill(loader)
        loader.stop()
        self.slots: Slots = loader.slots
        self._slot = {key: slots["full"] for key, slots in loader.queue.held.items()}
        self.threads, self.dtype = threads, torch.get_default_dtype()
        self.executor = make("executor", "fast")
        self._layers: dict[int, SeamExperts] = {}
        self.start()

    def start(self) -> None:
        """Begin with a thread of its own, also in a forked process."""
        self._thread = ThreadPoolExecutor(1, "moelab host", partial(alone, self.threads))

    def close(self) -> None:
        self._thread.shutdown()

    def submit(self, compute: Callable[[], Tensor]) -> Future[Tensor]:
        """Compute there, after what has been submitted before."""
        return self._thread.submit(compute)

    def bytes(self, layer: int, expert: int) -> np.ndarray:
        """An expert as it is stored: uint8."""
        return self.slots.bytes("full", self._slot[layer, expert])

    def experts(self, experts: SeamExperts) -> SeamExperts:
        """A layer's experts, whose weights are those that lie here."""
        if (here := self._layers.get(experts.layer)) is None:
            here = self._layers[experts.layer] = copy.copy(experts)
            here.source = self
        return here

    def __call__(self, layer: int, expert: int) -> dict[str, Tensor]:
        """The tensors of an expert, as a source of the seam; valid until the next call."""
        tensors = self.slots.tensors(self._slot[layer, expert], layer, expert, reuse=True)
        return cast(tensors, self.dtype)
