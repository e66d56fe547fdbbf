"""A second place that computes: all experts in the CPU's memory, as they are stored, and threads that
compute some of them there, while others are sent over a link (`moelab.offloading.hybrid`).

On a machine without a GPU both places are groups of threads of one CPU, and the link is a copy from
memory to memory, throttled to `bandwidth`: so a scheduler for two devices runs, and is measured, on
what people have."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.base.registry import make
from moelab.base.specs import Event
from moelab.models.experts import SeamExperts, assignments, execute
from moelab.offloading.threads import alone
from moelab.offloading.tiers import HostPool, experts_of
from moelab.store.headers import DTYPES, Tensors
from moelab.store.layout import ExpertStore
from moelab.store.reader import Chunks, cast, decode


class Host(HostPool):
    """All experts of a store, which can be computed with where they lie, in place of being read.

    threads : that compute.    bandwidth : bytes a second at which experts are read from here.
    options : of `Reader`."""

    def __init__(
        self, store: ExpertStore, threads: int, bandwidth: float | None, **options: Any
    ) -> None:
        self.threads = threads
        self.executor = make("executor", "fast")
        super().__init__(store, torch.device("cpu"), **options)
        self.hold(experts_of(store))
        self.verify = False  # nobody else can write there
        self.bandwidth = bandwidth

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
        """As of `Reader`, of whole experts."""
        if (layer, expert) not in self.slots:
            return super().read_parts(layer, expert, parts)
        start = time.perf_counter()
        chunks = self._chunks(layer, expert, "both", parts["both"])
        chunks.data[:] = self.held(layer, expert).data
        self._throttle(len(chunks.data), start)
        return [chunks]

    def tensors(self, layer: int, expert: int) -> Tensors:
        """An expert's tensors: as they lie, or decoded."""
        chunks = self.held(layer, expert)
        if not self.store.raw:
            return decode(chunks, chunks)
        return {
            name: torch.from_numpy(chunks.plane(name, 0).shards[0])
            .view(DTYPES[entry.dtype])
            .view(entry.shape)
            for name, entry in chunks.entries.items()
        }

    def compute(
        self,
        layer: SeamExperts,
        chosen: list[int],
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        tell: Callable[[Event], object],
    ) -> Tensor:
        """What these experts contribute, [T, H]; `tell` is told when each was computed."""

        here = copy.copy(layer)
        here.source = lambda *key: cast(self.tensors(*key), x.dtype)
        parts = {expert: rows for expert, *rows in assignments(ids, layer.num_experts)}
        out = torch.zeros_like(x)
        for expert in chosen:
            start = time.perf_counter()
            choice, tokens = parts[expert]
            alone = torch.full((len(tokens), 1), expert)
            w = weights[tokens, choice][:, None]
            out.index_add_(0, tokens, execute(self.executor, x[tokens], alone, w, here))
            tell(Event("host", "expert", layer.layer, expert, start, time.perf_counter()))
        return out
