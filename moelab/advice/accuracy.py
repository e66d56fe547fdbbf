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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice, product
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from moelab.advice.machine import here
from moelab.advice.model import AS_IS, Model, find_model
from moelab.advice.question import Question
from moelab.advice.sample import sample_costs
from moelab.advice.simulated import identity_of, judged, looked, searched
from moelab.advice.space import PROMPT, TIMED, WARM, Scene, at_rate, forms_of, typical
from moelab.advice.verify import Kept, forwards, given, opened, options_of, stored
from moelab.advice.ways import Way, needed
from moelab.arguments import number, several, whole
from moelab.bench import ENGINE
from moelab.bench.measure import aim, working
from moelab.bench.memory_limit import drop_cached
from moelab.progress import progress
from moelab.specs import DeviceSpec, MoESpec


def _shape(name: str, L: int, E: int, K: int, H: int, I: int) -> MoESpec:
    return MoESpec(
        name,
        "qwen3_moe",
        L,
        tuple(range(L)),
        E,
        K,
        H,
        I,
        vocab=8192,
        heads=8,
        kv_heads=4,
        head_dim=64,
    )


#: about 200 MB of experts each: few wide ones, some, many narrow ones
SPECS = (
    _shape("few", 4, 8, 2, 1024, 1024),
    _shape("some", 4, 32, 4, 512, 512),
    _shape("many", 6, 64, 8, 512, 128),
)
LOSSES = {"lossless": 0.0, "any loss": inf}
CONTEXT = PROMPT + WARM + TIMED
TURN, MORE = 8, 4  # tokens that a way takes in turn; of those in memory, times as many
FORMS = 3  # forms and executors that run in each setting, the advised one among them
NEAR, WORST, OFF, ENOUGH = (
    1.10,
    1.3,
    0.15,
    34 / 40,
)  # advised ÷ best, and of the prediction; share of the settings
Rows = dict[str, dict[str, Any]]  # setting → figures


@contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """moelab keeps stores, profiles and measurements in a folder meanwhile."""
    before = os.environ.get("MOELAB_CACHE")
    os.environ["MOELAB_CACHE"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("MOELAB_CACHE")
        os.environ.update({} if before is None else {"MOELAB_CACHE": before})


def contenders(ways: Sequence[Way]) -> list[Way]:
    """The two fastest of ways, which are sorted by their predicted time, and the fastest of each
    form and executor."""
    firsts = {(way.form, way.executor): way for way in reversed(ways)}.values()
    return list(dict.fromkeys([*ways[:2], *sorted(firsts, key=ways.index)[:FORMS]]))


@contextmanager
def noted(failed: dict[Way, str], way: Way) -> Iterator[None]:
    """What goes wrong within the block ends that way, not the bench."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        failed[way] = str(error)


def measured(
    model: Model, ways: Sequence[Way], rate: float, rounds: int, title: str
) -> dict[Way, float | str]:
    """TPOT of each way, `typical` of its tokens, each in its least disturbed round; why, of those
    that could not run. All are open at the same time and take turns of `TURN` tokens, so that what
    disturbs the machine disturbs all; those that are in memory take `MORE` times as many. A
    checkpoint's experts are never read from the page cache."""
    import torch

    best: dict[Way, list[float]] = {}
    failed: dict[Way, str] = {}
    for _ in progress(range(rounds), title, unit="rounds"):
        with ExitStack() as stack:
            running: dict[Way, tuple[Any, Iterator[None]]] = {}
            for way in ways:
                with noted(failed, way):
                    source = Path(stored(model, way.form))
                    options = options_of(way, model)
                    drop_cached(source)
                    lm = stack.enter_context(
                        opened(
                            str(source),
                            options | ({"bandwidth": rate} if "memory" in options else {}),
                        )
                    )
                    ids, _ = given(lm, 1, CONTEXT)
                    steps = forwards(
                        lm,
                        torch.cat([ids, *[ids[:, -TIMED:]] * (MORE - 1) * way.resident], 1),
                        PROMPT,
                    )
                    for _ in islice(steps, 1 + WARM):
                        pass
                    running[way] = lm, steps
            for way, (lm, steps) in list(running.items()) * (TIMED // TURN):
                if way.form == AS_IS:
                    drop_cached(model.folder)
                with noted(failed, way):
                    for _ in islice(steps, TURN * (MORE if way.resident else 1)):
                        pass
                    for _ in range(100):  # what is read for its next token is in nobody else's way;
                        if not (lm.moelab.engine and lm.moelab.engine.loader.queue.busy):
                            break  # what waits for a slot, waits for that token
                        time.sleep(1e-3)
            for way in running.keys() - failed.keys():
                seconds = [
                    end - start for start, end, *_ in running[way][0].moelab.forwards[1 + WARM :]
                ]
                best[way] = [*map(min, seconds, best.get(way, seconds))]
    return {way: typical(seconds) for way, seconds in best.items()} | failed


def settings(
    model: Model,
    seen: Scene,
    costs_of: Callable[..., Any],
    device: DeviceSpec,
    budget: float,
    rate: float,
    rounds: int,
) -> tuple[Rows, Rows]:
    """One budget and rate with every loss: (rows of the settings, rows of all ways that ran)."""
    kept = Kept(identity_of(model))
    memory = needed(model, CONTEXT, 1) + round(budget * model.spec.experts_bytes)
    popularity = "as in what ran here"
    asked = Question(model, device, memory, CONTEXT, 1, 0.0, False, seen.shares, popularity)
    title = f"{model.spec.name}, {budget:.0%} of experts, {rate / 1e6:g} MB/s"
    tried = {}
    search = None
    for name, loss in LOSSES.items():
        search = searched(replace(asked, loss=loss), costs_of, seen, kept, search)
        advice = judged(search, kept, costs_of, [])
        tried[name] = contenders([way for way in advice.ways if way.within(loss)])
    found = measured(
        model,
        list(dict.fromkeys(way for ways in tried.values() for way in ways)),
        rate,
        rounds,
        title,
    )
    rows: Rows = {}
    for name, ways in tried.items():
        ran = {way: found[way] for way in ways if not isinstance(found[way], str)}
        row = rows[f"{title}, {name}"] = {
            "advised": ways[0].name,
            "memory GB/s": device["memory_bandwidth_gbs"],
        }
        if ways[0] not in ran:
            row["result"] = found[ways[0]]
            continue
        best = min(ran, key=ran.__getitem__)
        row |= {
            "predicted s": ways[0].tpot,
            "measured s": ran[ways[0]],
            "predicted ÷ measured": ways[0].tpot / ran[ways[0]],
            "best": best.name,
            "advised ÷ best": ran[ways[0]] / ran[best],
        }
    return rows, {
        f"{title}: {way.name}": {"result": tpot}
        if isinstance(tpot, str)
        else {"predicted s": way.tpot, "measured s": tpot, "predicted ÷ measured": way.tpot / tpot}
        for way, tpot in found.items()
    }


def summary(rows: Rows) -> dict[str, Any]:
    """How many settings were advised and predicted well enough; one whose advice could not run
    counts as neither."""
    ran = [row for row in rows.values() if "result" not in row]
    worse, off = ([row[key] for row in ran] for key in ("advised ÷ best", "predicted ÷ measured"))
    return {
        "settings": len(rows),
        "advised within 10 % of the best": sum(x <= NEAR for x in worse),
        "worst advised ÷ best": max(worse, default=None),
        "predicted within 15 % of measured": sum(abs(x - 1) <= OFF for x in off),
        "median predicted ÷ measured": median(off) if off else None,
        "least": min(off, default=None),
        "most": max(off, default=None),
    }


def aims(counted: dict[str, Any]) -> Rows:
    """The summary beside what is wanted."""
    if not counted["settings"]:
        return {}
    names = "advised within 10 % of the best", "predicted within 15 % of measured"
    rows = {name: aim(counted[name] / counted["settings"], ENOUGH) for name in names}
    worst = counted["worst advised ÷ best"]
    return rows | ({} if worst is None else {"worst advised ÷ best": aim(worst, WORST, below=True)})


def run(
    budgets: Sequence[float] = (0.25, 0.5, 0.8),
    rates: Sequence[float] = (200, 600, 2000),
    rounds: int = 3,
    folder: str | Path | None = None,
    quick: bool = False,
    specs: Sequence[MoESpec] = SPECS,
) -> dict[str, Any]:
    if quick:
        specs = specs[:1]
        budgets = budgets[:1]
        rates = rates[:1]
        rounds = 1
    rows = {}
    ways = {}
    conditions = {
        "rounds": rounds,
        "tokens": f"random, given; a prompt of {PROMPT}, {WARM} that fill the cache, {TIMED} that "
        "count",
    }
    with working(folder) as place, cache_in(place / "cache"):
        shutil.rmtree(place / "cache" / "advice", ignore_errors=True)  # no profile of another day
        try:
            for spec in specs:
                conditions["stopped in"] = spec.name
                cells = list(product(rates, budgets))
                for rate, budget in progress(
                    cells, f"advice, {spec.name}", unit="budgets and rates"
                ):
                    model, seen, costs_of = prepared(spec, place, 1e6 * rate)
                    found = settings(
                        model, seen, costs_of, here(model.folder), budget, 1e6 * rate, rounds
                    )
                    rows = rows | found[0]
                    ways = ways | found[1]
            del conditions["stopped in"]
        except KeyboardInterrupt:  # it takes minutes: what is done is kept
            pass
    counted = summary(rows)
    return {
        "conditions": conditions,
        "settings": rows,
        "ways": ways,
        "summary": counted,
        "aims": aims(counted),
    }


def prepared(spec: MoESpec, place: Path, rate: float) -> tuple[Model, Scene, Callable[..., Any]]:
    """A shape's model, written if it is not there; its tokens, and what its experts cost in every
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
        look.seen,
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
