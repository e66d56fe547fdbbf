"""Prefetching is never slower: beside loading on demand, with copying throttled to 0.5, 1 and 3 ×
computing.

A preset of `grid`: the same generation on demand and with hints, in turn, each by a
model that was just opened and whose gate knows nothing (`moelab.offloading.prefetch_gate`), so what
it costs to find out counts. Both have the slots that prefetching needs, so the cache decides the
same. The ratio is of the first tokens after the prompt, pair by pair, with its 95 % interval;
"≤ 1.01" is shown where the whole interval is, refuted where none of it is. Of 8 tokens none is
tried with hints, so they show what the machine alone makes of it. The predictors are the next
router on this layer's router input, which is right as often as in a real model, and at the first of the rates a random
one, right in K/E of cases. What can be gained at most: notebook 04."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

import torch

from moelab.base.arguments import number, several, whole
from moelab.base.records import Record
from moelab.base.specs import MoESpec

from .end_to_end import SPEC
from .grid import ROUTING, Experiment, place_of
from .ratios import named, ratio
from .timing import ENGINE

EXECUTORS = ("exact", "fast")
AIM = 1.01  # hint ÷ on demand, at most


def verdict(demand: Sequence[float], hint: Sequence[float], tokens: int) -> Record:
    """Hint ÷ on demand of the first so many tokens, seconds of which are given for each pair, and
    whether that is at most `AIM`."""
    of = ratio(hint, demand)
    words = "shown" if of[2] <= AIM else "refuted" if of[1] > AIM else "undecided"
    return named(f"{tokens} tokens", of) | {f"{tokens} tokens: ≤ {AIM}": words}


def run(
    folder: str | Path | None = None,
    budgets: Sequence[float] = (0.25, 0.5),
    ratios: Sequence[float] = (0.5, 1.0, 3.0),
    executors: Sequence[str] = EXECUTORS,
    lengths: Sequence[int] = (8, 64),
    rounds: int = 8,
    routing: str = "fitted",
    spec: MoESpec = SPEC,
) -> Record:
    never = {}
    ahead = {"ahead": spec.K, "staging": spec.K + 2, "mode": "buffered"}
    with place_of(folder, spec, here=True) as (place, _):
        bench = Experiment(spec, place, 32, max(lengths), rounds, routing=routing, here=True)
        bench.prepare(["raw"])
        for share, executor in product(budgets, executors):
            how = {**ahead, "executor": executor}
            free = bench.report(bench.moelab("raw", share, **how))
            computing = fmean(free["tpot_s"]) - free["metrics"]["stall_per_step"]
            for times in ratios:
                how["bandwidth"] = free["metrics"]["read_bytes_per_token"] / (times * computing)
                for kind in ("router", "random")[: 1 + (times == ratios[0])]:
                    arms = {
                        "on demand": bench.moelab("raw", share, **how),
                        "hint": bench.moelab("raw", share, options={"predictor": kind}, **how),
                    }
                    title = f"budget {share:.0%}, {executor}, copying {times:g} × computing, {kind}"
                    rows = bench.compare(title, arms, "on demand")
                    row = never[title] = {}
                    pairs = [
                        torch.tensor(rows[arm]["each token s"]).view(rounds, -1) for arm in arms
                    ]
                    for n in lengths:
                        row |= verdict(*(of[:, :n].sum(1).tolist() for of in pairs), n)
    return {"never slower (hint ÷ on demand)": never}


MEASURES = ENGINE
OPTIONS = {
    "folder": (None, "where the model is kept, for the next time; else it is temporary"),
    "executors": ({"nargs": "+", "choices": EXECUTORS}, "that compute"),
    "budgets": (several(number(above=0)), "shares of the experts"),
    "ratios": (several(number(above=0)), "of copying to computing"),
    "lengths": (several(whole(1)), "of generations, tokens"),
    "rounds": (whole(1), "of each generation, in either way"),
    "routing": ROUTING,
}
