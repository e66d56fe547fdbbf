"""Advice: is the advised way the fastest, and does it take as long as was predicted?

Synthetic models of three families, routed as is fitted to real traces, shares of their experts as
budgets, throttled disks, and a loss that is not or is allowed; each combination is a setting. Its
advice is made as `moelab.advise` makes it: the model runs once on that disk, as it is, with half of
its experts in memory; forms, caches and prefetchers are simulated. No other measurement of a setting
is known to any advice. Then the ways that `--verify` runs, the fastest of each form, run for real,
in turn, on the same tokens. All in this process: reads are throttled, memory is not limited, and a
rate that the disk does not reach is the disk's own. With --device cuda a GPU's memory is the budget, and
what is predicted stands beside what is measured: `notebooks.studies.advise_on_gpu`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np

from moelab.advice.kept import Kept
from moelab.advice.machine import DISTURBED, here
from moelab.advice.model import find_model
from moelab.advice.question import Question
from moelab.advice.sample import sample_costs
from moelab.advice.simulated import chosen, looked
from moelab.advice.space import Costs, Look, Search
from moelab.advice.verify import run as run_way
from moelab.advice.verify import stored
from moelab.advice.ways import PROMPT, TIMED, WARM, Way
from moelab.base.arguments import number, one_of, several, whole
from moelab.base.files import read_json, write_json
from moelab.base.progress import progress
from moelab.base.records import Record, Records
from moelab.base.specs import MoESpec
from moelab.bench.memory_limit import drop_cached
from moelab.bench.results import git, watched
from moelab.cards import load_model
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.evaluation.intervals import typical

from .advise_on_gpu import on_gpu
from .grid import synthetic
from .timing import ENGINE, turns, working

#: 300 MB of experts each, with a family's number of experts and of those a token visits
SPECS = (
    synthetic("Qwen3-30B-A3B", 6, 128, 8, 512, 128, heads=8),
    synthetic("DeepSeek-V2-Lite", 6, 64, 6, 512, 256, heads=8),
    synthetic("GPT-OSS-20B", 6, 32, 4, 512, 512, heads=8),
)
LOSSES = {"lossless": 0.0, "any loss": inf}
CONTEXT = PROMPT + WARM + TIMED
#: of a search; simulating models so small takes less than the usual
SEARCH = 5.0


def asked_of(folder: Path, budget: float) -> Question:
    """A question of memory for this share of the experts, without loss."""
    model = find_model(folder)
    asked = Question(model, here(folder), 0, CONTEXT, 1, 0.0, False)
    return replace(asked, memory=asked.fixed + round(budget * model.spec.experts_bytes))


Times = dict[str, float | str]  # way, on a disk of some rate → TPOT, or why there is none


def measured(
    asked: Question, ways: Sequence[Way], rate: float, rounds: int, known: Times, title: str
) -> dict[Way, float | str]:
    """TPOT of each way, `typical` of its tokens, each in its least disturbed round; why, of those
    that could not run. What is `known` from other settings is not measured again."""
    keys = {way: json.dumps([way.settings, not way.resident and rate]) for way in ways}
    best: dict[str, list[float]] = {}
    for _, way in turns([way for way in ways if keys[way] not in known], rounds, title):
        key = keys[way]
        if key in known:  # it failed
            continue
        try:
            source = stored(asked.model, way.form)
            drop_cached(Path(source))
            slow = {} if way.resident else {"bandwidth": rate}
            ran = run_way(source, way.options(asked.model.stored) | slow)
        except (RuntimeError, ValueError, OSError) as error:
            known[key] = str(error)
            continue
        seconds = ran["tpot"][-TIMED:]
        best[key] = [*map(min, seconds, best.get(key, seconds))]
    known |= {key: typical(seconds) for key, seconds in best.items()}
    return {way: known[key] for way, key in keys.items()}


def settings(
    asked: Question,
    title: str,
    look: Look,
    costs: dict[str, Costs],
    rate: float,
    rounds: int,
    known: Times,
) -> Records:
    """One budget and rate with every loss: a row of each setting."""
    kept = Kept(Checkpoint.at(asked.model.folder).identity)
    tried: dict[str, list[Way]] = {}
    for name, loss in LOSSES.items():
        search = Search(replace(asked, loss=loss), costs, look.seen, kept, SEARCH)
        tried[name] = chosen(search)
    every = list(dict.fromkeys(way for ways in tried.values() for way in ways))
    found, busy = watched(lambda: measured(asked, every, rate, rounds, known, title))
    rows: Records = {}
    for name, (advised, *others) in tried.items():
        ran = {way: of for way in (advised, *others) if not isinstance(of := found[way], str)}
        row = rows[f"{title}, {name}"] = {"advised": advised.name}
        if advised not in ran:
            row["result"] = found[advised]
            continue
        best, tpot = min(ran, key=ran.__getitem__), ran[advised]
        said = search.corrected(advised)
        row |= {
            "predicted s": said.tpot,
            "predicted at least s": said.between[0],
            "predicted at most s": said.between[1],
            "measured s": tpot,
            "predicted ÷ measured": said.tpot / tpot,
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
    low, high = np.quantile(off, (0.05, 0.95)).tolist() if off else (None, None)
    return {
        "settings": len(rows),
        "disturbed": sum(row["cores that others kept busy"] > DISTURBED for row in ran),
        "advised within 10 % of the best": sum(x <= 1.1 for x in worse),
        "worst advised ÷ best": max(worse, default=None),
        "predicted within 20 % of measured": sum(abs(x - 1) <= 0.2 for x in off),
        "predicted range has the measured": sum(
            row["predicted at least s"] <= row["measured s"] <= row["predicted at most s"]
            for row in ran
        ),
        "median predicted ÷ measured": median(off) if off else None,
        "nine tenths of predicted ÷ measured at least": low,
        "nine tenths of predicted ÷ measured at most": high,
    }


def run(
    budgets: Sequence[float] = (0.25, 0.4, 0.6, 0.8),
    rates: Sequence[float] = (300, 1500),
    rounds: int = 2,
    folder: str | Path | None = None,
    quick: bool = False,
    specs: Sequence[MoESpec] = SPECS,
    device: str = "cpu",
    shares: Sequence[float] = (0.1, 0.25, 0.5, 0.75, 1.0),
) -> Record:
    if device == "cuda":
        return on_gpu(shares, rounds, folder)
    cells = list(product(specs, rates, budgets))
    if quick:
        cells = cells[:1]
        rounds = 1
    conditions = {
        "rounds": rounds,
        "tokens": "routed as fitted to real traces; given, not sampled: a prompt of "
        f"{PROMPT}, {WARM} that fill the cache, {TIMED} that count",
    }
    known: dict[str, Times] = {spec.name: {} for spec in specs}
    with working(folder) as place, patch.dict(os.environ, MOELAB_CACHE=str(place / "cache")):
        done = place / "settings.json"
        rows = resumed(done, rounds)
        if not rows:
            shutil.rmtree(place / "cache" / "advice", ignore_errors=True)  # another day's profile
        try:
            for spec, rate, budget in progress(cells, "advice", unit="settings"):
                title = f"{spec.name}, {budget:.0%} of experts, {rate:g} MB/s"
                if f"{title}, {[*LOSSES][-1]}" in rows:
                    continue
                folder = place / spec.name
                look, costs = prepared(spec, folder, 1e6 * rate)
                how = look, costs, 1e6 * rate, rounds, known[spec.name]
                rows |= settings(asked_of(folder, budget), title, *how)
                write_json(done, {"of": made_by(rounds), "rows": rows})
        except KeyboardInterrupt:  # it takes minutes: what is done is kept
            conditions["stopped in"] = spec.name
    return {"conditions": conditions, "settings": rows, "summary": summary(rows)}


def made_by(rounds: int) -> str:
    """What settings must have been measured with to be taken over."""
    return f"{rounds} rounds, {git('rev-parse', 'HEAD')}"


def resumed(file: Path, rounds: int) -> Records:
    """Settings that an earlier call of the same code has measured in this folder."""
    with suppress(FileNotFoundError, ValueError):
        kept = read_json(file, Record)
        if kept["of"] == made_by(rounds):
            return kept["rows"]
    return {}


def reading(costs: dict[str, Costs], change: Callable[[float, float], float]) -> dict[str, Costs]:
    """The same costs but for reads, whose seconds, of so many bytes, are changed."""
    found = {}
    for form, own in costs.items():
        d = own.machine.delays
        delays = replace(d, e_read=change(d.e_read, d.e_bytes))
        found[form] = replace(own, machine=replace(own.machine, delays=delays))
    return found


def prepared(spec: MoESpec, folder: Path, rate: float) -> tuple[Look, dict[str, Costs]]:
    """How a family's model, written if it is not there, ran with half of its experts in memory, and
    what its experts cost in every form, where so many bytes a second are read."""
    from moelab.bench.synthesize import synthesize
    from moelab.simulation.routing import routing_of

    if not folder.exists():
        routing, _ = routing_of(load_model(spec.name))
        synthesize(folder, spec, routing=routing.draw(spec.L, spec.E, spec.K, [CONTEXT]))
    asked = asked_of(folder, 0.5)
    look = looked(asked, Kept(Checkpoint.at(asked.model.folder).identity), bandwidth=rate)
    late = look.ran["late"]  # by so much does a throttled read wake up too late

    def throttled(seconds: float, nbytes: float) -> float:
        return max(seconds, nbytes / rate + late)

    return look, reading(sample_costs(asked.model, look), throttled)


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
        "where models, their forms and what was measured of them are kept, 5 GB, so that a call that "
        "was stopped goes on; else they are temporary",
    ),
    "quick": (
        {"action": "store_true"},
        "one family, budget, rate and round: whether all of it runs",
    ),
    "device": (one_of(("cpu", "cuda")), "cuda: the GPU of this machine, refused without one"),
    "shares": (
        several(number(above=0, most=1)),
        "of the experts in bf16, in the GPU's memory, with --device cuda",
    ),
}
