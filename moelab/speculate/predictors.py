"""Predictors: which experts a later layer will choose, asked before this layer's experts have run.

Source: Speculating Experts §3.3 (router, quasi), §4 (executing predictions, hence the weights),
§6.1, §6.3 (estimator, hybrid), §8 (several layers ahead); GPU-NDP §III-D (frequency).

    s, r [T, H]    ids, weights [T, K]    →    ids, weights [T, K] of layer + ahead

Ids and weights come out of the architecture's own router code, whatever the logits came from, so a
prediction can be executed. A router that drops tokens for lack of capacity (Switch) is asked as if
there were always room."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from moelab.base.files import beside
from moelab.base.registry import Entry, find
from moelab.checkpoint.opening import spec_of
from moelab.models import MoELayer
from moelab.models.identity import identity
from moelab.models.stream import stacks, streams
from moelab.speculate.estimator import TRAINED
from moelab.speculate.routers import check_given, route, router_logits
from moelab.speculate.signals import MEASURED, check_model, quasi_hidden
from moelab.trace import RoutingTrace

#: (ids [T, K], weights [T, K])
Prediction = tuple[Tensor, Tensor]
#: what predictors are made of, as keyword arguments, and where it comes from
INGREDIENTS = beside(__file__)


def takes(name: str) -> list[str]:
    """Which of the `INGREDIENTS` a predictor takes, by its name in the registry."""
    return list(find("predictor", name).takes)


def lacking(name: str, given: Collection[str] = ()) -> list[str]:
    """What a predictor still needs to be given: the rest is measured where it is needed."""
    return [part for part in takes(name) if part not in ("vectors", "seed", *given)]


def require_parts(name: str, given: Collection[str]) -> None:
    """ValueError for what a predictor lacks, with the command that makes it."""
    for part in lacking(name, given):
        raise ValueError(f"the predictor {name} needs {INGREDIENTS[part]}")


class Predictor(ABC):
    """Predicts, at MoE layer l, the experts and weights of layer l + ahead.

    A subclass says what it `takes`; that is given by keyword, is an attribute of the predictor, and
    `prepare` sees it first."""

    #: names of `INGREDIENTS` that it is made of; a class attribute of that name is the default
    takes: tuple[str, ...] = ()
    #: whether `predict` reads r, which not every architecture has (`moelab.models.stream`)
    reads_residual = False

    def __init__(self, model: nn.Module, *, ahead: int = 1, **ingredients: Any) -> None:
        made = type(self).__name__
        if ahead < 1:
            raise ValueError(
                f"ahead is {ahead}; a prediction is for a later layer, so it must be at least 1"
            )
        if unknown := sorted(ingredients.keys() - {*self.takes}):
            raise ValueError(
                f"the predictor {made} takes no {unknown[0]}; it takes "
                f"{', '.join(('ahead', *self.takes))}"
            )
        for name in self.takes:
            if (value := ingredients.get(name, getattr(self, name, None))) is None:
                raise ValueError(f"the predictor {made} needs {INGREDIENTS[name]}")
            setattr(self, name, value)
        self.ahead, self.spec = ahead, spec_of(model)
        self.device = getattr(model, "device", torch.device("cpu"))
        #: predicting layer → predicted layer; none across the border between encoder and decoder
        self.targets: dict[int, MoELayer] = {
            here.index: there
            for _, layers in stacks(model)
            for here, there in zip(layers, layers[ahead:])
        }
        self.prepare(model)

    def prepare(self, model: nn.Module) -> None:
        """Check the ingredients against the model, and make of them what `predict` uses."""

    def begin(self) -> None:
        """A new prompt, or a new batch of prompts, starts."""

    def observe(self, layer: int, ids: Tensor, weights: Tensor) -> None:
        """What the true router of `layer` chose for the T = B·S tokens of a pass, [T, K] each; E
        where nothing ran."""

    @abstractmethod
    def predict(
        self, layer: int, s: Tensor, r: Tensor, ids: Tensor, weights: Tensor
    ) -> Prediction | None:
        """(ids [T, K], weights [T, K]) of `targets[layer]`; None where there is nothing to say.

        layer : one of `targets`. s : its router input [T, H]. ids, weights : what it executes, [T,
            K].
        r : residual before its norm [T, H]; undefined for a predictor that does not say
        `reads_residual`."""


class NextRouter(Predictor):
    """The next router on this layer's router input s (Speculating Experts §3.3, the baseline)."""

    def prepare(self, model):
        width = model.config.get_text_config().hidden_size
        for layer in self.targets.values():  # each can be asked
            route(layer, torch.zeros(1, width, dtype=model.dtype, device=model.device))

    def predict(self, layer, s, r, ids, weights):
        return route(self.targets[layer], s)


class Quasi(Predictor):
    """The next router on the quasi-hidden state q (§3.3, Router-PF)."""

    takes = ("vectors",)
    reads_residual = True

    def prepare(self, model):
        self.streams = streams(model)
        made = self.vectors
        check_model(model, made.model_id, "these default vectors are", MEASURED, *made.counts.shape)
        self.vectors = made.to(self.device)

    def quasi(self, layer: int, r: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """q [T, H] of the layer that is predicted."""
        path = self.streams[layer : self.targets[layer].index + 1]
        return quasi_hidden(path, r, self.vectors.layer_default(layer, ids, weights))

    def predict(self, layer, s, r, ids, weights):
        return route(self.targets[layer], self.quasi(layer, r, ids, weights))


class Hybrid(Quasi):
    """Per layer the estimator or the next router on q, whichever was better on validation (§6.3,
    Hybrid-PF).

    estimator : (q [T, H], predicting layer) → logits [T, E] of the layer that is predicted; with a
        true attribute `residual`, what is added to those of its router on q.
    choice : bool for each of the L layers; `moelab.speculate.training.choose` finds it.
    """

    takes = ("vectors", "estimator", "choice")

    def prepare(self, model):
        super().prepare(model)
        if len(self.choice) != self.spec.L:
            raise ValueError(
                f"choice has {len(self.choice)} entries; it needs one for each of the {self.spec.L} "
                f"MoE layers"
            )
        trained = getattr(self.estimator, "ahead", self.ahead)
        if trained != self.ahead:
            raise ValueError(
                f"this estimator was trained to look {trained} layer(s) ahead, not {self.ahead}"
            )
        if model_id := getattr(self.estimator, "model_id", ""):
            sizes = {of: self.estimator.config[of] for of in "LE"}
            check_model(model, model_id, "this estimator is", TRAINED, **sizes)
            self.estimator.to(self.device)
        for layer, target in self.targets.items():
            if self.choice[layer]:
                check_given(target, self.vectors.d.shape[-1])

    def predict(self, layer, s, r, ids, weights):
        q = self.quasi(layer, r, ids, weights)
        if not self.choice[layer]:
            return route(self.targets[layer], q)
        return self.estimated(layer, q)

    def estimated(self, layer: int, q: Tensor) -> Prediction:
        """What the estimator says of q [T, H]."""
        target, logits = self.targets[layer], self.estimator(q, layer)
        if getattr(self.estimator, "residual", False):
            logits = router_logits(target, q) + logits
        return route(target, q, logits)


class EstimatorPredictor(Hybrid):
    """A trained estimator of the next router's logits on q, at every layer (§6.1, §6.3, Est-PF)."""

    takes = ("vectors", "estimator")

    def prepare(self, model):
        self.choice = [True] * self.spec.L
        super().prepare(model)


class Frequency(Predictor):
    """The experts that this prompt's own prefill chose most often, with their mean weights (GPU-NDP
    §III-D)."""

    def begin(self):
        self.prefill: dict[int, Prediction] = {}  # layer → ids and weights [B·S, K]
        self.popular: dict[int, Prediction] = {}  # layer → ids and weights [B, K]

    def observe(self, layer, ids, weights):
        self.prefill.setdefault(layer, (ids, weights))

    def predict(self, layer, s, r, ids, weights):
        B = len(ids)
        target = self.targets[layer].index
        known = self.popular.get(target)
        if known is None or len(known[0]) != B:
            seen = self.prefill.get(target)
            if seen is None or len(seen[0]) % B:
                return None
            ids, weights = (column.reshape(B, -1) for column in seen)
            self.popular[target] = known = popular(ids, weights, self.spec.E, self.spec.K)
        return known


class Static(Predictor):
    """The layer's most popular experts of a recorded trace, the same for every token, with their
    mean weights; of a calibration, which counts no weights, with equal ones."""

    takes = ("trace",)

    def prepare(self, model):
        trace = self.trace
        K = self.spec.K
        if isinstance(trace, RoutingTrace):
            of_model(trace, model)
            columns = trace.ids.long(), trace.weights
            ids, weights = (column.movedim(1, 0).flatten(1) for column in columns)  # [L, T·K]
            ids, weights = popular(ids, weights, self.spec.E, K)
        else:
            ids = trace.require(identity(model), self.spec).counts().topk(K).indices
            weights = torch.full(ids.shape, 1 / K, dtype=torch.float32)
        self.popular = ids.to(self.device), weights.to(self.device)  # [L, K] each

    def predict(self, layer, s, r, ids, weights):
        target = self.targets[layer].index
        return tuple(column[target].expand(len(ids), -1) for column in self.popular)


class Previous(Predictor):
    """What the token before chose at that layer, with its weights; nothing during prefill."""

    def begin(self):
        self.last: dict[int, Prediction] = {}  # layer → ids and weights [B·S, K]

    def observe(self, layer, ids, weights):
        self.last[layer] = ids, weights

    def predict(self, layer, s, r, ids, weights):
        last = self.last.get(self.targets[layer].index)
        if last is None or len(last[0]) % len(ids):
            return None
        return tuple(column.view(len(ids), -1, column.shape[-1])[:, -1] for column in last)


class Random(Predictor):
    """K different experts at random with equal weights: a control, K/E."""

    takes = ("seed",)
    seed = 0

    def prepare(self, model):
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    def predict(self, layer, s, r, ids, weights):
        noise = torch.empty(len(ids), self.spec.E, dtype=torch.float32, device=self.device)
        noise.uniform_(generator=self.generator)
        return noise.topk(self.spec.K).indices, torch.full_like(weights, 1 / self.spec.K)


def of_model(trace: RoutingTrace, model: nn.Module) -> None:
    """ValueError for a trace that was recorded from another model."""
    what = f"this trace is of {trace.spec.name},"
    remedy = "use moelab.record(model, prompts)"
    check_model(model, trace.model_id, what, remedy)


def popular(ids: Tensor, weights: Tensor, E: int, K: int) -> Prediction:
    """The K most frequent experts of each row and their mean weights, [B, K]; ids and weights [B,
    n], E is none."""
    B = len(ids)
    weights = weights.float()
    zeros = weights.new_zeros(B, E + 1)
    counts = zeros.scatter_add(1, ids, torch.ones_like(weights))
    total = zeros.scatter_add(1, ids, weights)
    count, chosen = counts[:, :E].topk(K)
    return chosen, (total.gather(1, chosen) / count.clamp(min=1)).to(weights.dtype)


#: name → predictor; another one is a class and a line here
PREDICTORS: dict[str, type[Predictor] | Entry] = {
    "router": NextRouter,
    "quasi": Quasi,
    "estimator": EstimatorPredictor,
    "hybrid": Hybrid,
    "frequency": Frequency,
    "static": Static,
    "previous": Previous,
    "random": Entry(Random, "K different experts at random: a control, K/E", teaching=True),
}
