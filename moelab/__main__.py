"""The command line: `moelab COMMAND`, or `python -m moelab COMMAND` where the package is not
installed.

A command is a module with `add_arguments(parser)` and `main(args) -> exit status`, and one entry in
`__main__.toml`. Those that only a clone has use for lie beside its notebooks."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from types import ModuleType

from moelab import __version__
from moelab.base.arguments import Parser
from moelab.base.errors import error_text
from moelab.base.files import CHECKOUT, absolute, beside
from moelab.base.table import filled

#: name → (module, what it does, an example of its arguments)
COMMANDS = beside(__file__)
#: commands that read or write the folder of results
OF_RESULTS = ("reproduce", "run", "list", "compare", "check", "claims", "sweep")
#: what goes wrong for reasons that lie outside of moelab; any other error is a mistake in it
FORESEEN = (ValueError, LookupError, OSError, RuntimeError, ImportError, MemoryError)


def module_of(home: str) -> ModuleType:
    """The module of a command. ValueError: one of the notebooks', and this is no clone."""
    if home.startswith("notebooks."):
        if CHECKOUT is None:
            raise ValueError(
                f"this command is of the project's notebooks ({home}): run it in a clone of the repository"
            )
        sys.path.append(str(CHECKOUT))
    return importlib.import_module(home)


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
            implementation = module_of(module)
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


if __name__ == "__main__":
    sys.exit(main())
