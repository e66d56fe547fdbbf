"""The offloading engine: an executor for the seam whose experts come from disk while others are
being computed.

Source: ZipMoE §3.3, §3.4, §4; the on-demand engine of Speculating Experts §5.1. The caller's thread
computes experts as they arrive, hits first; the results are added up in transformers' own order.

Ctrl-C may come at any line, and an error at many. Nothing tidies up then: a layer that did not
reach its last line leaves `_sound` False, and the next one begins by making everything anew from
what is certain (`_recover`)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.cache.cross_token import CANDIDATES, CrossToken
from moelab.cache.residency import Request, Residency, Step
from moelab.forks import renew_in_children
from moelab.intervals import Mean
from moelab.models.seam import SeamExperts, assignments, execute
from moelab.offloading.pipeline import Pipeline, Ready, clock
from moelab.offloading.prefetch_gate import PrefetchGate
from moelab.offloading.requests import Delays
from moelab.offloading.run import EngineRun
from moelab.offloading.slots import Slots
from moelab.offloading.threads import narrow
from moelab.specs import Event, ExpertKey, State
from moelab.store.reader import Reader, cast
from moelab.zipmoe.affinity import Order, default_order, given_order

#: choices an expert from which on a layer's tokens want all experts, so that the next layer's need
#: no guessing (§5.2)
PREFILL = 2
#: of a core, which reading and decoding use while tokens are decoded, from which on one is left to
#: them
SHARE = 0.2


class Cancelled(RuntimeError):
    """A generation was ended by `cancel()`."""

    def __init__(self) -> None:
        super().__init__("the generation was cancelled; the model can be used again")


class Engine:
    """An executor: `(x [T, H], ids [T, K], weights [T, K], experts) → [T, H]`, equal to `eager` bit
    for bit.

    residency : decides what is kept; the engine keeps exactly that.
    slots : memory for what residency may keep and for loads in flight.
    reader : of the store; closed with the engine.
    delays : of an expert's parts on this machine, for the order of reading.
    run : records what happens.
    ahead : how many experts may be prefetched into slots that nothing demanded needs.
    executor : computes instead of transformers' own operations, see `moelab.experts`; then no bit
        is promised.
    scheduler : orders reads and decoding, see `moelab.zipmoe.affinity`.
    held : slots of the experts that are in memory already, as residency has them.
    one_thread : whether one token's experts may be computed by one thread while others are loaded.
    cancelled : asked before every expert whether to end this thread's forward pass with
        `Cancelled`.
    serial : whether to compute a layer's experts only when all are there (if there is memory for
        them at once): the on-demand engine of Speculating Experts, to compare with.
    """

    def __init__(
        self,
        residency: Residency,
        slots: Slots,
        reader: Reader,
        delays: Delays,
        run: EngineRun,
        workers: int = 1,
        ahead: int = 0,
        executor: Callable[..., Tensor] | None = None,
        one_thread: bool = False,
        scheduler: Callable[..., Order] = default_order,
        held: dict[ExpertKey, dict[str, int]] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.residency, self.delays, self.workers, self.executor = (
            residency,
            delays,
            workers,
            executor,
        )
        self.run, self.timeline, self.one_thread = run, run.timeline, one_thread
        self.computes_in: torch.dtype | None = None
        self._mark, self.closed = (
            None,
            False,
        )  # since when the model does something else than experts, in a forward
        self._began, self._computed = (
            0.0,
            0.0,
        )  # the forward pass: when, and what the pipeline had computed by then
        # Its threads are started when they are needed, by `_recover`.
        self._use(Pipeline(slots, reader, workers, self.timeline, ahead, run.fetched, held=held))
        self._sound, self._step = (
            False,
            Step(-1, [], []),
        )  # the step under way; None while it is decided about
        self.cancelled: Callable[[], bool] | None = None
        self.serial = self.decoding = False
        self.gate, self._announced = PrefetchGate(), None  # (layer, experts)
        self.across = CrossToken(residency.E)
        self._one = threading.Lock()  # one layer at a time
        self._threads: int | None = None  # as many as torch had before it got fewer
        self._share = Mean()  # of cores that the pipeline uses in a decode step
        self._banks: dict[
            int, tuple[Any, Any]
        ] = {}  # of `token`, by first layer: what they are of, and they
        renew_in_children(self)

    def _use(self, pipeline: Pipeline) -> None:
        """Threads, files and memory of this pipeline go with the engine, which they do not know."""
        self.pipeline, self._with_me = pipeline, weakref.finalize(self, pipeline.end)

    def forked(self) -> None:
        """In a child process, the next layer makes everything anew."""
        self._one, self._sound = threading.Lock(), False
        self.pipeline.forked()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: SeamExperts) -> Tensor:
        with self._one:
            return self._layer(x, ids, weights, experts)  # one line: see `Pipeline._locked`

    def _layer(self, x: Tensor, ids: Tensor, weights: Tensor, experts: SeamExperts) -> Tensor:
        self._check()
        if not self._sound or self.pipeline.closed:  # or one of its threads has ended early
            self._recover()
        self._sound, self.computes_in = False, x.dtype  # which is another if the model was cast
        tokens = counts(ids, experts.num_experts)
        if (link := self.pipeline.slots.link) is not None:
            link.mark()
        if self._announced is None and ids.numel() >= PREFILL * experts.num_experts:
            self.prefetch(experts.layer + 1, torch.arange(experts.num_experts)[:, None])
        if self.residency.sees:
            self.residency.see(
                experts.layer, (x if self.decoding else x[-1:]).float().cpu().numpy()
            )
        self._other(clock(), experts.layer)
        compute = self._expert_by_expert if self.executor is None else self._with_executor
        try:
            step, ready = self._begin(experts.layer, tokens)
            out = compute(x, ids, weights, experts, step, ready)
        except BaseException:
            self.widen()  # torch's threads are not ours to keep until the next layer
            self.pipeline.halt()  # need not come so far; it spares the disk what nobody waits for
            raise
        self._sound = True
        return out

    def token(
        self, modules: list[SeamExperts], dtype: torch.dtype, compute: Callable[..., Any]
    ) -> Any:
        """A token's layers in one call (`moelab.fast.layers`), as far as their experts are
        resident for good; None where more than that is to be decided."""
        with self._one:
            return self._token(modules, dtype, compute)  # one line: see `Pipeline._locked`

    def _token(
        self, modules: list[SeamExperts], dtype: torch.dtype, compute: Callable[..., Any]
    ) -> Any:
        self._check()
        residency, find = self.residency, getattr(self.executor, "banks", None)
        if (
            find is None
            or not (self._sound and residency.holds_all)
            or residency.sees
            or self.pipeline.closed
        ):
            return None
        layers, there = (
            [of.layer for of in modules],
            (self.pipeline, self.executor, dtype, len(residency)),
        )
        if self._banks.get(layers[0], (None,))[0] != there:
            full = residency.full()
            self._banks[layers[0]] = there, find(modules, dtype, [full[layer] for layer in layers])
        if (banks := self._banks[layers[0]][1]) is None:
            return None
        self._sound, self._step = False, Step(-1, [], [])  # so `_recover` keeps all
        found = compute(*banks)
        for layer, chosen, (begin, end) in zip(
            layers[: found.layers], found.ids.tolist(), found.times.tolist()
        ):
            self._other(begin, layer)
            step = self._decide(layer, dict.fromkeys(chosen, 1), begin)
            self._report(step.requests, begin, end)
        self.executor.count_layers(found)
        self._sound = True
        return found

    def _recover(self) -> None:
        """After a layer that did not come to its end: hold only what the steps before it left
        behind, with new threads. No slot of that is given away as long as `residency` keeps it.
        Interrupted here, too, the next attempt finds the step unknown and keeps nothing."""
        step, self._step, old = self._step, None, self.pipeline
        old.stop()
        self.widen()
        if step is None:
            self.residency.clear()
        else:
            self.residency.forget(
                request.key
                for request in step.requests
                if request.state is not State.FULL or request.keep is not State.FULL
            )
        held = {
            key: slots
            for key, slots in old.queue.held.items()
            if self.residency.state(key) is not State.MISSED
        }
        self._with_me.detach()
        self._use(
            Pipeline(
                old.slots,
                old.reader,
                self.workers,
                self.timeline,
                old.queue.ahead,
                self.run.fetched,
                old,
                held,
            )
        )
        old.slots = (
            None  # or it keeps them, closed or not, until the garbage collector finds its cycle
        )
        self.pipeline.open()
        self._step, self._sound = Step(-1, [], []), True

    def _expert_by_expert(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: SeamExperts,
        step: Step,
        ready: Ready,
    ) -> Tensor:
        """The layer by transformers' own operations, each expert as it is loaded; [T, H]."""
        parts, contributions = _parts(ids, experts.num_experts), []
        # One core less for computing while others read or decode: two threads of a team of which
        # one has lost its core wait for each other. Not where they wait for a slow disk, and only
        # where that changes no bit.
        if self.one_thread and len(x) == 1 and self.pipeline.queue.keeps_up:
            self._threads = torch.get_num_threads()
            narrow(1)
        for request in self._as_ready(ready, step):
            expert, start = request.key.expert, clock()
            choice, tokens = parts[expert]
            tensors = self.weights(*request.key, x.dtype, reuse=True)
            out = experts.contribution(x, tokens, weights[tokens, choice], tensors)
            contributions.append((expert, tokens, out))
            self._executed([request], start)
        self.widen()
        return experts.accumulate(x, contributions)

    def widen(self) -> None:
        """Give torch its threads back; the next layer or forward does it again, should this one be
        interrupted."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
            self._threads = None

    def weights(
        self, layer: int, expert: int, dtype: torch.dtype | None = None, reuse: bool = False
    ) -> dict[str, Tensor]:
        """The tensors of an expert that is loaded, in `dtype`, which a store usually has them in
        already. With `reuse` they are valid until the next call."""
        tensors = self.pipeline.tensors((layer, expert), reuse)
        if dtype is None or all(
            t.dtype == dtype or not t.is_floating_point() for t in tensors.values()
        ):
            return tensors
        return cast(tensors, dtype)

    @property
    def _far(self) -> bool:
        """Whether experts are computed on a GPU: there a call of an executor takes longer to launch
        than to compute, so what is there is computed together."""
        return self.pipeline.slots.link is not None

    @property
    def opens(self) -> bool:
        """Whether predictors shall listen in this forward pass: not where nobody would ask them."""
        return bool(self.pipeline.queue.ahead) and self.gate.opens

    def wants(self, layer: int) -> bool:
        """Whether a predictor shall be asked which experts a layer will need."""
        return bool(self.pipeline.queue.ahead) and self.gate.wants(layer)

    def prefetch(self, layer: int, ids: Tensor) -> None:
        """Announce the experts [T, K] that a later layer of this forward pass will probably need.

        They are loaded behind the reads of the layer that runs next, into slots that it leaves
        (`ahead` at most; 0 is none). A prediction changes when things are read, never what is kept
        or computed."""
        if self.pipeline.queue.ahead and 0 <= layer < self.residency.L:
            experts = dict.fromkeys(ids.T.reshape(-1).tolist())  # all tokens' first choices first
            self._announced = layer, [expert for expert in experts if expert < self.residency.E]

    def _predict_next_token(self) -> None:
        """After a pass's last layer the disk rests until the first one of the next: announce its
        experts."""
        if self.gate.wants(self.across.first):
            experts = self.across.predict()[: CANDIDATES * self.pipeline.queue.ahead]
            self.prefetch(self.across.first, torch.tensor([experts]))

    def begin_forward(self, phase: str) -> float:
        """A forward pass of this phase begins; returns the time."""
        self._drop_prefetched()  # what one that was interrupted has left
        self.gate.begin(phase)
        self.across.begin(phase)
        self.decoding = phase == "decode"
        if self.decoding and self.executor is not None and not self._far:
            self._narrow()
        self._computed = sum(self.pipeline.computed.values())
        self._began = self._mark = clock()
        return self._mark

    def _narrow(self) -> None:
        """Leave the pipeline's threads the cores that they need: a team that shares one with them
        waits for it in each of its products, and the reads wait for the team. What reads past the
        page cache needs hardly any."""
        self.widen()
        if spare := int(self._share.value + 1 - SHARE):
            self._threads = torch.get_num_threads()
            narrow(max(1, self._threads - spare))

    def end_forward(self) -> float:
        """Report what came after the last layer's experts; returns the time."""
        now = clock()
        self.pipeline.settle()
        self._drop_prefetched()
        self._other(now, -1)
        self._mark = None
        self.widen()
        if self.decoding:
            self._share.add(
                max(0.0, sum(self.pipeline.computed.values()) - self._computed)
                / (now - self._began)
            )
        self.gate.ended(now - self._began)
        return now

    def _drop_prefetched(self) -> None:
        self._announced = None
        if self._sound and self.pipeline.queue.prefetched:
            with self._one:
                self._drop()  # one line: see `Pipeline._locked`

    def _drop(self) -> None:
        self._sound = False
        self.pipeline.change(self.pipeline.queue.drop_prefetched, self.across.starts)
        self._sound = True

    def close(self) -> None:
        """Stop the threads and let go of files and memory. What is running ends with an error."""
        self.closed = True
        self.pipeline.halt()
        with self._one:
            self._free()  # a layer that runs needs its memory until it has noticed

    def _free(self) -> None:
        self._sound = False
        self.pipeline.end()
        self._with_me.detach()

    def _with_executor(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: SeamExperts,
        step: Step,
        ready: Ready,
    ) -> Tensor:
        """The layer by `executor`: experts in memory together, then each as it is loaded; [T,
        H]."""
        E, (there, loads) = experts.num_experts, self._split(step, ready, self._far and len(x) == 1)
        if there:
            self._check()
            start, chosen = clock(), ids
            if loads:
                chosen = _only(there, ids, E)
            out = execute(self.executor, x, chosen, weights, experts)
            self._executed(there, start)
        else:
            out = torch.zeros_like(x)
        while loads and self._far:
            late, start = [loads.pop(self.pipeline.next_ready(ready, self._check))], clock()
            while loads and not ready.empty():
                late.append(loads.pop(self.pipeline.next_ready(ready, self._check)))
            out += execute(self.executor, x, _only(late, ids, E), weights, experts)
            self._executed(late, start)
        parts = _parts(ids, E) if loads else {}
        while loads:
            request, start = loads.pop(self.pipeline.next_ready(ready, self._check)), clock()
            choice, tokens = parts[request.key.expert]
            alone = torch.full((len(tokens), 1), request.key.expert, device=ids.device)
            part = execute(
                self.executor, x[tokens], alone, weights[tokens, choice][:, None], experts
            )
            out.index_add_(0, tokens, part)
            self._executed([request], start)
        return out

    def _executed(self, requests: list[Request], start: float) -> None:
        """Release experts that have been computed since `start`, and report it; several at once are
        one event."""
        if leaving := [request for request in requests if request.keep is not State.FULL]:
            if (link := self.pipeline.slots.link) is not None:
                link.leave(self.pipeline.queue.held[request.key]["full"] for request in leaving)
            self.pipeline.change(self.pipeline.queue.computed, leaving)
        self._report(requests, start, clock())

    def _report(self, requests: list[Request], start: float, end: float) -> None:
        self._mark, (layer, expert) = end, requests[0].key
        self.timeline.add(
            Event("compute", "expert", layer, expert if len(requests) == 1 else -1, start, end)
        )

    def _begin(self, layer: int, tokens: dict[int, int]) -> tuple[Step, Ready]:
        """Decide about a layer's step and set the threads to work."""
        self._step = None
        step = self._step = self._decide(layer, tokens, clock())
        loads = [request for request in step.requests if request.state is not State.FULL]
        pipeline, queue = self.pipeline, self.pipeline.queue
        last = queue.ahead and self._announced is None and self.across.ends(layer)
        if not (
            loads or step.evicted or self._announced or last or queue.prefetched
        ):  # nothing for the threads to do
            return step, Ready()
        ready, left = pipeline.begin(layer, loads, [key for key, _ in step.evicted])
        if left:
            pipeline.change(queue.demand, left, self.scheduler(left, self.delays, self.workers))
        if last:
            self._predict_next_token()
        if self._announced is not None:
            (later, predicted), self._announced = self._announced, None
            if later > layer:  # the other prediction follows from the steps
                self.run.predicted(later, predicted)
            if requests := self.gate.requests(self.residency, later, predicted, queue.reads):
                pipeline.change(queue.prefetch, later, requests, given_order(requests))
        return step, ready

    def _decide(self, layer: int, tokens: dict[int, int], now: float) -> Step:
        """A layer's step, of which everybody learns."""
        step = self.residency.begin(layer, tokens)
        self.gate.came(step)
        self.run.layer(layer, tokens)
        self.across.came(layer, tokens)
        self.pipeline.needed = now
        return step

    def _as_ready(self, ready: Ready, step: Step) -> Iterator[Request]:
        """The step's requests as they can be computed: hits first, in ascending order."""
        there, loads = self._split(step, ready)
        for request in there:
            self._check()
            yield request
        while loads:
            yield loads.pop(self.pipeline.next_ready(ready, self._check))

    def _split(
        self, step: Step, ready: Ready, at_once: bool = False
    ) -> tuple[list[Request], dict[ExpertKey, Request]]:
        """The requests for experts that are FULL, and the others by their key; these are waited for
        first if all are to be computed `at_once`, or `serial`."""
        loads = {
            request.key: request for request in step.requests if request.state is not State.FULL
        }
        if (
            at_once or self.serial
        ) and not self.pipeline.queue.running.waiting:  # all have slots, so all will come
            while loads:
                loads.pop(self.pipeline.next_ready(ready, self._check))
            return step.requests, loads
        return [request for request in step.requests if request.state is State.FULL], loads

    def _check(self) -> None:
        if self.closed:
            raise RuntimeError(
                "this model's engine is closed; moelab.open_model(store, memory=…) opens it again"
            )
        if self.cancelled is not None and self.cancelled():
            raise Cancelled

    def _other(self, now: float, layer: int) -> None:
        if self._mark is not None:
            if layer >= 0:
                self.gate.rested(layer, now - self.pipeline.needed)
            self.timeline.add(Event("compute", "other", layer, -1, self._mark, now))


class EngineSource:
    """An engine's experts as a source of the seam: tensors of `dtype`; `cast` if they are stored in
    another."""

    def __init__(self, engine: Engine, dtype: torch.dtype, cast: bool) -> None:
        self.engine, self.dtype, self.cast = engine, dtype, cast

    @property
    def device(self) -> torch.device:
        return self.engine.pipeline.slots.device

    def __call__(self, layer: int, expert: int) -> dict[str, Tensor]:
        try:
            return self.engine.weights(
                layer, expert, self.engine.computes_in or (self.dtype if self.cast else None)
            )
        except KeyError:
            raise ValueError(
                f"the executor asks for expert {expert} of layer {layer}, which no token was routed to, "
                f"so it has not been loaded: use this executor on a model in memory"
            ) from None

    def matrices(
        self, layer: int, experts: list[int], dtype: torch.dtype
    ) -> dict[str, tuple[str, np.ndarray]] | None:
        """As `Slots.matrices`, of loaded experts, addresses of `device`; None if they are not of
        this dtype."""
        slots, held = self.engine.pipeline.slots, self.engine.pipeline.queue.held
        if self.cast or dtype != self.dtype:
            return None
        return slots.matrices([held[layer, expert]["full"] for expert in experts], layer, experts)


def counts(ids: Tensor, E: int) -> dict[int, int]:
    """{expert: tokens} of the experts that are hit."""
    chosen = (
        ids.flatten().tolist() if len(ids) == 1 else None
    )  # a decode step: no choice comes twice, mostly
    if chosen is not None and len(once := dict.fromkeys(chosen, 1)) == len(chosen):
        once.pop(E, None)
        return once
    counts = torch.bincount(ids.flatten(), minlength=E).tolist()
    return {expert: n for expert, n in enumerate(counts[:E]) if n}


def _only(requests: list[Request], ids: Tensor, E: int) -> Tensor:
    """The ids [T, K], with E in place of experts that are not requested."""
    kept = torch.zeros(E + 1, dtype=torch.bool)
    kept[[request.key.expert for request in requests]] = True
    return torch.where(kept.to(ids.device)[ids], ids, E)


def _parts(ids: Tensor, E: int) -> dict[int, tuple[Tensor, Tensor]]:
    """{expert: (which choice, which token) of each of its rows}."""
    return {expert: (choice, tokens) for expert, choice, tokens in assignments(ids, E)}
