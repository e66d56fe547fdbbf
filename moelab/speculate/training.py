"""Training the expert estimator from activations on disk, in memory that does not grow with their number.

Source: Speculating Experts §6.1, §6.2 (Fig. 9), appendix A: distillation, the loss is KL(true router ‖ estimator).
A softmax router is matched in that distribution; a sigmoid router expert by expert, because a softmax would leave open
a constant that its weights depend on. Our choices: Muon for the inner matrices, which on the shipped model learns more
from the same tokens than AdamW; AdamW for the rest; a warm-up and a cosine. One device.

Shapes: R rows (`moelab.speculate.rows`); q [R, H], logits [R, E].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moelab.progress import progress
from moelab.registry import find
from moelab.speculate.estimator import DEFAULT_ESTIMATOR, Estimator
from moelab.speculate.execution import found
from moelab.speculate.predictors import estimated, route
from moelab.speculate.rows import Rows, seed_of
from moelab.speculate.signals import DefaultVectors
from moelab.trace import RoutingTrace

WARMUP = 0.02           # of all tokens


@dataclass(frozen=True)
class Point:
    """Where training was after a number of tokens, repetitions included, measured on the validation trace.

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
    """A trained estimator with the weights of `best`, the point of lowest loss; `history` is Fig. 9."""

    estimator: Estimator
    history: tuple[Point, ...]
    best: Point
    stopped_early: bool


def train(trace: RoutingTrace | str | Path, model: nn.Module, vectors: DefaultVectors, *,
          validation: RoutingTrace | str | Path, parameters: int = 150_000, tokens: int = 300_000, batch: int = 1280,
          learning_rate: float = 2e-3, muon_rate: float = 0.05, every: int | None = None, patience: int = 5,
          ahead: int = 1, kind: str = DEFAULT_ESTIMATOR, seed: int = 0) -> Training:
    """Train an estimator for `model` on the hidden states of a trace.

    trace : recorded with `hidden=True`; a path, or a trace whose hidden states lie on disk, is streamed.
    vectors : the default vectors that make q, the same that predictors will use.
    validation : of text that is not in `trace`. It decides when to stop, so measure the result on a third one.
    parameters : of the estimator (`Estimator.sized`).
    tokens : training tokens in all; a shorter trace is repeated, newly shuffled.
    batch : rows a step; a token is one row for every predicting layer.
    learning_rate, muon_rate : highest rates, of AdamW (embedding, norm, head, biases) and Muon (matrices A, B, C).
    every : tokens between validations, about; by default a twentieth of `tokens`.
    patience : validations in a row without a lower loss, after which training stops.
    kind : a name of `moelab.names("estimator")`. The default begins as the next router on q, and is given back as that
        if no training lowers the validation's loss.

    Raises ValueError: a trace without hidden states or of another model.
    """
    data, held_out = (Rows(t, model, vectors, ahead) for t in (trace, validation))
    if min(tokens, batch, patience) < 1:
        raise ValueError(f"tokens={tokens}, batch={batch}, patience={patience}: each must be at least 1")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        estimator = find("estimator", kind).sized(data.H, data.spec.E, data.spec.L, parameters, ahead=ahead)
    estimator.model_id = data.model_id
    estimator.to(data.quasi.device)
    inner = {"A.weight", "B.weight", "C.weight"}
    of = {matrix: [p for name, p in estimator.named_parameters() if (name in inner) is matrix]
          for matrix in (False, True)}
    optimizers = [(torch.optim.AdamW(of[False], lr=0, weight_decay=0.01), learning_rate),
                  (torch.optim.Muon(of[True], lr=0, weight_decay=0.01), muon_rate)]
    every, seen, buffer, worse = every or max(tokens // 20, 1), 0, 0, 0
    history: list[Point] = []
    best, weights = None, {}
    with progress(total=tokens, desc="training the estimator", unit="token") as bar:
        while worse < patience and not (history and history[-1].tokens == seen == tokens):
            if history and seen - history[-1].tokens < every and seen < tokens:
                spans = data.spans(buffer, seed, tokens - seen)
                n = sum(b - a for a, b in spans)
                learn(estimator, optimizers, data, spans, batch, seed_of(seed, "rows", buffer),
                      lambda step, steps: rate((seen + n * (step + 0.5) / steps) / tokens))
                seen, buffer = seen + n, buffer + 1
                bar.update(n)
                continue
            history.append(point := Point(seen, *evaluate(estimator, held_out)))
            worse += 1
            if best is None or point.loss < best.loss:
                best, weights, worse = point, deepcopy(estimator.state_dict()), 0
            bar.note(f"KL {point.loss:.4f}, hit rate {point.mean_hit_rate:.1%}")
    estimator.load_state_dict(weights)
    return Training(estimator.eval(), tuple(history), best, stopped_early=worse >= patience)


def rate(part: float) -> float:
    """Factor of the learning rates after a part of the tokens: a linear warm-up, then a cosine from 1 to 0."""
    return min(1.0, part / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * part))


def learn(estimator: Estimator, optimizers: Sequence[tuple[torch.optim.Optimizer, float]], data: Rows,
          spans: list[tuple[int, int]], batch: int, seed: int, factor: Callable[[int, int], float]) -> None:
    """Train on a buffer of stretches, shuffled by the seed; factor : (step, steps) → that of the optimizers' rates."""
    q, layer, start, logits, _ = data.read(spans)
    order = torch.randperm(len(q), generator=torch.Generator().manual_seed(seed)).to(q.device)
    steps = math.ceil(len(q) / batch)
    for step, rows in enumerate(order.tensor_split(steps) if steps else ()):
        for optimizer, peak in optimizers:
            optimizer.param_groups[0]["lr"] = peak * factor(step, steps)
        predicted = estimator(q[rows], layer[rows])
        if estimator.residual:
            predicted = start[rows] + predicted
        divergence(logits[rows], predicted, data.spec.router).mean().backward()
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def divergence(logits: Tensor, predicted: Tensor, router: str = "softmax") -> Tensor:
    """KL(router's distribution ‖ predicted) of each row, nats: [R, E], [R, E] → [R]  (§6.1).

    router : as in `MoESpec`; of the sigmoid kinds, the divergences of the E yes-or-no distributions are added up.
    """
    if router.startswith("sigmoid"):
        yes = logits.sigmoid()
        return sum(side * (F.logsigmoid(sign * logits) - F.logsigmoid(sign * predicted))
                   for side, sign in ((yes, 1), (1 - yes, -1))).sum(-1)
    true = logits.log_softmax(-1)
    return (true.exp() * (true - predicted.log_softmax(-1))).sum(-1)


@torch.no_grad()
def evaluate(estimator: Estimator, rows: Rows) -> tuple[float, tuple[float, ...]]:
    """(mean divergence, hit rate of each predicting layer) over all rows."""
    total = count = 0
    hits, requests = torch.zeros(2, rows.spec.L - rows.quasi.ahead, dtype=torch.long)
    for spans in rows.in_order():
        q, layer, _, logits, true = rows.read(spans)
        for l in layer.unique().tolist():
            here = layer == l
            predicted = estimated(estimator, l, rows.quasi.targets[l], q[here])
            total += float(divergence(logits[here], predicted, rows.spec.router).sum(dtype=torch.float64))
            count += len(predicted)
            ids, _ = route(rows.quasi.targets[l], q[here], predicted)
            there = true[here] != rows.spec.E
            hits[l] += int((found(ids, true[here]) & there).sum())
            requests[l] += int(there.sum())
    return total / count, tuple((hits.double() / requests).tolist())
