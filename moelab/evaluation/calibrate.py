"""`moelab calibrate MODEL FILE`: count a model's expert popularity once, for all that predicts
(NPUMoE §3.3).

    moelab calibrate small small.calibration.safetensors
    moelab calibrate Qwen/Qwen3-30B-A3B qwen.safetensors --prompts 64 --new-tokens 32 --external
    moelab ane plan small --calibration small.calibration.safetensors

Prompts of the training split run through the model; of their routing only counts are kept, a few
kilobytes that are bound to the model: a `moelab.calibration.Calibration`."""

from __future__ import annotations

import argparse
from pathlib import Path

from moelab import open_model
from moelab.base.arguments import one_of, several, whole
from moelab.base.files import writable
from moelab.base.library import token_count
from moelab.calibration import Calibration, calibrate
from moelab.checkpoint.opening import require_tokenizer
from moelab.evaluation import questions
from moelab.recording import record
from moelab.trace import DECODE, PREFILL

SOURCES = ("code", "prose", "needle_multikey", "lookup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="a checkpoint folder, a store or a hub id; 'small' is the shipped model"
    )
    parser.add_argument("file", type=Path, help="the new file, FILE.safetensors")
    parser.add_argument(
        "--prompts", type=whole(1), default=16, metavar="N", help="of each source (%(default)s)"
    )
    parser.add_argument(
        "--sources",
        type=several(one_of(questions.SOURCES)),
        default=list(SOURCES),
        help=f"of {', '.join(questions.SOURCES)} (default: {','.join(SOURCES)})",
    )
    parser.add_argument(
        "--tokens", type=whole(1), default=256, help="length of a prompt (%(default)s)"
    )
    parser.add_argument(
        "--new-tokens",
        type=whole(),
        default=17,
        metavar="N",
        help="generated after each prompt; n "
        "tokens are n - 1 decode steps, 0 leaves decode out (%(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=whole(1),
        default=8,
        metavar="B",
        help="prompts a forward pass (%(default)s)",
    )
    parser.add_argument(
        "--external",
        action="store_true",
        help="read experts one by one where they are needed: slower, and a fraction of the memory",
    )
    parser.add_argument("--seed", type=whole(), default=0, help="picks the prompts (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")


def main(args: argparse.Namespace) -> int:
    if writable(args.file).exists() and not args.force:
        raise FileExistsError(
            f"{args.file} is there already; choose another name, or replace it with --force"
        )
    name = None if args.model == "small" else args.model
    require_tokenizer(name)
    model = open_model(name, experts="external" if args.external else "resident")
    prompts = questions.prompts(
        args.sources,
        args.prompts,
        tokens=args.tokens,
        seed=args.seed,
        split="train",
        count=token_count(model.tokenizer),
    )
    trace = record(model, prompts, max_new_tokens=args.new_tokens, batch_size=args.batch)
    source = f"{args.prompts} prompts each of {', '.join(args.sources)}, seed {args.seed}"
    found = calibrate(trace, source)
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
