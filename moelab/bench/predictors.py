"""Predictors of the next layer's experts beside each other: recall, recall by training, the cost of
executing them.

For notebook 04 and the benches `recall_and_misses` and `seeds`. Predictors learn from the train
split and are scored on the test split (Speculating Experts §3, §6). The control is an untrained
model of the same shape. "estimator" is the paper's kind (appendix A), "estimator_early" the same
after a quarter of the tokens and "hybrid_early" its hybrid; "residual" is ours
(`moelab.speculate.estimator`)."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any

import torch

from moelab.evaluation import accuracy
from moelab.evaluation.intervals import Interval
from moelab.evaluation.predictors import Score, choose, score, similarity
from moelab.evaluation.questions import REMEMBERED, prompts
from moelab.offloading.session import Session
from moelab.recording import record
from moelab.records import Numbers, Record
from moelab.registry import make
from moelab.speculate import DefaultVectors, Predictor, Speculation, default_vectors, takes
from moelab.speculate.estimator import DEFAULT_ESTIMATOR, ESTIMATORS
from moelab.speculate.training import train
from moelab.trace import PREFILL, RoutingTrace

#: of all prompts
SOURCES = ("code", "prose", "needle_multikey", "lookup")
#: name → (predictor, key of the estimator that it uses); others are predictors by their own names
TRAINED = {
    "residual": ("estimator", DEFAULT_ESTIMATOR),
    "residual_hybrid": ("hybrid", DEFAULT_ESTIMATOR),
    "estimator": ("estimator", "appendix-a"),
    "estimator_early": ("estimator", "early"),
    "hybrid_early": ("hybrid", "early"),
}
#: what is scored in a contest of executing predictions; the last two are controls
CONTEST = ("router", "quasi", *TRAINED, "static", "random")
#: tasks, and of each what its difference is in
TASKS = {"loss": "%"} | dict.fromkeys(("needle_multikey", *REMEMBERED), "points")
RECALL = "of true experts, prefill"  # unit of the metrics of recall
#: shares of the training tokens by which estimators are compared
PARTS = {"sixteenth": 16, "quarter": 4, "all": 1}
#: kind of estimator → tokens trained on → recall of each seed
Learned = dict[str, dict[int, list[float]]]


def texts(split: str, n: int, tokens: int, seed: int = 0) -> list[str]:
    """`n` prompts of each source, of about so many tokens."""
    return [prompt.text for prompt in prompts(SOURCES, n, tokens=tokens, seed=seed, split=split)]


def random_weights(model: Any, seed: int) -> Any:
    """A model of the same shape with random weights and the same tokenizer."""
    torch.manual_seed(seed)
    made = type(model)(copy.deepcopy(model.config)).to(model.dtype).eval()
    made.spec = model.spec
    made.tokenizer = model.tokenizer
    Session(made)
    return made


def book(tokenizer: Any, seed: int) -> torch.Tensor:
    """Some thousands of tokens of the test split in a row, [1, N]."""
    return torch.tensor(
        [sum((tokenizer(text)["input_ids"] for text in texts("test", 24, 256, seed + 2)), [])]
    )


@dataclass
class Contest:
    """One model, what was recorded of it, and what predictors are made of.

    train, validation : traces of the train split with hidden states, of other prompts each; test :
        of the test split.
    estimators, choices : by their keys in `TRAINED`, after `teach`.
    """

    model: Any
    train: RoutingTrace
    validation: RoutingTrace | None
    test: RoutingTrace
    vectors: DefaultVectors
    estimators: Record = field(default_factory=dict)
    choices: dict[str, tuple[bool, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: Any, prompts_each: int, tests_each: int, tokens: int, new_tokens: int, seed: int
    ) -> Contest:
        """Record a model on prompts of each source; decode steps of the test prompts, too."""
        of = partial(texts, tokens=tokens)
        seen = of("train", prompts_each, seed=seed)
        unseen = of("test", tests_each, seed=seed)
        if set(seen) & set(unseen):
            raise ValueError("prompts of the train and of the test split are the same")
        kept = partial(record, model, hidden=True, batch_size=32)
        return cls(
            model,
            kept(seen),
            kept(of("train", max(2, tests_each), seed=seed + 1)),
            kept(unseen, max_new_tokens=new_tokens, min_new_tokens=new_tokens),
            default_vectors(model, seen[:: max(1, len(seen) // 24)]),
        )

    @classmethod
    def control(cls, model: Any, tests_each: int, tokens: int, seed: int) -> Contest:
        """An untrained model of the same shape on the same test prompts, which it also learns
        popularity from."""
        control = random_weights(model, seed)
        unseen = texts("test", tests_each, tokens, seed)
        trace = record(control, unseen, hidden=True, batch_size=32)
        return cls(control, trace, None, trace, default_vectors(control, unseen[::4]))

    def predictor(self, name: str, model: Any = None, ahead: int = 1, **more: Any) -> Predictor:
        """One by its name, with what it takes; of another copy of the model, such as one that is
        offloaded."""
        kind, key = TRAINED.get(name, (name, None))
        parts = {
            "vectors": self.vectors,
            "trace": self.train,
            "estimator": self.estimators.get(key),
            "choice": self.choices.get(key),
        } | more
        return make(
            "predictor",
            kind,
            self.model if model is None else model,
            ahead=ahead,
            **{part: parts[part] for part in takes(kind) if part in parts},
        )

    def scores(
        self, names: Iterable[str], phase: int | None = PREFILL, ahead: int = 1
    ) -> dict[str, Score]:
        """Of each on the test prompts."""
        return {name: score(self.test, self.predictor(name, ahead=ahead), phase) for name in names}

    def similarity(self, phase: int = PREFILL) -> dict[str, torch.Tensor]:
        """Of s and q to the next router input, by layer."""
        return similarity(self.test, self.model, self.vectors, phase)

    def seconds(self, name: str, times: int = 200) -> float:
        """Median time of predicting for one token at layer 0."""
        asked = self.predictor(name)
        test = self.test
        took = []
        for _ in range(times + 1):
            took.append(time.perf_counter())
            asked.predict(
                0,
                test.router_inputs[:1, 0],
                test.residuals[:1, 0],
                test.ids[:1, 0].long(),
                test.weights[:1, 0],
            )
        return median(later - now for now, later in zip(took, took[1:]))

    def controls(self) -> dict[str, bool | float]:
        """What must come out: chance is chance, and recall is what a loop counts.

        Raises RuntimeError if the loop's is another.
        """
        chance = score(self.test, self.predictor("random"))
        naive, counted = self.naive_recall()
        if abs(naive - counted) >= 0.01:  # bf16 logits tie now and then
            raise RuntimeError(f"recall is counted wrongly: {counted:.3f}, by a loop {naive:.3f}")
        within = (
            chance.recall - self.test.spec.K / self.test.spec.E
        ).abs() <= 4 * chance.standard_error
        return {
            "naive_recall_agrees": True,
            "random_within_four_standard_errors_of_chance": bool(within.all()),
        }

    def naive_recall(self) -> tuple[float, float]:
        """Recall of the next router on s at layer 0, of the first prompt: recomputed token by
        token, and as scored."""
        some = self.test.select(self.test.sequence == 0)
        predictor = self.predictor("router")
        weight = predictor.targets[0].router.weight
        K = self.test.spec.K
        hits = 0
        for s, chosen in zip(some.router_inputs[:, 0], some.ids[:, 1]):
            hits += len(set((weight @ s).topk(K).indices.tolist()) & set(chosen.tolist()))
        return hits / (len(some) * K), float(score(some, predictor).recall[0])

    def teach(self, tokens: int, seeds: int, seed: int) -> tuple[Learned, float]:
        """Train both kinds of estimators on parts of the tokens, on fewer than all with several
        seeds.

        Returns recall, mean over layers, on the test prompts' prefill: {kind: {tokens: [of each
        seed]}}; and the CPU seconds of our kind's training on all."""
        found: Learned = {}
        for kind in ESTIMATORS:
            for part in PARTS.values():
                n = max(1, tokens // part)
                began = time.process_time()
                made = []
                for i in range(seeds if part > 1 else 1):
                    made.append(
                        train(
                            self.train,
                            self.model,
                            self.vectors,
                            validation=self.validation,
                            kind=kind,
                            tokens=n,
                            every=-(-n // 5),
                            seed=seed + i,
                        ).estimator
                    )
                if (kind, part) == (DEFAULT_ESTIMATOR, 1):
                    seconds = time.process_time() - began
                found.setdefault(kind, {})[n] = [
                    mean(score(self.test, self.predictor("estimator", estimator=one), PREFILL))
                    for one in made
                ]
                self.estimators["early" if (kind, part) == ("appendix-a", 4) else kind] = made[0]
        self.choices = {
            key: choose(self.validation, self.model, self.vectors, one)
            for key, one in self.estimators.items()
        }
        return found, seconds

    def speculation(self, name: str, mode: str = "speculative", **how: Any) -> Speculation:
        return Speculation(self.model, self.predictor(name), mode, **how)

    def executed(
        self, names: Iterable[str], windows: int, questions: int, tokens: int, seed: int
    ) -> tuple[dict[str, dict[str, Interval]], float]:
        """What executing predictions costs, prompt included: ({task: {name: (difference, low,
        high)}}, the loss).

        Per cent of the loss on `windows` of text, points of right answers to so many questions of
        each other task."""
        modes = {"as it is": nullcontext} | {
            name: partial(self.speculation, name, prefill=True) for name in names
        }
        others = [task for task in TASKS if task != "loss"]
        how = {"seed": seed, "batch_size": 32}
        found = (
            accuracy.compare(self.model, modes, ("loss",), windows=windows, tokens=tokens, **how)[
                "scores"
            ]
            | accuracy.compare(self.model, modes, others, n=questions, tokens=128, **how)["scores"]
        )
        loss = found["loss"]["as it is"]["score"]
        scale = {task: 100 / loss if task == "loss" else 100 for task in found}
        return {
            task: {
                name: tuple(
                    scale[task] * x for x in (rows[name]["difference"], *rows[name]["interval"])
                )
                for name in names
            }
            for task, rows in found.items()
        }, loss

    def identical(self, prompt: list[int], new_tokens: int = 12) -> dict[str, bool]:
        """Whether tokens and logits are equal, bit for bit: hints to the model as it is; without
        routers (§6.4) to routers whose choice is replaced by the estimator's."""
        ids = torch.tensor([prompt])

        def generate(*how: str) -> Any:
            with self.speculation(*how) if how else nullcontext():
                return self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=new_tokens,
                    min_new_tokens=new_tokens,
                    output_logits=True,
                    return_dict_in_generate=True,
                )

        def same(a: Any, b: Any) -> bool:
            return torch.equal(a.sequences, b.sequences) and all(
                map(torch.equal, a.logits, b.logits)
            )

        return {
            "hint": same(generate(), generate("residual_hybrid", "hint")),
            "router-free": same(generate("residual"), generate("residual", "router-free")),
        }


def training_metrics(found: Learned) -> Numbers:
    """Mean recall of each kind and part, by the names of metrics."""
    return {
        f"recall_{kind.replace('-', '_')}_{part}": fmean(rates)
        for kind, of in found.items()
        for part, rates in zip(PARTS, of.values(), strict=True)
    }


def by_layer(name: str, found: Score) -> Numbers:
    """Recall of each layer, by the names of metrics."""
    return {f"{name}_{layer}": value for layer, value in enumerate(found.recall.tolist())}


def mean(found: Score) -> float:
    """Recall@K, mean over the layers that predict."""
    return float(found.recall.nanmean())
