"""A transformers model whose experts stay on disk, all but what a budget holds: what
`open_model(memory=…)` builds.

Source: ZipMoE §3.1 (real-time inference). Everything of the model but its routed experts is loaded;
the experts' modules hand each call to the engine.

    budget = pools (F, C, S, E: what is kept) + staging (in-flight loads, demanded or prefetched)
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moelab.cache.policies import DEFAULT_POLICY
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.calibration import Calibration
from moelab.checkpoint import opening
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.experts import CheckpointStore
from moelab.models import plug
from moelab.models.identity import identity
from moelab.offloading.budget import available_on, parse_budget
from moelab.offloading.engine import Engine, EngineSource
from moelab.offloading.filling import filling
from moelab.offloading.link import PinnedReader
from moelab.offloading.pipeline import DEPTH
from moelab.offloading.requests import Delays
from moelab.offloading.run import EngineRun, EngineSettings
from moelab.offloading.session import Session
from moelab.offloading.slots import (
    Sizes,
    Slots,
    divide,
    every_one_is_multiplied,
    has_few_bits,
    slot_counts,
)
from moelab.offloading.threads import one_thread_pays
from moelab.registry import make
from moelab.simulation.microbenchmarks import quick_delays
from moelab.store.headers import NAMES
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader
from moelab.zipmoe.affinity import default_order, naive_order
from moelab.zipmoe.planner import TIMED, WARM, best_pools, drawn, shares_of
from moelab.zipmoe.planning import CachePlan


def offload(
    store: ExpertStore | str | Path | None,
    budget: str | float | int = "auto",
    *,
    policy: Any = DEFAULT_POLICY,
    plan: Pools | CachePlan | str | None = None,
    scope: str = "model",
    margin: float | None = None,
    workers: int = 1,
    staging: int | None = None,
    ahead: int | None = 0,
    delays: Delays | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str = "auto",
    executor: Any = None,
    compact: bool | str = False,
    calibration: Calibration | None = None,
    scheduler: Any = "default",
    **reading: Any,
) -> Any:
    """Open the model of a store with its experts offloaded; its output is that of transformers'
    `eager`, bit for bit.

    store : an `ExpertStore` or its folder; a checkpoint's folder or hub id, whose own files experts
        are then read from (`moelab.checkpoint.experts`); None for the small model.
    budget : memory for experts, see `parse_budget`; allocated at once and never exceeded. Where all
        of them fit, they are read while the model is opened, and no prompt reads any.
    policy, scope, margin : who is evicted, see `moelab.cache.residency.Residency`.
    plan : how the budget is divided into pools; None keeps whole experts only, "auto" chooses by
        simulation where experts are compressed (`moelab.zipmoe.planner`), and keeps whole ones
        where they are not.
    workers : threads that decompress.
    staging : loads in flight beyond the experts that are kept; by default workers + 2, on a GPU 2K,
        fewer if the budget is small.
    ahead : experts that may be prefetched for layers to come: in prefill all of the next layer's,
        in decode those that are announced (`moelab.speculate.Speculation`), and the first layer's
        for the token after (`CrossToken`). They are staged; None for up to K, as many as the
        staging has room for beside one that is demanded, so that the cache is none the smaller.
        None are prefetched where all are in memory.
    delays : of an expert's parts on this machine; measured within a second if not given
        (`quick_delays`).
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
        changes. By default what is sent from pinned memory as it lies is sent in ascending order.
    calibration : of this very model; "auto" takes popularity from it.
    reading : options of `moelab.store.reader.Reader`: mode, bandwidth, verify.

    Returns the model. `model.moelab` is its `Session`: metrics, run, residency, `cancel()`,
    `close()`. Raises FileNotFoundError or StoreError without a store or for a damaged one;
    ValueError for a budget that is too small (the message says the least), a plan beyond the
    budget, or unknown options."""
    checkpoint = Checkpoint.at(store)
    store = checkpoint.store or CheckpointStore(checkpoint, checkpoint.dtype(dtype))
    order = make("scheduler", scheduler) if isinstance(scheduler, str) else scheduler
    if workers < 1:
        raise ValueError(f"workers is {workers}; at least one thread must decompress")
    if ahead is not None and ahead < 0:
        raise ValueError(f"ahead is {ahead}; it is a number of experts, 0 or more")
    if isinstance(plan, str) and plan != "auto":
        raise ValueError(
            f"the plan is {plan!r}; it must be pools, what `moelab.zipmoe.planning.plan` makes, or 'auto'"
        )
    auto = isinstance(plan, str)
    pools = None if auto else getattr(plan, "pools", plan)
    # Parts of experts are kept in slots of their own, so a plan for them needs the chunks apart.
    whole_only = pools is None or not (pools.C or pools.S or pools.E)
    compact = every_one_is_multiplied(store) if compact == "kernels" else compact
    device, pinned = torch.device(device), reading.get("mode") == "pinned"
    if device.type not in ("cpu", "cuda") or pinned and device.type == "cpu":
        raise ValueError(
            f"the device is {str(device)!r}; experts can be offloaded for the CPU and for CUDA GPUs, and "
            f"kept with mode='pinned' for the latter only"
        )
    in_place = whole_only and (compact and device.type == "cpu" or not has_few_bits(store))
    sizes = Sizes.of(store, None if in_place else False)
    if pinned and in_place and order is default_order:
        order = naive_order  # experts that are sent take equally long
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
    if (auto := auto and sizes.sm > 0) and calibration is None:
        raise ValueError(
            "plan='auto' divides the memory by how popular experts are: give calibration=, which "
            "`moelab calibrate MODEL FILE` makes"
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
            model = opening.build(checkpoint, dtype, external=True).to(device)
            held = loaded()
        delays = delays or quick_delays(store, model, sizes.in_place, compact)
        if auto and not held:
            shares = shares_of(calibration.require(identity(model), store.spec))
            pools = best_pools(
                shares,
                drawn(shares, WARM + TIMED),
                kept - staging * sizes.in_flight,
                sizes,
                delays,
                workers=workers,
                staging=staging,
                policy=policy,
                scope=scope,
                margin=margin,
            )[0].pools
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
            delays,
            store.weights_bytes,
            scheduler,
            device.type,
        )
        run = EngineRun(settings, residency)
        engine = Engine(
            residency,
            slots,
            reader,
            delays,
            run,
            workers,
            ahead,
            make("executor", executor) if isinstance(executor, str) else executor,
            one_thread_pays(store, model, sizes.in_place),
            order,
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
        plug(model, executor=engine, source=source if executor else None)
        Session(model, engine, source, store, room)
        unless_open.pop_all()
    return model
