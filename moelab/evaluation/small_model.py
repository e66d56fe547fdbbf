"""`python -m moelab train-small DESTINATION`: train the small model, score it, write its model card.

Scores are of library text and keys that training never saw: questions with one right answer, language loss beside a
unigram and a bigram model of the same training text, and how evenly each router spreads its tokens. A test holds the
shipped weights to the card.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from moelab import datasets
from moelab.arguments import whole
from moelab.evaluation.scores import language_loss, right_answers, text_windows
from moelab.files import write_json, write_text
from moelab.models.small import Recipe, corpus_ids, train_small
from moelab.recording import record

#: the model card, with fields to fill in
CARD = Path(__file__).with_suffix(".md")


def ngram_losses(train: np.ndarray, windows: np.ndarray, vocabulary: int) -> tuple[float, float]:
    """Loss in nats of a unigram and of a bigram model fitted to `train` (token ids), on windows [n, S].

    Both are smoothed: the unigram by one count each, the bigram by the unigram with ten pseudo-counts.
    """
    train = train.astype(np.int64)
    unigram = np.bincount(train, minlength=vocabulary) + 1.0
    unigram /= unigram.sum()
    pairs = np.bincount(train[:-1] * vocabulary + train[1:], minlength=vocabulary**2).reshape(vocabulary, vocabulary)
    previous, following = windows[:, :-1].ravel(), windows[:, 1:].ravel()
    seen = pairs.sum(1)[previous]
    bigram = (pairs[previous, following] + 10 * unigram[following]) / (seen + 10)
    return float(-np.log(unigram[following]).mean()), float(-np.log(bigram).mean())


def score_small(model: Any, n: int = 300, tokens: int = 256, seed: int = 0) -> dict[str, Any]:
    """Every score of the model card: {name: value}; accuracies come with their standard errors.

    n : questions a task; tokens : context length S.
    """
    scores: dict[str, Any] = {"questions a task": n, "context": tokens}
    for task in ("needle", "needle_multikey", "lookup", "yesno"):
        share = float(np.mean(right_answers(model, datasets.prompts(task, n, tokens=tokens, seed=seed))))
        scores[task] = {"accuracy": share, "standard error": math.sqrt(share * (1 - share) / n)}
    windows = text_windows(model.tokenizer, "test", max(n // 4, 8), tokens, seed)
    loss = language_loss(model, windows)
    unigram, bigram = ngram_losses(corpus_ids(model.tokenizer), windows.numpy(), len(model.tokenizer))
    scores["language loss"] = {"model": float(loss.mean()),
                               "standard error": float(loss.std(ddof=1) / math.sqrt(len(loss))),
                               "bigram": bigram, "unigram": unigram}
    texts = [p.text for source in ("needle", "code", "prose") for p in datasets.prompts(source, 16, tokens=tokens)]
    counts = record(model, texts).counts().double()
    scores["load"] = {"max/mean by layer": (counts.amax(1) / counts.mean(1)).tolist(),
                      "dead experts": int((counts == 0).sum())}
    return scores


def write_card(folder: Path, recipe: Recipe, scores: dict[str, Any], parameters: int) -> Path:
    """Write `README.md` (for people) and `card.json` (recipe and scores) into the checkpoint's folder."""
    share = {task: f"{100 * scores[task]['accuracy']:.1f} % ± {100 * scores[task]['standard error']:.1f}"
             for task in ("needle", "needle_multikey", "lookup", "yesno")}
    loss, load = scores["language loss"], scores["load"]
    text = CARD.read_text(encoding="utf-8").format(
        **{k: v for k, v in asdict(recipe).items() if k not in ("phases", "polish")}, **share,
        parameters=parameters / 1e6, steps=recipe.steps,
        contexts=", ".join(str(phase.context) for phase in (*recipe.phases, recipe.polish)),
        size=sum(f.stat().st_size for f in folder.iterdir()) / 1e6, python=platform.python_version(),
        questions=scores["questions a task"], context=scores["context"], loss=loss["model"],
        loss_error=loss["standard error"], bigram=loss["bigram"], unigram=loss["unigram"],
        load=", ".join(f"{ratio:.2f}" for ratio in load["max/mean by layer"]), dead=load["dead experts"] or "no")
    write_json(folder / "card.json", {"recipe": asdict(recipe), "python": platform.python_version(), "scores": scores})
    return write_text(folder / "README.md", text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("destination", type=Path, help="a new folder; an interrupted training goes on where it was")
    parser.add_argument("--seed", type=whole(), default=0, help="of the weights and the data (%(default)s)")
    parser.add_argument("--steps", type=whole(1), metavar="N",
                        help="shrink the training to about N steps, every phase in proportion; for a trial")
    parser.add_argument("--threads", type=whole(1), default=1,
                        help="CPU threads; the same weights come out only with the same number (%(default)s)")


def main(args: argparse.Namespace) -> int:
    import torch

    from moelab.models.opening import open_model
    recipe = Recipe(seed=args.seed)
    if args.steps is not None:
        if args.steps <= len(recipe.phases):
            raise ValueError(f"--steps is {args.steps}; the training has {len(recipe.phases) + 1} phases, each of at "
                             "least one step")
        share = args.steps / recipe.steps
        shorter = [replace(phase, steps=max(1, round(phase.steps * share)))
                   for phase in (*recipe.phases, recipe.polish)]
        recipe = replace(recipe, warmup=max(1, round(recipe.warmup * share)), phases=tuple(shorter[:-1]),
                         polish=shorter[-1])
    torch.set_num_threads(args.threads)
    folder = train_small(args.destination, recipe)
    model = open_model(folder)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{folder} is ready; {write_card(folder, recipe, score_small(model), parameters)} says what it can do")
    return 0
