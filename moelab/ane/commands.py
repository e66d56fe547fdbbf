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
from moelab.ane.coreml.ffn_graph import WEIGHTS
from moelab.ane.plan import MAX_GRAPH_MB, ANEPlan, make_plan
from moelab.ane.predict import DeviceModel, beside
from moelab.ane.systems import SYSTEMS
from moelab.base.arguments import number, one_of, output, several, whole
from moelab.base.records import Record
from moelab.base.specs import MoESpec
from moelab.base.table import format_value, head_and_rows, text_table
from moelab.calibration import Calibration
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.simulation.routing import routing_of
from moelab.static.tiers import RULES
from moelab.trace import PREFILL
from moelab.trace.foreign import model_of

#: an option of `make_plan`, of the command line and of `moelab evaluate --modes npumoe`:
#: name → (type, metavar, default, help)
PLANNING = {
    "chunk": (whole(1), "B", 256, "tokens of a prefill chunk"),
    "group_size": (whole(1), "G", 8, "experts a graph"),
    "levels": (whole(1), "N", 3, "capacity tiers a layer"),
    "slack": (number(above=0), "X", 1.0, "factor of all expected loads"),
    "rule": (one_of(RULES), "RULE", "topk", "of capacities: topk, or the paper's literal B/E"),
    "capacities": (several(whole(1)), "C,…", None, "fixed ones instead, as 32,64,128"),
    "cold_share": (
        number(0, most=1),
        "X",
        0.1,
        "of the routings, whose rarest experts the CPU has",
    ),
    "min_rows": (number(0), "N", 32, "tokens that a group on the ANE expects of a chunk"),
    "max_graphs": (whole(1), "N", None, "graphs of experts on the ANE, the hottest"),
    "max_graph_mb": (number(above=0), "MB", MAX_GRAPH_MB, "weights that one graph holds"),
    "system": (
        one_of(SYSTEMS),
        "NAME",
        None,
        f"{', '.join(SYSTEMS)}; if not given, plan takes the fastest, others npumoe",
    ),
}
#: what a plan is made from beside its options
SOURCE = {
    "calibration": (
        Path,
        "FILE",
        None,
        "of the model, by `moelab calibrate`; else routing is drawn",
    ),
    "weights": (one_of(WEIGHTS), "NAME", "fp16", "of the experts: fp16 or int8"),
}
CHECKPOINT = (Path, "FOLDER", None, "if it is not where it was converted")
CONVERTED = (Path, "a converted model")
#: tokens of drawn routing that are counted where there is no calibration
DRAWN = 4096
MODEL = "a checkpoint folder, a store or a hub id; 'small' is the shipped model"
PLAN = {
    "plan": (
        Path,
        "FILE",
        None,
        "of `moelab ane plan MODEL --save FILE`; else npumoe's, of routing that is drawn",
    ),
    "context": (whole(1), "P", 2048, "positions of the KV cache"),
}
COMPARED = {
    "prompts": (whole(1), "N", 20, "prefills to compare"),
    "tokens": (whole(1), "N", 256, "length of a prompt"),
    "checkpoint": CHECKPOINT,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for run, purpose, positional, options in COMMANDS:
        command = commands.add_parser(
            run.__name__, help=purpose, description=purpose[0].upper() + purpose[1:] + "."
        )
        command.set_defaults(run=run)
        for name, (kind, told) in positional.items():
            command.add_argument(
                name, type=kind, nargs="+" if name.endswith("s") else None, help=told
            )
        for name, (kind, metavar, default, told) in options.items():
            command.add_argument(
                f"--{name.replace('_', '-')}",
                type=kind,
                metavar=metavar,
                default=default,
                help=told if default is None else f"{told} ({default})",
            )


def main(args: argparse.Namespace) -> int:
    return args.run(args)


def plan(args: argparse.Namespace) -> int:
    """Print what each system would take, and the plan of the fastest, or of the one asked for."""
    spec, source = _source(args)
    device = DeviceModel.of(args.device)
    given = {name: of for name in PLANNING if (of := getattr(args, name)) is not None}
    plans = {of: make_plan(spec, **source | given | {"system": of}) for of in SYSTEMS}
    made = plans[args.system or "npumoe"]
    try:
        rows = beside(device, plans, args.prompt, args.new_tokens)
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
    from moelab.ane.coreml.converted import MANIFEST, ConvertedModel
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
    from moelab.ane.backends import ConvertedBackend
    from moelab.ane.coreml.converted import ConvertedModel

    return _compare(ConvertedBackend(ConvertedModel(args.folder)), args)[0]


def doctor(args: argparse.Namespace) -> int:
    from moelab.ane.backends import ConvertedBackend
    from moelab.ane.coreml.converted import ConvertedModel
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


def _source(args: argparse.Namespace) -> tuple[MoESpec, Record]:
    """(spec, what `make_plan` is told) of a card or, without reading its weights, of a
    checkpoint."""
    spec, identity = model_of(args.model)
    calibration = None if args.calibration is None else Calibration.load(args.calibration)
    if calibration is not None:  # a card has geometry, but no routers
        calibration.require(calibration.model_id if cards.card_of(args.model) else identity, spec)
    return spec, counted(spec, calibration) | {"bytes_per_weight": WEIGHTS[args.weights] / 8}


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
    if model.tokenizer is None:
        raise ValueError(
            "this checkpoint has no tokenizer, so there are no prompts; put one beside its weights"
        )
    each = -(-args.prompts // 2), args.tokens, token_count(model.tokenizer)
    texts = [*passages("prose", *each), *passages("code", *each)][: args.prompts]
    ids = [model.tokenizer(text)["input_ids"][: args.tokens] for text in texts]
    found = compare(backend, model, ids, rounding=rounding)
    for name, value in found.summary().items():
        print(f"  {name:<34} {format_value(value)}")
    return int(not found.ok), found


#: function, purpose, positional arguments, options
COMMANDS = (
    (
        plan,
        "what each system would take, and the fastest one's tiers, groups, graphs and placement",
        {"model": (None, f"a model card (moelab.names('model') lists them), or {MODEL}")},
        PLANNING
        | SOURCE
        | {
            "device": (None, "NAME", "m2-ultra", "a device card, or a .toml of `bench ane_mac`"),
            "prompt": (whole(1), "N", 1024, "tokens of a prompt that the systems are compared by"),
            "new_tokens": (whole(), "N", 8, "decoded after it, on the CPU"),
            "save": (output, "FILE", None, "write the plan as JSON"),
        },
    ),
    (
        convert,
        "turn a model into Core ML packages, layer by layer",
        {
            "model": (None, MODEL),
            "destination": (Path, "the new folder; until it is complete, DESTINATION.part"),
        },
        PLAN | {"weights": SOURCE["weights"]},
    ),
    (
        lint,
        "predict what the Neural Engine does not run of saved packages",
        {"packages": (Path, "packages, or folders of converted models")},
        {},
    ),
    (
        parity,
        "compare whole prefills through the packages with the model",
        {"folder": CONVERTED},
        COMPARED,
    ),
    (
        doctor,
        "on a Mac: check that each operation is on the Neural Engine, and computes well",
        {"folder": CONVERTED},
        COMPARED | {"timeout": (number(above=0), "S", 300.0, "for one package")},
    ),
)
