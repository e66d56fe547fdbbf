"""`moelab train`: files that `--speculate`, `--prefetch` and `moelab evaluate` take.

    moelab train vectors small small.vectors.safetensors
    moelab train estimator small small.estimator.safetensors
    moelab train estimator Qwen/Qwen3-30B-A3B qwen.safetensors --parameters 17_000_000
    moelab generate --memory 50% --speculate hybrid --estimator small.estimator.safetensors

Source: Speculating Experts §3.1 (default vectors), §6.1 to §6.3 (estimator; where a hybrid uses it).
Prompts of the training split run through the model. For an estimator their hidden states, two of
the residual stream's size for each token and layer, lie beside the file until it is written, in
FILE.….parts: a call that was cut off goes on with what is recorded there."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from moelab.base.arguments import described
from moelab.evaluation import calibrate
from moelab.evaluation.calibrate import add_prompts, opened, prompts
from moelab.models.identity import identity
from moelab.recording import record
from moelab.speculate import DefaultVectors, default_vectors, train
from moelab.trace import RoutingTrace

#: one in so many prompts of an estimator measures its default vectors; as many more validate it
PART = 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for name, run, n, purpose in (
        ("vectors", vectors, 6, "measure default vectors: what each expert adds on average"),
        ("estimator", estimator, 54, "train what predicts the next layer's experts"),
    ):
        command = commands.add_parser(name, help=purpose, description=f"{purpose.capitalize()}.")
        add_prompts(command, n)
        command.set_defaults(run=run)
    described(calibrate.__file__, "batch")(command)
    described(__file__)(command)


def main(args: argparse.Namespace) -> int:
    return args.run(args)


def vectors(args: argparse.Namespace) -> int:
    """`vectors`."""
    model = opened(args)
    print(default_vectors(model, prompts(model, args, args.prompts, args.seed)).save(args.file))
    return 0


def estimator(args: argparse.Namespace) -> int:
    """`estimator`."""
    model = opened(args)
    parts = parts_of(args, identity(model))
    seen = partial(prompts, model, args)
    few = -(-args.prompts // PART)

    def recorded(name: str, n: int, seed: int) -> RoutingTrace:
        path = parts / f"{name}.safetensors"  # written last, when its hidden states are whole
        if path.is_file():
            return RoutingTrace.load(path)
        return record(model, seen(n, seed), hidden=path, batch_size=args.batch)

    if not (path := parts / "vectors.safetensors").is_file():
        default_vectors(model, seen(few, args.seed)).save(path)
    found = train(
        recorded("train", args.prompts, args.seed),
        model,
        DefaultVectors.load(path),
        validation=recorded("validation", max(2, few), args.seed + 1),
        kind=args.kind,
        parameters=args.parameters,
        tokens=args.train_tokens,
        seed=args.seed,
    )
    print(found.estimator.save(args.file))
    shutil.rmtree(parts)
    better = sum(found.estimator.choice)
    print(f"better than the next router at {better} of {model.spec.L - 1} layers, on other text")
    return 0


def parts_of(args: argparse.Namespace, model_id: str) -> Path:
    """The folder of what is recorded for such a call, beside the file that it writes."""
    what: list[Any] = [model_id, args.prompts, args.sources, args.tokens, args.seed]
    key = hashlib.sha1(json.dumps(what).encode()).hexdigest()[:8]
    folder = args.file.with_name(f"{args.file.name}.{key}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
