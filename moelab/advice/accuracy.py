"""Advice: is the advised way the fastest, and does it take as long as was predicted?

Synthetic models of three shapes, shares of their experts as budgets, throttled disks, and a loss
that is not or is allowed; each combination is a setting. Its advice is made as `moelab.advise`
makes it: the model runs once on that disk, as it is, with half of its experts in memory; forms,
caches and prefetchers are simulated. No other measurement of a setting is known to any advice. Then
the ways that `--verify` runs, the fastest of each form, run for real, in turn, on the same tokens.
All in this process: reads are throttled, memory is not limited, and a rate that the disk does not
reach is the disk's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from unittest.mock import patch

from moelab.advice.kept import Kept
from moelab.advice.machine import DISTURBED, here
from moelab.advice.model import find_model
from moelab.advice.question import Question
from moelab.advice.sample import sample_costs
from moelab.advice.simulated import chosen, identity_of, looked
from moelab.advice.space import PROMPT, TIMED, WARM, CostsOf, Look, Search, forms_of, reading
from moelab.advice.verify import options_of, stored
from moelab.advice.verify import run as run_way
from moelab.advice.ways import Way
from moelab.base.arguments import number, several, whole
from moelab.base.progress import progress
from moelab.base.records import Record, Records
from moelab.base.specs import MoESpec
from moelab.bench import ENGINE
from moelab.bench.grid import synthetic
from moelab.bench.measure import turns, working
from moelab.bench.memory_limit import drop_cached
from moelab.bench.results import watched
from moelab.evaluation.intervals import typical

#: about 200 MB of experts each: few wide ones, some, many narrow ones
SPECS = (
    synthetic("few", 4, 8, 2, 1024, 1024, heads=8),
    synthetic("some", 4, 32, 4, 512, 512, heads=8),
    synthetic("many", 6, 64, 8, 512, 128, heads=8),
)
LOSSES = {"lossless": 0.0, "any loss": inf}
CONTEXT = PROMPT + WARM + TIMED


def asked_of(folder: Path, budget: float) -> Question:
    """A question of memory for this share of the experts, without loss."""
    model = find_model(folder)
    asked = Question(model, here(folder), 0, CONTEXT, 1, 0.0, False)
    return replace(asked, memory=asked.fixed + round(budget * model.spec.experts_bytes))


def measured(
    asked: Question, ways: Sequence[Way], rate: float, rounds: int, title: str
) -> dict[Way, float | str]:
    """TPOT of each way, `typical` of its tokens, each in its least disturbed round; why, of those
    that could not run."""
    best: dict[Way, list[float]] = {}
    failed: dict[Way, str] = {}
    for _, way in turns(ways, rounds, title):
        if way in failed:
            continue
        try:
            source = stored(asked.model, way.form)
            slow = {} if way.resident else {"bandwidth": rate}
            drop_cached(Path(source))
            ran = run_way(source, options_of(way, asked.model) | slow)
        except (RuntimeError, ValueError, OSError) as error:
            failed[way] = str(error)
            continue
        seconds = ran["tpot"][-TIMED:]
        best[way] = [*map(min, seconds, best.get(way, seconds))]
    return {way: typical(seconds) for way, seconds in best.items()} | failed


def settings(asked: Question, look: Look, costs_of: CostsOf, rate: float, rounds: int) -> Records:
    """One budget and rate with every loss: a row of each setting."""
    budget = (asked.memory - asked.fixed) / asked.model.spec.experts_bytes
    title = f"{asked.model.spec.name}, {budget:.0%} of experts, {rate / 1e6:g} MB/s"
    kept = Kept(identity_of(asked.model))
    tried = {
        name: chosen(Search(replace(asked, loss=loss), costs_of, [look.seen], kept))
        for name, loss in LOSSES.items()
    }
    every = list(dict.fromkeys(way for ways in tried.values() for way in ways))
    found, busy = watched(lambda: measured(asked, every, rate, rounds, title))
    rows: Records = {}
    for name, (advised, *others) in tried.items():
        ran = {way: of for way in (advised, *others) if not isinstance(of := found[way], str)}
        row = rows[f"{title}, {name}"] = {"advised": advised.name}
        if advised not in ran:
            row["result"] = found[advised]
            continue
        best, tpot = min(ran, key=ran.__getitem__), ran[advised]
        row |= {
            "predicted s": advised.tpot,
            "measured s": tpot,
            "predicted ÷ measured": advised.tpot / tpot,
            "best": best.name,
            "advised ÷ best": tpot / ran[best],
            "cores that others kept busy": busy,
        }
    return rows


def summary(rows: Records) -> Record:
    """How many settings were advised and predicted well enough; one whose advice could not run
    counts as neither, and one that others disturbed tells little."""
    ran = [row for row in rows.values() if "result" not in row]
    worse, off = ([row[key] for row in ran] for key in ("advised ÷ best", "predicted ÷ measured"))
    return {
        "settings": len(rows),
        "disturbed": sum(row["cores that others kept busy"] > DISTURBED for row in ran),
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
                folder = place / spec.name
                look, costs_of = prepared(spec, folder, 1e6 * rate)
                rows |= settings(asked_of(folder, budget), look, costs_of, 1e6 * rate, rounds)
        except KeyboardInterrupt:  # it takes minutes: what is done is kept
            conditions["stopped in"] = spec.name
    return {"conditions": conditions, "settings": rows, "summary": summary(rows)}


def prepared(spec: MoESpec, folder: Path, rate: float) -> tuple[Look, CostsOf]:
    """How a shape's model, written if it is not there, ran with half of its experts in memory, and
    what its experts cost in every form, where so many bytes a second are read."""
    from moelab.bench.synthesize import synthesize

    if not folder.exists():
        synthesize(folder, spec)
    asked = asked_of(folder, 0.5)
    look = looked(asked, Kept(identity_of(asked.model)), bandwidth=rate)
    late = look.ran["late"]  # by so much does a throttled read wake up too late

    def throttled(seconds: float, nbytes: float) -> float:
        return max(seconds, nbytes and nbytes / rate + late)

    own = sample_costs(asked.model, forms_of(asked.model), look)
    return look, reading(own, throttled)


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
