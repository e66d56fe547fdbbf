"""Running a model on predictions: announced for prefetching (hint), or executed (speculative,
router-free).

Source: Speculating Experts §4, §5.1 (Algorithm 1), §6.4. At each MoE layer, before its experts run,
the predictor says what a later layer will choose; an executor with a method `prefetch(layer, ids)`
is told and can load while it computes. In hint mode the true experts run, so no bit of the output
changes; in speculative mode the later layer executes what was predicted for it; router-free, its
router does not run (a residual estimator asks it, but a layer early).

Shapes: s and r [T, H], ids and weights [T, K].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moelab.base.registry import require
from moelab.models import MoELayer, discover, plugged
from moelab.models.dialects import ROUTING
from moelab.models.experts import named
from moelab.models.forward import forward_info
from moelab.models.patches import Patches, while_on
from moelab.models.stream import stacks, streams
from moelab.models.unchanged import Listener
from moelab.speculate.predictors import EstimatorPredictor, Prediction, Predictor
from moelab.speculate.routers import ask
from moelab.trace import DECODE, PREFILL

MODES = ("hint", "speculative", "router-free")
#: (x [T, H], ids [T, K], weights [T, K]) → ids, weights
Change = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Speculation(Patches):
    """A model that runs on predictions, until `close()` or the end of the `with`.

    model : any model that moelab can plug; whatever runs its experts stays in place.
    predictor : `registry.make("predictor", name, model, …)` or your own; it belongs to one
        `Speculation`.
    mode : "hint", "speculative" or "router-free".
    prefill : whether predictions are executed in prefill too; they are announced in both phases.

    In hint mode an executor with `wants_predictions` says with it before each pass whether predictions are
    worth their time. If not, no hook lies on the layers, so that fused kernels run; but where the
    predictor learns from what routers choose, it is told of that.

    A model runs on one at a time, the last that was made and not closed: its attribute `speculation`.

    requests, hits : int64 [2, L] by phase (`PREFILL`, `DECODE`): experts that the true routers
        chose where there was a prediction, and how many of them were predicted. Padding does not
        count; nor do routers that did not run.

    Raises ValueError: an unknown mode; router-free without an estimator; a model whose residuals
    cannot be had."""

    def __init__(
        self, model: nn.Module, predictor: Predictor, mode: str = "hint", prefill: bool = False
    ) -> None:
        super().__init__()
        require("mode", mode, MODES)
        if mode == "router-free" and not isinstance(predictor, EstimatorPredictor):
            raise ValueError(
                f"router-free needs the predictor 'estimator', which replaces routers; "
                f"{type(predictor).__name__} asks them"
            )
        self._owner = vars(model)
        self.predictor = predictor
        self.mode = mode
        self.prefill = prefill
        self.layers = discover(model)
        self._none = predictor.spec.E
        #: the module of each layer whose first argument is the residual
        self._entries = (
            [stream.entry for stream in streams(model)] if predictor.reads_residual else []
        )
        self._residuals: dict[int, Tensor] = {}  # r of each layer, in this pass
        self._predicted: dict[int, Prediction] = {}  # for each layer, in this pass
        self._hooks = Patches()
        self._predicting = False
        device = getattr(model, "device", "cpu")
        self._counts = torch.zeros(2, 2, len(self.layers), dtype=torch.long, device=device)
        self.requests, self.hits = self._counts
        self._end()
        predictor.begin()
        with Patches() as patches:
            patches.enter_context(plugged(model))
            for stack, layers in stacks(model):
                begin = while_on(partial(self._begin, layers[0].index == 0))
                patches.hook(stack.register_forward_pre_hook, begin, with_kwargs=True)
                patches.hook(stack.register_forward_hook, lambda *_: self._end(), always_call=True)
            patches.callback(lambda: self._hooks.close())
            patches.put(model, "speculation", self)
            self._listen(True)
            self.push(patches.pop_all())

    def recall(self) -> Tensor:
        """Share of the true experts that had been predicted, [L]; NaN without predictions."""
        return self.hits.sum(0).double() / self.requests.sum(0)

    # ---------------------------------------------------------------------------------------------
    # hooks on the layers

    def _listen(self, predicting: bool) -> None:
        """Put on the layers what predicting needs, or only what learning needs."""
        if predicting is self._predicting:
            return
        self._hooks.close()
        learns = type(self.predictor).observe is not Predictor.observe
        with Patches() as patches:
            for layer in self.layers:
                if predicting:
                    self._attach(layer, patches)
                elif learns:
                    layer.listen(patches, partial(self._observe, layer.index))
            self._hooks = patches.pop_all()
            self._predicting = predicting

    def _attach(self, layer: MoELayer, patches: Patches) -> None:
        if self._entries:
            see = partial(self._residuals.__setitem__, layer.index)

            def of_entry(_m: nn.Module, args: tuple) -> None:
                see(args[0])

            register = self._entries[layer.index].register_forward_pre_hook
            patches.hook(register, Listener(see, of_entry))
        intercept(patches, layer, partial(self._before, layer))
        if self.mode == "router-free":
            patches.wrap(layer.router, "forward", lambda below: partial(self._routed, layer, below))

    # ---------------------------------------------------------------------------------------------
    # one forward pass

    def _begin(self, first: bool, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """A forward pass of a stack begins, of the model's `first` or of its decoder."""
        self._end()
        if self._owner["speculation"] is not self:
            return self._listen(False)
        info = forward_info(args, kwargs)
        mask = kwargs.get("attention_mask")
        if first and not info.cached:
            self.predictor.begin()
        self._phase = DECODE if info.phase == "decode" else PREFILL
        if self._phase == PREFILL and mask is not None and mask.dim() == 2:
            S = info.tokens // len(mask)
            self._real = mask[:, -S:].reshape(-1).bool()
        self._running = True
        self._listen(
            self.mode != "hint" or getattr(_executor(self.layers[0]), "wants_predictions", True)
        )

    def _end(self) -> None:
        self._running = False
        self._phase = PREFILL
        self._real: Tensor | None = None  # which of the T tokens are no padding; None: all
        self._residuals.clear()
        self._predicted.clear()

    @property
    def _executes(self) -> bool:
        return self._running and self.mode != "hint" and (self.prefill or self._phase == DECODE)

    def _before(
        self, layer: MoELayer, x: Tensor, ids: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the experts of a layer are to run with, whose router's input is x (Algorithm 1)."""
        if not self._running:  # a part of the model was called by itself
            return ids, weights
        index = layer.index
        mine = self._predicted.get(layer.index)
        executes = mine is not None and self._executes
        if not (executes and self.mode == "router-free"):  # the true router has run
            true = self._observe(index, ids, weights)
            if mine is not None:
                self._count(index, mine[0], true)
        if executes:
            ids, weights = mine  # lines 6–7
        if (target := self.predictor.targets.get(index)) is None:
            return ids, weights
        r = self._residuals.pop(index).reshape(len(ids), -1) if self._entries else x
        prediction = self.predictor.predict(index, x, r, ids, weights)  # line 8
        if prediction is not None:
            check(prediction, len(ids), self.predictor)
            self._predicted[target.index] = prediction
            if (prefetch := getattr(_executor(layer), "prefetch", None)) is not None:
                prefetch(target.index, prediction[0])  # line 9
        return ids, weights

    def _observe(self, layer: int, ids: Tensor, weights: Tensor) -> Tensor:
        """Tell the predictor what a router chose, ids and weights [T, K]; returns the ids, E for
        padding."""
        if self._running:
            if self._real is not None:
                ids = ids.masked_fill(~self._real[:, None], self._none)
            self.predictor.observe(layer, ids, weights)
        return ids

    def _count(self, layer: int, predicted: Tensor, true: Tensor) -> None:
        if len(true) == 1 and self._counts.device.type == "cpu":  # sets are faster than tensors
            chosen = set(true[0].tolist()) - {self._none}
            counts = len(chosen), len(chosen.intersection(predicted[0].tolist()))
            self._counts.numpy()[:, self._phase, layer] += counts
            return
        there = true != self._none
        self.requests[self._phase, layer] += there.sum()
        self.hits[self._phase, layer] += (found(predicted, true) & there).sum()

    def _routed(
        self, layer: MoELayer, below: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """The forward of a router in router-free mode, around the one `below`."""
        if not self._executes or layer.index not in self._predicted:
            return below(x, *args, **kwargs)
        ids, weights = self._predicted[layer.index]
        if type(layer.router).__name__ not in ROUTING:
            return None, weights, ids
        # A dialect's block wants the dialect's own form; what is in it, `_before` replaces.
        return ask(layer, x, weights.new_zeros(len(ids), self._none))


def intercept(patches: Patches, layer: MoELayer, change: Change) -> None:
    """Run a layer's experts with `change(x, ids, weights)` in place of the ids and weights that
    they are called with; x [T, H] is what its router has seen."""
    seen: list[Tensor] = []

    def of_router(_m: nn.Module, args: tuple) -> None:
        seen[:] = [args[0]]

    @while_on
    @torch.no_grad()
    def of_experts(_m: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if not seen:
            return None
        s, ids, weights = *args, *kwargs.values()
        return (s, *change(seen.pop().reshape(len(ids), -1), ids, weights)), {}

    patches.hook(layer.router.register_forward_pre_hook, of_router)
    # First of all hooks on the experts, so that a recording's sees what is executed.
    register = layer.experts.register_forward_pre_hook
    patches.hook(register, of_experts, with_kwargs=True, prepend=True)


def _executor(layer: MoELayer) -> Any:
    """What is called with a layer's experts, and may be told of predictions."""
    return layer.seam.engine or layer.seam.executor


def check(prediction: Any, T: int, predictor: Predictor) -> None:
    """ValueError, naming the predictor, unless this is a prediction for T tokens."""
    E = predictor.spec.E
    given = f"a {type(prediction).__name__}"
    match prediction:
        case (Tensor() as ids, Tensor() as weights):
            given = f"{ids.dtype} {list(ids.shape)} and {weights.dtype} {list(weights.shape)}"
            fits = ids.dim() == 2 and ids.shape == weights.shape and len(ids) == T
            if fits and ids.numel() and ids.dtype in WHOLE:
                # one token's as a list: faster than a tensor
                flat = ids[0].tolist() if T == 1 else [int(bound) for bound in ids.aminmax()]
                if min(flat) >= 0 and max(flat) <= E:
                    return
                given = f"ids from {min(flat)} to {max(flat)}"
    raise ValueError(
        f"the predictor {named(predictor)} predicted {given}; expected are (ids, weights), [{T}, K] "
        f"each, the ids whole numbers from 0 to {E - 1}, or {E} for no expert"
    )


def found(predicted: Tensor, true: Tensor) -> Tensor:
    """Which of the true experts [T, K] are among the predicted ones [T, n]: bool [T, K]."""
    return (true[:, :, None] == predicted[:, None, :]).any(-1)
