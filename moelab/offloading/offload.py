"""A transformers model whose experts stay on disk, all but what a budget holds: what
`open_model(memory=…)` builds.

Source: ZipMoE §3.1 (real-time inference). Everything of the model but its routed experts is loaded;
the experts' modules hand each call to the engine.

    budget = pools (F, C, S, E: what is kept) + staging (in-flight loads, demanded or prefetched)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from moelab.base.specs import ExpertKey
from moelab.cache.policies import DEFAULT_POLICY
from moelab.cache.pools import Pools
from moelab.cache.residency import SPARE, Residency
from moelab.checkpoint import opening
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.experts import CheckpointStore
from moelab.experts import AS_THEY_LIE
from moelab.models import plug
from moelab.offloading.budget import available, available_on, parse_budget
from moelab.offloading.engine import Engine, EngineSource
from moelab.offloading.heat import Heat
from moelab.offloading.host import Host
from moelab.offloading.link import Link, link_to
from moelab.offloading.load_queue import order_of
from moelab.offloading.loading import DEPTH, WAITING, Loader, fill, threads_to_fill
from moelab.offloading.prefetch_gate import PrefetchGate
from moelab.offloading.run import EngineRun, EngineSettings, experts_bytes
from moelab.offloading.session import Session
from moelab.offloading.slots import Sizes, Slots, divide, slot_counts
from moelab.offloading.step import StepController
from moelab.offloading.tiers import HostPool, experts_of
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader


@dataclass(frozen=True, kw_only=True)
class Offloading:
    """How a model is offloaded; `moelab/api.toml` says what each option does."""

    cache: Any = DEFAULT_POLICY
    scope: str = "model"
    plan: Any = None
    workers: int = 1
    staging: int | None = None
    ahead: int | None = 0
    compact: bool | str | None = None
    scheduler: Any = "default"
    delays: Any = None
    mode: str = "auto"
    warm: bool = True
    host: str | float | int = "auto"
    bandwidth: float | None = None
    verify: bool = True
    hybrid: int = 0
    device: str | torch.device | None = None
    dtype: torch.dtype | str = "auto"

    #: what will compute; whether predictions are executed; tokens that went to each expert, [L, E], if that is known
    executor = "exact"
    executes = False
    popular = None

    @property
    def on(self) -> torch.device:
        return torch.device(self.device or "cpu")

    @property
    def learns(self) -> bool:
        """Whether sessions begin with what others have learnt: never in benches, which set $MOELAB_WARM."""
        return self.warm and os.environ.get("MOELAB_WARM") != "0"

    @property
    def packed(self) -> bool:
        """Whether what is not experts is computed with as it lies in a GGUF file."""
        return self.on.type == "cpu" and self.executor in AS_THEY_LIE

    def experts_of(self, checkpoint: Checkpoint) -> CheckpointStore:
        """A checkpoint's experts; on GPUs, which have no kernels for GGML's types, decoded ones."""
        dtype = checkpoint.dtype(self.dtype)
        return CheckpointStore(checkpoint, dtype, self.on.type == "cpu", self.verify)

    def require_possible(self) -> None:
        """ValueError for options that exclude each other, or that nothing can do."""
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}; at least one thread must decompress")
        if self.ahead is not None and self.ahead < 0:
            raise ValueError(f"ahead is {self.ahead}; it is a number of experts, 0 or more")
        if isinstance(self.plan, str):
            raise ValueError(
                f"the plan is {self.plan!r}; it must be pools, or one of `moelab.zipmoe.planning.plans`"
            )
        if self.hybrid and self.ahead:
            raise ValueError(
                f"hybrid is {self.hybrid}, with ahead={self.ahead}: nothing is prefetched beside it"
            )
        kind = self.on.type
        if kind not in ("cpu", "cuda") or self.host != "auto" and kind == "cpu":
            raise ValueError(
                f"the device is {str(self.on)!r}; experts can be offloaded for the CPU and for CUDA "
                f"GPUs, and host= is memory beside the latter only"
            )


def offload(
    source: ExpertStore | Checkpoint | str | Path | None,
    budget: str | float | int = "auto",
    how: Offloading | None = None,
    **options: Any,
) -> Any:
    """Open a model with its experts offloaded; bit for bit it computes as transformers' `eager`.

    source : as of `Checkpoint.at`; of a checkpoint that is no store, experts are read from its own
        files (`moelab.checkpoint.experts`).
    budget : memory for experts, see `parse_budget`, never exceeded. If all fit, they are read now.
    how : an `Offloading`; or `options`, fields of one.

    Returns the model. `model.moelab` is its `Session`: metrics, run, residency, `cancel()`,
    `close()`. Raises FileNotFoundError or StoreError without a store or for a damaged one;
    ValueError for too small a budget (it says the least), a plan beyond it, or impossible options."""
    how = how or Offloading(**options)
    checkpoint = Checkpoint.at(source)
    how.require_possible()
    store = checkpoint.store or how.experts_of(checkpoint)
    memory = Memory.divided(store, budget, how)
    residency = memory.residency()
    heat = Heat(checkpoint, store.spec) if how.learns else None
    if heat and isinstance(how.cache, str | type):  # no policy that knows the run to come
        memory = replace(memory, hot=heat.hottest())
    build = partial(opening.build, checkpoint, how.dtype, external=True, packed=how.packed)
    _bound_code_caches()
    with ExitStack() as unless_open:  # whatever fails, no thread, file or memory is left
        beside = unless_open.enter_context(ThreadPoolExecutor(1, "moelab filling"))
        reader = memory.reader(how.hybrid and not residency.holds_all)
        unless_open.callback(reader.close)
        loader = None
        if first := memory.first(residency):
            loader = memory.loader(residency, reader, first)
            unless_open.callback(loader.end)
        filled = beside.submit(memory.fill, loader, reader, first)
        model = build().to(how.on)
        filled.result()
        delays = how.delays
        if callable(delays):
            asked = memory.sizes.sm or how.scheduler != "default"
            delays = delays(store, model) if asked else None

        again = partial(memory.again, model, delays)
        if not loader:
            hot = () if memory.link else memory.hot
            memory = again(memory.budget)
            residency = memory.residency()
            loader = memory.loader(residency, reader, residency.fill(hot))
            unless_open.callback(loader.end)
        order = order_of(how.scheduler, delays, how.workers)
        controller = StepController(residency, loader.queue, PrefetchGate(), order, loader.run)
        engine = Engine(loader, controller)
        unless_open.callback(engine.close)
        plug(model, source=EngineSource(engine), engine=engine)
        session = Session(model, engine, store, memory.budget, again)
        if heat:
            session.enter(heat.learning(loader.run))
        unless_open.pop_all()
    return model


@dataclass(frozen=True)
class Memory:
    """How a budget is divided.

    budget : bytes of all of it.
    kept : bytes of the pools.
    most : slots of a kind that the largest budget takes.
    link : to a GPU, if it is its memory.
    host : slots of pinned memory beside that, else for all.
    spare : of `Residency`.
    hot : experts, as of `Heat`.
    """

    store: ExpertStore
    how: Offloading
    budget: int
    kept: int
    sizes: Sizes
    pools: Pools
    staging: int
    most: int
    link: Link | None
    host: int
    spare: int
    hot: Sequence[ExpertKey] = ()

    @classmethod
    def divided(
        cls, store: ExpertStore, budget: str | float | int, how: Offloading, own: int = 0
    ) -> Memory:
        """`own` bytes are the model's already. Raises ValueError: less than one load in flight and those
        prefetched; a plan beyond the budget; beside a GPU, less of the CPU's memory than works, or more."""
        device, L, E, K = how.on, store.spec.L, store.spec.E, store.spec.K
        link = link_to(device)
        pools = None if callable(how.plan) else getattr(how.plan, "pools", how.plan)
        compact = store.multiplied if how.compact == "kernels" else bool(how.compact)
        # Parts of experts are kept in slots of their own, so a plan for them needs the chunks apart.
        whole_only = pools is None or not (pools.C or pools.S or pools.E)
        as_stored = compact or device.type != "cpu" or not store.few_bits
        sizes = Sizes.of(store, None if whole_only and as_stored else False)
        exchanges = link is not None and sizes.in_place
        sizes = replace(sizes, far=link is not None and not exchanges)
        if how.hybrid and not sizes.in_place:
            raise ValueError(
                f"hybrid computes experts where they lie, as they are stored, but those of "
                f"{store.folder} are decoded first, or kept in parts: convert them with --codec raw or "
                f"bf12, and give no plan"
            )
        ahead, scratch = how.ahead or 0, DEPTH * store.scratch  # of each thread that reads
        most = L * E * sizes.full + scratch
        most += max(how.staging or how.workers + 2, ahead + 1) * sizes.in_flight
        room = parse_budget(budget, most, store.weights_bytes, lambda: available_on(device) + own)
        loads = max(how.staging or 1, ahead + 1)
        if room < (least := loads * sizes.in_flight + scratch):
            raise ValueError(
                f"the budget is {room:,} bytes; {least:,} bytes are the least that works: {loads} "
                f"in-flight expert(s), read and decoded{f', {ahead} of them prefetched' * bool(ahead)}; "
                f"give '{-(-least // 10**6)}MB' or more"
            )
        there = available_on(device)
        if link and (needed := min(room, most) + store.weights_bytes) > there:
            raise ValueError(
                f"{needed:,} bytes of {device} are needed, for experts and all other weights, and {there:,} "
                f"are left: give less, or auto"
            )
        # On a GPU a load takes less than a call that computes some of them: so there is room for two tokens' experts.
        workers = how.workers if device.type == "cpu" else 2 * K - 2
        if how.executes:  # all that a layer will execute is loaded while the one before computes
            workers = max(workers, K)
        room_left = room - scratch
        if link and room_left >= (K + 2) * sizes.in_flight:
            ahead = max(ahead, K - 1)  # scratch slots of a token that runs alone
        copies = L if how.scope == "layer" else 1
        given = pools, how.scope, workers, how.staging, ahead
        pools, staging = divide(room_left, sizes, L, E, *given)
        kept = room_left - staging * sizes.in_flight
        spare = 0  # slots that are free before a token that a GPU runs alone, which fills them
        if exchanges and how.executor == "fast" and how.scope == "model" and pools.F < L * E:
            spare = min(-(-pools.F // SPARE), L * K)
        stay = min(pools.F * copies, L * E) - spare
        beside = copies * pools.nbytes(0, sizes.sm, sizes.e)
        beside += staging * sizes.far * (sizes.full + sizes.sm + sizes.e)
        host = host_slots(store, sizes, how.host, stay, beside) if link else L * E
        most = most // sizes.full + K
        return cls(store, how, room, kept, sizes, pools, staging, most, link, host, spare)

    def again(self, model: Any, delays: Any, budget: str | float | int, own: int = 0) -> Memory:
        """As `divided`, when the model is there, by which a plan may be found."""
        store, how = self.store, self.how
        other = Memory.divided(store, budget, how, own + store.weights_bytes)
        if callable(how.plan) and other.sizes.e:
            other = replace(other, pools=how.plan(model, other, delays))
        return other

    def residency(self) -> Residency:
        how, spec = self.how, self.store.spec
        return Residency(spec.L, spec.E, self.pools, how.cache, how.scope, spare=self.spare)

    def reader(self, hybrid: int) -> Reader:
        how = self.how
        options = {"mode": how.mode, "bandwidth": how.bandwidth, "verify": how.verify}
        pool = how.on, self.host, self.exchanges
        if hybrid:
            return Host(self.store, hybrid, *pool, **options)
        if self.link:
            return HostPool(self.store, *pool, **options)
        return Reader(self.store, **options)

    @property
    def exchanges(self) -> bool:
        """Whether a GPU computes experts as they lie, which come and go."""
        return self.link is not None and self.sizes.in_place

    @cached_property
    def order(self) -> list[ExpertKey]:
        """All experts, those that shall be near first: the hot ones, the most popular or, if that is
        not known, the first of each layer."""
        counts, shape = self.how.popular, (self.store.spec.L, self.store.spec.E)
        if counts is None or counts.shape != shape:
            counts = torch.zeros(shape, dtype=torch.int64)
        others = sorted(experts_of(self.store), key=lambda key: -counts[key].item())
        return [*dict.fromkeys((*self.hot, *others))]

    def first(self, residency: Residency) -> list[ExpertKey]:
        """The experts that the engine opens with: all, or on a GPU those that fit; none where they
        would be read into memory that the CPU computes from, or a policy knows the run to come."""
        opens = self.exchanges and isinstance(self.how.cache, str | type)
        return residency.fill(self.order if opens else ())

    def fill(self, loader: Loader | None, reader: Reader, first: list[ExpertKey]) -> None:
        """Read the experts that the engine opens with, each once."""
        if first:
            fill(loader, first)
        if self.link:
            there = {*first}
            reader.hold(key for key in self.order if key not in there)
            if len(there) == len(self.order):
                reader.close()  # nothing pinned stays

    @property
    def slots(self) -> dict[str, int]:
        """How many of each kind."""
        copies = self.store.spec.L if self.how.scope == "layer" else 1
        return slot_counts(self.pools, copies, self.staging)

    def settings(self, residency: Residency, first: Iterable[ExpertKey] = ()) -> EngineSettings:
        """What a simulation needs of it."""
        how, spec = self.how, self.store.spec
        ahead = min(spec.K, self.staging - 1) if how.ahead is None else how.ahead
        return EngineSettings(
            spec,
            self.pools,
            how.cache,
            how.scope,
            how.workers,
            self.staging,
            0 if residency.holds_all else ahead,
            experts_bytes(self.store),
            self.store.weights_bytes,
            how.scheduler,
            how.on.type,
            tuple(first),
            self.spare,
        )

    def loader(
        self, residency: Residency, reader: Reader, first: Iterable[ExpertKey] = ()
    ) -> Loader:
        """What loads the model's experts into this memory, and records it."""
        slots = Slots(self.store, self.slots, self.sizes, self.how.on, self.link, self.most)
        workers, readers = self.how.workers, DEPTH
        if residency.holds_all:
            workers = readers = threads_to_fill(slots, self.store.scratch)
        if self.exchanges:
            readers = min(readers, self.host - 1)
        run = EngineRun(self.settings(residency, first), residency)
        loader = Loader(slots, reader, workers, run, readers)
        if not (self.link or residency.holds_all):
            with loader.changing() as queue:
                queue.warm(first, loader.ready.put)
        return loader


def host_slots(
    store: ExpertStore, sizes: Sizes, budget: str | float | int, stay: int, beside: int = 0
) -> int:
    """How many slots of pinned memory a budget gives to the experts that do not stay on the GPU, and
    to a few that are spare where they come and go (`moelab.offloading.tiers`); `beside` bytes of it
    are for compressed parts, kept or on their way. ValueError for less than works, or more than
    there is."""
    spec, size = store.spec, Sizes.of(store, True).full
    least, everyone = 0, spec.L * spec.E
    most, away = everyone, everyone - stay
    if sizes.in_place:
        least = DEPTH + 1
        landing = least if away else (os.cpu_count() or 1) + WAITING
        most = max(landing, away + max(1, min(2 * spec.K, away // 50)))
    needs = least * size + beside
    room = parse_budget(budget, everyone * size + beside, store.weights_bytes)
    if room < needs:
        raise ValueError(
            f"host is {room:,} bytes; {needs:,} are the least that works: {least} experts that are "
            f"read, or exchanged{', and parts of compressed ones' * bool(beside)}; give "
            f"'{-(-needs // 10**6)}MB' or more"
        )
    count = min(most, (room - beside) // size)
    taken = count * size + beside
    if budget != "auto" and taken > (there := available()):
        raise ValueError(
            f"host is {room:,} bytes, of which {taken:,} are needed, and this machine has {there:,} "
            f"left: give less, or auto; what does not fit is read when it is needed"
        )
    return count


def _bound_code_caches() -> None:
    """Let oneDNN, by which torch multiplies bf16, keep less code, unless it is in use already.

    Experts of a prompt get ever other numbers of tokens. For each shape oneDNN keeps 0.7 MB of
    code, and so does what calls it: 1024 each, unless the first use finds a smaller number here. A
    layer's shapes must fit, or each expert's code is made anew: with 8, prompts of 128 tokens took
    twice as long, with 128 those of 512 by a fifth longer."""
    for cache, shapes in (("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256"), ("LRU_CACHE_CAPACITY", "8")):
        os.environ.setdefault(cache, shapes)
