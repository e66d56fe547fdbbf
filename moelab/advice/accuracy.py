"""Advice: is the advised way the fastest, and does it take as long as was predicted?

Synthetic models of three shapes, shares of their experts as budgets, throttled disks, and a loss
that is not or is allowed; each combination is a setting. Its advice is made as `moelab.advise`
makes it: the model runs once on that disk, as it is, with half of its experts in memory; forms,
caches, prefetchers and executors are simulated. No other measurement of a setting is known to any
advice. Then the advised way, the next one, and the fastest of other forms and executors run for
real, in turn, on the same tokens; the rate of memory just before tells how steady the machine is.
All in this process: reads are throttled, memory is not limited, and a rate that the disk does not
reach is the disk's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from moelab.advice.machine import here
from moelab.advice.model import Model, find_model
from moelab.advice.question import Question
from moelab.advice.sample import sample_costs
from moelab.advice.simulated import identity_of, judged, looked, searched
from moelab.advice.space import PROMPT, TIMED, WARM, Look, at_rate, forms_of, typical
from moelab.advice.verify import Kept, options_of, stored
from moelab.advice.verify import run as run_way
from moelab.advice.ways import Way, needed
from moelab.arguments import number, several, whole
from moelab.bench import ENGINE
from moelab.bench.grid import synthetic
from moelab.bench.measure import turns, working
from moelab.bench.memory_limit import drop_cached
from moelab.progress import progress
from moelab.records import Record, Records
from moelab.specs import MoESpec

#: about 200 MB of experts each: few wide ones, some, many narrow ones
SPECS = (
    synthetic("few", 4, 8, 2, 1024, 1024, heads=8),
    synthetic("some", 4, 32, 4, 512, 512, heads=8),
    synthetic("many", 6, 64, 8, 512, 128, heads=8),
)
LOSSES = {"lossless": 0.0, "any loss": inf}
CONTEXT = PROMPT + WARM + TIMED
FORMS = 3  # forms and executors that run in each setting, the advised one among them


def contenders(ways: Sequence[Way]) -> list[Way]:
    """The two fastest of ways, which are sorted by their predicted time, and the fastest of each
    form and executor."""
    firsts = {(way.form, way.executor): way for way in reversed(ways)}.values()
    return list(dict.fromkeys([*ways[:2], *sorted(firsts, key=ways.index)[:FORMS]]))


def measured(
    model: Model, ways: Sequence[Way], rate: float, rounds: int, title: str
) -> dict[Way, float | str]:
    """TPOT of each way, `typical` of its tokens, each in its least disturbed round; why, of those
    that could not run."""
    best: dict[Way, list[float]] = {}
    failed: dict[Way, str] = {}
    for _, way in turns(ways, rounds, title):
        if way in failed:
            continue
        try:
            source = stored(model, way.form)
            options = options_of(way, model)
            slow = {"bandwidth": rate} if "memory" in options else {}
            drop_cached(Path(source))
            ran = run_way(source, options | slow, prompt=PROMPT, tokens=WARM + TIMED)
        except (RuntimeError, ValueError, OSError) as error:
            failed[way] = str(error)
            continue
        seconds = ran["tpot"][-TIMED:]
        best[way] = [*map(min, seconds, best.get(way, seconds))]
    return {way: typical(seconds) for way, seconds in best.items()} | failed


def settings(
    model: Model, look: Look, costs_of: Callable[..., Any], budget: float, rate: float, rounds: int
) -> Records:
    """One budget and rate with every loss: a row of each setting."""
    kept = Kept(identity_of(model))
    device = here(model.folder)
    memory = needed(model, CONTEXT, 1) + round(budget * model.spec.experts_bytes)
    popularity = "as in what ran here"
    asked = Question(model, device, memory, CONTEXT, 1, 0.0, False, look.seen.shares, popularity)
    title = f"{model.spec.name}, {budget:.0%} of experts, {rate / 1e6:g} MB/s"
    tried = {}
    for name, loss in LOSSES.items():
        search = searched(replace(asked, loss=loss), costs_of, look.seen, kept)
        advice = judged(search, kept, costs_of, [])
        tried[name] = contenders([way for way in advice.ways if way.within(loss)])
    every = list(dict.fromkeys(way for ways in tried.values() for way in ways))
    found = measured(model, every, rate, rounds, title)
    rows: Records = {}
    for name, ways in tried.items():
        ran = {way: found[way] for way in ways if not isinstance(found[way], str)}
        best = min(ran, key=ran.__getitem__, default=None)
        row = rows[f"{title}, {name}"] = {
            "advised": ways[0].name,
            "memory GB/s": device["memory_bandwidth_gbs"],
        }
        if isinstance(tpot := found[ways[0]], str):
            row["result"] = tpot
            continue
        row |= {
            "predicted s": ways[0].tpot,
            "measured s": tpot,
            "predicted ÷ measured": ways[0].tpot / tpot,
            "best": best.name,
            "advised ÷ best": tpot / ran[best],
        }
    return rows


def summary(rows: Records) -> Record:
    """How many settings were advised and predicted well enough; one whose advice could not run
    counts as neither."""
    ran = [row for row in rows.values() if "result" not in row]
    worse, off = ([row[key] for row in ran] for key in ("advised ÷ best", "predicted ÷ measured"))
    return {
        "settings": len(rows),
        "advised within 10 % of the best": sum(x <= 1.1 for x in worse),
        "worst advised ÷ best": max(worse, default=None),
        "predicted within 15 % of measured": sum(abs(x - 1) <= 0.15 for x in off),
        "median predicted ÷ measured": median(off) if off else None,
        "least": min(off, default=None),
        "most": max(off, default=None),
    }


def run(
    budgets: Sequence[float] = (0.25, 0.5, 0.8),
    rates: Sequence[float] = (200, 600, 2000),
    rounds: int = 3,
    folder: str | Path | None = None,
    quick: bool = False,
    specs: Sequence[MoESpec] = SPECS,
) -> Record:
    cells = list(product(specs, rates, budgets))
    if quick:
        cells = cells[:1]
        rounds = 1
    rows: Records = {}
    conditions = {
        "rounds": rounds,
        "tokens": f"random, given; a prompt of {PROMPT}, {WARM} that fill the cache, {TIMED} that "
        "count",
    }
    with working(folder) as place, patch.dict(os.environ, MOELAB_CACHE=str(place / "cache")):
        shutil.rmtree(place / "cache" / "advice", ignore_errors=True)  # no profile of another day
        try:
            for spec, rate, budget in progress(cells, "advice", unit="settings"):
                model, look, costs_of = prepared(spec, place, 1e6 * rate)
                rows |= settings(model, look, costs_of, budget, 1e6 * rate, rounds)
        except KeyboardInterrupt:  # it takes minutes: what is done is kept
            conditions["stopped in"] = spec.name
    return {"conditions": conditions, "settings": rows, "summary": summary(rows)}


def prepared(spec: MoESpec, place: Path, rate: float) -> tuple[Model, Look, Callable[..., Any]]:
    """A shape's model, written if it is not there; how it ran, and what its experts cost in every
    form where so many bytes a second are read, once it has run there."""
    from moelab.bench.synthesize import synthesize

    folder = place / spec.name
    if not folder.exists():
        synthesize(folder, spec)
    model = find_model(folder)
    memory = needed(model, CONTEXT, 1) + spec.experts_bytes // 2
    look, why = looked(
        model, Kept(identity_of(model)), rate, memory=memory, context=CONTEXT, batch=1
    )
    if look is None:
        raise RuntimeError(f"{spec.name} could not be run: {why}")
    return (
        model,
        look,
        at_rate(sample_costs(model, forms_of(model), look), rate, look.ran["late"]),
    )


MEASURES = (*ENGINE, "moelab/advice", "moelab/simulation")
OPTIONS = {
    "budgets": (
        several(number(above=0, most=1)),
        "memory for experts, shares of what all of them take in bf16",
    ),
    "rates": (several(number(above=0)), "of the disk, MB/s, by throttling our reader"),
    "rounds": (
        whole(1),
        "of every way; of each token the fastest counts, as others only disturb it",
    ),
    "folder": (
        None,
        "where models and their forms are kept, 5 GB, for the next time; else they are temporary",
    ),
    "quick": (
        {"action": "store_true"},
        "one shape, budget, rate and round: whether all of it runs",
    ),
}
