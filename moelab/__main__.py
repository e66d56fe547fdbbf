"""The command line: `moelab COMMAND`, or `python -m moelab COMMAND` where the package is not
installed.

A command is a module with `add_arguments(parser)` and `main(args) -> exit status`, and one line in
COMMANDS."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import sys

from moelab import __version__
from moelab.base.arguments import Parser
from moelab.base.files import absolute
from moelab.base.table import filled

#: name → (module, what it does, an example of its arguments)
COMMANDS = {
    "reproduce": (
        "moelab.lab.reproduce",
        "run the notebooks, one after the other",
        "-p smoke=true",
    ),
    "run": ("moelab.lab.runner", "run one notebook, with parameters", "01 -p smoke=true -p seed=3"),
    "list": ("moelab.lab.runs", "list the notebooks and their finished runs", ""),
    "compare": ("moelab.lab.compare", "put the metrics of two runs side by side", "01"),
    "check": ("moelab.lab.check", "compare the newest runs with results/baseline", "01 02"),
    "claims": (
        "moelab.claims",
        "judge the claims of the five sources by what was found here",
        "--source zipmoe",
    ),
    "sweep": (
        "moelab.lab.sweep",
        "run a notebook or a bench at every point of a grid, here or on a cluster",
        "03 --grid disk_mbs=10,20,40 seed=0,1,2",
    ),
    "advise": (
        "moelab.advice.advise",
        "say what to do with a model in so much memory, and what it will give",
        "Qwen3-30B-A3B --memory 16GB",
    ),
    "doctor": (
        "moelab.advice.doctor",
        "say what this machine can do, what will run and what not",
        "",
    ),
    "neuron": (
        "moelab.advice.neuron_command",
        "plan a model on AWS Neuron: degrees, blocks, memory a core, settings for NxD",
        "plan DeepSeek-V3 --cores 64 --batch 32",
    ),
    "generate": (
        "moelab.generate",
        "generate text: in memory, within a memory budget, or on several processes",
        "Qwen/Qwen3-30B-A3B --memory 8GB --executor fast --prefetch quasi",
    ),
    "convert": (
        "moelab.checkpoint.convert",
        "turn a checkpoint into a compressed expert store",
        "Qwen/Qwen3-30B-A3B qwen.store",
    ),
    "restore": (
        "moelab.checkpoint.restore",
        "turn a store back into the checkpoint that it was made from",
        "qwen.store checkpoint",
    ),
    "export": (
        "moelab.checkpoint.export",
        "write a model as a GGUF file, which llama.cpp opens",
        "Qwen/Qwen3-30B-A3B qwen.gguf --kind Q8_0",
    ),
    "verify": ("moelab.store.verify", "re-read a store and check every byte", "qwen.store"),
    "inspect": ("moelab.store.inspect", "show what a store holds", "qwen.store"),
    "synthesize": (
        "moelab.bench.synthesize",
        "write a synthetic checkpoint or store of a card's geometry",
        "folder --model Mixtral-8x7B --scale 0.1",
    ),
    "profile": (
        "moelab.bench.profile",
        "measure what reading, decoding and computing experts costs here",
        "qwen.store",
    ),
    "calibrate": (
        "moelab.evaluation.calibrate",
        "count which experts a model's tokens visit, and keep the counts",
        "Qwen/Qwen3-30B-A3B qwen.safetensors",
    ),
    "train": (
        "moelab.evaluation.train",
        "train a predictor of experts, or measure its default vectors, and keep it",
        "estimator Qwen/Qwen3-30B-A3B qwen.estimator.safetensors",
    ),
    "trace": (
        "moelab.evaluation.traces",
        "read routing traces of any program, and say what caches would find in them",
        "show route.csv --model Qwen3-30B-A3B",
    ),
    "evaluate": (
        "moelab.evaluation.evaluate",
        "score a model's answers and language loss, mode by mode",
        "--modes speculative:quasi,executor:fast",
    ),
    "ane": (
        "moelab.ane.commands",
        "plan, convert, lint and check models for the Apple Neural Engine",
        "plan Qwen3-30B-A3B --chunk 256",
    ),
    "ndp": (
        "moelab.advice.ndp",
        "model a GPU beside memory that computes: the systems of GPU-NDP on a model of your own",
        "Qwen3-30B-A3B --modules 4",
    ),
    "view": (
        "moelab.viz.views.command",
        "draw one of the interactive views without Jupyter, as a page or a table",
        "budget qwen.store -p share=37 --output budget.html",
    ),
    "bench": ("moelab.bench", "measure on this machine", "engine --rounds 1"),
}


#: commands that read or write the folder of results
OF_RESULTS = ("reproduce", "run", "list", "compare", "check", "claims", "sweep")
#: what goes wrong for reasons that lie outside of moelab; any other error is a mistake in it
FORESEEN = (ValueError, LookupError, OSError, RuntimeError, ImportError, MemoryError)


def build_parser(arguments: list[str]) -> argparse.ArgumentParser:
    """The parser; only the chosen command's arguments are known to it."""
    parser = Parser(
        prog="moelab", description="Mixture-of-experts models on machines too small for them."
    )
    parser.add_argument("--version", action="version", version=f"moelab {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, (module, purpose, example) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=purpose,
            description=purpose[0].upper() + purpose[1:] + ".",
            epilog=f"example: moelab {name} {example}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        if name == chosen:
            implementation = importlib.import_module(module)
            implementation.add_arguments(command)
            command.set_defaults(main=implementation.main)
            if name in OF_RESULTS:
                command.add_argument(
                    "--results",
                    metavar="DIR",
                    help="where results lie (default: $MOELAB_RESULTS, else results/)",
                )
        command.epilog = filled(
            re.sub(r"(?<=\S)\n(?=\S)", " ", command.epilog)
        )  # of prose, but not of tables
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 (it found a failure), 2 (bad input), 130
    (interrupted), 141 (who read its output has left, as `head` does)."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what a terminal's encoding lacks is shown as "?"
            stream.reconfigure(errors="replace")
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()  # the interpreter would at its end, and complain
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, what a shell says of other tools


def _run(arguments: list[str]) -> int:
    """`main`, but for a reader who leaves."""
    try:
        parser = build_parser(arguments)
        if not arguments:
            parser.print_help()
            return 2
        args = parser.parse_args(arguments)
        if folder := getattr(args, "results", None):
            os.environ["MOELAB_RESULTS"] = str(absolute(folder))  # for child processes, too
        return args.main(args)
    except KeyboardInterrupt:
        print("\nmoelab: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        if "--debug" in arguments:
            raise
        words = error_text(error)
        if not isinstance(error, FORESEEN):
            words = (
                f"{type(error).__name__}: this is a mistake in moelab, please report it with what "
                f"--debug shows: {words}"
            )
        print(f"moelab: {words}", file=sys.stderr)
        return 2


def error_text(error: BaseException) -> str:
    """An error in words for a person."""
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0])  # str() would put it between quotes
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename is not None else ""
        advice = {
            errno.ENOSPC: "; free some space, or write to another disk, and run the command again",
            errno.EACCES: "; choose another place, or change its permissions",
            errno.EROFS: "; choose another place",
        }.get(error.errno, "")
        return error.strerror + where + advice
    if isinstance(error, MemoryError):
        return (
            f"there is not enough memory for this{f' ({error})' if str(error) else ''}; ask for "
            "less"
        )
    return str(error) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
