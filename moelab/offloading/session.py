"""`lm.moelab`: what a model that `moelab.open_model` has opened tells about itself, and how it is
closed.

It follows the model's forward passes: when, over how many tokens, which experts they were routed
to. Of an offloaded model the engine reports the rest: reads, decoding, waiting. Of a resident one
only the latest passes are kept."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from moelab.base.forks import renew_in_children
from moelab.cache.policies import DEFAULT_POLICY
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.models import compat
from moelab.models.experts import Run, eager, named
from moelab.models.forward import ForwardInfo, forward_info
from moelab.models.identity import require_unwritten
from moelab.models.patches import Patches, while_on
from moelab.models.seam import MoELayer, discover, require_adaptable
from moelab.models.stream import stacks
from moelab.models.unchanged import forward as replaced
from moelab.offloading.drafts import ASKED, COUNTS, DraftGate, Drafting, PromptLookup, drafting
from moelab.offloading.engine import Cancelled, Engine, counts
from moelab.offloading.interrupts import deferred
from moelab.offloading.loading import clock
from moelab.offloading.metrics import Forward, Metrics, process
from moelab.offloading.run import EngineRun, EngineSettings
from moelab.store.layout import ExpertStore
from moelab.store.packed import Packed, unpacked

#: forward passes of a resident model that are kept, at most
LONGEST = 4096


class InTurn:
    """Mixin over an opened model, or what is called by itself of it: of all threads' calls, one
    runs at a time."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.moelab.turn, self.moelab.running():
            return super().__call__(*args, **kwargs)


class OpenedModel(InTurn):
    """Mixin over a transformers model: `with open_model(…) as lm` closes it."""

    def __enter__(self) -> OpenedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.moelab.close()

    def generate(self, *args: Any, drafts: int | str = 0, **kwargs: Any) -> Any:
        """As transformers' own; `cancel` and Ctrl-C end it between two layers.

        drafts : tokens that are guessed ahead, of an `assistant_model` or from the text itself, and
            verified in one forward pass, for one sequence: a number, or "auto" for as many as have
            been seen to be faster, or none. Tokens stay what they are without, but for the last
            bits of a pass over several positions, by which a close choice may change."""
        ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
        with self.moelab.running(), drafting(self, drafts, ids, kwargs) as kwargs:
            return super().generate(*args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own; ValueError where the experts are not in memory, since they would be
        left out."""
        if not all(layer.resident for layer in discover(self)):
            raise ValueError(
                "this model's experts are not in memory, so they would not be saved: copy its folder, "
                "restore its store (moelab.restore), or open it without memory="
            )
        state = self.state_dict()
        if any(isinstance(weight, Packed) for weight in state.values()):
            kwargs.setdefault("state_dict", {name: unpacked(of) for name, of in state.items()})
        return super().save_pretrained(*args, **kwargs)


@functools.cache
def mixed(mixin: type, cls: type) -> type:
    """A class with such a mixin, named as transformers names it."""
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return cls if issubclass(cls, InTurn) else type(cls.__name__, (mixin, cls), members)


class Session:
    """What an opened model does, and with what.

    run : what happened since the last `reset`, see `EngineRun`; `moelab.simulate` replays it.
    engine, store, budget : of an offloaded model: what loads and computes its experts, where they
        are stored, bytes of memory for them. None for a resident one.
    divided : how so much memory, as of `open_model`, would be divided: a `Memory`. None likewise.
    residency : which experts are in memory, and the counts of hits and misses.
    speculation : the `Speculation` on whose predictions it runs, if one does: `speculation.recall()`.
    gates : what `generate(drafts="auto")` has learnt, of an assistant's drafts (True) and of the
        text's own (False).
    planned : what runs prompts through a Neural Engine's graphs, if the model was opened so:
        `planned.total` counts, `planned.backend.name` says by what.
    meter : where the machine tells its energy: `window()` yields a dictionary that gets it.
    """

    #: those of the run
    timeline = property(lambda self: self.run.timeline)
    forwards = property(lambda self: self.run.forwards)
    steps = property(lambda self: self.run.steps)
    predictions = property(lambda self: self.run.predictions)

    def __init__(
        self,
        model: Any,
        engine: Engine | None = None,
        store: ExpertStore | None = None,
        budget: int | None = None,
        divided: Callable[..., Any] | None = None,
    ) -> None:
        self.engine = engine
        self.store = store
        self.budget = budget
        self.divided = divided
        self._model, self._layers = id(model), discover(model)
        self._resizes: list[Any] = []  # memory to go on in
        if engine:
            self.run = engine.run
            self.residency = engine.residency
        else:
            settings = _resident_settings(model, self._layers)
            self.residency = Residency(model.spec.L, model.spec.E, settings.pools)
            self.run = EngineRun(settings, self.residency)
        self.speculation: Any = None
        self.gates: dict[bool, DraftGate] = {}
        self.planned: Any = None
        self.meter: Any = None
        #: forwards of layers that a GPU runs as graphs, once there was a token
        self._graphs: list[Any] | None = None
        self._running: set[int] = set()  # threads that run a generation, or a forward by itself
        self._cancelled = engine.cancelled if engine else set()  # of these
        self.forked()
        renew_in_children(self)
        self.reset()
        self._parts = self._listen(model)  # what was put on the model
        for part in (model, *(stack for stack, _ in stacks(model))):
            part.__class__ = mixed(OpenedModel if part is model else InTurn, type(part))
            part.moelab = self

    def _listen(self, model: Any) -> Patches:
        """Hooks that say when forward passes begin and end, and in memory what is routed."""
        # `generate` calls an encoder by itself
        alone = [model.get_encoder()] if model.config.is_encoder_decoder else []
        layers = () if self.engine else self._layers  # an engine knows its steps
        with Patches() as patches:
            patches.wrap(model, compat.CANDIDATES, self._drafting)
            for module in (model, *alone):
                before = module.register_forward_pre_hook
                patches.hook(before, while_on(self._begin_forward), with_kwargs=True)
                patches.hook(module.register_forward_hook, self._end_forward, always_call=True)
            for layer in layers:
                layer.listen(patches, functools.partial(self._note, layer))
            return patches.pop_all()

    def forked(self) -> None:
        """In a child process there are no other threads, so it is nobody's turn."""
        self.turn = threading.RLock()
        self._forward = None
        self._running.clear()

    @property
    def executor(self) -> Run:
        """What computes the experts; `moelab.models.eager` for transformers' own operations."""
        return self._layers[0].seam.executor if self._layers[0].plugged else eager

    def __repr__(self) -> str:
        parts = ["all experts in memory"]
        if self.engine:
            parts = [f"offloaded, {self.budget / 1e9:.3g} GB for experts"]
            parts += [named(self.run.settings.policy)]
        parts += ["exact" if self.executor is eager else named(self.executor).lower()]
        if self.planned:
            parts += [f"prompts by {self.planned.backend.name}"]
        if self.speculation:
            hint = self.speculation.mode == "hint"
            parts += [f"{'prefetch' if hint else 'speculate'} {named(self.speculation.predictor)}"]
        return f"<moelab: {', '.join(parts)}; {len(self.forwards)} forward passes>"

    def reset(self) -> None:
        """Forget events, forwards and counts, after the forward pass that runs; what is in memory
        stays."""
        with self.turn:
            self.run.reset()
            #: the forward pass that runs: its module, thread, beginning; seconds of CPU before, energy
            self._forward: tuple[int, int, float, ForwardInfo, tuple] | None = None
            self._routed: list[tuple[MoELayer, Any]] = []  # ids [T, K] of its layers

    def metrics(self) -> Metrics:
        """TTFT, TPOT, hit rates, bytes a token, stall …, since the last `reset`: see
        `moelab.offloading.metrics`."""
        return self.run.metrics(**process())

    @property
    def tiers(self) -> dict[str, int]:
        """Of an offloaded model: bytes of its experts on the "gpu" (or in the "memory" that the CPU
        computes from), of others in "pinned" memory beside it, and of those that are only on the
        "disk"."""
        return self.engine.loader.tiers if self.engine else {}

    def resize(self, memory: str | float | int) -> None:
        """Give the experts of an offloaded model other memory, as of `open_model`: at once or, of one
        that runs, when its forward pass is over. Who stays in it is what the cache wants most; what is
        computed stays what it was, and never takes more than the larger of both.

        Raises ValueError for a model that is in memory or on a GPU, and for too little memory (the
        message says the least): then all is as it was."""
        if not (self.divided and self.engine.loader.slots.most):
            raise ValueError(
                "only experts that are offloaded for a CPU, on a system that reserves addresses "
                "beyond its memory, can be given more or less: open the model again, with memory="
            )
        self._resizes.append(self.divided(memory, self.budget))
        if not self._running:
            self._resize()

    def _resize(self) -> None:
        with self.turn:
            while self._resizes:
                memory = self._resizes.pop(0)
                self.engine.resize(memory)
                self.budget = memory.budget

    def enter(self, context: Any) -> Any:
        """Enter a context that ends when the model is closed."""
        return self._parts.enter_context(context)

    def cancel(self) -> bool:
        """End the generations that run with `Cancelled`, before their next layer; False if none is
        running."""
        running = self._running.copy()
        self._cancelled |= running
        return bool(running)

    def close(self) -> None:
        """Take everything off the model; an offloaded one loses its threads and experts and cannot
        run any more."""
        self._parts.close()
        if self.engine:
            self.engine.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block this thread runs a generation, or a forward pass by itself, which
        `cancel` and, with an engine, Ctrl-C end between two layers."""
        me = threading.get_ident()
        if me in self._running:  # a forward of a generation, or a generation that assists it
            yield
            return
        self._cancelled.discard(me)
        self._running.add(me)
        try:
            with deferred() if self.engine else nullcontext():
                yield
        finally:
            self._running.discard(me)
            self._cancelled.discard(me)
            if self._forward and self._forward[1] == me:
                self._forward = None  # one that was interrupted
            if self.engine:
                self.engine.widen()
            if self._resizes:  # since the last pass began
                self._resize()

    def _drafting(self, below: Callable[..., Any]) -> Callable[..., Any]:
        """What makes a generation's source of drafts, around transformers' own."""

        def made(**given: Any) -> Any:
            asked = ASKED.get()
            assistant = given["assistant_model"] is not None
            inner = below(**given) if assistant or not asked else PromptLookup()
            if inner.requires_model_outputs:
                return inner
            gate = self.gates.setdefault(assistant, DraftGate(not assistant))
            return Drafting(
                inner,
                (COUNTS[-1] if asked == "auto" else asked) or None,
                gate if asked == "auto" else None,
                given["model_kwargs"]["past_key_values"],
                self.run.accepted,
                given["generation_config"].max_length,
            )

        return made

    def _begin_forward(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        me = threading.get_ident()
        this = id(module)
        if self._forward and self._forward[:2] == (self._model, me) and this != self._model:
            return  # the encoder, called by the model
        if me in self._cancelled:
            raise Cancelled
        self._resize()
        require_unwritten(module)
        require_adaptable(module)
        info = forward_info(args, kwargs)
        self.run.begin_forward()
        exact = self.executor is eager
        start = self.engine.begin_forward(info, exact) if self.engine else clock()
        energy = ExitStack()
        mj = energy.enter_context(self.meter.window()) if self.meter else None
        self._forward = (this, me, start, info, (time.process_time(), energy, mj))
        self._routed = []

    def _end_forward(self, module: Any, *_: Any) -> None:
        if not self._forward or self._forward[0] != id(module):
            return
        (*_, start, info, (used, energy, mj)), self._forward = self._forward, None
        used = time.process_time() - used
        energy.close()
        end = self.engine.end_forward() if self.engine else clock()
        for layer, routed in self._routed:
            self.run.layer(layer.index, counts(routed, layer.E))
        given = start, end, info.tokens, info.phase, info.drafts, 0, used, mj or None
        python = self.engine and self.engine.python
        self.run.end_forward(Forward(*given, self._path(module), python))
        if not self.engine and len(self.forwards) > LONGEST:
            self.run.forget(LONGEST // 2)

    def _path(self, model: Any) -> str:
        """What a GPU ran as one graph in the forward pass that ends, as of `Forward`."""
        if self._graphs is None:
            self._graphs = [of for of in map(replaced, model.modules()) if hasattr(of, "ran")]
        found = {of.ran for of in self._graphs}
        for of in self._graphs:
            of.ran = "none"
        return next((path for path in ("token", "layer") if path in found), "none")

    def _note(self, layer: MoELayer, ids: Any, _: Any) -> None:
        if self._forward:  # else a part of the model was called by itself
            self._routed.append((layer, ids))


def _resident_settings(model: Any, layers: list[MoELayer]) -> EngineSettings:
    """Of a model whose experts are all in memory."""
    spec = model.spec
    pools = Pools(F=spec.L * spec.E)
    experts = {id(p) for layer in layers for p in layer.experts.parameters()}
    dense_bytes = sum(p.nbytes for p in model.parameters() if id(p) not in experts)
    return EngineSettings(spec, pools, DEFAULT_POLICY, "model", 1, spec.K, 0, (), dense_bytes)
