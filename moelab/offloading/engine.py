"""The offloading engine: an executor for the seam whose experts come from disk while others are
being computed.

Source: ZipMoE §3.3, §3.4, §4; the on-demand engine of Speculating Experts §5.1. A layer's step is

    decide    which experts are in memory, which stay, who leaves (`StepController`, `Residency`)
    load      threads read and decode what is missing (`LoadQueue`, `Loader`), into slots (`Slots`)
    compute   the caller's thread, hits first, then experts as they arrive; results are added up in
              transformers' own order

Ctrl-C and `cancel()` end a generation between two steps. An error within a step empties the cache:
the next step begins with new threads and nothing in memory."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.base.forks import renew_in_children
from moelab.base.specs import Event, ExpertKey, State
from moelab.cache.residency import Request, Step
from moelab.models.experts import SeamExperts, assignments, eager, execute
from moelab.models.forward import ForwardInfo
from moelab.offloading.gpu_token import DeviceTables
from moelab.offloading.host import Host
from moelab.offloading.hybrid import Balance
from moelab.offloading.interrupts import raise_waiting
from moelab.offloading.loading import Loader, clock, fill
from moelab.offloading.prompts import PREFILL, PromptChunks, choices_of
from moelab.offloading.step import StepController
from moelab.offloading.threads import narrow
from moelab.offloading.tiers import experts_of
from moelab.store.reader import cast

#: of a core, which loading uses while tokens are decoded, from which on one is left to it
SHARE = 0.4
#: share of a token's layers that lack no expert, from which on a call of several layers pays: in a
#: Qwen3 MoE of 5 GB a token took 10 to 20 % less at 0.7, 5 % more at 0.5
WHOLE = 0.6
MEMORY = 20  # decode steps that running means of these look back on


class Cancelled(RuntimeError):
    """A generation was ended by `cancel()`."""

    def __init__(self) -> None:
        super().__init__("the generation was cancelled; the model can be used again")


class Engine:
    """An executor: `(x [T, H], ids [T, K], weights [T, K], experts) → [T, H]`, equal to `eager` bit
    for bit.

    loader : reads and decodes; closed with the engine.
    controller : decides, for the loader's queue.
    run : records what happens, the loader's.
    cancelled : threads whose forward passes end with `Cancelled` before their next layer.
    idle_since : in a forward, since when the caller's thread does what is reported as "other"; None:
        somebody else reports it.
    python : seconds a layer of the last token that a GPU ran alone, for which that had nothing to do.
    serial : whether to compute a layer's experts only when all are there (if there is memory for
        them at once): the on-demand engine of Speculating Experts, to compare with.
    """

    def __init__(self, loader: Loader, controller: StepController) -> None:
        self.loader = loader
        self.controller = controller
        self.run = loader.run
        self.residency = controller.residency
        self.timeline = loader.timeline
        settings = self.run.settings
        #: computes some experts where they lie, beside this
        self.host = loader.reader if isinstance(loader.reader, Host) else None
        if self.host:
            controller.balance = Balance(settings.experts_bytes, K=settings.spec.K)
        if self.host and loader.pool:
            controller.lies = loader.pool.slots.__contains__
        self._far = loader.slots.link is not None  # experts are computed on a GPU
        if self._far:  # as many come beside a token as the link has time for
            controller.wished = None
        self.cancelled: set[int] = set()
        self.computes_in: torch.dtype | None = None
        self.closed = self.serial = self.decoding = self._broken = False
        self._one = threading.Lock()  # one layer at a time
        self.idle_since: float | None = None
        self.python: float | None = None
        self._chunks = PromptChunks(settings.spec)
        self._drafts = 0  # in the forward
        self._events = 0  # before it
        self._began = self._used = 0.0  # the forward: when, and seconds of cores used until then
        # running means over decode steps: the share of a core that loading uses, and the share of layers
        # that lack no expert
        self._share, self._whole = 0.0, 1.0
        self._steps = 0  # so many
        self._lacking = 0  # layers of the forward that lack experts
        self._threads: int | None = None  # as many as torch had before it got fewer
        #: of `token`, by first layer: (what they are of, banks, which experts have moved since)
        self._banks: dict[int, tuple[Any, Any, dict[ExpertKey, bool]]] = {}
        #: of whole tokens on a GPU: (what they are of, tables), and whether these say what is in memory
        self._tables: tuple[Any, DeviceTables | None] = (None, None)
        self._current = False
        #: whether the GPU runs this token alone, and that has been launched
        self._alone = self._launched = False
        # The threads know the loader, not the engine, and end when nobody knows the engine.
        self._at_end = weakref.finalize(self, loader.end)
        renew_in_children(self)

    def _restart(self) -> None:
        """After an error, or in a forked process: nothing is in memory, and threads are new."""
        self._forget_tables()
        self.loader.stop()
        self.residency.clear()
        self.loader.start()
        self.controller.queue = self.loader.queue
        if pool := self.loader.pool:  # what had no other place than the GPU is read
            everyone = experts_of(pool.store)
            if first := self.residency.fill([key for key in everyone if key not in pool.slots]):
                fill(self.loader, first)
            near = pool.slots.keys() | self.loader.queue.held
            pool.hold(key for key in everyone if key not in near)
        self._broken = False

    def forked(self) -> None:
        """In a child process, the next layer starts anew."""
        self._one = threading.Lock()
        self._broken = True
        self.loader.forked()

    def close(self) -> None:
        """Stop the threads and let go of files and memory. What is running ends with an error."""
        self.closed = True
        self.loader.halt()
        with self._one:  # a layer that runs needs its memory until it has noticed
            self._forget_tables()
            self.loader.end()
            self._at_end.detach()

    def resize(self, memory: Any) -> None:
        """Between two forward passes, go on in other `Memory`: who stays, stays where it is."""
        with self._one, self._sound():
            evicted = self.residency.resize(memory.pools)
            self.run.set_up.append((len(self.run.forwards), memory.settings(self.residency)))
            self.loader.resize(memory.slots, self.run.settings, evicted)
            self._banks.clear()

    # a layer

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: SeamExperts) -> Tensor:
        with self._one, self._sound():
            self.computes_in = x.dtype  # which is another if the model was cast
            return self._step(x, ids, weights, experts)

    @contextmanager
    def _sound(self) -> Iterator[None]:
        """Raise what ends a generation between two layers; after an error, start anew. An error within
        the block leaves the engine broken."""
        if self.closed:
            raise RuntimeError(
                "this model's engine is closed; moelab.open_model(store, memory=…) opens it again"
            )
        if threading.get_ident() in self.cancelled:
            raise Cancelled
        raise_waiting()
        if self._broken or self.loader.closed:  # as one of its threads has ended early
            self._restart()
        try:
            yield
        except BaseException:
            self._broken = True
            if self.host:  # or the interpreter would wait for its thread at its end
                self.host.worker.stop()
            raise

    def _step(self, x: Tensor, ids: Tensor, weights: Tensor, experts: SeamExperts) -> Tensor:
        if self._current:
            self._hand_back()
        if self.residency.free is not None:  # the GPU does not run this token alone after all
            self.controller.begin_forward("decode")
        layer = experts.layer
        E = experts.num_experts
        controller = self.controller
        if controller.announced is None and ids.numel() >= PREFILL * E:
            controller.announce(layer + 1, range(E))
        self._report_other(clock(), layer)
        with self.loader.changing():
            step = controller.decide(layer, counts(ids, E))
            if step.away and self._far:  # nobody who is loaded takes their places
                self.loader.pool.busy = {request.key for request in step.away}
            controller.load(step, self.loader.ready.put)
        self._lacking += bool(step.loads)
        compute = self._with_eager if experts.executor is eager else self._with_executor
        return compute(x, ids, weights, experts, step)

    def _with_eager(
        self, x: Tensor, ids: Tensor, weights: Tensor, experts: SeamExperts, step: Step
    ) -> Tensor:
        """The layer by transformers' own operations, each expert as it is loaded; [T, H]."""
        there, loads = self._split(step)
        parts = {expert: rows for expert, *rows in assignments(ids, experts.num_experts)}
        found = []
        for request in chain(there, chain.from_iterable(self._batches(loads))):
            start = clock()
            choice, tokens = parts[request.key.expert]
            tensors = self.weights(*request.key, reuse=True)
            y = experts.contribution(x, tokens, weights[tokens, choice], tensors)
            found.append((request.key.expert, tokens, y))
            self._executed([request], start)
        return experts.accumulate(x, found)

    def _with_executor(
        self, x: Tensor, ids: Tensor, weights: Tensor, experts: SeamExperts, step: Step
    ) -> Tensor:
        """The layer by an executor: experts in memory together, then others as they are loaded; [T, H].
        No bit is promised. On a GPU a call takes longer to launch than to compute, so there a token's
        experts are all computed together, and those of several tokens in `_batches`."""

        def run(requests: list[Request], compute: Callable[[list[int]], Any]) -> Any:
            start = clock()
            experts.source.computing = [request.key.expert for request in requests]
            found = compute(experts.source.computing)
            self._executed(requests, start)
            return found

        def together(chosen: list[int]) -> Tensor:
            some = _only(chosen, ids, experts.num_experts) if loads or step.away else ids
            return execute(experts.executor, x, some, weights, experts)

        aside = self._begin_aside(x, ids, weights, experts, step)
        one = len(x) == 1
        out = None
        there, loads = self._split(step, self._far and one)
        if there and (one if self._far else not (one and loads)):
            out = run(there, together)
            there = []
        if there or loads:
            choices = choices_of(x, ids, weights, step)
            for batch in chain([there] if there else [], self._batches(loads)):
                run(batch, partial(choices.compute, experts))
            out = choices.sum() if out is None else out + choices.sum()
        out = torch.zeros_like(x) if out is None else out
        if aside:
            start = clock()
            out += aside.result().to(out.device)
            if self._far:
                self.loader.pool.busy = frozenset()
            self.idle_since = end = clock()
            self.timeline.add(Event("compute", "wait", experts.layer, -1, start, end))
        return out

    def _batches(self, loads: dict[ExpertKey, Request]) -> Iterator[list[Request]]:
        """As each is loaded; on a GPU as many as are loaded by then, of half of the staging at most: the
        link fills one half while the other is computed."""
        most = self.run.settings.staging // 2 if self._far else 1
        while loads:
            batch = [loads.pop(self.loader.wait())]
            while not self.loader.ready.empty() and len(batch) < most:
                batch.append(loads.pop(self.loader.wait()))
            yield batch

    def _begin_aside(
        self, x: Tensor, ids: Tensor, weights: Tensor, experts: SeamExperts, step: Step
    ) -> Future | None:
        """Have the host compute what it is to: beside what happens here."""
        if not step.away:
            return None
        keys = [request.key for request in step.away]
        if self._far:
            self.loader.bring_home(keys)
        given = [of.cpu() for of in (x, ids, weights)]

        def compute() -> Tensor:  # all of it there, as torch's inference mode is of this thread
            away = [key.expert for key in keys]
            choices = choices_of(*given, step)
            return self.host.compute(experts, away, choices, self.timeline.add)

        return self.host.worker.submit(compute)

    def _split(
        self, step: Step, at_once: bool = False
    ) -> tuple[list[Request], dict[ExpertKey, Request]]:
        """The requests for experts that are FULL, in ascending order, and the others by their key;
        these are waited for first if all are to be computed `at_once`, or `serial`."""
        loads = {request.key: request for request in step.loads}
        if (at_once or self.serial) and not self.loader.queue.waiting:  # all have slots
            while loads:
                loads.pop(self.loader.wait())
            return step.requests, loads
        return [request for request in step.requests if request.state is State.FULL], loads

    def _executed(self, requests: list[Request], start: float, end: float | None = None) -> None:
        """Release experts that have been computed since `start`, and report it; several at once are
        one event."""
        if leaving := [request for request in requests if request.keep is not State.FULL]:
            with self.loader.changing() as queue:
                queue.computed(leaving)
        experts = [request.key.expert for request in requests]
        self._report(requests[0].key.layer, experts, start, end or clock())

    def _report(self, layer: int, experts: list[int], start: float, end: float) -> None:
        self.idle_since = end
        expert = experts[0] if len(experts) == 1 else -1
        self.timeline.add(Event("compute", "expert", layer, expert, start, end))

    def _report_other(self, now: float, layer: int) -> None:
        if self.idle_since is not None:
            self.timeline.add(Event("compute", "other", layer, -1, self.idle_since, now))

    # layers of a token in one call

    @contextmanager
    def token(self, modules: list[SeamExperts], dtype: torch.dtype) -> Iterator[tuple]:
        """Layers of a token in one call (`moelab.experts.gemv.GEMV.token`): on a CPU as far as their
        experts are in memory, on a GPU all of them, wherever their experts are."""
        with self._one, self._sound():
            if not self._far:
                yield self._find_banks(modules, dtype), partial(self._layers_computed, modules)
            elif (tables := self._begin_token(modules, dtype)) is None:
                yield None, None
            else:
                launched = partial(self._token_launched, modules)
                yield tables.calls, launched if self._alone else None
                if self._alone and not self._launched:  # somebody listens to its parts
                    self._hand_back()

    def _layers_computed(self, modules: list[SeamExperts], first: int, found: Any) -> None:
        chosen = zip(modules[first:], found.ids.tolist(), found.times.tolist())
        for of, experts, (begin, end) in chosen:
            layer = of.layer
            self._report_other(begin, layer)
            if self.residency.holds_all:  # nobody is asked who stays
                self.controller.found(layer, dict.fromkeys(experts, 1))
                self._report(layer, experts, begin, end)
            else:
                step = self.controller.decide(layer, dict.fromkeys(experts, 1))
                self._executed(step.requests, begin, end)
        modules[0].executor.count_layers(first, found)

    def _find_banks(self, modules: list[SeamExperts], dtype: torch.dtype) -> Any:
        """Where those experts of these layers lie that are in memory, as the executor asks for it; None if
        the layers cannot be computed in one call, or too many of them lack experts (`WHOLE`)."""
        executor = modules[0].executor
        queue = self.loader.queue
        find = getattr(executor, "banks", None)
        if find is None or queue.late or queue.prefetched or self.host or self._whole < WHOLE:
            return None
        if any(of.executor is not executor for of in modules):
            return None
        moved, self.loader.moved = self.loader.moved, {}
        for *_, since in self._banks.values():
            since |= moved
        first = modules[0].layer
        state = (queue, executor, dtype)
        known, banks, since = self._banks.get(first, (None, None, {}))
        if known != state or banks is None and since:  # no expert of some layer was there
            banks = find(modules, dtype, [self.residency.full(of.layer) for of in modules])
            banks = banks if isinstance(banks, tuple) else None  # a list would be a GPU's
        elif since:
            executor.update(banks, modules, since, dtype)
        self._banks[first] = state, banks, {}
        return banks

    # a whole token on a GPU, see `moelab.offloading.gpu_token`

    def _begin_token(self, modules: list[SeamExperts], dtype: torch.dtype) -> DeviceTables | None:
        """The tables by which the GPU computes the token that begins, if it is to run `_alone`, or is
        prepared for the next ones; None where it cannot."""
        loader = self.loader
        residency = self.residency
        executor = modules[0].executor
        if len(modules) != residency.L or any(of.executor is not executor for of in modules):
            return None
        state = loader, executor, dtype
        if self._tables[0] != state:
            K = self.run.settings.spec.K
            worker = self.host and self.host.worker
            self._forget_tables()
            self._tables = state, DeviceTables.of(loader, modules, dtype, K, worker)
        tables = self._tables[1]
        # or nothing that is fetched would ever stay, or some are on the disk only
        near = residency.pools.F + loader.reader.count >= residency.L * residency.E
        keeps = residency.holds_all or residency.spare and near
        if tables is None or not keeps or not self.decoding or self._drafts:
            return None
        keep = 0
        shares = None
        coming = ()
        if self._alone:
            balance = self.controller.balance
            shares = balance.shares() if balance else None
            keep = residency.free or 0
            coming = residency.coming
        with loader.changing() as queue:
            if not self._current:
                tables.read(queue)
            self._current = tables.begin(keep, shares, coming)
        if self._current and self._alone:
            tables.serve()
        return tables if self._current else None

    def _token_launched(self, modules: list[SeamExperts], first: int, found: Any) -> None:
        self._tables[1].end()
        self._launched = True
        modules[0].executor.count_layers(first, found)

    def _token_done(self) -> None:
        """Take over what the GPU has done alone: by the rule that it has followed."""
        tables = self._tables[1]
        self._launched = False
        layers, events = tables.layers()
        for layer, did in enumerate(layers):
            fetching, computing, end = did.times
            self._report_other(fetching, layer)
            chosen = (expert for expert in did.experts if expert < self.residency.E)
            step = self.controller.decide(layer, dict.fromkeys(chosen, 1))
            with self.loader.changing() as queue:
                came = tables.apply(queue, step, did)
            if came:
                nbytes = sum(int(tables.nbytes[key]) for key in came)
                copied = layer, -1, fetching, computing
                self.timeline.add(Event("link", "read", *copied, nbytes))
                self.timeline.add(Event("compute", "wait", *copied))
            self.idle_since = end
            self.timeline.add(Event("compute", "expert", layer, -1, computing, end))
        with self.loader.changing() as queue:
            tables.came(queue)
        for event in events:
            self.timeline.add(event)
        alone = layers[-1].times[-1] - layers[0].times[0]
        self.python = max(0.0, clock() - self._began - alone) / len(layers)

    def _hand_back(self) -> None:
        """From here on the host decides again, when what the GPU does alone is done; of a token that
        was interrupted nothing is left."""
        self._current = self._launched = self._alone = False
        if (tables := self._tables[1]) is not None and self.loader.slots is not None:
            tables.rest()

    def _forget_tables(self) -> None:
        self._hand_back()
        self._tables = None, None

    # a forward pass

    def begin_forward(self, info: ForwardInfo, exact: bool = True) -> float:
        """A forward pass begins, `exact` if its experts are computed by transformers' own
        operations; returns the time."""
        with self._one, self._sound():
            if self._launched:
                self._hand_back()
            self._chunks.begin(info, self.timeline.since(self._events))
            self._events = len(self.timeline)
            self.decoding = info.phase == "decode"
            self._drafts = info.drafts
            tables = self._tables[1]
            one = self.decoding and info.tokens == 1 and not exact
            self._alone = one and tables is not None and tables.captured
            self.python = None
            with self.loader.changing():
                steps = self.controller.begin_forward(info.phase, self._alone)
            for step in steps:  # what shall be there before
                with self.loader.changing():
                    self.controller.load(step, self.loader.ready.put)
                for _ in step.loads:
                    self.loader.wait()
        if (self.decoding or self.host) and not exact and not self._far:
            self._narrow()
        self._used = self.loader.used
        self._lacking = 0
        self._began = self.idle_since = clock()
        return self._began

    def end_forward(self) -> float:
        """Report what came after the last layer's experts; returns the time."""
        if self._launched:
            with self._one, self._sound():
                self._token_done()
        now = clock()
        self.loader.settle()
        self._report_other(now, -1)
        self.idle_since = None
        self.widen()
        if self._broken:
            return now
        if self.decoding:
            share = max(0.0, self.loader.used - self._used) / (now - self._began)
            whole = 1 - self._lacking / self.residency.L
            self._steps = min(self._steps + 1, MEMORY)
            self._share += (share - self._share) / self._steps
            self._whole += (whole - self._whole) / self._steps
        with self.loader.changing() as queue:
            took = None if self._drafts else now - self._began
            events = self._events
            evicted = self.controller.end_forward(took, self.timeline.since(events))
            for key in evicted:
                queue.leave(key)
            if self._current:
                self._tables[1].remove(evicted)
        return now

    def _narrow(self) -> None:
        """Leave the loader's threads the cores that they need: a team that shares one with them
        waits for it in each of its products, and the reads wait for the team. What reads past the
        page cache needs hardly any."""
        self.widen()
        others = self.host.worker.threads if self.host else 0
        if spare := max(int(self._share + 1 - SHARE), others):
            self._threads = torch.get_num_threads()
            narrow(max(1, self._threads - spare))

    def widen(self) -> None:
        """Give torch its threads back."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
            self._threads = None

    @property
    def wants_predictions(self) -> bool:
        """Whether predictors shall listen in this forward pass: not where nobody would ask them."""
        return bool(self.loader.queue.ahead) and self.controller.gate.enabled

    def prefetch(self, layer: int, ids: Tensor) -> None:
        """Announce the experts [T, K] that a later layer of this forward pass will probably need.

        They are loaded behind the reads of the layer that runs next, into slots that it leaves
        (`ahead` at most; 0 is none). A prediction changes when things are read, never what is kept
        or computed."""
        self.controller.announce(layer, ids.T.reshape(-1).tolist())  # first choices first

    # memory

    def weights(self, layer: int, expert: int, reuse: bool = False) -> dict[str, Tensor]:
        """The tensors of an expert that is loaded, in the dtype of the hidden states, which a store
        usually has them in already. With `reuse` they are valid until the next call."""
        slot = self.loader.queue.held[layer, expert]["full"]
        tensors = self.loader.slots.tensors(slot, layer, expert, reuse)
        return tensors if self.computes_in is None else cast(tensors, self.computes_in)


class EngineSource:
    """An engine's loaded experts as a source of the seam."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        #: the experts of which a call computes some, so that it waits for no others to land
        self.computing: list[int] = []

    @property
    def device(self) -> torch.device:
        return self.engine.loader.slots.device

    def __call__(self, layer: int, expert: int) -> dict[str, Tensor]:
        try:
            return self.engine.weights(layer, expert)
        except KeyError:
            raise ValueError(
                f"expert {expert} of layer {layer} is not loaded, as no token was routed to it: use "
                f"this executor on a model in memory"
            ) from None

    def matrices(
        self, layer: int, experts: list[int], dtype: torch.dtype
    ) -> dict[str, tuple[str, np.ndarray]] | None:
        """`Slots.matrices` of loaded experts, addresses of `device`."""
        loader = self.engine.loader
        slots = [loader.queue.held[layer, expert]["full"] for expert in experts]
        return loader.slots.matrices(slots, layer, experts, dtype)


def counts(ids: Tensor, E: int) -> dict[int, int]:
    """{expert: tokens} of the experts that are hit."""
    found = Counter(ids.flatten().tolist())
    found.pop(E, None)
    return dict(found)


def _only(chosen: list[int], ids: Tensor, E: int) -> Tensor:
    """The ids [T, K], with E in place of experts that are not chosen."""
    kept = torch.zeros(E + 1, dtype=torch.bool)
    kept[chosen] = True
    return torch.where(kept.to(ids.device)[ids], ids, E)
