"""`moelab claims`: prints what the five sources claim, and the verdicts of `moelab.claims` on it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from moelab.base.table import text_table
from moelab.claims import HEAD, NOT_REPRODUCED, Row, ledger, rows, summary


def problems(answered: Iterable[Row]) -> list[str]:
    """What `--check` objects to: metrics that are gone, and what is not reproduced for no stated
    reason, unless it was measured: that is another machine's business, and may differ from run to
    run."""
    found = []
    for row in answered:
        of = row.claim
        if of.metric and row.ours is None:
            found.append(
                f"{of.source}/{of.id}: {of.metric[0]} has no metric {', '.join(of.metric[1:])}"
            )
        elif (
            row.verdict == NOT_REPRODUCED
            and not (of.reason or row.doubt)
            and row.kind != "measured"
        ):
            found.append(f"{of.source}/{of.id}: not reproduced, and no reason is given")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sources = dict.fromkeys(claim.source for claim in ledger())
    parser.add_argument(
        "--source", choices=sources, metavar="NAME", help=f"only its claims: {', '.join(sources)}"
    )
    parser.add_argument(
        "--check", action="store_true", help="fail if a metric is gone or a claim is unanswered"
    )


def main(args: argparse.Namespace) -> int:
    chosen = [claim for claim in ledger() if args.source in (None, claim.source)]
    answered = rows(chosen)
    print(summary(answered))
    for source in dict.fromkeys(claim.source for claim in chosen):
        own = [row for row in answered if row.claim.source == source]
        print(f"\n{own[0].claim.title} ({source})\n" + text_table(HEAD, [row.cells for row in own]))
    wrong = problems(answered) if args.check else []
    for problem in wrong:
        print(f"FAILED {problem}")
    return 1 if wrong else 0
