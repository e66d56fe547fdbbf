"""Residency on a GPU: tables that say where each expert lies, so that a whole token is computed without
asking the host.

Source: issue 52; the rule is `Residency`'s with `spare` slots. Before a token the host uploads its tables
in one small copy. While the GPU computes, `moelab.offloading.device_triton` reads them, layer by layer:
hits are multiplied where they lie, and what misses is fetched by the GPU itself, over the link, into free
slots, where it stays, or into scratch slots. After the token the host reads which experts were chosen and
where they were put, and takes that over. Until it has, its own tables are the truth: a token that was
interrupted leaves nothing behind, as what it has fetched lies in slots that are free.

    table, home   int64 [L, E], addresses in GPU memory and in pinned memory; 0 where an expert is not
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moelab.base.specs import ExpertKey, State
from moelab.cache.residency import Step
from moelab.experts.located import locate
from moelab.models.experts import SeamExperts
from moelab.offloading.link import PinnedReader, host_memory
from moelab.offloading.load_queue import LoadQueue
from moelab.offloading.slots import Slots

#: (x [1, H], ids [K], weights [K]) → [1, H] of one layer
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
STAMPS = 3  # of a layer: before fetching, before computing, after it


class Fields(NamedTuple):
    """What is uploaded for a token, see `device_triton.Tables`."""

    table: Any
    home: Any
    share: Any
    counts: Any
    scratch: Any
    free: Any


class Layer(NamedTuple):
    """What a GPU did in one layer of a token.

    experts, addresses : [K], chosen ones, and where they were computed; 0 elsewhere.
    times : seconds of the host's clock: fetching began, computing began and ended.
    """

    experts: list[int]
    addresses: list[int]
    times: tuple[float, float, float]


class _InSlot:
    """The source of experts that lie in one slot."""

    def __init__(self, slots: Slots, slot: int) -> None:
        self.device, self._slots, self._slot = slots.device, slots, slot

    def matrices(self, layer: int, experts: list[int], _: torch.dtype) -> Any:
        return self._slots.matrices([self._slot] * len(experts), layer, experts)


class DeviceTables:
    """All experts' addresses on a GPU, and what computes a token's experts by them.

    calls : one for each MoE layer; the first call of a token is its first layer's.
    home : int64 [L, E]; what changes it takes effect with the next token.
    """

    def __init__(
        self, slots: Slots, reader: PinnedReader, modules: list[SeamExperts], K: int
    ) -> None:
        from moelab.offloading import device_triton

        self.kernels, self.slots, self.K = device_triton, slots, K
        L, E = len(modules), max(of.num_experts for of in modules)
        device = slots.device
        sizes = [L * E, L * E, L * (K + 1), 2, K, slots.count["full"]]
        bounds = [0, *accumulate(sizes)]
        self._host = host_memory(8 * bounds[-1], device, self).view(np.int64)
        self._state = torch.empty(bounds[-1], dtype=torch.int64, device=device)
        parts = [slice(*of) for of in zip(bounds, bounds[1:])]
        shapes = Fields((L, E), (L, E), (L, K + 1), (2,), (K,), (-1,))
        #: as the host has it, and as the GPU
        self.fields = Fields(*(self._host[of].reshape(to) for of, to in zip(parts, shapes)))
        self._there = Fields(*(self._state[of].view(to) for of, to in zip(parts, shapes)))
        self.home = self.fields.home
        self._nbytes = np.zeros((L, E), np.int64)
        for key in ((layer, e) for layer, of in enumerate(modules) for e in range(of.num_experts)):
            if isinstance(reader, PinnedReader):
                data = reader.held(*key).data
                self.home[key], self._nbytes[key] = data.ctypes.data, len(data)
        self._sizes = torch.from_numpy(-(-self._nbytes // device_triton.BLOCK)).to(device)
        self._rows = torch.zeros(2, K, 4, dtype=torch.int64, device=device)
        self._jobs = torch.zeros(3, K, dtype=torch.int64, device=device)
        self._order = torch.arange(K, device=device)
        told = L * (2 * K + STAMPS) + 1
        self._told = torch.zeros(told, dtype=torch.int64, device=device)
        self._heard = host_memory(8 * told, device, self).view(np.int64)
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._launched = 0.0
        self.calls: list[Call] = []

    @classmethod
    def of(
        cls, slots: Slots, reader: Any, modules: list[SeamExperts], dtype: torch.dtype, K: int
    ) -> DeviceTables | None:
        """For these layers' experts; None where their executor has no kernels for them, or they
        are not all in pinned memory."""
        make = getattr(modules[0].executor, "on_gpu", None)
        if make is None or slots.count["full"] < 2:
            return None
        found = [_rows_in_slots(slots, of, dtype) for of in modules]
        if None in found:
            return None
        with torch.inference_mode(False):  # or they could not be written to outside of it
            made = cls(slots, reader, modules, K)
            for layer, (of, (matrices, begins, moves)) in enumerate(zip(modules, found)):
                if (forward := make(of, matrices, made._rows)) is None:
                    return None
                made.calls.append(made._call(layer, forward, begins, moves))
        return made

    def _call(self, layer: int, forward: Call, begins: np.ndarray, moves: np.ndarray) -> Call:
        """What computes a layer's experts of a token; may be captured."""
        there, kernels, device = self._there, self.kernels, self.slots.device
        K = self.K
        begin = layer * (2 * K + STAMPS) + 1
        told = self._told[begin : begin + 2 * K].view(2, K)
        times = self._told[begin + 2 * K :][:STAMPS].split(1)
        tables = kernels.Tables(
            table=there.table[layer],
            home=there.home[layer],
            share=there.share[layer],
            free=there.free,
            scratch=there.scratch,
            counts=there.counts,
            begins=torch.from_numpy(begins).to(device),
            moves=torch.from_numpy(moves).to(device),
            sizes=self._sizes[layer],
            rows=self._rows,
            jobs=self._jobs,
            told=told,
        )

        def call(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
            if layer == 0:
                kernels.stamp(self._told[:1])
            kernels.assign(ids, tables)
            kernels.stamp(times[0])
            kernels.fetch(self._jobs)
            kernels.stamp(times[1])
            y = forward(x, self._order, w)
            kernels.stamp(times[2])
            return y

        return call

    # between tokens

    def read(self, queue: LoadQueue) -> None:
        """The host's tables are what a queue says, after it has loaded experts itself."""
        self.fields.table[:] = 0
        for (layer, expert), slots in queue.held.items():
            self.fields.table[layer, expert] = self.slots.address(slots["full"])
        self.slots.link.arrive(range(self.slots.count["full"]))

    def begin(self, queue: LoadQueue, keep: int, share: np.ndarray | None) -> bool:
        """Upload what the next token goes by: `keep` free slots may keep what it fetches, of so many
        misses of a layer `share` [L, K + 1] are fetched, or all. Whether there are as many slots."""
        free = queue.free["full"]
        if len(free) < self.K + keep:
            return False
        fields = self.fields
        addresses = [self.slots.address(slot) for slot in free[: self.K + keep]]
        fields.scratch[:] = addresses[: self.K]
        fields.free[:keep] = addresses[self.K :]
        fields.counts[:] = 0, keep
        fields.share[:] = np.arange(self.K + 1) if share is None else share
        self._state.copy_(torch.from_numpy(self._host), non_blocking=True)
        self._launched = time.perf_counter()
        return True

    def end(self) -> None:
        """All of the token has been launched: what it tells follows."""
        torch.from_numpy(self._heard).copy_(self._told, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self.slots.device))

    def rest(self) -> None:
        """Wait until the GPU has done what was launched, by any thread."""
        if self._event is not None:
            torch.cuda.synchronize(self.slots.device)

    def layers(self) -> list[Layer]:
        """What the token did, once it is done."""
        if self._event is not None:
            self._event.synchronize()
        began, K = int(self._heard[0]), self.K
        found = []
        for row in self._heard[1:].reshape(-1, 2 * K + STAMPS).tolist():
            # The GPU has waited for the host, so its first time is when that launched it.
            times = (self._launched + (at - began) / 1e9 for at in row[2 * K :])
            found.append(Layer(row[:K], row[K : 2 * K], tuple(times)))
        return found

    def apply(self, queue: LoadQueue, step: Step, did: Layer) -> list[ExpertKey]:
        """Let the queue know which experts stay where the token has put them; returns what was
        fetched. RuntimeError if that is not what the rule says."""
        fetched, table = [], self.fields.table[step.layer]
        scratch = set(self.fields.scratch.tolist())
        where = dict(zip(did.experts, did.addresses))
        for request in step.requests:
            if table[request.key.expert]:
                continue
            fetched.append(request.key)
            address = where[request.key.expert]
            if (request.keep is State.FULL) == (address in scratch or not address):
                raise RuntimeError(
                    f"{request.key} shall be {request.keep.name} after a token, and the GPU has put it "
                    f"{'elsewhere' if address else 'nowhere'}: they do not decide by the same rule"
                )
            if request.keep is State.FULL:
                queue.keep(request.key, self.slots.at(address))
                table[request.key.expert] = address
        return fetched

    def remove(self, evicted: list[ExpertKey]) -> None:
        """These experts have left GPU memory."""
        for key in evicted:
            self.fields.table[key] = 0

    def nbytes(self, key: ExpertKey) -> int:
        """That are fetched of an expert."""
        return int(self._nbytes[key])


def _rows_in_slots(
    slots: Slots, of: SeamExperts, dtype: torch.dtype
) -> tuple[Any, np.ndarray, np.ndarray] | None:
    """Of a layer's experts: their `Matrices` of up and down, `begins` and `moves` of
    `device_triton.Tables`; None where kernels do not find them in a slot."""
    experts = np.arange(of.num_experts)
    found = []
    for slot in (0, 1):
        there = copy.copy(of)
        there.source = _InSlot(slots, slot)
        if (matrices := locate(there, experts, dtype, slots.device.type)) is None:
            return None
        found.append(np.stack([one.rows for one in matrices]))
    first, second = found
    moves = (second - first) // (slots.address(1) - slots.address(0))
    return matrices, first - moves * slots.address(0), moves
