"""Training the expert estimator from activations on disk, in memory that does not grow with their
number.

Source: Speculating Experts §6.1, §6.2 (Fig. 9), appendix A: distillation, the loss is KL(true
router ‖ estimator). A softmax router is matched in that distribution; a sigmoid router expert by
expert, because a softmax would leave open a constant that its weights depend on. Our choices: Muon
for the inner matrices, which on the shipped model learns more from the same tokens than AdamW;
AdamW for the rest; a warm-up and a cosine. One device.

Shapes: R rows (`moelab.speculate.rows`); q [R, H], logits [R, E].
"""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moelab.files import absolute, atomic
from moelab.progress import progress
from moelab.registry import find
from moelab.schema import Count, checked, naming, parse_json, typed
from moelab.speculate.estimator import DEFAULT_ESTIMATOR, Estimator
from moelab.speculate.execution import found
from moelab.speculate.predictors import estimated, route
from moelab.speculate.rows import Rows, digest_of, seed_of
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
    checkpoint: str | Path | None = None,
) -> Training:
    """Train an estimator for `model` on the hidden states of a trace.

    trace : recorded with `hidden=True`; a path, or a trace whose hidden states lie on disk, is
        streamed.
    vectors : the default vectors that make q, the same that predictors will use.
    validation : of text that is not in `trace`. It decides when to stop, so measure the result on a
        third one.
    parameters : of the estimator (`Estimator.sized`).
    tokens : training tokens in all; a shorter trace is repeated, newly shuffled.
    batch : rows a step; a token is one row for every predicting layer.
    learning_rate, muon_rate : highest rates, of AdamW (embedding, norm, head, biases) and Muon
        (matrices A, B, C).
    every : tokens between validations and checkpoints, about; by default a twentieth of `tokens`.
    patience : validations in a row without a lower loss, after which training stops.
    kind : a name of `moelab.names("estimator")`. The default begins as the next router on q, and is
        given back as that if no training lowers the validation's loss.
    checkpoint : a file that is rewritten at every validation; if it exists, training resumes from
        it, with the same result as without the interruption.

    Raises ValueError: a trace without hidden states or of another model, or a checkpoint made with
    other arguments."""
    data, held_out = (Rows(t, model, vectors, ahead) for t in (trace, validation))
    settings = {
        "parameters": parameters,
        "tokens": tokens,
        "batch": batch,
        "learning_rate": learning_rate,
        "muon_rate": muon_rate,
        "every": every,
        "patience": patience,
        "ahead": ahead,
        "kind": kind,
        "seed": seed,
        "model": data.model_id,
        "trace": data.fingerprint(),
        "validation": held_out.fingerprint(),
        "vectors": digest_of([vectors.d, vectors.shared]),
    }
    if min(tokens, batch, patience) < 1:
        raise ValueError(
            f"tokens={tokens}, batch={batch}, patience={patience}: each must be at least 1"
        )
    run = _Run(data, settings)
    path = None if checkpoint is None else absolute(checkpoint)
    if path is not None and path.exists():
        run.resume(path)
    every = every or max(tokens // 20, 1)
    with progress(
        total=tokens, desc="training the estimator", unit="token", initial=run.seen
    ) as bar:
        while not run.finished:
            if not run.history or run.seen - run.history[-1].tokens >= every or run.seen == tokens:
                run.validated(held_out)
                bar.note(
                    f"KL {run.history[-1].loss:.4f}, hit rate {run.history[-1].mean_hit_rate:.1%}"
                )
                if path is not None:
                    run.save(path)
            else:
                bar.update(run.buffer())
    return run.result()


class _Run:
    """The state of a training, and its steps."""

    def __init__(self, data: Rows, settings: dict[str, Any]) -> None:
        self.data, self.settings = data, settings
        spec, device = data.spec, data.quasi.device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings["seed"])
            self.estimator = find("estimator", settings["kind"]).sized(
                data.H, spec.E, spec.L, settings["parameters"], ahead=settings["ahead"]
            )
        self.estimator.model_id = data.model_id
        e = self.estimator.to(device)
        inner = [e.A.weight, e.B.weight, e.C.weight]
        rest = [
            p
            for name, p in e.named_parameters()
            if name not in ("A.weight", "B.weight", "C.weight")
        ]
        self.optimizers = [
            torch.optim.AdamW(rest, lr=0, weight_decay=0.01),
            torch.optim.Muon(inner, lr=0, weight_decay=0.01),
        ]
        self.seen = self.buffers = self.worse = 0
        self.history: list[Point] = []
        self.best: Point | None = None
        self.best_weights: dict[str, Tensor] = {}

    @property
    def finished(self) -> bool:
        done = (
            bool(self.history) and self.history[-1].tokens == self.seen == self.settings["tokens"]
        )
        return done or self.worse >= self.settings["patience"]

    def rate(self, seen: float) -> float:
        """Factor of the learning rates: a linear warm-up, then a cosine from 1 to 0."""
        part = seen / self.settings["tokens"]
        return min(1.0, part / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * part))

    def buffer(self) -> int:
        """Train on the next buffer; returns its tokens."""
        s = self.settings
        spans = self.data.spans(self.buffers, s["seed"], s["tokens"] - self.seen)
        n = sum(b - a for a, b in spans)
        q, layer, start, logits, _ = self.data.read(spans)
        generator = torch.Generator().manual_seed(seed_of(s["seed"], "rows", self.buffers))
        order = torch.randperm(len(q), generator=generator).to(q.device)
        steps = math.ceil(len(q) / s["batch"])
        for step, rows in enumerate(order.tensor_split(steps) if steps else ()):
            for optimizer, peak in zip(self.optimizers, (s["learning_rate"], s["muon_rate"])):
                optimizer.param_groups[0]["lr"] = peak * self.rate(
                    self.seen + n * (step + 0.5) / steps
                )
            predicted = self.estimator(q[rows], layer[rows])
            if self.estimator.residual:
                predicted = start[rows] + predicted
            divergence(logits[rows], predicted, self.data.spec.router).mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        self.seen, self.buffers = self.seen + n, self.buffers + 1
        return n

    def validated(self, held_out: Rows) -> None:
        """Measure on the validation trace; keep the weights if they are the best so far."""
        point = Point(self.seen, *evaluate(self.estimator, held_out))
        self.history.append(point)
        if self.best is None or point.loss < self.best.loss:
            self.best, self.worse = point, 0
            self.best_weights = deepcopy(self.estimator.state_dict())
        else:
            self.worse += 1

    def result(self) -> Training:
        self.estimator.load_state_dict(self.best_weights)
        return Training(
            self.estimator.eval(),
            tuple(self.history),
            self.best,
            stopped_early=self.worse >= self.settings["patience"],
        )

    COUNTERS = ("seen", "buffers", "worse")

    def save(self, path: Path) -> None:
        with atomic(path) as part:
            torch.save(
                {
                    "settings": json.dumps(self.settings),
                    "counters": {name: getattr(self, name) for name in self.COUNTERS},
                    "history": [asdict(point) for point in self.history],
                    "best": asdict(self.best),
                    "weights": self.estimator.state_dict(),
                    "best_weights": self.best_weights,
                    "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                },
                part,
            )

    def resume(self, path: Path) -> None:
        what = (
            "checkpoint of an estimator's training",
            "training with another file, or without this one,",
        )
        with naming(path, *what):
            saved = torch.load(path, weights_only=True, map_location=self.data.quasi.device)
            theirs = typed(parse_json(saved["settings"]), dict[str, Any])
        mine = json.loads(json.dumps(self.settings))
        if different := [
            f"{name} ({theirs.get(name)} there, {mine[name]} here)"
            for name in mine
            if theirs.get(name) != mine[name]
        ]:
            raise ValueError(
                f"{path} is a checkpoint of another training, which differs in {', '.join(different)}; "
                f"repeat its arguments to go on, or delete it to start over"
            )
        with naming(path, *what):
            for name in self.COUNTERS:
                setattr(self, name, typed(saved["counters"][name], Count, name))
            self.history, self.best = (
                typed(saved["history"], list[Point]),
                typed(saved["best"], Point),
            )
            for weights in (saved["best_weights"], saved["weights"]):
                for name, tensor in self.estimator.state_dict().items():
                    checked(weights, name, ("float32",), tensor.shape)
                self.estimator.load_state_dict(weights)
            self.best_weights = saved["best_weights"]
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)


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
    for q, layer, _, logits, true in rows.buffers():
        for l in layer.unique().tolist():
            here = layer == l
            predicted = estimated(estimator, l, rows.quasi.targets[l], q[here])
            total += float(
                divergence(logits[here], predicted, rows.spec.router).sum(dtype=torch.float64)
            )
            count += len(predicted)
            ids, _ = route(rows.quasi.targets[l], q[here], predicted)
            there = true[here] != rows.spec.E
            hits[l] += int((found(ids, true[here]) & there).sum())
            requests[l] += int(there.sum())
    return total / count, tuple((hits.double() / requests).tolist())
