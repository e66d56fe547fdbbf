"""`moelab ane …`: plan, convert, lint and check models for the Neural Engine, and use them on a
Mac.

    moelab ane plan Qwen3-30B-A3B --chunk 256 --group-size 8        from a card, without weights
    moelab ane plan MODEL --calibration FILE                        with the counts of `moelab
                                                                    calibrate MODEL FILE`
    moelab ane convert MODEL folder --chunk 256                     resumes an interrupted
                                                                    conversion
    moelab ane lint folder                                          or single packages
    moelab ane parity folder --prompts 200                          the packages against the model,
                                                                    on any machine
    moelab ane doctor folder                                        on a Mac: what really runs on
                                                                    the Neural Engine
    moelab ane bench folder --prompts 1024,4096                     on a Mac: latency and energy
    moelab ane calibrate samples.json                               on a Mac: refits the device
                                                                    model

Exit status: 0, 1 where a check failed, 2 for bad input and for what needs a Mac.
"""

from __future__ import annotations

import argparse
import json
import platform
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

from moelab import cards, registry
from moelab.arguments import number, output, several, whole
from moelab.specs import MoESpec
from moelab.table import format_value, head_and_rows, text_table

MB = 1e6
#: an option of `make_plan` and of the command line: name → (type, metavar, default, help)
PLANNING = {
    "chunk": (whole(1), "B", 256, "tokens of a prefill chunk"),
    "group_size": (whole(1), "G", 8, "experts a graph"),
    "levels": (whole(1), "N", 3, "capacity tiers a layer"),
    "slack": (number(above=0), "X", 1.0, "factor of all capacities"),
    "rule": (None, None, "topk", "of capacities: topk, or the paper's literal B/E"),
    "system": (None, None, "npumoe", "cpu, naive, anemll, base, base+T, base+TG or npumoe"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for run, add_options, purpose in (
        (
            plan,
            _plan_options,
            "tiers, groups, graphs and placement of a model, from a card or a checkpoint's config",
        ),
        (convert, _convert_options, "turn a model into Core ML packages, layer by layer"),
        (lint, _lint_options, "predict what the Neural Engine does not run of saved packages"),
        (parity, _parity_options, "compare whole prefills through the packages with the model"),
        (
            doctor,
            _doctor_options,
            "on a Mac: check that each operation is on the Neural Engine, and computes well",
        ),
        (bench, _bench_options, "on a Mac: latency and energy of prefills"),
        (
            calibrate,
            _calibrate_options,
            "on a Mac: time graphs as NPUMoE Table 5 does, and refit the device model",
        ),
    ):
        command = commands.add_parser(
            run.__name__, help=purpose, description=purpose[0].upper() + purpose[1:] + "."
        )
        command.set_defaults(run=run)
        add_options(command)


def _planning(one: argparse.ArgumentParser) -> None:
    """The options of planning, absent from the namespace unless they are given."""
    for name, (kind, metavar, default, purpose) in PLANNING.items():
        one.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            metavar=metavar,
            default=SUPPRESS,
            help=f"{purpose} ({default})",
        )
    one.add_argument(
        "--max-graph-mb",
        type=number(above=0),
        metavar="MB",
        default=SUPPRESS,
        help="weights that one graph holds (1258)",
    )
    popularity = one.add_mutually_exclusive_group()
    popularity.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        default=SUPPRESS,
        help="of the model, by `moelab calibrate MODEL FILE`; without it, popularity is assumed",
    )
    popularity.add_argument(
        "--skew", default=SUPPRESS, help="assumed: even, typical or strong (typical)"
    )
    one.add_argument(
        "--weights",
        default="fp16",
        help="of the experts: fp16, int8, palette4, palette6 or palette8 (%(default)s)",
    )


def _comparing(one: argparse.ArgumentParser) -> None:
    one.add_argument("folder", type=Path, help="a converted model")
    one.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="if it is not where it was converted"
    )
    one.add_argument(
        "--prompts",
        type=whole(1),
        default=20,
        metavar="N",
        help="prefills to compare (%(default)s)",
    )
    one.add_argument(
        "--tokens", type=whole(1), default=256, help="length of a prompt (%(default)s)"
    )


def _plan_options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "model",
        help="a model card (moelab.names('model') lists them), a checkpoint folder or a hub id; "
        "'small' is the shipped model",
    )
    _planning(one)
    one.add_argument(
        "--layers", type=several(whole()), help="MoE layers to print, such as 0,1,47 (default: all)"
    )
    one.add_argument(
        "--prompt",
        type=whole(1),
        metavar="N",
        help="also what a prompt of N tokens costs, as modelled",
    )
    where = one.add_mutually_exclusive_group()
    where.add_argument(
        "--device",
        default="m2-ultra",
        choices=("m2-ultra", "m2-max"),
        help="its memory must hold the weights; also of --prompt (%(default)s)",
    )
    where.add_argument(
        "--samples",
        type=Path,
        metavar="FILE",
        help="of --prompt: samples of `ane calibrate` to refit to",
    )
    one.add_argument("--save", type=output, metavar="FILE", help="write the plan as JSON")


def _convert_options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "model", help="a checkpoint folder, a store or a hub id; 'small' is the shipped model"
    )
    one.add_argument(
        "destination", type=Path, help="the new folder; until it is complete, DESTINATION.part"
    )
    _planning(one)
    one.add_argument(
        "--plan", type=Path, metavar="FILE", help="a saved plan, instead of the options of planning"
    )
    one.add_argument(
        "--context",
        type=whole(1),
        default=2048,
        metavar="P",
        help="positions of the KV cache (%(default)s)",
    )
    one.add_argument("--layout", default="bc1s", help="bc1s or paper (%(default)s)")
    one.add_argument(
        "--units",
        default="cpuAndNeuralEngine",
        help="what a Mac is asked for: cpuAndNeuralEngine, cpuOnly, cpuAndGPU or all (%(default)s)",
    )
    one.add_argument(
        "--every-tier",
        action="store_true",
        help="each package has a function for each capacity, and the smallest that fits is run",
    )
    one.add_argument(
        "--no-validation", action="store_true", help="do not evaluate each saved graph"
    )


def _lint_options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "packages", nargs="+", type=Path, help="packages, or folders of converted models"
    )
    one.add_argument("--json", action="store_true", help="print JSON")


def _parity_options(one: argparse.ArgumentParser) -> None:
    _comparing(one)
    one.add_argument(
        "--mode",
        choices=("double", "fp16"),
        default="double",
        help="of the evaluator (%(default)s)",
    )


def _doctor_options(one: argparse.ArgumentParser) -> None:
    _comparing(one)
    one.add_argument(
        "--timeout",
        type=number(above=0),
        default=300.0,
        metavar="S",
        help="for one package (%(default)s)",
    )
    one.add_argument("--json", action="store_true", help="print JSON")


def _bench_options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "folders", nargs="+", type=Path, help="converted models, e.g. one a chunk size"
    )
    one.add_argument(
        "--prompts",
        type=several(whole(1)),
        default=[1024],
        metavar="N,N",
        help="their lengths in tokens, such as 256,1024 (1024)",
    )
    one.add_argument("--repeats", type=whole(1), default=5, metavar="N", help="(%(default)s)")
    one.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="if it is not where it was converted"
    )


def _calibrate_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("output", type=output, help="where the samples go, as JSON")
    one.add_argument("--grid", default="", help="such as 1x32,4x64,8x128 (default: Table 5's)")
    one.add_argument("--repeats", type=whole(1), default=5, metavar="N", help="(%(default)s)")


def main(args: argparse.Namespace) -> int:
    return args.run(args)


def plan(args: argparse.Namespace) -> int:
    from moelab.ane.device.device_model import DeviceModel

    if args.samples is not None and args.prompt is None:
        raise ValueError(
            f"--samples {args.samples} says what a prompt costs; give its length, too, by "
            "--prompt N"
        )
    device = DeviceModel.of(args.device)
    if args.samples is not None:
        from moelab.ane.device.timing import load_samples

        device = DeviceModel.of("m2-ultra").refit(*load_samples(args.samples))
    spec, model_id = _spec(None if args.model == "small" else args.model, "calibration" in args)
    made = _plan(spec, model_id, args)
    device.require(made)
    if (
        args.prompt is not None and args.model not in cards.MODELS
    ):  # only what a conversion would put on the ANE
        from moelab.ane.coreml.convert import ConversionSettings, possible
        from moelab.checkpoint.checkpoint import Checkpoint

        made = possible(
            made,
            Checkpoint.at(None if args.model == "small" else args.model).config,
            ConversionSettings(max(args.prompt, made.chunk)),
        )
    if args.layers is not None and max(args.layers) >= spec.L:
        raise ValueError(
            f"--layers names {max(args.layers)}; {spec.name} has the MoE layers 0 to {spec.L - 1}"
        )
    print(made.describe(args.layers))
    if args.prompt is not None:
        cost = device.prefill(made, args.prompt)
        latency, energy = (100 * cost.error[quantity] for quantity in ("latency", "energy"))
        print(
            f"A prompt of {args.prompt:,} tokens on {cost.device}, modelled: TTFT "
            f"{cost.ttft_s:.2f} s, {cost.mj_per_token:.1f} mJ a token, {cost.cpu_s:.2f} s of "
            f"CPU. Graphs that were left out of the fit are predicted to {latency:.1f} % RMS "
            f"in latency, {energy:.1f} % in energy; the CPU's times and powers are single "
            "figures of unknown error"
            + (
                ""
                if args.weights == "fp16"
                else f"; of fp16 graphs, nobody has published times of {args.weights}"
            )
        )
    if args.save is not None:
        print(made.save(args.save))
    return 0


def convert(args: argparse.Namespace) -> int:
    from moelab.ane.coreml.convert import ConversionSettings, convert_model
    from moelab.ane.plan import ANEPlan

    name = None if args.model == "small" else args.model
    given = [
        f"--{option.replace('_', '-')}"
        for option in (*PLANNING, "max_graph_mb", "calibration", "skew")
        if option in args
    ]
    if args.plan and given:
        raise ValueError(
            f"--plan and {', '.join(given)}: a saved plan has all of these; leave out one or "
            "the other"
        )
    made = (
        ANEPlan.load(args.plan) if args.plan else _plan(*_spec(name, "calibration" in args), args)
    )
    settings = ConversionSettings(
        args.context, args.layout, args.weights, args.every_tier, args.units
    )
    converted = convert_model(
        name, args.destination, made, settings, validate=not args.no_validation
    )
    worst = max((entry["difference"] or 0.0 for entry in converted.packages), default=0.0)
    size = sum(entry["weight_bytes"] for entry in converted.packages)
    print(
        f"{converted.folder}: {len(converted.packages)} packages, {size / MB:,.1f} MB of "
        f"weights; popularity {made.popularity}"
    )
    if not args.no_validation:
        print(
            f"In double precision the expert graphs differ from torch by at most {worst:.1e} "
            "of the largest output"
        )
    return 0


def lint(args: argparse.Namespace) -> int:
    from moelab.ane.coreml.converted import MANIFEST, ConvertedModel
    from moelab.ane.coreml.linter import lint as judge

    paths = []
    for path in args.packages:
        converted = ConvertedModel(path) if (path / MANIFEST).is_file() else None
        paths += (
            [path]
            if converted is None
            else [converted.package(entry) for entry in converted.packages]
        )
    reports = [judge(path) for path in paths]
    if args.json:
        print(json.dumps([report.to_dict() for report in reports], indent=1))
    else:
        print("\n\n".join(report.table() for report in reports))
        if len(reports) > 1:
            print(
                f"\n{sum(report.clean for report in reports)} of {len(reports)} packages are clean"
            )
    return 0 if all(report.clean for report in reports) else 1


def parity(args: argparse.Namespace) -> int:
    from moelab.ane.backends import ConvertedBackend

    return _compare(ConvertedBackend(args.folder, args.mode), args)[0]


def doctor(args: argparse.Namespace) -> int:
    from moelab.ane.backends import ConvertedBackend
    from moelab.ane.doctor import coreml_backend, diagnose

    found = diagnose(args.folder, args.timeout)
    print(json.dumps(found.to_dict(), indent=1) if args.json else found.table())
    if any(checkup.probe.error for checkup in found.checkups):
        return 1
    print("What fp16 alone does to the same prompts, by the evaluator:")
    _, rounding = _compare(ConvertedBackend(args.folder, "fp16"), args)
    status, _ = _compare(coreml_backend(args.folder, args.timeout), args, rounding)
    return max(status, 0 if found.well else 1)


def bench(args: argparse.Namespace) -> int:
    from moelab.ane.device.mac import require_mac
    from moelab.ane.device.timing import Meter
    from moelab.ane.doctor import coreml_backend, time_prefill

    require_mac("ane bench")
    meter = Meter()
    rows = []
    for folder in args.folders:
        backend = coreml_backend(folder)
        print(f"{folder}: {backend.name}")
        model = _model_of(backend.converted, args.checkpoint)
        rows += time_prefill(model, backend, args.prompts, args.repeats, meter)
    print(text_table(*head_and_rows(rows)))
    if meter.why:
        print(meter.why)
    print(
        "\n"
        + json.dumps(
            {"bench": "ane", "kind": "measured", "machine": platform.platform(), "rows": rows}
        )
    )
    return 0


def calibrate(args: argparse.Namespace) -> int:
    from moelab.ane.device.device_model import DeviceModel
    from moelab.ane.device.mac import require_mac
    from moelab.ane.device.timing import GRID, PARALLEL, Meter, save_samples, time_grid

    require_mac("ane calibrate")
    meter = Meter()
    samples = time_grid(_grid(args.grid) if args.grid else GRID, repeats=args.repeats, meter=meter)
    device = f"{platform.machine()}, macOS {platform.mac_ver()[0]}"
    print(
        text_table(
            ["G×C", "mode", "ms a slot", "mJ a slot"],
            [[f"{s.G}×{s.C}", s.mode, f"{s.ms:.4f}", s.mj] for s in samples],
        )
    )
    print(PARALLEL)
    if meter.why:
        print(f"{meter.why}; the refitted model keeps the M2 Ultra's powers")
    print(save_samples(args.output, samples, device))  # before the fit, which may refuse them
    errors = DeviceModel.of("m2-ultra").refit(samples, device).fit_table()
    print(
        text_table(
            ["fit", "RMS error", "worst"],
            [
                [name, f"{100 * row['RMS']:.1f} %", f"{100 * row['worst']:.1f} %"]
                for name, row in errors.items()
            ],
        )
    )
    return 0


def _spec(model: str | None, with_identity: bool) -> tuple[MoESpec, str | None]:
    """(spec, model id or None) of a card or, without reading its weights, of a checkpoint."""
    if card := registry.like("model", model):
        return cards.load_model(card), None
    from moelab.checkpoint.checkpoint import Checkpoint
    from moelab.checkpoint.opening import open_checkpoint
    from moelab.models.identity import identity

    try:
        checkpoint = Checkpoint.at(model)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}.{registry.near(model, cards.MODELS)} Model cards are: "
            f"{', '.join(cards.MODELS)}"
        ) from None
    if with_identity:
        opened = open_checkpoint(checkpoint, experts="external")
        return opened.spec, identity(opened)
    return checkpoint.spec, None


def _plan(spec: MoESpec, model_id: str | None, args: argparse.Namespace) -> Any:
    from moelab.ane.coreml.ffn_graph import WEIGHTS
    from moelab.ane.plan import MAX_GRAPH_BYTES, make_plan
    from moelab.ane.popularity import assumed_counts

    registry.require("--weights", args.weights, WEIGHTS)
    options = {name: getattr(args, name, default) for name, (*_, default, _) in PLANNING.items()}
    options |= {
        "bytes_per_weight": WEIGHTS[args.weights] / 8,
        "max_graph_bytes": args.max_graph_mb * MB if "max_graph_mb" in args else MAX_GRAPH_BYTES,
    }
    if "calibration" not in args:
        skew = getattr(args, "skew", "typical")
        counts, tokens = assumed_counts(spec, options["chunk"], skew=skew)
        return make_plan(spec, counts, tokens, popularity=f"assumed: {skew}", **options)
    from moelab.calibration import Calibration
    from moelab.trace import PREFILL

    found = Calibration.load(args.calibration)
    found.require(
        found.model_id if model_id is None else model_id, spec
    )  # a card has geometry, but no routers
    return make_plan(
        spec,
        found.counts(PREFILL),
        found.tokens[PREFILL],
        popularity=f"calibrated on {found.source or args.calibration.name}",
        model_id=found.model_id,
        **options,
    )


def _model_of(converted: Any, checkpoint: Path | None) -> Any:
    """The model whose other parts run on the CPU, in float32."""
    import torch

    from moelab.checkpoint.opening import open_checkpoint

    return open_checkpoint(converted.checkpoint(checkpoint), dtype=torch.float32)


def _compare(backend: Any, args: argparse.Namespace, rounding: Any = None) -> tuple[int, Any]:
    from moelab.ane.parity import parity as compare
    from moelab.evaluation import questions
    from moelab.library import token_count

    model = _model_of(backend.converted, args.checkpoint)
    if model.tokenizer is None:
        raise ValueError(
            "this checkpoint has no tokenizer, so there are no prompts; put one beside its weights"
        )
    sources = ("needle", "yesno", "code", "prose")
    count = token_count(model.tokenizer)
    texts = [
        p.text
        for turn in zip(
            *(
                questions.prompts(
                    s, -(-args.prompts // len(sources)), tokens=args.tokens, count=count
                )
                for s in sources
            )
        )
        for p in turn
    ][: args.prompts]
    found = compare(
        backend, model, [model.tokenizer(text)["input_ids"] for text in texts], rounding=rounding
    )
    for name, value in found.summary().items():
        print(f"  {name:<34} {format_value(value)}")
    return (0 if found.ok else 1), found


def _grid(text: str) -> list[tuple[int, int]]:
    try:
        grid = [tuple(int(n) for n in part.split("x")) for part in text.split(",")]
        if any(len(pair) != 2 or min(pair) < 1 for pair in grid):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--grid is {text!r}; write group sizes and capacities such as 1x32,4x64"
        ) from None
    return grid
