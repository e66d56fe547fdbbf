"""What can be predicted of a trained model's routing, and what a cache makes of it.

Does an estimator that begins as the next layer's router stay above it and above the paper's kind
(Speculating Experts §6.1)? How do eviction policies compare with LRU? On the small model or, by `--model`, on several, such as one of another shape: `python data/train_small.py FOLDER --shape
wide --steps 1200` trains it. `--untrained` adds the control, a model of each one's shape with
random weights, without estimators.

`Contest` is what notebook 04 compares predictors by. All is fitted to prompts of the train split
and scored on prompts of the test split (§3): 95 %
intervals are over these, paired in differences and ratios. An estimator is trained several times;
its hits are the mean, and "least" is the worst training. Misses are exact counts of every policy,
Belady's among them, with a cache for a share of the experts: prompts are decoded token by token, one
after another, and the cache is never emptied.

Shapes: hits and requests [P], of each prompt, summed over predicting layers.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moelab import open_model
from moelab.base.arguments import number, several, whole
from moelab.base.files import small_model
from moelab.base.progress import progress
from moelab.base.records import Numbers, Record, Records
from moelab.base.registry import make
from moelab.base.specs import State
from moelab.bench.arena import steps
from moelab.cache.policies import POLICIES, Belady
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.evaluation import accuracy
from moelab.evaluation.intervals import Interval
from moelab.evaluation.questions import REMEMBERED, prompts
from moelab.offloading.session import Session
from moelab.recording import record
from moelab.speculate import DefaultVectors, Predictor, Speculation, default_vectors, takes
from moelab.speculate.estimator import DEFAULT_ESTIMATOR, ESTIMATORS
from moelab.speculate.training import train
from moelab.trace import PREFILL, RoutingTrace

from .predictor_scores import Score, score
from .ratios import ratio

#: of all prompts
SOURCES = ("code", "prose", "needle_multikey", "lookup")
#: name → (predictor, key of the estimator that it uses); others are predictors by their own names.
#: "estimator" is the paper's kind (appendix A), "estimator_early" the same after a quarter of the
#: tokens and "hybrid_early" its hybrid; "residual" is ours (`moelab.speculate.estimator`)
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
#: shares of the training tokens by which estimators are compared
PARTS = {"sixteenth": 16, "quarter": 4, "all": 1}
ROUTERS = {"next router on s": "router", "next router on q": "quasi"}
#: policies that also run with a pool for each layer
BY_LAYER = ("lru", "lfu", "lrfu")


# ---- across layers


def random_weights(model: Any, seed: int) -> Any:
    """A model of the same shape with random weights and the same tokenizer."""
    torch.manual_seed(seed)
    made = type(model)(copy.deepcopy(model.config)).to(model.dtype).eval()
    made.set_experts_implementation("eager")  # a model in few bits has its own
    made.spec, made.tokenizer = model.spec, model.tokenizer
    Session(made)
    return made


def texts(split: str, n: int, tokens: int, seed: int = 0) -> list[str]:
    """`n` prompts of each source, of about so many tokens."""
    return [prompt.text for prompt in prompts(SOURCES, n, tokens=tokens, seed=seed, split=split)]


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
        seen, unseen = of("train", prompts_each, seed=seed), of("test", tests_each, seed=seed)
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
        control, unseen = random_weights(model, seed), texts("test", tests_each, tokens, seed)
        trace = record(control, unseen, hidden=True, batch_size=32)
        return cls(control, trace, None, trace, default_vectors(control, unseen[::4]))

    def predictor(self, name: str, model: Any = None, **more: Any) -> Predictor:
        """One by its name, with what it takes; of another copy of the model, such as one that is
        offloaded."""
        kind, key = TRAINED.get(name, (name, None))
        parts = {
            "vectors": self.vectors,
            "trace": self.train,
            "estimator": self.estimators.get(key),
            "choice": self.choices.get(key),
        } | more
        wanted = {part: parts[part] for part in takes(kind) if part in parts}
        return make("predictor", kind, self.model if model is None else model, **wanted)

    def scores(self, names: Iterable[str], phase: int | None = PREFILL) -> dict[str, Score]:
        """Of each on the test prompts."""
        return {name: score(self.test, self.predictor(name), phase) for name in names}

    def trained(self, kind: str, tokens: int, seeds: Iterable[int]) -> list[tuple[Any, Score]]:
        """(an estimator, its score on the test prompts' prefill) of each seed."""
        found = []
        for seed in seeds:
            how = {"validation": self.validation, "kind": kind, "every": -(-tokens // 5)}
            made = train(self.train, self.model, self.vectors, tokens=tokens, seed=seed, **how)
            one = made.estimator
            tried = self.predictor("estimator", estimator=one)
            found.append((one, score(self.test, tried, PREFILL)))
        return found

    def teach(
        self, tokens: int, seeds: int, seed: int
    ) -> tuple[dict[str, dict[int, list[float]]], float]:
        """Train both kinds of estimators on parts of the tokens, on fewer than all with several
        seeds.

        Returns recall, mean over layers, on the test prompts' prefill: {kind: {tokens: [of each
        seed]}}; and the CPU seconds of our kind's training on all."""
        found: dict[str, dict[int, list[float]]] = {}
        for kind in ESTIMATORS:
            for part in PARTS.values():
                n = max(1, tokens // part)
                began = time.process_time()
                made = self.trained(kind, n, range(seed, seed + (seeds if part > 1 else 1)))
                if (kind, part) == (DEFAULT_ESTIMATOR, 1):
                    seconds = time.process_time() - began
                found.setdefault(kind, {})[n] = [mean(of) for _, of in made]
                key = "early" if (kind, part) == ("appendix-a", 4) else kind
                self.estimators[key] = made[0][0]
        self.choices = {key: one.choice for key, one in self.estimators.items()}
        return found, seconds

    def speculation(self, name: str, mode: str = "speculative", **how: Any) -> Speculation:
        return Speculation(self.model, self.predictor(name), mode, **how)

    def executed(
        self, names: Iterable[str], windows: int, questions: int, tokens: int, seed: int
    ) -> dict[str, dict[str, Interval]]:
        """What executing predictions costs, prompt included: {task: {name: (difference, low,
        high)}}.

        Per cent of the loss on `windows` of text, points of right answers to so many questions of
        each other task."""
        modes = {"as it is": nullcontext} | {
            name: partial(self.speculation, name, prefill=True) for name in names
        }
        compare = partial(accuracy.compare, self.model, modes, seed=seed, batch_size=32)
        loss, *others = TASKS
        found = compare((loss,), windows=windows, tokens=tokens)["scores"]
        scale = dict.fromkeys(others, 100) | {loss: 100 / found[loss]["as it is"]["score"]}
        found |= compare(others, n=questions, tokens=128)["scores"]
        return {
            task: {
                name: tuple(
                    scale[task] * x for x in (rows[name]["difference"], *rows[name]["interval"])
                )
                for name in names
            }
            for task, rows in found.items()
        }

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
            equal = map(torch.equal, a.logits, b.logits)
            return torch.equal(a.sequences, b.sequences) and all(equal)

        return {
            "hint": same(generate(), generate("residual_hybrid", "hint")),
            "router-free": same(generate("residual"), generate("residual", "router-free")),
        }


def mean(found: Score) -> float:
    """Recall@K, mean over the layers that predict."""
    return float(found.recall.nanmean())


def scores(
    contest: Contest, tokens: Sequence[int], seeds: int, seed: int
) -> dict[str, list[Score]]:
    """Of the prompts' prefill, by "next router on q", or "residual, 4,000 tokens" with a score of
    each training."""
    found = {label: [of] for label, of in zip(ROUTERS, contest.scores(ROUTERS.values()).values())}
    for n in tokens:
        for kind in ESTIMATORS:
            made = contest.trained(kind, n, range(seed, seed + seeds))
            found[f"{kind}, {n:,} tokens"] = [of for _, of in made]
    return found


def hits(of: Sequence[Score]) -> torch.Tensor:
    """Experts that were predicted, mean of the trainings, float64 [P]."""
    return torch.stack([one.hits.sum(1) for one in of]).double().mean(0)


def recalls(found: dict[str, list[Score]]) -> dict[str, Numbers]:
    """Recall@K of each."""
    return {
        name: dict(zip(("recall", "from", "to"), ratio(hits(of), of[0].requests.sum(1))))
        | {"least": min(map(mean, of)), "trainings": len(of)}
        for name, of in found.items()
    }


def leads(found: dict[str, list[Score]], tokens: Sequence[int]) -> dict[str, Numbers]:
    """Points of recall of our kind of estimator above the better router's and above the other
    kinds'."""
    router = max(ROUTERS, key=lambda name: float(hits(found[name]).sum()))
    rows = {}
    for n in tokens:
        ours = found[f"{DEFAULT_ESTIMATOR}, {n:,} tokens"]
        others = [f"{kind}, {n:,} tokens" for kind in ESTIMATORS if kind != DEFAULT_ESTIMATOR]
        for other in (router, *others):
            of = ratio(hits(ours) - hits(found[other]), ours[0].requests.sum(1))
            rows[f"{n:,} tokens, above {other.partition(',')[0]}"] = dict(
                zip(("points", "from", "to"), (100 * x for x in of))
            )
    return rows


# ---- what a cache makes of it


def misses(trace: RoutingTrace, policy: Any, scope: str, share: float) -> np.ndarray:
    """Misses in each sequence, int64 [P], with memory for a share of the experts; scope "model" or
    "layer"."""
    L, E = trace.spec.L, trace.spec.E
    held = round(share * (E if scope == "layer" else L * E))
    residency = Residency(L, E, Pools(F=held), policy, scope)
    sequence = trace.sequence.tolist()
    found = np.zeros(trace.sequences, np.int64)
    for row, layer, tokens in steps(trace):
        asked = residency.begin(layer, tokens).requests
        found[sequence[row]] += sum(request.state is State.MISSED for request in asked)
    return found


def evictions(trace: RoutingTrace, share: float) -> dict[str, Numbers]:
    """Misses of every policy over LRU's; fewest first."""
    future = [step[1:] for step in steps(trace)]
    arms = [("model", name) for name in POLICIES] + [("layer", name) for name in BY_LAYER]
    found = {
        name if scope == "model" else f"{name}, layer by layer": misses(
            trace, Belady(future) if name == "belady" else name, scope, share
        )
        for scope, name in progress(arms, f"{share:.0%} of the experts", unit="policy")
    }
    requests = int((trace.ids != trace.spec.E).sum())
    return {
        name: {"hit rate": 1 - of.sum() / requests}
        | dict(zip(("misses ÷ lru", "from", "to"), ratio(of, found["lru"])))
        for name, of in sorted(found.items(), key=lambda item: item[1].sum())
    }


def run(
    model: Sequence[str] = (),
    tokens: Sequence[int] = (4_000, 16_000, 64_000),
    seeds: int = 2,
    train_prompts: int = 54,
    test_prompts: int = 6,
    prompt_tokens: int = 256,
    new_tokens: int = 32,
    budgets: Sequence[float] = (0.25, 0.5, 0.75),
    untrained: bool = False,
    seed: int = 0,
) -> Records:
    """ValueError: two folders of one name."""
    sections: Records = {}
    folders = {Path(folder).name: folder for folder in model or [small_model()]}
    if len(folders) < len(model):
        raise ValueError(
            f"of {', '.join(model)} two have the same name, under which results are; rename one"
        )
    models = {name: open_model(folder) for name, folder in folders.items()}
    controls = {
        f"{name}, untrained": random_weights(model, seed)
        for name, model in models.items()
        if untrained
    }
    for name, one in (models | controls).items():
        contest = Contest.of(one, train_prompts, test_prompts, prompt_tokens, new_tokens, seed)
        spec = contest.test.spec
        learn = () if name in controls else tokens
        name = f"{name} (L {spec.L}, E {spec.E}, K {spec.K})"
        found = scores(contest, learn, seeds, seed)
        chance = f"{spec.K / spec.E:.3f}"
        sections[f"{name}: recall one layer ahead, chance {chance} (measured)"] = recalls(found)
        if learn:
            sections[f"{name}: recall of our estimator (measured)"] = leads(found, learn)
        for share in budgets:
            title = f"{name}: evictions, {share:.0%} of the experts (exact counts)"
            sections[title] = evictions(contest.test, share)
    return sections


OPTIONS = {
    "model": (
        {"action": "append", "metavar": "FOLDER"},
        "a model, instead of the small one; may be repeated",
    ),
    "tokens": (several(whole(1)), "that estimators see"),
    "seeds": (whole(1), "trainings of each"),
    "train_prompts": (whole(2), "of each of four sources, to learn from"),
    "test_prompts": (whole(2), "of each, to score on"),
    "prompt_tokens": (whole(64), "of a prompt"),
    "new_tokens": (whole(2), "generated after each that is scored"),
    "budgets": (several(number(above=0)), "shares of the experts that a cache has memory for"),
    "untrained": ({"action": "store_true"}, "also a model of the same shape with random weights"),
    "seed": (whole(), "picks the prompts and the first training"),
}
