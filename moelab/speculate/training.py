"""Training the expert estimator from the hidden states of a trace, which are mapped where they lie
on disk.

Source: Speculating Experts §6.1, §6.2 (Fig. 9), appendix A: distillation, the loss is KL(true
router ‖ estimator). A softmax router is matched in that distribution; a sigmoid router expert by
expert, because a softmax would leave open a constant that its weights depend on. Our choices: Muon
for the inner matrices, which on the shipped model learns more from the same tokens than AdamW;
AdamW for the rest; a warm-up and a cosine. One device.

Shapes: R rows (`moelab.speculate.rows`); q [R, H], logits [R, E].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moelab.base.progress import progress
from moelab.base.registry import find
from moelab.speculate.estimator import DEFAULT_ESTIMATOR, Estimator
from moelab.speculate.execution import found
from moelab.speculate.predictors import EstimatorPredictor
from moelab.speculate.routers import route
from moelab.speculate.rows import Examples, Rows
from moelab.speculate.signals import DefaultVectors
from moelab.trace import RoutingTrace

WARMUP = 0.02  # of all tokens
#: highest learning rates: of AdamW (embedding, norm, head, biases) and of Muon (matrices A, B, C)
ADAMW_RATE = 2e-3
MUON_RATE = 0.05


class Point(NamedTuple):
    """Where training was after a number of tokens, repetitions included."""

    tokens: int
    loss: float  # mean KL divergence on the validation trace, nats


@dataclass(frozen=True, eq=False)
class Training:
    """A trained estimator, with the weights of the point of lowest loss; `history` is Fig. 9's loss."""

    estimator: Estimator
    history: tuple[Point, ...]


def train(
    trace: RoutingTrace,
    model: Any,
    vectors: DefaultVectors,
    *,
    validation: RoutingTrace,
    kind: str = DEFAULT_ESTIMATOR,
    parameters: int = 150_000,
    tokens: int = 300_000,
    batch: int = 1280,
    every: int | None = None,
    seed: int = 0,
) -> Training:
    """Train an estimator for `model` on the hidden states of a trace.

    trace : recorded with `hidden=True`; hidden states on disk are read as needed.
    vectors : the default vectors that make q, the same that predictors will use.
    validation : of text that is not in `trace`. It decides which weights are kept, and at which
        layers a hybrid uses them, so measure the result on a third one.
    kind : a name of `moelab.names("estimator")`. The default begins as the next router on q, and is
        given back as that if no training lowers the validation's loss.
    parameters : of the estimator (`Estimator.sized`).
    tokens : training tokens in all; a shorter trace is repeated, newly shuffled.
    batch : rows a step; a token is one row for every predicting layer.
    every : tokens between validations, about; by default a twentieth of `tokens`.

    Raises ValueError: a trace without hidden states or of another model."""
    if min(tokens, batch) < 1:
        raise ValueError(f"tokens={tokens}, batch={batch}: each must be at least 1")
    data, held_out = (Rows(t, model, vectors) for t in (trace, validation))
    estimator = _estimator(data, kind, parameters, seed)
    # refused now, not when it is trained, where a router's logits cannot be replaced
    predictor = EstimatorPredictor(model, vectors=vectors, estimator=estimator)
    optimizers = _optimizers(estimator)
    every = every or max(tokens // 20, 1)
    history = []
    weights = {}
    with progress(total=tokens, desc="training the estimator", unit="token") as bar:

        def validate() -> None:
            point = Point(int(bar.n), evaluate(estimator, held_out))
            bar.note(f"KL {point.loss:.4f}")
            history.append(point)
            if point.loss == min(loss for _, loss in history):
                weights.update(deepcopy(estimator.state_dict()))

        validate()
        generator = torch.Generator().manual_seed(seed)
        for some in drawn(len(trace), data.size, tokens, generator):
            batches = shuffled(data.read(some), batch, generator)
            for step, rows in enumerate(batches):
                loss = divergence(rows.logits, predicted(estimator, rows), data.spec.router)
                part = (bar.n + len(some) * (step + 0.5) / len(batches)) / tokens
                _step(optimizers, loss.mean(), schedule(part))
            bar.update(len(some))
            if bar.n - history[-1].tokens >= every or bar.n == tokens:
                validate()
    estimator.load_state_dict(weights)
    estimator.vectors, estimator.choice = vectors, choose(held_out, predictor)
    return Training(estimator.eval(), tuple(history))


def drawn(T: int, size: int, total: int, generator: torch.Generator) -> Iterator[Tensor]:
    """`total` numbers of T tokens, at most `size` at a time: all in random order, again and again."""
    while True:
        for some in torch.randperm(T, generator=generator).split(size):
            yield some[:total]
            total -= len(some)
            if total <= 0:
                return


def shuffled(examples: Examples, batch: int, generator: torch.Generator) -> list[Examples]:
    """The rows in random order, in batches of about as many."""
    R = len(examples.q)
    order = torch.randperm(R, generator=generator)
    return [
        Examples(*(column[rows] for column in examples))
        for rows in (order.tensor_split(math.ceil(R / batch)) if R else ())
    ]


def predicted(estimator: Estimator, rows: Examples) -> Tensor:
    """The logits [R, E] that an estimator predicts for rows."""
    logits = estimator(rows.q, rows.layer)
    return rows.start + logits if estimator.residual else logits


def _step(optimizers: list[torch.optim.Optimizer], loss: Tensor, rate: float) -> None:
    loss.backward()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        optimizer.step()
        optimizer.zero_grad()


def _estimator(data: Rows, kind: str, parameters: int, seed: int) -> Estimator:
    """Untrained, on the model's device; its initial weights are drawn by the seed alone."""
    spec = data.spec
    H = data.trace.residuals.shape[-1]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        estimator = find("estimator", kind).sized(H, spec.E, spec.L, parameters)
    estimator.model_id = data.trace.model_id
    return estimator.to(data.quasi.device)


def _optimizers(estimator: Estimator) -> list[torch.optim.Optimizer]:
    """Muon for the inner matrices, AdamW for the rest; "peak" of a group is its highest rate."""
    inner = ("A.weight", "B.weight", "C.weight")
    named = dict(estimator.named_parameters())
    rest = [parameter for name, parameter in named.items() if name not in inner]
    return [
        torch.optim.AdamW([{"params": rest, "peak": ADAMW_RATE}], weight_decay=0.01),
        torch.optim.Muon(
            [{"params": [named[name] for name in inner], "peak": MUON_RATE}], weight_decay=0.01
        ),
    ]


def schedule(part: float) -> float:
    """Factor of the learning rates after a part of all tokens: a linear warm-up, then a cosine from
    1 to 0."""
    return min(1.0, part / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * part))


def divergence(logits: Tensor, predicted: Tensor, router: str = "softmax") -> Tensor:
    """KL(router's distribution ‖ predicted) of each row, nats: [R, E], [R, E] → [R]  (§6.1).

    router : as in `MoESpec`; of the sigmoid kinds, the divergences of the E yes-or-no distributions
    are added up."""
    if router.startswith("sigmoid"):
        yes = logits.sigmoid()
        of = partial(F.binary_cross_entropy_with_logits, target=yes, reduction="none")
        return (of(predicted) - of(logits)).sum(-1)
    logs = predicted.log_softmax(-1), logits.log_softmax(-1)
    return F.kl_div(*logs, reduction="none", log_target=True).sum(-1)


@torch.no_grad()
def evaluate(estimator: Estimator, rows: Rows) -> float:
    """Mean divergence over all rows, nats."""
    losses = []
    for tokens in rows.all():
        some = rows.read(tokens)
        losses.append(divergence(some.logits, predicted(estimator, some), rows.spec.router))
    return float(torch.cat(losses).mean(dtype=torch.float64))


@torch.no_grad()
def choose(rows: Rows, predictor: EstimatorPredictor) -> tuple[bool, ...]:
    """For each of the L layers, whether the estimator has the better recall@K than the next router
    on q  (§6.3). A layer that predicts nothing, such as the last, is the router's."""
    lead = [0] * rows.spec.L  # hits of the estimator less those of the router
    for tokens in rows.all():
        for l, target, q, _, true in rows.layers(tokens):
            for sign, (ids, _) in ((1, predictor.estimated(l, q)), (-1, route(target, q))):
                lead[l] += sign * int((found(ids, true) & (true != rows.spec.E)).sum())
    return tuple(hits > 0 for hits in lead)
