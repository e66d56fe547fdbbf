"""`moelab calibrate MODEL FILE`: count a model's expert popularity once, for all that predicts
(NPUMoE §3.3).

    moelab calibrate small small.calibration.safetensors
    moelab calibrate Qwen/Qwen3-30B-A3B qwen.safetensors --prompts 64 --new-tokens 32 --external
    moelab ane plan small --calibration small.calibration.safetensors

Prompts of the training split run through the model; of their routing only counts are kept, a few
kilobytes that are bound to the model: a `moelab.calibration.Calibration`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moelab import open_model
from moelab.base.arguments import described, one_of, several
from moelab.base.files import writable
from moelab.base.library import token_count
from moelab.calibration import Calibration, calibrate
from moelab.checkpoint.opening import require_tokenizer
from moelab.evaluation import questions
from moelab.evaluation.imatrix import write_imatrix
from moelab.recording import record
from moelab.trace import DECODE, PREFILL

SOURCES = ("code", "prose", "needle_multikey", "lookup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts(parser, 16)
    described(__file__, "batch", "calibrate")(parser)


def add_prompts(parser: argparse.ArgumentParser, prompts: int) -> None:
    """A model, a new file, and what the model is run on to fill it."""
    described(__file__, "run")(parser)
    parser.set_defaults(prompts=prompts)
    parser.add_argument(
        "--sources",
        type=several(one_of(questions.SOURCES)),
        default=list(SOURCES),
        help=f"of {', '.join(questions.SOURCES)} (default: {','.join(SOURCES)})",
    )


def require_new(file: Path, force: bool) -> None:
    """FileExistsError: the file is there, and it is not said to replace it."""
    if writable(file).exists() and not force:
        raise FileExistsError(
            f"{file} is there already; choose another name, or replace it with --force"
        )


def opened(args: argparse.Namespace) -> Any:
    """The model of `add_prompts`. FileExistsError as of `require_new`."""
    require_new(args.file, args.force)
    name = None if args.model == "small" else args.model
    require_tokenizer(name)
    return open_model(name, experts="external" if args.external else "resident")


def prompts(
    model: Any, args: argparse.Namespace, n: int, seed: int, sources: Sequence[str] = ()
) -> list[questions.Prompt]:
    """`n` prompts of each source, of the training split."""
    count = token_count(model.tokenizer)
    how = {"tokens": args.tokens, "seed": seed, "split": "train", "count": count}
    return questions.prompts(sources or args.sources, n, **how)


def main(args: argparse.Namespace) -> int:
    model = opened(args)
    seen = prompts(model, args, args.prompts, args.seed)
    inputs = args.inputs or (4096 if args.imatrix else 0)
    how = {"max_new_tokens": args.new_tokens, "batch_size": args.batch}
    trace = record(model, seen, hidden=bool(inputs), **how)
    source = f"{args.prompts} prompts each of {', '.join(args.sources)}, seed {args.seed}"
    found = calibrate(trace, source, inputs)
    if args.imatrix:
        print(write_imatrix(args.imatrix, model, found))
    print(f"{found.save(args.file)}\n{summary(found)}")
    return 0


def summary(found: Calibration) -> str:
    """What was counted, in lines: tokens and imbalance of both phases."""
    spec = found.spec
    lines = [f"{spec.name}: {spec.L} MoE layers of {spec.E} experts, top-{spec.K}; {found.source}"]
    for name, phase in (("prefill", PREFILL), ("decode", DECODE)):
        if n := found.tokens[phase]:
            busiest = found.imbalance(phase)
            lines.append(
                f"{name}: {n:,} tokens; the busiest expert of a layer has {busiest.nanquantile(0):.2f} "
                f"to {busiest.nanquantile(1):.2f} times the mean"
            )
    return "\n".join(lines)
