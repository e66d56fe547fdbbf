"""Experts computed where they lie, in the CPU's memory as they are stored, while others are sent over
a link (`moelab.offloading.hybrid`) or computed on a GPU.

`Worker` is the thread that does it, with a team of its own: for a GPU it answers a
`moelab.offloading.mailbox`, a token at a time, in one compiled call without the GIL. On a machine
without a GPU both places are groups of threads of one CPU, and the link is a copy from memory to
memory, throttled to `bandwidth`: so a scheduler for two devices runs, and is measured, on what people
have."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moelab.base.forks import renew_in_children
from moelab.base.registry import make
from moelab.base.specs import Event
from moelab.experts.executor import gate_of, plain
from moelab.experts.located import locate
from moelab.kernels.feed_forward import plans
from moelab.kernels.gates import Gate
from moelab.kernels.products import KINDS, Matrices, layers
from moelab.kernels.serve import TIMER, serve
from moelab.kernels.threads import team
from moelab.models.experts import SeamExperts
from moelab.offloading.mailbox import Mailbox
from moelab.offloading.prompts import Choices, OneToken
from moelab.offloading.slots import Located
from moelab.offloading.threads import alone
from moelab.offloading.tiers import HostPool, experts_of
from moelab.store.headers import DTYPES, Tensors
from moelab.store.layout import ExpertStore
from moelab.store.reader import Chunks, cast, decode


class Lying(NamedTuple):
    """Experts of L layers that lie in the CPU's memory as they are stored.

    up, down : their matrices, a kind a layer; rows [L, E, 4] are as if each expert's bytes began at
        address 0.
    rows : int64 [2, L, E, 4], those of both.
    moves : int64 [2, 4], by how much a row of up and one of down move with where an expert begins.
    home : int64 [L, E], where it begins; 0 where it is not there. May change between tokens.
    """

    up: Matrices
    down: Matrices
    gate: Gate
    rows: np.ndarray
    moves: np.ndarray
    home: np.ndarray

    def given(self, dtype: torch.dtype) -> tuple[tuple, tuple]:
        """(plan, experts) of `moelab.kernels.serve`, for hidden states of a dtype."""
        plan = plans(self.up, self.down, KINDS[dtype], self.gate)
        return plan, (self.rows, self.moves, self.home)


def lying(
    modules: list[SeamExperts], store: ExpertStore, home: np.ndarray, dtype: torch.dtype
) -> Lying | None:
    """Experts of these layers, alike, of a store, by where each one begins, int64 [L, E]; None if
    kernels cannot compute them as they lie."""
    source = Located(store, True)
    found = []
    alike = set()
    for of in modules:
        here = copy.copy(of)
        every = np.arange(of.num_experts)
        here.source = source
        readable = plain(of) and dtype in KINDS and source.matrices(of.layer, every, dtype)
        one = locate(here, every, dtype) if readable else None
        if one is None or (gate := gate_of(of)) is None:
            return None
        found.append(one)
        alike.add((gate, of.num_experts, *((m.kind.other > 0, m.R, m.transposed) for m in one)))
    if len(alike) > 1:
        return None
    rows = np.stack([np.stack([one.rows for one in of]) for of in zip(*found)])
    up, down = (layers(of, table) for of, table in zip(zip(*found), rows))
    bias = modules[0].has_bias
    moves = np.array([(1, of.kind[0].other > 0, bias, 0) for of in (up, down)], np.int64)
    return Lying(up, down, gate, rows, moves, home)


class Worker:
    """A thread that computes, with a team of `threads`; it sleeps until there is something to do."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._known: Lying | None = None  # the experts that it has computed last
        self.forked()
        renew_in_children(self)

    def forked(self) -> None:
        """A thread of its own, also in a child process."""
        self._box: Mailbox | None = None  # of the token that is computed
        thread = ThreadPoolExecutor(1, "moelab host", partial(alone, self.threads))
        self.submit = thread.submit
        self._end = thread.shutdown

    def stop(self) -> None:
        """A GPU and the thread do not wait for each other any more, in a token that has failed."""
        if box := self._box:
            box.stop()

    def close(self) -> None:
        """End the thread when it has done what it is at; a GPU does not wait for it any more."""
        self.stop()
        self._end()

    @contextmanager
    def token(self, box: Mailbox, experts: Lying, number: int) -> Iterator[list[Event]]:
        """Answer what is posted of a token, the `number` larger than that of the last, within the
        block, at whose end the GPU must have ended it.

        The list then has when its experts were computed; those of a layer are computed together, so
        each has an equal part of their time. Raises at the end what was raised there, and RuntimeError
        if the GPU has gone on without an answer: then the token is worth nothing, and the mailbox
        neither, as after an error in the block."""
        events = []
        try:
            box.check()
            if experts is not self._known:  # compiled before a GPU waits for it
                _serve(box.stopped(), experts, number)
                self._known = experts
            self._box = box
            serving = self.submit(_serve, box, experts, number)
            yield events
            box.end(number)
            events += serving.result()
            box.check()
        except BaseException:
            box.stop()
            raise
        finally:
            self._box = None


def _serve(box: Mailbox, experts: Lying, number: int) -> list[Event]:
    try:
        ids = np.full((box.L, box.K), -1)
        times = np.zeros((box.L, 2), np.int64)
        since = time.perf_counter() - time.clock_gettime_ns(TIMER[1]) / 1e9
        given = (*experts.given(box.dtype), tuple(box.at.values()), number)
        if failed := serve(*given, (ids, times), TIMER, team()):
            layer = -1 - failed
            raise RuntimeError(
                f"layer {layer} of token {number} wants experts {ids[layer].tolist()} (−1: none): not "
                f"all lie in the CPU's memory, or it is another token's"
            )
    except BaseException:
        box.stop()
        raise
    done = (since + times / 1e9).tolist()
    return [
        event
        for layer, (chosen, span) in enumerate(zip(ids.tolist(), done))
        for event in _events(layer, [e for e in chosen if e >= 0], *span)
    ]


def _events(layer: int, experts: list[int], start: float, end: float) -> list[Event]:
    """Of experts computed together: each has an equal part of the time."""
    each = (end - start) / (len(experts) or 1)
    return [
        Event("host", "expert", layer, e, start + i * each, start + (i + 1) * each)
        for i, e in enumerate(experts)
    ]


class Host(HostPool):
    """Experts of a store in the CPU's memory, which can be computed with where they lie, in place of
    being read: all of them or, beside a GPU, those that are not there.

    threads : that compute.
    pool, options : of `HostPool`; `bandwidth` is that of here, if all are,
        else of the disk."""

    def __init__(self, store: ExpertStore, threads: int, *pool: Any, **options: Any) -> None:
        self.worker, self.executor = Worker(threads), make("executor", "fast")
        super().__init__(store, *pool, **options)
        if not self.exchanges:
            bandwidth = self.bandwidth
            self.bandwidth = None
            self.hold(experts_of(store))
            self.verify, self.bandwidth = False, bandwidth  # nobody else can write there
        self._located = Located(store, True)

    def close(self) -> None:
        """End the thread when it has done what it is at."""
        self.worker.close()
        super().close()

    def read_parts(
        self, layer: int, expert: int, parts: dict[str, np.ndarray | None]
    ) -> list[Chunks]:
        """As of `Reader`, of whole experts."""
        if self.exchanges or (layer, expert) not in self.slots:
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

    def matrices(
        self, layer: int, experts: list[int], dtype: torch.dtype
    ) -> dict[str, tuple[str, np.ndarray]] | None:
        """As of a source of the seam, of experts that are all here."""
        begins = self.home[layer, experts][:, None]
        return self._located.matrices(layer, experts, dtype, begins) if begins.all() else None

    def compute(
        self,
        layer: SeamExperts,
        chosen: list[int],
        choices: Choices | OneToken,
        tell: Callable[[Event], object],
    ) -> Tensor:
        """What these experts contribute, [T, H]; `tell` is told when each was computed."""
        gate_of(layer)  # which its copy knows, then
        here = copy.copy(layer)
        here.executor, here.source = self.executor, _Here(self, choices.x.dtype)
        for batch in [chosen] if len(choices.x) == 1 else [[expert] for expert in chosen]:
            start = time.perf_counter()
            choices.compute(here, batch)
            for event in _events(layer.layer, batch, start, time.perf_counter()):
                tell(event)
        return choices.sum()


class _Here(NamedTuple):
    """A host's experts as a source of the seam, for hidden states of a dtype."""

    host: Host
    dtype: torch.dtype

    def __call__(self, layer: int, expert: int) -> Tensors:
        return cast(self.host.tensors(layer, expert), self.dtype)

    @property
    def matrices(self) -> Callable[..., Any]:
        return self.host.matrices
