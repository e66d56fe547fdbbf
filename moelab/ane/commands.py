"""`moelab ane …`: plan, convert, lint and check models for the Neural Engine, and use them on a
Mac.

    moelab ane plan Qwen3-30B-A3B --prompt 4096                     from a card, without weights: what
                                                                    each system would take, and the
                                                                    fastest one's plan
    moelab ane plan MODEL --calibration FILE --save plan.json       with the counts of `moelab
                                                                    calibrate MODEL FILE`
    moelab ane convert MODEL folder --plan plan.json                resumes an interrupted
                                                                    conversion
    moelab ane lint folder                                          or single packages
    moelab ane parity folder --prompts 200                          the packages against the model,
                                                                    on any machine
    moelab ane doctor folder                                        on a Mac: what really runs on
                                                                    the Neural Engine

Exit status: 0, 1 where a check failed, 2 for bad input and for what needs a Mac.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moelab import cards
from moelab.ane import predict
from moelab.ane.backends import ConvertedBackend
from moelab.ane.coreml.converted import MANIFEST, ConvertedModel
from moelab.ane.coreml.ffn_graph import WEIGHTS
from moelab.ane.plan import ANEPlan, make_plan
from moelab.ane.systems import SYSTEMS
from moelab.base.arguments import Parser, described, number
from moelab.base.files import beside
from moelab.base.records import Record
from moelab.base.specs import MoESpec
from moelab.base.table import format_value, head_and_rows, text_table
from moelab.calibration import Calibration
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.simulation.routing import routing_of
from moelab.trace import PREFILL
from moelab.trace.foreign import model_of

#: how `cold_share` and `min_rows` are read
SHARE, AMOUNT = number(0, most=1), number(0)
#: option of `make_plan`, also of `moelab evaluate --modes npumoe` → how it is read
PLANNING = {of.dest: of.type for of in described(__file__, "planning")(Parser())}
#: tokens of drawn routing that are counted where there is no calibration
DRAWN = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for run in (plan, convert, lint, parity, doctor):
        purpose, *groups = beside(__file__)["commands"][run.__name__]
        command = commands.add_parser(
            run.__name__, help=purpose, description=purpose[0].upper() + purpose[1:] + "."
        )
        command.set_defaults(run=run)
        described(__file__, *groups)(command)


def main(args: argparse.Namespace) -> int:
    return args.run(args)


def plan(args: argparse.Namespace) -> int:
    """Print what each system would take, and the plan of the fastest, or of the one asked for."""
    spec, identity = model_of(args.model)
    calibration = None if args.calibration is None else Calibration.load(args.calibration)
    if calibration is not None:  # a card has geometry, but no routers
        calibration.require(calibration.model_id if cards.card_of(args.model) else identity, spec)
    source = counted(spec, calibration) | {"bytes_per_weight": WEIGHTS[args.weights] / 8}
    device = predict.DeviceModel.of(args.device)
    given = {name: of for name in PLANNING if (of := getattr(args, name)) is not None}
    plans = {of: make_plan(spec, **source | given | {"system": of}) for of in SYSTEMS}
    made = plans[args.system or "npumoe"]
    try:
        rows = predict.beside(device, plans, args.prompt, args.new_tokens)
    except ValueError as error:  # another attention
        print(f"What this takes is not known: {error}")
    else:
        fastest = min(rows, key=lambda system: rows[system]["TTFT, s"])
        made = plans[args.system or fastest]
        print(
            f"Modelled for {device.device}, a prompt of {args.prompt:,} tokens; fastest: {fastest}\n"
            + text_table(*head_and_rows(rows.values()))
        )
    device.require(made, args.prompt + args.new_tokens)
    print(made.describe())
    if args.save is not None:
        print(made.save(args.save))
    return 0


def convert(args: argparse.Namespace) -> int:
    from moelab.ane.coreml.convert import convert_model

    checkpoint = Checkpoint.at(None if args.model == "small" else args.model)
    spec, how = checkpoint.spec, {"context": args.context, "weights": args.weights}
    made = ANEPlan.load(args.plan) if args.plan else make_plan(spec, **counted(spec))
    converted = convert_model(checkpoint, args.destination, made, **how)
    worst = max((entry["difference"] or 0.0 for entry in converted.packages), default=0.0)
    size = sum(entry["weight_bytes"] for entry in converted.packages)
    print(
        f"{converted.folder}: {len(converted.packages)} packages, {size / 1e6:,.1f} MB of "
        f"weights; popularity {made.popularity}\nIn double precision the expert graphs differ from "
        f"torch by at most {worst:.1e} of the largest output"
    )
    return 0


def lint(args: argparse.Namespace) -> int:
    from moelab.ane.coreml.linter import lint as judge

    reports = []
    for path in args.packages:
        if (path / MANIFEST).is_file():
            converted = ConvertedModel(path)
            reports += [judge(converted.package(entry)) for entry in converted.packages]
        else:
            reports.append(judge(path))
    clean = sum(report.clean for report in reports)
    print("\n\n".join(report.table() for report in reports))
    print(f"\n{clean} of {len(reports)} packages are clean")
    return int(clean < len(reports))


def parity(args: argparse.Namespace) -> int:
    return _compare(ConvertedBackend(ConvertedModel(args.folder)), args)[0]


def doctor(args: argparse.Namespace) -> int:
    from moelab.ane.device.mac import require_mac
    from moelab.ane.doctor import coreml_backend, diagnose, table

    require_mac("ane doctor")
    converted = ConvertedModel(args.folder)
    checkups = diagnose(converted, args.timeout)
    print(table(checkups))
    if any(checkup.error for checkup in checkups):
        return 1
    print("What fp16 alone does to the same prompts, by the evaluator:")
    _, rounding = _compare(ConvertedBackend(converted, "fp16"), args)
    status, _ = _compare(coreml_backend(converted, checkups), args, rounding)
    return max(status, int(any(checkup.complaints for checkup in checkups)))


def counted(spec: MoESpec, calibration: Calibration | None = None) -> Record:
    """Counts for `make_plan`, of a calibration or of routing that is drawn, and whose they are."""
    if calibration is None:
        routing, words = routing_of(spec)
        drawn = routing.trace(spec, [DRAWN])
        return {"counts": drawn.counts(), "tokens": DRAWN, "popularity": words}
    return {
        "counts": calibration.counts(PREFILL),
        "tokens": calibration.tokens[PREFILL],
        "popularity": f"calibrated on {calibration.source or 'prompts'}",
        "model_id": calibration.model_id,
    }


def _model_of(converted: Any, checkpoint: Path | None) -> Any:
    """The model whose other parts run on the CPU, in float32, its experts read as they are needed."""
    import torch

    from moelab.ane.opening import open_beside
    from moelab.offloading.offload import Offloading

    source = converted.checkpoint(checkpoint)
    return open_beside(converted, source, None, Offloading(dtype=torch.float32))


def _compare(backend: Any, args: argparse.Namespace, rounding: Any = None) -> tuple[int, Any]:
    from moelab.ane.parity import parity as compare
    from moelab.base.library import passages, token_count

    model = _model_of(backend.converted, args.checkpoint)
    each = -(-args.prompts // 2), args.tokens, token_count(model.tokenizer)
    texts = [*passages("prose", *each), *passages("code", *each)][: args.prompts]
    ids = [model.tokenizer(text)["input_ids"][: args.tokens] for text in texts]
    found = compare(backend, model, ids, rounding=rounding)
    for name, value in found.summary().items():
        print(f"  {name:<34} {format_value(value)}")
    return int(not found.ok), found
