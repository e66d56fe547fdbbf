"""`python -m moelab train-small DESTINATION`: train the small model, score it, write its model card."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moelab.arguments import whole
from moelab.models.small import Recipe, train_small

CARD = """# The small model

A Qwen3-MoE of {parameters:.1f} million parameters, trained from scratch on two CPU cores so that everything in
moelab runs, within minutes and without a network, on a model that has learned something. It completes Python code,
finds facts that are stated in its context, and is good for nothing else.

| | |
|---|---|
| architecture | `qwen3_moe`: {layers} MoE layers, {experts} experts, top-{experts_per_token} |
| sizes | H {hidden}, I {intermediate}, vocabulary {vocabulary} |
| files | {size:.1f} MB of bf16 safetensors, config, tokenizer: plain `transformers` opens the folder |
| trained on | the sources and manual pages of Python {python}'s standard library, and generated facts and questions |
| recipe | `moelab/models/small.py`; `python -m moelab train-small DESTINATION` repeats it |
| steps | {steps:,} of 2,048 tokens, contexts of {contexts} tokens |

## What it scores

*Measured* on {questions} questions a task in contexts of {context} tokens. No library file, manual page or key of
these prompts occurred in training.

| task | right answers |
|---|---|
| one fact in library text (`needle`) | {needle} |
| four facts in library text, one asked for (`needle_multikey`) | {needle_multikey} |
| eight facts and nothing else (`lookup`) | {lookup} |
| yes or no about one of four facts (`yesno`; guessing gives 50 %) | {yesno} |

Language loss on unseen library text: **{loss:.2f}** nats a token (standard error {loss_error:.2f}); a bigram model of
the same training text has {bigram:.2f}, a unigram model {unigram:.2f}.

Busiest expert over mean load, layer by layer: {load}; {dead} experts are never used.

## Licence

The weights are moelab's (Apache-2.0); the text they were trained on is Python's (PSF licence).
"""


def write_card(folder: Path, recipe: Recipe, scores: dict[str, Any], parameters: int) -> Path:
    """Write `README.md` (for people) and `card.json` (recipe and scores) into the checkpoint's folder."""
    share = {task: f"{100 * scores[task]['accuracy']:.1f} % ± {100 * scores[task]['standard error']:.1f}"
             for task in ("needle", "needle_multikey", "lookup", "yesno")}
    loss, load = scores["language loss"], scores["load"]
    text = CARD.format(
        **{k: v for k, v in asdict(recipe).items() if k not in ("phases", "polish")}, **share,
        parameters=parameters / 1e6, steps=recipe.steps,
        contexts=", ".join(str(phase.context) for phase in (*recipe.phases, recipe.polish)),
        size=sum(f.stat().st_size for f in folder.iterdir()) / 1e6, python=platform.python_version(),
        questions=scores["questions a task"], context=scores["context"], loss=loss["model"],
        loss_error=loss["standard error"], bigram=loss["bigram"], unigram=loss["unigram"],
        load=", ".join(f"{ratio:.2f}" for ratio in load["max/mean by layer"]), dead=load["dead experts"] or "no")
    (folder / "card.json").write_text(json.dumps({"recipe": asdict(recipe), "python": platform.python_version(),
                                                  "scores": scores}, indent=1) + "\n")
    path = folder / "README.md"
    path.write_text(text)
    return path


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
    from moelab.evaluation.scores import score_small
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
