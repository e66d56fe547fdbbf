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
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moelab.progress import progress
from moelab.registry import find
from moelab.speculate.estimator import DEFAULT_ESTIMATOR, Estimator
from moelab.speculate.execution import found
from moelab.speculate.predictors import estimated
from moelab.speculate.routers import route
from moelab.speculate.rows import Examples, Rows, generator_of
from moelab.speculate.signals import DefaultVectors
from moelab.trace import RoutingTrace

WARMUP = 0.02  # of all tokens


@dataclass(frozen=True)
class Point:
    """Where training was after a number of tokens, repetitions included, measured on the validation
    trace.

    loss : mean KL divergence, nats.
    hit_rate : recall@K of each predicting layer 0 … L − ahead − 1; NaN where nothing is predicted.
    """

    tokens: int
    loss: float
    hit_rate: tuple[float, ...]

    @property
    def mean_hit_rate(self) -> float:
        rates = [rate for rate in self.hit_rate if not math.isnan(rate)]
        return sum(rates) / len(rates)


@dataclass(frozen=True, eq=False)
class Training:
    """A trained estimator with the weights of `best`, the point of lowest loss; `history` is Fig.
    9."""

    estimator: Estimator
    history: tuple[Point, ...]
    best: Point
    stopped_early: bool


def train(
    trace: RoutingTrace | str | Path,
    model: Any,
    vectors: DefaultVectors,
    *,
    validation: RoutingTrace | str | Path,
    parameters: int = 150_000,
    tokens: int = 300_000,
    batch: int = 1280,
    learning_rate: float = 2e-3,
    muon_rate: float = 0.05,
    every: int | None = None,
    patience: int = 5,
    ahead: int = 1,
    kind: str = DEFAULT_ESTIMATOR,
    seed: int = 0,
) -> Training:
    """Train an estimator for `model` on the hidden states of a trace.

    trace : recorded with `hidden=True`, or its path; hidden states on disk are read as needed.
    vectors : the default vectors that make q, the same that predictors will use.
    validation : of text that is not in `trace`. It decides when to stop, so measure the result on a
        third one.
    parameters : of the estimator (`Estimator.sized`).
    tokens : training tokens in all; a shorter trace is repeated, newly shuffled.
    batch : rows a step; a token is one row for every predicting layer.
    learning_rate, muon_rate : highest rates, of AdamW (embedding, norm, head, biases) and Muon
        (matrices A, B, C).
    every : tokens between validations, about; by default a twentieth of `tokens`.
    patience : validations in a row without a lower loss, after which training stops.
    kind : a name of `moelab.names("estimator")`. The default begins as the next router on q, and is
        given back as that if no training lowers the validation's loss.

    Raises ValueError: a trace without hidden states or of another model."""
    if min(tokens, batch, patience) < 1:
        raise ValueError(
            f"tokens={tokens}, batch={batch}, patience={patience}: each must be at least 1"
        )
    data, held_out = (Rows(t, model, vectors, ahead) for t in (trace, validation))
    estimator = _estimator(data, kind, parameters, seed)
    optimizers = _optimizers(estimator, learning_rate, muon_rate)
    run = _Run(data, estimator, optimizers, tokens, batch, seed)
    every, history, best, weights, worse = every or max(tokens // 20, 1), [], None, {}, 0
    with progress(total=tokens, desc="training the estimator", unit="token") as bar:
        while not history or (history[-1].tokens < tokens and worse < patience):
            if not history or run.seen - history[-1].tokens >= every or run.seen == tokens:
                history.append(point := Point(run.seen, *evaluate(estimator, held_out)))
                bar.note(f"KL {point.loss:.4f}, hit rate {point.mean_hit_rate:.1%}")
                worse += 1
                if best is None or point.loss < best.loss:
                    best, weights, worse = point, deepcopy(estimator.state_dict()), 0
            else:
                bar.update(run.buffer())
    estimator.load_state_dict(weights)
    return Training(estimator.eval(), tuple(history), best, stopped_early=worse == patience)


@dataclass
class _Run:
    """A training under way: it has seen so many tokens, in so many buffers."""

    data: Rows
    estimator: Estimator
    optimizers: Sequence[torch.optim.Optimizer]
    tokens: int
    batch: int
    seed: int
    seen: int = 0
    buffers: int = 0

    def buffer(self) -> int:
        """Train on the next buffer; returns its tokens."""
        spans = self.data.spans(self.buffers, self.seed, self.tokens - self.seen)
        n = sum(b - a for a, b in spans)
        examples = self.data.read(spans)
        generator = generator_of(self.seed, "rows", self.buffers)
        order = torch.randperm(len(examples.q), generator=generator).to(examples.q.device)
        steps = math.ceil(len(order) / self.batch)
        for step, rows in enumerate(order.tensor_split(steps) if steps else ()):
            rate = schedule((self.seen + n * (step + 0.5) / steps) / self.tokens)
            self._step(examples, rows, rate)
        self.seen, self.buffers = self.seen + n, self.buffers + 1
        return n

    def _step(self, examples: Examples, rows: Tensor, rate: float) -> None:
        predicted = self.estimator(examples.q[rows], examples.layer[rows])
        if self.estimator.residual:
            predicted = examples.start[rows] + predicted
        divergence(examples.logits[rows], predicted, self.data.spec.router).mean().backward()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
            optimizer.step()
            optimizer.zero_grad()


def _estimator(data: Rows, kind: str, parameters: int, seed: int) -> Estimator:
    """Untrained, on the model's device; its initial weights are drawn from a generator of its
    own."""
    spec, H = data.spec, data.trace.residuals.shape[-1]
    with torch.device("meta"):
        estimator = find("estimator", kind).sized(
            H, spec.E, spec.L, parameters, ahead=data.quasi.ahead
        )
    estimator.to_empty(device="cpu").initialise(torch.Generator().manual_seed(seed))
    estimator.model_id = data.trace.model_id
    return estimator.to(data.quasi.device)


def _optimizers(
    estimator: Estimator, learning_rate: float, muon_rate: float
) -> list[torch.optim.Optimizer]:
    """Muon for the inner matrices, AdamW for the rest; "peak" of a group is its highest rate."""
    inner = [estimator.A.weight, estimator.B.weight, estimator.C.weight]
    ids = {id(p) for p in inner}
    rest = [p for p in estimator.parameters() if id(p) not in ids]
    return [
        torch.optim.AdamW([{"params": rest, "peak": learning_rate}], weight_decay=0.01),
        torch.optim.Muon([{"params": inner, "peak": muon_rate}], weight_decay=0.01),
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
        return sum(
            side * (F.logsigmoid(sign * logits) - F.logsigmoid(sign * predicted))
            for side, sign in ((yes, 1), (1 - yes, -1))
        ).sum(-1)
    true = logits.log_softmax(-1)
    return (true.exp() * (true - predicted.log_softmax(-1))).sum(-1)


@torch.no_grad()
def evaluate(estimator: Estimator, rows: Rows) -> tuple[float, tuple[float, ...]]:
    """(mean divergence, hit rate of each predicting layer) over all rows."""
    total = count = 0
    hits, requests = torch.zeros(2, rows.spec.L - rows.quasi.ahead, dtype=torch.long)
    for buffer in rows.buffers():
        for layer in buffer.layer.unique().tolist():
            q, _, _, logits, true = (column[buffer.layer == layer] for column in buffer)
            target = rows.quasi.targets[layer]
            predicted = estimated(estimator, layer, target, q)
            loss = divergence(logits, predicted, rows.spec.router)
            total += float(loss.sum(dtype=torch.float64))
            count += len(loss)
            ids, _ = route(target, q, predicted)
            there = true != rows.spec.E
            hits[layer] += int((found(ids, true) & there).sum())
            requests[layer] += int(there.sum())
    return total / count, tuple((hits.double() / requests).tolist())
