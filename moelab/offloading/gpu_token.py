"""A whole token on a GPU that does not ask the host: tables say where each expert lies.

The GPU follows a rule that the host can follow after it, `Residency`'s with `spare` slots. A token:

    before    the host uploads its tables in one small copy
    each      hits are multiplied where they lie. Of the experts that are missing, the GPU fetches some over
    layer     the link, into free slots, where they stay, or into scratch slots; the host computes the others
              in its own memory (`moelab.offloading.mailbox`). The kernels are in `gpu_token_triton`.
    after     the host reads which experts were chosen and where they were put, and updates its tables

Until the host has updated its tables, they are the truth. So an interrupted token needs no cleaning up:
what it has fetched lies in slots that are free.

    table   int64 [L, E], address of an expert's slot in GPU memory; 0 if it has none
    home    int64 [L, E], address that it is fetched from: pinned memory or, until it has been copied back
            there, the slot that it has left; 0 if it is only on disk"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moelab.base.specs import Event, ExpertKey, State
from moelab.cache.residency import Step
from moelab.models.experts import SeamExperts
from moelab.offloading.host import Lying, Worker, lying
from moelab.offloading.link import host_memory
from moelab.offloading.load_queue import LoadQueue
from moelab.offloading.loading import Loader
from moelab.offloading.mailbox import Mailbox
from moelab.store.layout import run

#: (x [1, H], ids [1, K], weights [1, K]) → [1, H] of one layer
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
STAMPS = 3  # of a layer: before fetching, before computing, after it


class Fields(NamedTuple):
    """What is uploaded for a token, see `gpu_token_triton.Tables`."""

    table: Any
    home: Any
    share: Any
    counts: Any
    scratch: Any
    free: Any


class Layer(NamedTuple):
    """What a GPU did in one layer of a token.

    experts, addresses : [K], ids that were chosen, and the slots they were computed from; 0 for one that
        the host computed.
    times : seconds of the host's clock: fetching began, computing began and ended.
    """

    experts: list[int]
    addresses: list[int]
    times: tuple[float, float, float]


class DeviceTables:
    """All experts' addresses on a GPU, and what computes a token's experts by them.

    loader : has the GPU's slots, and the pinned memory of the others.
    where : of all layers' experts, their matrices from their first bytes on.
    box, worker : by which one computes some of what misses; None: all of it is fetched.
    calls : one for each MoE layer; a token calls each once, in order.
    captured : whether they have been tried, or captured: with all fetched, as nobody answers then.
    """

    def __init__(self, loader: Loader, where: Lying, box: Mailbox, worker: Worker | None) -> None:
        from moelab.offloading import gpu_token_triton, mailbox_triton

        self.kernels = gpu_token_triton
        self.mail = mailbox_triton
        self.loader = loader
        self.where = where
        self.box = box
        self.worker = worker
        self.K = K = box.K
        self._first = loader.slots.full(0).data_ptr()
        self._slot = loader.slots.sizes.full
        self.device = device = loader.slots.device
        self._stream = loader.slots.link.now()  # of the latest token
        L, E = where.home.shape
        shapes = Fields((L, E), (L, E), (L, K + 1), (3,), (K,), (loader.slots.count["full"],))
        bounds = [0, *accumulate(map(math.prod, shapes))]
        parts = [slice(*of) for of in pairwise(bounds)]
        self._host = host_memory(8 * bounds[-1], device, self).view(np.int64)
        self._state = torch.zeros(bounds[-1], dtype=torch.int64, device=device)
        #: as the host has it, and as the GPU
        self.fields = Fields(*(self._host[of].reshape(to) for of, to in zip(parts, shapes)))
        self._there = Fields(*(self._state[of].view(to) for of, to in zip(parts, shapes)))
        entries = loader.reader.store.entries
        nbytes = [run(entries(*key), "both")[1] for key in np.ndindex(L, E)]
        self.nbytes = np.array(nbytes).reshape(L, E)
        self._given = [
            torch.from_numpy(of).to(device)
            for of in (where.rows, where.moves, -(-self.nbytes // gpu_token_triton.BLOCK))
        ]
        self._rows, self._jobs, self._away = (
            torch.zeros(of, dtype=torch.int64, device=device) for of in ((2, K, 4), (3, K), (K,))
        )
        self._order = torch.arange(K, device=device)[None]
        told = L * (2 * K + STAMPS) + 1
        self._told = torch.zeros(told, dtype=torch.int64, device=device)
        self._heard = host_memory(8 * told, device, self).view(np.int64)
        self._number = 0  # of the token
        self._serving = ExitStack()
        self._events: list[Event] = []  # of the host's experts
        self._done: Any = None  # the event of its end
        self._launched = 0.0
        #: experts that have left a slot, whose bytes may not have come back yet → address of the slot
        self._left: dict[ExpertKey, int] = {}
        self._brought: dict[ExpertKey, int] = {}  # who comes beside the token → slot
        self.calls: list[Call] = []
        self.captured = device.type != "cuda"

    @classmethod
    def of(
        cls,
        loader: Loader,
        modules: list[SeamExperts],
        dtype: torch.dtype,
        K: int,
        worker: Worker | None,
    ) -> DeviceTables | None:
        """For these layers' experts, a worker computing some; None where their executor has
        no kernels for them, or they do not come to the GPU as they are stored, or
        it does not reach them."""
        make = getattr(modules[0].executor, "on_gpu", None)
        pool = loader.reader
        if make is None or not loader.in_place or not pool.pinned:
            return None
        if (where := lying(modules, pool.store, pool.home, dtype)) is None:
            return None
        H = modules[0].shapes["down_proj"][-1 if modules[0].is_transposed else -2]
        with torch.inference_mode(False):  # or they could not be written to outside of it
            box = Mailbox(len(modules), K, H, dtype, loader.slots.device)
            made = cls(loader, where, box, worker)
            for layer, of in enumerate(modules):
                found = [
                    one._replace(kind=one.kind[layer], rows=rows[layer])
                    for one, rows in zip((where.up, where.down), where.rows)
                ]
                if (forward := make(of, found, made._rows)) is None:
                    return None
                made.calls.append(made._call(layer, forward))
        return made

    def _call(self, layer: int, forward: Call) -> Call:
        """What computes a layer's experts of a token; may be captured."""
        there = self._there
        kernels = self.kernels
        mail = self.mail
        K = self.K
        begin = layer * (2 * K + STAMPS) + 1
        began, copied, ended = self._told[begin + 2 * K :][:STAMPS].split(1)
        rows, moves, sizes = self._given
        number = there.counts[2:]
        tables = kernels.Tables(
            table=there.table[layer],
            home=there.home[layer],
            share=there.share[layer],
            free=there.free,
            scratch=there.scratch,
            counts=there.counts,
            begins=rows[:, layer].contiguous(),
            moves=moves,
            sizes=sizes[layer],
            rows=self._rows,
            jobs=self._jobs,
            told=self._told[begin : begin + 2 * K].view(2, K),
            away=self._away,
        )

        def call(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
            if layer == 0:
                self.captured = True
                kernels.stamp(self._told[:1])
            kernels.assign(ids, tables)
            if self.worker:
                mail.post(self.box, number, layer, x, self._away, w)
            kernels.stamp(began)
            kernels.fetch(self._jobs)
            kernels.stamp(copied)
            y = forward(x, self._order, w)
            kernels.stamp(ended)
            if self.worker:
                mail.take(self.box, number, layer, self._away, y)
            return y

        return call

    # between tokens

    def read(self, queue: LoadQueue) -> None:
        """The host's tables are what a queue says, after it has loaded experts itself."""
        self.fields.table[:] = 0
        for (layer, expert), slots in queue.held.items():
            self.fields.table[layer, expert] = self._address(slots["full"])
        link = self.loader.slots.link
        link.rest()
        link.arrive(range(self.loader.slots.count["full"]))
        self._left = {key: self._address(slot) for key, slot in self.loader.leaving.items()}

    def begin(self, keep: int, share: np.ndarray | None, coming: Sequence[ExpertKey] = ()) -> bool:
        """Upload what the next token goes by: so many free slots `keep` what it fetches, of so many
        misses of a layer `share` [L, K + 1] are fetched, or all; copy who is `coming` beside it.
        Whether that can be: there are slots, and no expert is on disk only. The loader's lock is
        held."""
        loader = self.loader
        fields = self.fields
        K = self.K
        by_host = share is not None
        free = loader.writable(K + keep)
        others = [slot for slot in loader.free_slots if slot not in free][: len(coming)]
        self._find_homes([*free, *others], by_host)
        if len(free) < K + keep or by_host and self._left or not self._everyone():
            return False
        if len(others) < len(coming) or any(key not in loader.reader.slots for key in coming):
            return False
        self._brought = dict(zip(coming, others))
        for key, slot in self._brought.items():
            loader.send(key, slot)
        addresses = [self._address(slot) for slot in free]
        self._number += 1
        fields.scratch[:], fields.free[:keep] = addresses[:K], addresses[K:]
        fields.counts[:] = 0, keep, self._number
        fields.share[:] = share if by_host else np.arange(K + 1)
        self._stream = loader.slots.link.now()
        self._state.copy_(torch.from_numpy(self._host), non_blocking=True)
        self._launched = time.perf_counter()
        return True

    def _find_homes(self, free: Iterable[int], by_host: bool) -> None:
        """Where what is not in a slot is fetched from: pinned memory or, until it has come back there,
        the slot that it has left, unless that is written to; not if the host is to reach it."""
        pool = self.loader.reader
        pool.landed()
        written = {self._address(slot) for slot in free}
        for key, address in [*self._left.items()]:
            coming = pool.coming.get(key)
            if coming is not None and (by_host or address in written):
                coming.synchronize()
                pool.landed()
            if pool.home[key] or self.fields.table[key] or coming is None and address in written:
                del self._left[key]
        self.fields.home[:] = pool.home
        for key, address in self._left.items():
            self.fields.home[key] = address

    def _everyone(self) -> bool:
        """Whether all experts are somewhere near: those that a prompt has left on the disk are read
        into spare slots of pinned memory."""
        table = self.fields.table
        home = self.fields.home
        pool = self.loader.reader
        lacking = [ExpertKey(*key) for key in np.argwhere((table | home) == 0).tolist()]
        if lacking:
            self.loader.slots.link.rest()
            pool.hold(lacking)
            for key in lacking:
                home[key] = pool.home[key]
        return bool((table | home).all())

    def serve(self) -> None:
        """The host answers what the token posts."""
        if self.worker:
            serving = self.worker.token(self.box, self.where, self._number)
            self._events = self._serving.enter_context(serving)

    def end(self) -> None:
        """All of the token has been launched: what it tells follows."""
        torch.from_numpy(self._heard).copy_(self._told, non_blocking=True)
        self._done = self.loader.slots.link.now().record_event()

    def rest(self) -> None:
        """Wait until the GPU has done what was launched, by any thread; the host, too. Not for the whole
        GPU: that would end a capture of another model's thread."""
        self._brought = {}
        self._stream.synchronize()
        with suppress(Exception):  # of a token that is worth nothing
            self._serving.close()

    def layers(self) -> tuple[list[Layer], list[Event]]:
        """What the token did, once it is done, and the host for it."""
        self._done.synchronize()
        self._serving.close()
        began = int(self._heard[0])
        K = self.K
        found = []
        for row in self._heard[1:].reshape(-1, 2 * K + STAMPS).tolist():
            # The GPU has waited for the host, so its first time is when that launched it.
            times = (self._launched + (at - began) / 1e9 for at in row[2 * K :])
            found.append(Layer(row[:K], row[K : 2 * K], tuple(times)))
        events = self._events
        self._events = []
        return found, events

    def apply(self, queue: LoadQueue, step: Step, did: Layer) -> list[ExpertKey]:
        """Let the queue know which experts stay where the token has put them; returns what was
        fetched. RuntimeError if that is not what the rule says."""
        fetched = []
        table = self.fields.table[step.layer]
        nowhere = 0, *self.fields.scratch.tolist()
        where = dict(zip(did.experts, did.addresses))
        for request in step.requests + step.away:
            key = request.key
            address = where[request.key.expert]
            stays = request.keep is State.FULL
            if stays != (address not in nowhere) or request in step.away and address:
                raise RuntimeError(
                    f"{key} shall be {request.keep.name} after a token, and the GPU has put it into "
                    f"{self._place(address)}: they do not decide by the same rule"
                )
            if table[key.expert] or not address:
                continue
            fetched.append(key)
            self.loader.reader.touch(key)
            if stays:
                queue.keep(key, self._place(address))
                table[key.expert] = address
        return fetched

    def came(self, queue: LoadQueue) -> None:
        """Who came beside the token is there from now on, but for whom the token has fetched and kept
        itself."""
        for key, slot in self._brought.items():
            if key not in queue.held:
                queue.keep(key, slot)
                self.fields.table[key] = self._address(slot)
        self.loader.slots.link.arrive(self._brought.values())
        self._brought = {}

    def remove(self, evicted: Iterable[ExpertKey]) -> None:
        """These experts have left their slots."""
        for key in evicted:
            self._left[key] = int(self.fields.table[key])
            self.fields.table[key] = 0

    def _address(self, slot: int) -> int:
        return self._first + slot * self._slot

    def _place(self, address: int) -> int:
        """The slot there; less than 0 for none."""
        return (address - self._first) // self._slot
