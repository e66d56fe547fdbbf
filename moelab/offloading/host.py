"""A second place that computes: all experts in the CPU's memory, as they are stored, and threads that
compute some of them there, while others are sent over a link (`moelab.offloading.hybrid`).

On a machine without a GPU both places are groups of threads of one CPU, and the link is a copy from
memory to memory, throttled to `bandwidth`: so a scheduler for two devices runs, and is measured, on
what people have."""

from __future__ import annotations

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from moelab.base.registry import make
from moelab.models.experts import SeamExperts, assignments, execute
from moelab.offloading.slots import Slots
from moelab.offloading.threads import alone
from moelab.store.layout import ExpertStore
from moelab.store.reader import Chunks, Reader, cast


class Host(Reader):
    """Reads experts from a slot for each, and computes with them there.

    held : (layer, expert) → its slot; filled and verified.
    threads : that compute.    bandwidth : bytes a second at which experts are read.
    """

    def __init__(
        self,
        store: ExpertStore,
        slots: Slots,
        held: dict[tuple[int, int], int],
        threads: int,
        bandwidth: float | None,
    ) -> None:
        self.slots, self.held, self.threads = slots, held, threads
        self.executor = make("executor", "fast")
        super().__init__(store, "buffered", bandwidth, verify=False)

    def forked(self) -> None:
        """A thread of its own, also in a child process."""
        super().forked()
        thread = ThreadPoolExecutor(1, "moelab host", partial(alone, self.threads))
        self.submit, self._end = thread.submit, thread.shutdown

    def close(self) -> None:
        """End the thread when it has done what it is at."""
        self._end()
        super().close()

    def read_parts(
        self, layer: int, expert: int, parts: dict[str, np.ndarray | None]
    ) -> list[Chunks]:
        """As of `Reader`."""
        start = time.perf_counter()
        (chunks,) = (self._chunks(layer, expert, *part) for part in parts.items())
        chunks.data[:] = self.slots.bytes("full", self.held[layer, expert])[: len(chunks.data)]
        self._count(len(chunks.data), start)
        return [chunks]

    def compute(
        self, layer: SeamExperts, chosen: list[int], x: Tensor, ids: Tensor, weights: Tensor
    ) -> tuple[Tensor, list[tuple[float, float]]]:
        """What these experts contribute, [T, H]; and when each was computed."""

        def tensors(layer: int, expert: int) -> dict[str, Tensor]:
            found = self.slots.tensors(self.held[layer, expert], layer, expert, reuse=True)
            return cast(found, x.dtype)

        here = copy.copy(layer)
        here.source = tensors
        parts = {expert: rows for expert, *rows in assignments(ids, layer.num_experts)}
        out, times = torch.zeros_like(x), [time.perf_counter()]
        for expert in chosen:
            choice, tokens = parts[expert]
            alone = torch.full((len(tokens), 1), expert)
            w = weights[tokens, choice][:, None]
            out.index_add_(0, tokens, execute(self.executor, x[tokens], alone, w, here))
            times.append(time.perf_counter())
        return out, list(zip(times, times[1:]))
