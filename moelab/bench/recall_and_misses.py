"""What can be predicted of a trained model's routing, across layers and across tokens: two of our
findings, judged.

Does an estimator that begins as the next layer's router stay above it and above the paper's kind
(Speculating Experts §6.1)? Does a regression to the next tokens' experts
(`moelab.speculate.next_token`) evict better than what knows the past alone? On the small model or,
by `--model`, on several, such as one of another shape: `python data/train_small.py FOLDER --shape
wide --steps 1200` trains it. `--untrained` adds the control, a model of each one's shape with
random weights, without estimators.

All is fitted to prompts of the train split and scored on prompts of the test split: 95 % intervals
are over these, paired in differences and ratios. An estimator is trained several times; its hits
are the mean, and "least" is the worst training. Misses are exact counts of every policy, Belady's
among them, with a cache for a share of the experts: prompts are decoded token by token, one after
another, and the cache is never emptied.

Shapes: hits and requests [P], of each prompt, summed over predicting layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moelab import open_model
from moelab.arguments import number, several, whole
from moelab.bench.predictors import Contest, mean, random_weights
from moelab.cache.next_token import NextTokenPolicy
from moelab.cache.policies import DEFAULT_POLICY, POLICIES, Belady
from moelab.cache.pools import Pools
from moelab.cache.residency import SCOPES, Residency
from moelab.evaluation.intervals import ratio
from moelab.evaluation.predictors import Score, score
from moelab.evaluation.scores import language_loss, text_windows
from moelab.files import small_model
from moelab.progress import progress
from moelab.records import Numbers, Records
from moelab.specs import State
from moelab.speculate.estimator import DEFAULT_ESTIMATOR, ESTIMATORS
from moelab.speculate.next_token import NextToken, fit
from moelab.speculate.training import train
from moelab.trace import PREFILL, RoutingTrace

ROUTERS = {"next router on s": "router", "next router on q": "quasi"}
#: policies that also run with a pool for each layer
BY_LAYER = ("lru", "lfu", "lrfu")
#: (policy, scope)
DEFAULT = (DEFAULT_POLICY, "model")
OURS = (NEXT := "next-token", "model")
CEILING = ("belady", "model")


def scores(
    contest: Contest, tokens: Sequence[int], seeds: int, seed: int
) -> dict[str, list[Score]]:
    """Of the prompts' prefill, by "next router on q", or "residual, 4,000 tokens" with a score of
    each training."""
    found = {label: [of] for label, of in zip(ROUTERS, contest.scores(ROUTERS.values()).values())}
    for n in tokens:
        for kind in ESTIMATORS:
            trained = (
                train(
                    contest.train,
                    contest.model,
                    contest.vectors,
                    validation=contest.validation,
                    kind=kind,
                    tokens=n,
                    every=-(-n // 5),
                    seed=seed + i,
                ).estimator
                for i in range(seeds)
            )
            found[f"{kind}, {n:,} tokens"] = [
                score(contest.test, contest.predictor("estimator", estimator=one), PREFILL)
                for one in trained
            ]
    return found


def hits(of: Sequence[Score]) -> torch.Tensor:
    """Experts that were predicted, mean of the trainings, float64 [P]."""
    return torch.stack([one.hits.sum(1) for one in of]).double().mean(0)


def recalls(found: dict[str, list[Score]]) -> dict[str, Numbers]:
    """Recall@K of each."""
    rows = {}
    for name, of in found.items():
        recall, low, high = ratio(hits(of), of[0].requests.sum(1))
        rows[name] = {
            "recall": recall,
            "from": low,
            "to": high,
            "least": min(map(mean, of)),
            "trainings": len(of),
        }
    return rows


def leads(found: dict[str, list[Score]], tokens: Sequence[int]) -> dict[str, Numbers]:
    """Points of recall of our kind of estimator above the better router's and above the other
    kinds'."""
    router = max(ROUTERS, key=lambda name: float(hits(found[name]).sum()))
    rows = {}
    for n in tokens:
        ours = found[f"{DEFAULT_ESTIMATOR}, {n:,} tokens"]
        for other in (
            router,
            *(f"{kind}, {n:,} tokens" for kind in ESTIMATORS if kind != DEFAULT_ESTIMATOR),
        ):
            of = ratio(hits(ours) - hits(found[other]), ours[0].requests.sum(1))
            rows[f"{n:,} tokens, above {other.partition(',')[0]}"] = dict(
                zip(("points", "from", "to"), (100 * x for x in of))
            )
    return rows


def steps(trace: RoutingTrace) -> list[tuple[int, int, dict[int, int]]]:
    """(row of the trace, layer, {expert: 1}), token by token, prompt after prompt; no prefill."""
    ids = trace.ids.tolist()
    E = trace.spec.E
    return [
        (row, layer, dict.fromkeys((e for e in chosen if e != E), 1))
        for row in torch.argsort(trace.sequence.long(), stable=True).tolist()
        for layer, chosen in enumerate(ids[row])
        if chosen[0] != E
    ]


def misses(trace: RoutingTrace, policy: Any, scope: str, share: float) -> np.ndarray:
    """Misses in each sequence, int64 [P], with memory for a share of the experts; scope "model" or
    "layer"."""
    L = trace.spec.L
    E = trace.spec.E
    residency = Residency(
        L, E, Pools(F=round(share * (E if scope == "layer" else L * E))), policy, scope
    )
    inputs = trace.router_inputs.float().numpy() if residency.sees else None
    sequence = trace.sequence.tolist()
    found = np.zeros(trace.sequences, np.int64)
    for row, layer, tokens in steps(trace):
        if inputs is not None:
            residency.see(layer, inputs[row, layer][None])
        found[sequence[row]] += sum(
            r.state is State.MISSED for r in residency.begin(layer, tokens).requests
        )
    return found


def compare(
    fitted: NextToken, trace: RoutingTrace, share: float, arms: Sequence[tuple[str, str]] = ()
) -> dict[tuple[str, str], np.ndarray]:
    """(policy, scope) → misses in each sequence of `trace`; of all policies unless `arms` says
    which."""
    future = [step[1:] for step in steps(trace)]
    made = {"next-token": lambda: NextTokenPolicy(fitted), "belady": lambda: Belady(future)}
    arms = arms or [
        (name, scope)
        for name in POLICIES
        for scope in SCOPES
        if scope == "model" or name in BY_LAYER
    ]
    return {
        (name, scope): misses(trace, made.get(name, lambda name=name: name)(), scope, share)
        for name, scope in progress(arms, f"{share:.0%} of the experts", unit="policy")
    }


def missed(
    seen: RoutingTrace, test: RoutingTrace, shares: str, arms: dict[str, tuple[str, str]]
) -> dict[float, dict[str, np.ndarray]]:
    """`compare` at each share of "0.25,0.5" on every other prompt, by the names of `arms`;
    "next-token" is fitted to `seen`."""
    fitted = fit(seen)
    some = test.select(test.sequence % 2 == 0)
    found = {
        share: compare(fitted, some, share, list(arms.values()))
        for share in map(float, shares.split(","))
    }
    return {
        share: {name: of[arm][::2] for name, arm in arms.items()} for share, of in found.items()
    }


def evictions(contest: Contest, fitted: NextToken, share: float) -> dict[str, Numbers]:
    """Misses of every policy over LRU's, and those of the prediction across tokens over the
    policy's; fewest first."""
    found = compare(fitted, contest.test, share)
    requests = int((contest.test.ids != contest.test.spec.E).sum())
    rows = {}
    for (name, scope), of in sorted(found.items(), key=lambda item: item[1].sum()):
        over = ratio(of, found["lru", "model"])
        ours = ratio(found[OURS], of)
        rows[name if scope == "model" else f"{name}, layer by layer"] = {
            "hit rate": 1 - of.sum() / requests,
            **dict(zip(("misses ÷ lru", "from", "to"), over)),
            **dict(zip((f"{NEXT} ÷ its misses", f"{NEXT} from", f"{NEXT} to"), ours)),
        }
    return rows


def router_of(contest: Contest, windows: int, seed: int) -> Numbers:
    """Whether there is something to predict: language loss, load of the busiest expert, dead
    experts."""
    counts = contest.train.counts().double()
    texts = text_windows(contest.model.tokenizer, "test", windows, 256, seed)
    return {
        "parameters": float(sum(p.numel() for p in contest.model.parameters())),
        "language loss, nats a token": float(language_loss(contest.model, texts).mean()),
        "busiest expert over mean load, worst layer": float(
            (counts.amax(1) / counts.mean(1)).max()
        ),
        "experts never used": float((counts == 0).sum()),
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
    windows: int = 24,
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
        sections[f"{name}: its router (measured)"] = router_of(contest, windows, seed)
        found = scores(contest, learn, seeds, seed)
        fitted = fit(contest.train)
        sections[f"{name}: recall one layer ahead, chance {spec.K / spec.E:.3f} (measured)"] = (
            recalls(found)
        )
        if learn:
            sections[f"{name}: recall of our estimator (measured)"] = leads(found, learn)
        for share in budgets:
            sections[f"{name}: evictions, {share:.0%} of the experts (exact counts)"] = evictions(
                contest, fitted, share
            )
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
    "windows": (whole(2), "of text, for the language loss"),
    "untrained": ({"action": "store_true"}, "also a model of the same shape with random weights"),
    "seed": (whole(), "picks the prompts and the first training"),
}
