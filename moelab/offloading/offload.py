"""A transformers model whose experts stay on disk, all but what a budget holds: what
`open_model(memory=…)` builds.

Source: ZipMoE §3.1 (real-time inference). Everything of the model but its routed experts is loaded;
the experts' modules hand each call to the engine.

    budget = pools (F, C, S, E: what is kept) + staging (in-flight loads, demanded or prefetched)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moelab.cache.policies import DEFAULT_POLICY
from moelab.cache.residency import Residency
from moelab.checkpoint import opening
from moelab.checkpoint.direct import CheckpointStore
from moelab.models import plug
from moelab.offloading.budget import available_on, parse_budget
from moelab.offloading.engine import Engine, EngineSource
from moelab.offloading.link import PinnedReader
from moelab.offloading.load_queue import Order, given_order, plain_order
from moelab.offloading.loading import DEPTH, filling
from moelab.offloading.run import EngineRun, EngineSettings, experts_bytes
from moelab.offloading.session import Session
from moelab.offloading.slots import (
    Sizes,
    Slots,
    divide,
    slot_counts,
)
from moelab.offloading.threads import one_thread_pays
from moelab.registry import make
from moelab.store.headers import NAMES
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader


def offload(
    store: ExpertStore | str | Path | None,
    budget: str | float | int = "auto",
    *,
    policy: Any = DEFAULT_POLICY,
    plan: Any = None,
    scope: str = "model",
    margin: float | None = None,
    workers: int = 1,
    staging: int | None = None,
    ahead: int | None = 0,
    delays: Any = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str = "auto",
    executor: Any = None,
    compact: bool | str = False,
    scheduler: Any = "default",
    **reading: Any,
) -> Any:
    """Open the model of a store with its experts offloaded; its output is that of transformers'
    `eager`, bit for bit.

    store : an `ExpertStore` or its folder; a checkpoint's folder or hub id, whose own files experts
        are then read from (`moelab.checkpoint.direct`); None for the small model.
    budget : memory for experts, see `parse_budget`; allocated at once and never exceeded. Where all
        of them fit, they are read while the model is opened, and no prompt reads any.
    policy, scope, margin : who is evicted, see `moelab.cache.residency.Residency`.
    plan : how the budget is divided into pools, or a function that says so where experts are
        compressed, as `moelab.zipmoe.planner.auto_pools`; None keeps whole experts only.
    workers : threads that decompress.
    staging : loads in flight beyond the experts that are kept; by default workers + 2, on a GPU 2K,
        fewer if the budget is small.
    ahead : experts that may be prefetched for layers to come: in prefill all of the next layer's,
        in decode those that are announced (`moelab.speculate.Speculation`). They are staged; None
        for up to K, as many as the staging has room for beside one that is demanded, so that the
        cache is none the smaller. None are prefetched where all are in memory.
    delays : what schedulers and plans are told of an expert's parts on this machine, or a function
        that measures it where they need it, as `moelab.zipmoe.measure.quick_delays`.
    device : "cpu", or a CUDA GPU, whose memory the budget then is for. Experts pass through pinned
        memory; with mode="pinned" all of them stay there, as they are stored, and nothing is read
        from the disk any more.
    dtype : to compute in; "auto" takes what config.json says. Experts stored in another are cast
        when they are used.
    executor : a registered name or your own, equal to `eager` within the dtype's tolerance; None:
        bit for bit.
    compact : keep experts of few bits as they are, for kernels that multiply them so; other
        executors unpack them at each use, where they are otherwise unpacked once a load. "kernels":
        only if kernels multiply all of them.
    scheduler : orders reads and decoding: a registered name or your own; no bit of the output
        changes. By default `plain_order`, where nothing is known of delays; what is sent from
        pinned memory as it lies is sent in ascending order.
    reading : options of `moelab.store.reader.Reader`: mode, bandwidth, verify.

    Returns the model. `model.moelab` is its `Session`: metrics, run, residency, `cancel()`,
    `close()`. Raises FileNotFoundError or StoreError without a store or for a damaged one;
    ValueError for a budget that is too small (the message says the least), a plan beyond the
    budget, or unknown options."""
    model = opening.examine(store.folder if isinstance(store, ExpertStore) else store)
    if not isinstance(store, ExpertStore):
        store = model.checkpoint.store or CheckpointStore(model, model.dtype(dtype))
    if workers < 1:
        raise ValueError(f"workers is {workers}; at least one thread must decompress")
    if ahead is not None and ahead < 0:
        raise ValueError(f"ahead is {ahead}; it is a number of experts, 0 or more")
    if isinstance(plan, str):
        raise ValueError(
            f"the plan is {plan!r}; it must be pools, or what `moelab.zipmoe.planning.plan` makes"
        )
    pools = None if callable(plan) else getattr(plan, "pools", plan)
    # Parts of experts are kept in slots of their own, so a plan for them needs the chunks apart.
    whole_only = pools is None or not (pools.C or pools.S or pools.E)
    compact = store.multiplied if compact == "kernels" else compact
    device, pinned = torch.device(device), reading.get("mode") == "pinned"
    if device.type not in ("cpu", "cuda") or pinned and device.type == "cpu":
        raise ValueError(
            f"the device is {str(device)!r}; experts can be offloaded for the CPU and for CUDA GPUs, and "
            f"kept with mode='pinned' for the latter only"
        )
    in_place = whole_only and (compact and device.type == "cpu" or not store.few_bits)
    sizes = Sizes.of(store, None if in_place else False)
    L, E = len(store.layers), max(len(layer.experts) for layer in store.layers)
    at_least, scratch = (
        (ahead or 0) + 1,
        DEPTH * store.scratch,
    )  # staging; of each thread that reads
    everything = (
        L * E * sizes.full + max(staging or workers + 2, at_least) * sizes.in_flight + scratch
    )
    room = parse_budget(budget, everything, store.weights_bytes, partial(available_on, device))
    least = max(staging or 1, at_least) * sizes.in_flight + scratch
    if room < least:
        raise ValueError(
            f"the budget is {room:,} bytes; {least:,} bytes are the least "
            f"that works: {max(staging or 1, at_least)} in-flight expert(s), read and decoded"
            + f", {ahead} of them prefetched" * bool(ahead)
            + f"; give '{-(-least // 10**6)}MB' or more"
        )
    kept = room - scratch
    if (
        staging is None and device.type != "cpu"
    ):  # a load takes less than a call that computes some of them
        staging = max(1, min(2 * store.spec.K, kept // (4 * sizes.in_flight)))
    pools, staging = divide(kept, sizes, L, E, pools, scope, workers, staging, ahead or 0)
    residency = Residency(L, E, pools, policy, scope, margin)
    ahead = 0 if residency.holds_all else min(store.spec.K, staging - 1) if ahead is None else ahead

    def memory() -> Slots:
        return Slots(
            store, slot_counts(pools, L if scope == "layer" else 1, staging), sizes, device
        )

    # Experts of a prompt get ever other numbers of tokens. For each shape oneDNN, by which torch
    # multiplies bf16, keeps 0.7 MB of code, and so does what calls it: 1024 each, unless the first
    # use finds a smaller number here. A layer's shapes must fit, or each expert's code is made
    # anew: with 8, prompts of 128 tokens took twice as long, with 128 those of 512 by a fifth
    # longer.
    for cache, shapes in (("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256"), ("LRU_CACHE_CAPACITY", "8")):
        os.environ.setdefault(cache, shapes)
    with contextlib.ExitStack() as unless_open:  # whatever fails, no thread, file or memory is left
        reader = (
            PinnedReader(store, device, **reading | {"mode": "auto"})
            if pinned
            else Reader(store, **reading)
        )
        unless_open.callback(reader.close)
        with (
            filling(slots := memory(), reader)
            if residency.holds_all
            else contextlib.nullcontext(dict) as loaded
        ):
            model = opening.open_checkpoint(model, experts="external", dtype=dtype, device=device)
            held = loaded()
        if callable(delays):
            delays = delays(store, model) if sizes.sm or scheduler != "default" else None
        if callable(plan) and sizes.sm and not held:
            room = kept - staging * sizes.in_flight
            pools = plan(
                model, store.spec, room, sizes, delays, workers, staging, policy, scope, margin
            )
            residency = Residency(L, E, pools, policy, scope, margin)
        if held:
            residency.fill()
        else:
            slots = memory()
            slots.touch()
        settings = EngineSettings(
            store.spec,
            pools,
            policy,
            scope,
            margin,
            workers,
            staging,
            ahead,
            experts_bytes(store),
            store.weights_bytes,
            scheduler,
            device.type,
        )
        run = EngineRun(settings, residency)
        engine = Engine(
            residency,
            slots,
            reader,
            run,
            _bound(scheduler, delays, workers, pinned and sizes.in_place),
            workers,
            ahead,
            not sizes.in_place and one_thread_pays(store, model),
            held,
        )
        unless_open.callback(engine.close)
        stored = {
            entry.dtype
            for layer in store.layers
            for entries in layer.experts
            for entry in entries.values()
        }
        source = EngineSource(engine, model.dtype, cast=stored != {NAMES[model.dtype]})
        run = make("executor", executor) if isinstance(executor, str) else executor
        plug(model, executor=run, source=source, engine=engine)
        Session(model, engine, source, store, room)
        unless_open.pop_all()
    return model


def _bound(scheduler: Any, delays: Any, workers: int, sends: bool) -> Callable[..., Order]:
    """A scheduler as the engine calls it, with requests alone. sends : whether experts are sent from
    pinned memory as they lie, which takes equally long."""
    if scheduler == "default" and (sends or delays is None):
        return given_order if sends else plain_order
    order = make("scheduler", scheduler) if isinstance(scheduler, str) else scheduler
    return lambda requests: order(requests, delays, workers)
