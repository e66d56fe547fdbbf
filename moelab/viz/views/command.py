"""`moelab view NAME [MODEL]`: a view without Jupyter, as a page, a table or what it says.

moelab view budget qwen.store -p share=37 -p policies=lru,zipmoe --output budget.html
moelab view theatre --memory 25% -p way=hint --output theatre.csv
moelab view model_map qwen.folder --output map.html
moelab view budget trace.npz --model Qwen3-30B-A3B          # a routing trace of any engine
"""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

from moelab import open_model
from moelab.base import registry
from moelab.base.arguments import described, whole
from moelab.base.files import atomic, small_model
from moelab.base.table import filled
from moelab.speculate.predictors import lacking
from moelab.trace import load
from moelab.trace.reading import READERS
from moelab.viz import theme, views
from moelab.viz.views.recorded import TOKENS, TRACED, Recorded

#: those that the command shows, and what predicts without being given anything
VIEWS = [name for name in views.__all__ if name != "arena"]
PREDICTORS = [name for name in registry.names("predictor") if not lacking(name)]


def command(name: str, found: Recorded) -> Callable[..., str]:
    """What reproduces a view of a recorded run: values → a line for a shell."""
    words = ["moelab view", name, _word(found.source)]
    if Path(found.source).resolve() == small_model().resolve():
        words.pop()  # it needs no name
    words += [f"--{key} {_word(value)}" for key, value in found.flags.items()]

    def told(**values: Any) -> str:
        return " ".join(words + [f"-p {key}={_word(value)}" for key, value in values.items()])

    return told


def _word(value: Any) -> str:
    return quote(",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    described(__file__)(parser)
    parser.add_argument(
        "--tokens",
        type=whole(3),
        metavar="N",
        help=f"generated (default: {TOKENS}), or decoded tokens of a trace (default: {TRACED})",
    )


def main(args: argparse.Namespace) -> int:
    if args.output is not None and args.output.suffix not in WRITERS:
        raise ValueError(f"{args.output} must end in one of {', '.join(WRITERS)}")
    if len(args.what) > (most := args.view != "claims"):
        raise ValueError(
            f"the view {args.view} takes {most:d} of what it is of, not {', '.join(args.what)}"
        )
    view = turned(_view(args), args.parameter)
    print(filled(view.words[0]))
    if args.output is not None:
        content = WRITERS[args.output.suffix](view)
        with atomic(args.output) as part:
            part.write_bytes(content)
        print(f"written to {args.output}")
        if args.output.suffix == ".html" and sys.stdout.isatty():
            webbrowser.open(args.output.resolve().as_uri())
    return 0


def _view(args: argparse.Namespace) -> Any:
    """The view, as it is at first."""
    make = getattr(views, args.view)
    what = args.what[0] if args.what else None
    how = {"tokens": args.tokens, "prompt": args.prompt}
    if args.view == "budget" and (card := registry.like("model", what)):
        return make(card)
    if args.view in ("model_map", "claims"):
        return make(*args.what)
    if what and Path(what).is_file() and Path(what).suffix in READERS:
        if args.prefetch:
            raise ValueError("--prefetch is of a model: a trace has no weights that predict")
        kept = {"memory": args.memory, "cache": args.cache}
        return make(load(what, args.model), **how, **kept)
    with open_model(what, memory=args.memory, cache=args.cache, prefetch=args.prefetch) as lm:
        return make(lm, **how)


#: end of a file's name → what is written there
WRITERS: dict[str, Callable[[Any], bytes]] = {
    ".html": lambda view: view.html().encode(),
    ".csv": lambda view: view.csv().encode(),
    ".png": lambda view: theme.render_png(view.figures[0]),
}


def turned(view: Any, assignments: list[str]) -> Any:
    """A view with its controls as "name=value" says; ValueError for what cannot be read."""
    values = {}
    for assignment in assignments:
        name, given, text = assignment.partition("=")
        registry.require("control", name, view.values)
        if not given:
            raise ValueError(f"-p {assignment}: write -p {name}=value")
        is_now = view.values[name]
        try:
            values[name] = (
                tuple(text.split(",")) if isinstance(is_now, tuple) else type(is_now)(text)
            )
        except ValueError:
            raise ValueError(
                f"-p {assignment}: it must be like {name}={_word(view.values[name])}"
            ) from None
    return view.set(**values) if values else view
