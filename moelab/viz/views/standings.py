"""The arena: a cache policy of your own, ranked against all others and the optimum.

moelab.lab.arena(MyPolicy)                      see `moelab.bench.arena`
moelab arena mine:TakeTurns                     a class of mine.py, on the traces that are shipped
moelab arena mine:TakeTurns --traces folder --shares 0.1,0.2 --output arena.html
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from runpy import run_path
from shlex import quote
from typing import Any

from plotly.graph_objects import Figure

from moelab.base.arguments import described
from moelab.base.files import absolute, shipped, write_text
from moelab.base.records import Rows
from moelab.base.table import filled, head_and_rows, text_table
from moelab.bench import arena as contests
from moelab.bench.arena import Contest
from moelab.trace import RoutingTrace, load
from moelab.trace.reading import READERS
from moelab.viz.charts import EDGE, LOOKS, bar_look, finish, hover
from moelab.viz.views.base import View

#: of the scores
UNIT = "hit rate (%)"
#: others that are drawn; the table has all
OTHERS = 3
#: of the experts in memory, where nobody says
SHARES = (0.1, 0.25)


def draw(contest: Contest) -> Figure:
    """What the own one and the best others reached of the ceiling, a group of bars a trace; the own
    one's name is bold."""
    figure = Figure()
    traces = [*contest.ceiling][::-1]
    order = [contest.own, *[of for of in contest.standings if not of.own][:OTHERS]][::-1]
    for i, of in enumerate(order):
        figure.add_bar(
            y=traces,
            x=[100 * contest.share(of, trace) for trace in traces],
            name=f"<b>{escape(of.name)}</b>" if of.own else of.name,
            marker=bar_look(i),
            text=[f"{of.scores[trace]:.3g}" if trace in of.scores else "–" for trace in traces],
            hovertemplate=hover("%{y}: %{x:.1f} % of the ceiling, %{text} " + UNIT, of.name),
            **LOOKS["contestant"],
        )
    figure.add_vline(x=100, line=EDGE)
    return finish(
        figure,
        "reached of the ceiling (%)",
        legend=f"numbers:<br>{UNIT}",
        height=140 + 14 * len(traces) * len(order),
        **LOOKS["arena"],
    )


def words(contest: Contest) -> tuple[str, str]:
    own = contest.own
    best = contest.standings[0]
    if own.error:
        said = f"{own.name} raised {own.error.strip().splitlines()[-1]}."
    else:
        far = max(100 * (1 - contest.share(own, trace)) for trace in contest.ceiling)
        said = (
            f"{own.name} is number {contest.place} of {len(contest.standings)}, "
            f"at most {far:.1f} % below the ceiling."
        )
        said += "" if contest.place == 1 else f" First is {best.name}."
    return (
        f"{said} Scores: {UNIT}, exact counts; the ceiling is 100 %.",
        f"Bars of {len(contest.standings)} contestants on {', '.join(contest.ceiling)}: share "
        "of the ceiling.",
    )


def arena(mine: Any, of: Any = None, **how: Any) -> View:
    """Rank a class or an object of one's own; see `moelab.bench.arena.arena`, whose arguments these
    are.

    What it raises is printed with its traceback, and breaks nothing."""
    contest = contests.arena(mine, of, **how)
    if contest.own.error:
        print(contest.own.error, file=sys.stderr)

    def command() -> str:
        made = mine if isinstance(mine, type) else type(mine)
        home = made.__module__ if made.__module__ != "__main__" else "your_file"
        given = contest.own.name if of is None else f"{contest.own.name}, of"
        given = ", ".join([given, *(f"{name}={value}" for name, value in how.items())])
        call = f"moelab.lab.arena({given})"
        imports = f"from {home} import {contest.own.name}; import moelab.lab"
        return f'python -c "{imports}; print({call}.csv())"'

    compute, figures = lambda: contest, lambda contest: [draw(contest)]
    return View("arena", {}, compute, figures, _rows, command, words)


def _rows(contest: Contest) -> Rows:
    """A row a trace: hit rates, the first one's first, the ceiling and how far the own one is below."""
    return [
        {UNIT: trace}
        | {
            f"{of.name}, yours" if of.own else of.name: of.scores.get(trace)
            for of in contest.standings
        }
        | {"belady": most, "yours below it": most - contest.own.scores.get(trace, 0.0)}
        for trace, most in contest.ceiling.items()
    ]


def class_of(text: str) -> type:
    """The class of "module:name", of a module in this folder, where no other is imported.
    ValueError: there is none, or it is no cache policy."""
    module, _, name = text.partition(":")
    sys.path.insert(0, "")
    try:
        found = run_path(f"{module}.py", run_name=module)[name]
        contests.require_policy(found)
        return found
    except Exception as error:  # whatever the file itself raises, too
        raise ValueError(
            "the arena is of a class, as in `moelab arena mine:TakeTurns` for TakeTurns of mine.py, "
            f"not of {text!r}: {error}"
        ) from error
    finally:
        sys.path.remove("")


def traces_of(text: str) -> dict[str, RoutingTrace]:
    """The traces of a file or a folder, by name; of "all" those that are shipped. ValueError: there is
    none."""
    place = shipped("traces") if text == "all" else absolute(text)
    root, files = (place.parent, [place]) if place.is_file() else (place, sorted(place.rglob("*")))
    files = [file for file in files if file.suffix in READERS]
    found = {str(file.relative_to(root).with_suffix("")): load(file) for file in files}
    if not found:
        raise ValueError(f"{text} has no trace: no file that ends in {', '.join(READERS)}")
    return found


add_arguments = described(__file__)


def main(args: argparse.Namespace) -> int:
    view = arena(class_of(args.policy), traces_of(args.traces), share=args.shares)
    shares = ",".join(map(str, args.shares))
    told = f"moelab arena {args.policy} --traces {quote(args.traces)} --shares {shares}"
    view.command = lambda: told
    print(text_table(*head_and_rows(view.rows())), filled(view.words[0]), sep="\n\n")
    if args.output:
        print(f"written to {write_text(args.output, view.html())}")
    return 0
