"""`moelab.offload(store, budget)`: a transformers model whose experts stay on disk, all but what the budget holds.

Source: ZipMoE §3.1 (real-time inference). Everything of the model but its routed experts is loaded; the experts'
modules hand each call to the engine. `generate`, streaming, batches, sampling and padding are transformers' own.

    budget = pools (F, C, S, E: what is kept) + staging (what is on its way)
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from moelab.cache.planning import Plan
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.experts import make
from moelab.models import opening, plug
from moelab.models.direct import CheckpointStore
from moelab.models.patches import Patches
from moelab.offloading.budget import parse_budget
from moelab.offloading.engine import Engine, EngineSource
from moelab.offloading.metrics import Forward, metrics, process
from moelab.offloading.delays import quick_delays, same_bits_on_one_thread
from moelab.offloading.loads import Fetched
from moelab.offloading.slots import Sizes, Slots
from moelab.schedule.requests import Delays
from moelab.store.headers import NAMES
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader


def offload(store: ExpertStore | str | Path | None, budget: str | float | int = "auto", *, policy: Any = "lru",
            plan: Pools | Plan | None = None, scope: str = "model", margin: float | None = None, workers: int = 1,
            staging: int | None = None, ahead: int = 0, delays: Delays | None = None,
            device: str | torch.device = "cpu", executor: Any = None, **reading: Any) -> Any:
    """Open the model of a store with its experts offloaded; its output is that of transformers' `eager`, bit for bit.

    Parameters
    ----------
    store : an `ExpertStore` or its folder, see `moelab.convert`; or a checkpoint's folder or hub id, whose experts are
        then read from its own files (`moelab.models.direct`), or None for the small model.
    budget : memory for experts: bytes, a fraction of what all of them take, "2GB", "50%" or "auto" (`parse_budget`).
        It is allocated at once and never exceeded.
    policy, scope, margin : who is evicted, see `moelab.cache.residency.Residency`; `policy` is a name of
        `moelab.cache.policies.POLICIES` or your own.
    plan : how the budget is divided into pools; None keeps whole experts only. `moelab.cache.planning.plan` makes one.
    workers : L, threads that decompress.
    staging : experts that may be on their way at the same time beyond those that are kept; by default workers + 2,
        fewer if the budget is small.
    ahead : experts that may be fetched for layers to come: in prefill all of the next layer's, in decode those that
        somebody announces (`moelab.speculate.Speculation`). Their memory is part of the budget.
    delays : what an expert's parts cost here, measured in a moment if not given (`moelab.offloading.profile`).
    device : "cpu", or a GPU: its memory then holds the experts, and chunks pass through pinned memory (not yet run).
    executor : who computes the experts: a name of `moelab.experts.EXECUTORS` ("fast"), or your own; equal to `eager`
        within the dtype's tolerance only. None: transformers' own operations, bit for bit.
    reading : options of `moelab.store.reader.Reader`: mode, bandwidth, verify.

    Returns
    -------
    The model. `model.moelab` is its `Offloading`: metrics, timeline, residency, `cancel()`, `close()`.

    Raises
    ------
    FileNotFoundError, StoreError : no store, or a damaged one.
    ValueError : a budget that is too small (the message says the least), a plan beyond the budget, unknown options.
    """
    model = opening.examine(store.folder if isinstance(store, ExpertStore) else store)
    if not isinstance(store, ExpertStore):
        store = model.checkpoint.store or CheckpointStore(model, model.dtype())
    if workers < 1:
        raise ValueError(f"workers is {workers}; at least one thread must decompress")
    if ahead < 0:
        raise ValueError(f"ahead is {ahead}; it is a number of experts, 0 or more")
    pools = getattr(plan, "pools", plan)
    # Parts of experts are kept in slots of their own, so a plan for them needs the chunks apart.
    whole_only = pools is None or not (pools.C or pools.S or pools.E)
    sizes = Sizes.of(store, None if whole_only and torch.device(device).type == "cpu" else False)
    L, E = len(store.layers), max(len(layer.experts) for layer in store.layers)
    everything = L * E * sizes.full + (ahead + (staging or workers + 2)) * sizes.in_flight + store.scratch
    room = parse_budget(budget, everything, store.weights_bytes)
    pools, staging = divide(room - ahead * sizes.in_flight - store.scratch, sizes, L, E, pools, scope, workers, staging)
    copies, moving = L if scope == "layer" else 1, staging + ahead
    count = {"full": copies * pools.F + moving, "e": copies * (pools.C + pools.E) + moving,
             "sm": copies * (pools.C + pools.S) + moving}
    residency = Residency(L, E, pools, policy, scope, margin)
    with contextlib.ExitStack() as unless_open:         # whatever fails, no thread, file or memory is left
        reader = Reader(store, **reading)
        unless_open.callback(reader.close)
        model = opening.open_model(model, experts="external", device=device)
        engine = Engine(residency, Slots(store, count, sizes, device), reader, delays or quick_delays(store, model),
                        workers, ahead, make(executor) if isinstance(executor, str) else executor)
        unless_open.callback(engine.close)
        engine.one_thread = same_bits_on_one_thread(store, model)
        stored = {entry.dtype for layer in store.layers for entries in layer.experts for entry in entries.values()}
        cast = stored != {NAMES[model.dtype]}
        plug(model, executor=engine, source=EngineSource(engine, model.dtype, cast) if executor else None)
        model.moelab = Offloading(model, engine, store, pools, staging, room)
        unless_open.pop_all()
    return model


def divide(budget: int, sizes: Sizes, L: int, E: int, plan: Pools | None, scope: str, workers: int,
           staging: int | None) -> tuple[Pools, int]:
    """The pools (per layer if that is the scope) and the staging that fit into a budget of so many bytes."""
    least = (staging or 1) * sizes.in_flight
    if budget < least:
        raise ValueError(f"the budget is {budget / 1e6:,.1f} MB, but {staging or 1} expert(s) on the way, read and "
                         f"decoded, take {least / 1e6:,.1f} MB ({least:,} bytes): that is the least that works")
    if staging is None:
        staging = max(1, min(workers + 2, budget // (4 * sizes.in_flight)))
    room, copies = budget - staging * sizes.in_flight, L if scope == "layer" else 1
    if plan is None:
        return Pools(F=min(E * L, room // sizes.full) // copies), staging
    needed = copies * plan.nbytes(sizes.full, sizes.sm, sizes.e)
    if needed > room:
        raise ValueError(f"the plan {plan} takes {needed / 1e6:,.1f} MB; of the budget of {budget / 1e6:,.1f} MB, "
                         f"{room / 1e6:,.1f} MB are left beside {staging} experts on their way")
    return plan, staging


class Offloading:
    """What a model that is offloaded tells about itself, as `model.moelab`; a context manager that closes it.

    Attributes
    ----------
    store, pools, staging, budget : what it runs with; `budget` in bytes.
    residency : what is in memory, and the counts of hits and misses.
    timeline : the `Event`s since the last `reset`.
    forwards : start, end, tokens and phase of each forward pass since then.
    steps : what they routed: for each forward a list of (layer, {expert: tokens}), which the simulator takes.
    guesses : what was announced to be fetched ahead: for each forward a list of (layer, experts), for the simulator.
    """

    def __init__(self, model: Any, engine: Engine, store: ExpertStore, pools: Pools, staging: int, budget: int) -> None:
        self.engine, self.store, self.pools, self.staging, self.budget = engine, store, pools, staging, budget
        self.residency, self.timeline = engine.residency, engine.timeline
        self._calls: dict[int, object] = {}             # thread → the generation, or the forward alone, that it runs
        self._alone: object = None                      # the latest of the latter
        self._cancelled: set[object] = set()
        self.reset()
        engine.on_layer, engine.on_guess = self._on_layer, self._on_guess
        engine.cancelled = self._is_cancelled
        self._model = id(model)
        alone = [model.get_encoder()] if model.config.is_encoder_decoder else []        # `generate` calls it by itself
        with Patches() as patches:
            for module in (model, *alone):
                patches.hook(module.register_forward_pre_hook, self._begin_forward, with_kwargs=True)
                patches.hook(module.register_forward_hook, self._end_forward, always_call=True)
            if hasattr(type(model), "generate"):
                patches.wrap(model, "generate", lambda below: functools.partial(self._counted, below))
            self._patches = patches.pop_all()
        weakref.finalize(model, engine.close)

    def reset(self) -> None:
        """Forget events, forwards and counts; what is in memory stays."""
        self.timeline.clear()
        self.residency.reset_counters()
        self.engine.pipeline.fetched = Fetched()
        self.forwards: list[Forward] = []
        self.steps: list[list[tuple[int, dict[int, int]]]] = []
        self.guesses: list[list[tuple[int, list[int]]]] = []
        self._forward: tuple[int, float, int, str] | None = None        # module, since when, tokens, phase

    def metrics(self) -> dict[str, Any]:
        """TTFT, TPOT, hit rates, bytes a token, stall …, since the last `reset`: see `moelab.offloading.metrics`."""
        counters = self.residency.counters
        return metrics(list(self.timeline), self.forwards, {
            "hits": {state.value: n for state, n in counters.hits.items()}, "misses": counters.misses,
            "evictions": counters.evictions, "rereads": counters.rereads,
            "fetched_ahead": asdict(self.engine.pipeline.fetched)}) | process()

    def cancel(self) -> bool:
        """End the generations that run with `Cancelled`; False if none is running."""
        self._cancelled = {call for call in list(self._calls.values()) if call is not None}
        self.engine.pipeline.wake()
        return bool(self._cancelled)

    def close(self) -> None:
        """Stop the threads and free the memory; the model cannot be used any more."""
        self._patches.close()
        self.engine.close()

    def __enter__(self) -> Offloading:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------------- what the model reports

    # Each of these may be interrupted, and what would come after it is then not called. So nothing is counted up and
    # down: what begins takes the place of whatever was left.

    def _is_cancelled(self) -> bool:
        return bool(self._cancelled) and self._calls.get(threading.get_ident()) in self._cancelled

    def _counted(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Between two tokens no forward runs, but the generation does: `cancel` must know."""
        me = threading.get_ident()
        outer = self._calls.get(me) if self._generates() else None      # or one that was interrupted has left it
        self._calls[me], self._forward = object(), None
        try:
            return generate(*args, **kwargs)
        finally:
            self._calls[me] = outer

    def _generates(self) -> bool:
        """Whether this thread is within a generation already: assisted by itself, a model generates while it does."""
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code is Offloading._counted.__code__ and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False

    def _begin_forward(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if id(module) != self._model and self._forward is not None and self._forward[0] == self._model:
            return                                              # the encoder, called by the model
        ids = next((x for x in (kwargs.get("decoder_input_ids"), kwargs.get("input_ids"), kwargs.get("inputs_embeds"),
                                *args[:1]) if x is not None), None)
        tokens, length = (ids.shape[0] * ids.shape[1], ids.shape[1]) if ids is not None else (0, 0)
        cache = kwargs.get("past_key_values")
        seen = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
        if self._calls.get(threading.get_ident()) in (None, self._alone):
            self._calls[threading.get_ident()] = self._alone = object()
        del self.steps[len(self.forwards):], self.guesses[len(self.forwards):]
        self.steps.append([])
        self.guesses.append([])
        phase = "prefill" if length > 1 or not seen else "decode"
        self._forward = id(module), self.engine.begin_forward(), tokens, phase

    def _end_forward(self, module: Any, *_: Any) -> None:
        if self._forward is None or self._forward[0] != id(module):
            return
        (_, start, tokens, phase), self._forward = self._forward, None
        self.forwards.append(Forward(start, self.engine.end_forward(), tokens, phase))
        self.timeline.compact()
        if self._calls.get(threading.get_ident()) is self._alone:
            self._calls[threading.get_ident()] = None

    def _on_layer(self, layer: int, tokens: dict[int, int]) -> None:
        if self._forward is not None:                   # else a part of the model was called by itself
            self.steps[-1].append((layer, tokens))

    def _on_guess(self, layer: int, experts: list[int]) -> None:
        if self._forward is not None:
            self.guesses[-1].append((layer, experts))
