"""`lm.moelab`: what a model that `moelab.open_model` has opened tells about itself, and how it is
closed.

It follows the model's forward passes: when, over how many tokens, which experts they were routed
to. Of an offloaded model the engine reports the rest: reads, decoding, waiting. Of a resident one
only the latest passes are kept."""

from __future__ import annotations

import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from moelab.cache.policies import DEFAULT_POLICY
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.forks import renew_in_children
from moelab.models.experts import named
from moelab.models.gradients import refuse_all
from moelab.models.identity import require_unwritten
from moelab.models.patches import Patches
from moelab.models.seam import MoELayer, discover, require_adaptable
from moelab.models.stream import stacks
from moelab.offloading.engine import Cancelled, Engine, EngineSource, counts
from moelab.offloading.metrics import Forward, Metrics, metrics, process
from moelab.offloading.pipeline import clock
from moelab.offloading.run import EngineRun, EngineSettings, Timeline
from moelab.store.layout import ExpertStore

#: forward passes of a resident model that are kept, at most
LONGEST = 4096


class InTurn:
    """Mixin over an opened model, or what is called by itself of it: of all threads' calls, one
    runs at a time."""


class OpenedModel(InTurn):
    """Mixin over a transformers model: `with open_model(…) as lm` closes it."""

    def __enter__(self) -> OpenedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.moelab.close()

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own; ValueError where the experts are not in memory, since they would be
        left out."""
        if not all(layer.resident for layer in discover(self)):
            raise ValueError(
                "this model's experts are not in memory, so they would not be saved: copy its folder, "
                "restore its store (moelab.restore), or open it without memory="
            )
        return super().save_pretrained(*args, **kwargs)


@functools.cache
def in_turn_class(cls: type, mixin: type = InTurn) -> type:
    """The class of a model, or a part of it, whose calls take turns, named as transformers names
    it."""
    if issubclass(cls, InTurn):
        return cls

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        with self.moelab.turn:
            return cls.__call__(self, *args, **kwargs)  # one line: see `Pipeline._locked`

    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__call__": __call__}
    if mixin is OpenedModel and hasattr(cls, "generate"):

        @functools.wraps(cls.generate)
        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.moelab._counted(functools.partial(cls.generate, self), *args, **kwargs)

        members["generate"] = generate
    return type(cls.__name__, (mixin, cls), members)


def opened_class(cls: type) -> type:
    """The class of an opened model."""
    return in_turn_class(cls, OpenedModel)


class Session:
    """What an opened model does, and with what.

    run : what happened since the last `reset`, see `EngineRun`; `moelab.simulate` replays it.
    engine, source, store, budget : of an offloaded model: what loads and computes its experts, what
        hands them to executors, where they are stored, bytes of memory for them. None for a
        resident one.
    residency : which experts are in memory, and the counts of hits and misses.
    speculation : the `Speculation` that prefetches, if one does: `speculation.recall()`.
    executor : the name, or the function, by which experts are computed.
    routing : the `CacheAwareRouting` that chooses experts in memory, if one does.
    """

    executor: Any = "exact"
    routing: Any = None
    timeline: Timeline = property(lambda self: self.run.timeline)
    forwards: list[Forward] = property(lambda self: self.run.forwards)
    steps: list[list[tuple[int, dict[int, int]]]] = property(lambda self: self.run.steps)
    predictions: list[list[tuple[int, list[int]]]] = property(lambda self: self.run.predictions)

    def __init__(
        self,
        model: Any,
        engine: Engine | None = None,
        source: EngineSource | None = None,
        store: ExpertStore | None = None,
        budget: int | None = None,
    ) -> None:
        self.engine, self.source, self.store, self.budget = engine, source, store, budget
        self.speculation = None
        if engine is None:
            spec, pools = model.spec, Pools(F=model.spec.L * model.spec.E)
            self.residency = Residency(spec.L, spec.E, pools)
            experts = {id(p) for layer in discover(model) for p in layer.experts.parameters()}
            dense_bytes = sum(p.nbytes for p in model.parameters() if id(p) not in experts)
            settings = EngineSettings(
                spec, pools, DEFAULT_POLICY, "model", None, 1, spec.K, 0, None, dense_bytes
            )
            self.run = EngineRun(settings, self.residency)
        else:
            self.residency, self.run = engine.residency, engine.run
            mine = weakref.WeakMethod(
                self._is_cancelled
            )  # else an engine would keep its model alive
            engine.cancelled = lambda: (asked := mine()) is not None and asked()
        self._calls: dict[
            int, object
        ] = {}  # thread → the generation, or the forward alone, that it runs
        self._alone: object = None  # the latest of the latter
        self._cancelled: set[object] = set()
        self._model = id(model)
        self.forked()
        renew_in_children(self)
        self.reset()
        alone = (
            [model.get_encoder()] if model.config.is_encoder_decoder else []
        )  # `generate` calls it by itself
        with Patches() as patches:
            for module in (model, *alone):
                patches.hook(
                    module.register_forward_pre_hook, self._begin_forward, with_kwargs=True
                )
                patches.hook(module.register_forward_hook, self._end_forward, always_call=True)
            for layer in (
                discover(model) if engine is None else ()
            ):  # no engine counts what it is asked for
                register, hook, options = layer.listening(functools.partial(self._note, layer))
                patches.hook(register, hook, **options)
            self._patches = patches.pop_all()
        self._parts = ExitStack()  # what was put on the model besides
        for part in (model, *(stack for stack, _ in stacks(model))):
            part.__class__ = (opened_class if part is model else in_turn_class)(type(part))
            part.moelab = self

    def forked(self) -> None:
        """In a child process there are no other threads, so it is nobody's turn."""
        self.turn, self._forward = threading.RLock(), None
        self._calls.clear()

    def __repr__(self) -> str:
        parts = (
            ["all experts in memory"]
            if self.engine is None
            else [
                f"offloaded, {self.budget / 1e9:.3g} GB for experts",
                named(self.run.settings.policy),
            ]
        )
        parts += [named(self.executor)]
        if self.speculation is not None:
            parts += [f"prefetch {named(self.speculation.predictor)}"]
        if self.routing is not None:
            parts += [f"lossy: cache-aware routing, margin {self.routing.margin:g}"]
        return f"<moelab: {', '.join(parts)}; {len(self.forwards)} forward passes>"

    def reset(self) -> None:
        """Forget events, forwards and counts, after the forward pass that runs; what is in memory
        stays."""
        with self.turn:
            self._reset()  # one line: see `Pipeline._locked`

    def _reset(self) -> None:
        self.run.reset()
        self._forward: tuple[int, object, float, int, str] | None = (
            None  # module, call, since when, tokens, phase
        )
        self._routed: list[tuple[MoELayer, Any]] = []  # ids [T, K] of the layers of a forward pass

    def metrics(self) -> Metrics:
        """TTFT, TPOT, hit rates, bytes a token, stall …, since the last `reset`: see
        `moelab.offloading.metrics`."""
        return metrics(
            list(self.timeline),
            self.forwards,
            self.run.counters,
            asdict(self.run.fetched),
            **process(),
        )

    def enter(self, context: Any) -> Any:
        """Enter a context that ends when the model is closed."""
        return self._parts.enter_context(context)

    def cancel(self) -> bool:
        """End the generations that run with `Cancelled`; False if none is running."""
        self._cancelled = {call for call in list(self._calls.values()) if call is not None}
        if self.engine is not None:
            self.engine.pipeline.wake()
        return bool(self._cancelled)

    def close(self) -> None:
        """Take everything off the model; an offloaded one loses its threads and experts and cannot
        run any more."""
        self._parts.close()
        self._patches.close()
        if self.engine is not None:
            self.engine.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the model reports. Each of these may be interrupted, and what would come after it is then
    # not called. So nothing is counted up and down: what begins takes the place of whatever was
    # left.

    def _is_cancelled(self) -> bool:
        return bool(self._cancelled) and self._calls.get(threading.get_ident()) in self._cancelled

    def _counted(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Between two tokens no forward runs, but the generation does: `cancel` must know."""
        me = threading.get_ident()
        outer = (
            self._calls.get(me) if self._generates() else None
        )  # or one that was interrupted has left it
        self._calls[me] = object()
        try:
            return generate(*args, **kwargs)
        finally:
            self._calls[me] = outer
            if self.engine is not None:
                self.engine.widen()  # Ctrl-C calls no hook

    def _generates(self) -> bool:
        """Whether this thread is within a generation already: assisted by itself, a model generates
        while it does."""
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code is Session._counted.__code__ and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False

    def _begin_forward(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if (
            id(module) != self._model
            and self._forward is not None
            and self._forward[:2] == (self._model, self._calls.get(threading.get_ident()))
        ):
            return  # the encoder, called by the model
        if self._is_cancelled():
            raise Cancelled
        require_unwritten(module)
        require_adaptable(module)
        ids = next(
            (
                x
                for x in (
                    kwargs.get("decoder_input_ids"),
                    kwargs.get("input_ids"),
                    kwargs.get("inputs_embeds"),
                    *args[:1],
                )
                if x is not None
            ),
            None,
        )
        shape = ids.shape[:2] if ids is not None else (0,)
        tokens, length = math.prod(shape), shape[-1]
        cache = kwargs.get("past_key_values")
        seen = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
        if self._calls.get(threading.get_ident()) in (None, self._alone):
            self._calls[threading.get_ident()] = self._alone = object()
        self.run.begin_forward()
        phase = "prefill" if length > 1 or not seen else "decode"
        start = clock() if self.engine is None else self.engine.begin_forward(phase)
        self._forward = id(module), self._calls[threading.get_ident()], start, tokens, phase
        self._routed = []

    def _end_forward(self, module: Any, _: tuple, output: Any) -> Any:
        if self._forward is None or self._forward[0] != id(module):
            return None
        (*_, start, tokens, phase), self._forward = self._forward, None
        end = clock() if self.engine is None else self.engine.end_forward()
        for layer, routed in self._routed:  # of a resident model; where no engine has counted
            self.run.layer(layer.index, counts(routed, layer.E))
        self.run.end_forward(Forward(start, end, tokens, phase))
        if self.engine is None and len(self.forwards) > LONGEST:
            self.run.forget(LONGEST // 2)
        if self._calls.get(threading.get_ident()) is self._alone:
            self._calls[threading.get_ident()] = None
        return refuse_all(output)

    def _note(self, layer: MoELayer, ids: Any, _: Any) -> None:
        if self._forward is not None:  # else a part of the model was called by itself
            self._routed.append((layer, ids))
