"""Prefetching beside loading on demand, with copying throttled to 0.5, 1 and 3 × computing, at
every budget and with every executor; one process and one model (raw experts, routing from random
tokens).

Never slower (`run`): the same generation on demand and with hints in turn, from the cache that the
one before has left, which decides the same whether anything is prefetched. Each begins with a new
gate (`moelab.offloading.prefetch_gate`), so what it costs to find out counts. The ratio is of the
first tokens of all generations, pair by pair, with its 95 % interval; "≤ 1.01" is shown where the
whole interval is, refuted where none of it is. Of 8 tokens none is tried with hints, so they show
what the machine alone makes of it. The median, beside it, is of the pairs. The predictors are the
next router on this layer's router input, as the model is random, and at the first of the rates a
random one, right in K/E of cases.

What can be gained (`PrefetchBenchmark.study`, notebook 04): each token is decoded by the next of four
ways that share the cache: on demand as in Speculating Experts (all of a layer's experts are copied,
then computed) or as the engine does it (each is computed as it comes), hint and speculative, both
with the gate open. No gain can exceed what `least` leaves of a token's time, which is Eq. (1) made a
bound; gains come from three prompts, three times each, with 95 % intervals. As another way runs the
token after, nothing is prefetched across tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from moelab.api import using
from moelab.arguments import number, several, whole
from moelab.bench import ENGINE, measure
from moelab.bench.end_to_end import SPEC
from moelab.bench.synthesize import synthesize
from moelab.cache.pools import Pools
from moelab.checkpoint.convert import convert
from moelab.evaluation.intervals import Interval, named
from moelab.evaluation.intervals import ratio as ratio_of
from moelab.offloading.metrics import Forward, Metrics
from moelab.offloading.offload import offload
from moelab.offloading.prefetch_gate import PrefetchGate
from moelab.offloading.slots import Sizes
from moelab.records import Numbers, Record
from moelab.registry import make
from moelab.specs import Event, MoESpec
from moelab.speculate import MODES, Predictor, Speculation
from moelab.store.layout import ExpertStore

ARMS = ("copy, then compute", "on demand", "hint", "speculative")
PAIR = ARMS[1:3]
RATIOS = (0.5, 1.0, 3.0)
BUDGETS = (0.25, 0.5)
EXECUTORS = ("exact", "fast")
WARM = 2  # tokens of every arm that are not counted
LENGTHS = (8, 64)  # tokens of a generation
AIM = 1.01  # hint ÷ on demand, at most


class Taken(NamedTuple):
    """What one token took."""

    events: list[Event]
    forward: Forward
    metrics: Metrics

    @property
    def seconds(self) -> float:
        """Of the token's forward pass."""
        return self.forward.end - self.forward.start


Turns = dict[str, list[Taken]]  # arm → what each of its tokens took


class Spent(NamedTuple):
    """Seconds of one layer of a token: reading from disk, waiting for it, its experts, all else
    before them."""

    copy: float
    wait: float
    expert: float
    other: float


def by_layer(taken: Taken) -> list[Spent]:
    """What a token's layers took, in their order. Idle time counts as computing: it can hide
    copying just as well."""
    layers = []
    before = taken.forward.start
    for layer in sorted({event.layer for event in taken.events if event.layer >= 0}):
        mine = [event for event in taken.events if event.layer == layer]
        disk, wait = (
            sum(e.end - e.start for e in mine if kind in (e.resource, e.kind))
            for kind in ("disk", "wait")
        )
        routed = max((e.end for e in mine if e.kind == "other"), default=before)
        done = max((e.end for e in mine if e.kind == "expert"), default=routed + wait)
        layers.append(Spent(disk, wait, done - routed - wait, routed - before))
        before = done
    return layers


def least(layers: Sequence[Spent]) -> float:
    """Seconds that a token's layers take at the least if experts are predicted one layer before
    their own.

    Eq. (1) as a bound. It sums min(copy, compute) over all layers; but the copy of layer l + 1 is
    hidden by what comes after layer l's router, the experts of l and all else of l + 1, and the
    first layer's by nothing before. Copies follow each other. An engine may compute experts as they
    come, which Algorithm 1 does not: allowed here, too."""
    copied = done = 0.0
    predicted = None  # when this layer's experts were: the router before it had run
    for copy, _, expert, other in layers:
        routed = done + other
        copied = max(copied, routed if predicted is None else predicted) + copy
        done = max(routed + expert, copied)
        predicted = routed
    return done


def hideable(layers: Sequence[Spent]) -> float:
    """Seconds by which a token that copied, then computed, could be shorter: Eq. (1)'s bound on the
    gain."""
    return sum(layer.wait + layer.expert + layer.other for layer in layers) - least(layers)


def eq1(layers: Sequence[Spent]) -> float:
    """Eq. (1) as Algorithm 1 can reach it, seconds: each copy but the first beside the experts
    before and all else."""
    return sum(
        min(here.copy, before.expert + here.other) for before, here in zip(layers, layers[1:])
    )


def copy_and_compute(found: Sequence[Taken]) -> tuple[float, float]:
    """Seconds a token of copying, and of computing."""
    layers = [layer for taken in found for layer in by_layer(taken)]
    return (
        sum(layer.copy for layer in layers) / len(found),
        sum(layer.expert + layer.other for layer in layers) / len(found),
    )


class Gain(NamedTuple):
    """Of one sample: seconds a token that a way takes less than another, and the most that it could
    take less."""

    seconds: float
    bound: float


def gains(samples: Sequence[Turns], way: str, against: str = ARMS[0]) -> list[Gain]:
    """Of each sample. What can be gained follows from the layers of "copy, then compute"."""
    found = []
    for sample in samples:
        serial, slow, fast = (
            fmean(taken.seconds for taken in sample[arm]) for arm in (ARMS[0], against, way)
        )
        found.append(
            Gain(
                slow - fast,
                slow - serial + fmean(hideable(by_layer(taken)) for taken in sample[ARMS[0]]),
            )
        )
    return found


def reached(found: Sequence[Gain]) -> Interval:
    """Share of the bound that was gained, with its 95 % interval: sum over sum, by the ratio
    estimator."""
    return ratio_of([one.seconds for one in found], [one.bound for one in found])


class PrefetchBenchmark:
    """Ways of running an offloaded model that take turns on its tokens `ids` [1, N], repeated, so
    that all share a
    cache. model : with slots for experts ahead and staging for a token's experts."""

    def __init__(self, model: Any, ids: torch.Tensor, predictor: Callable[[], Predictor]) -> None:
        self.model = model
        self.ids = ids
        self.predictor = predictor
        self.prompts = {}
        self.free = None
        self.gates = defaultdict(lambda: PrefetchGate(trials=False))  # every arm learns by itself
        self.ahead = model.moelab.engine.loader.queue.ahead
        self.begin(1)

    def begin(self, length: int, first: int = 0) -> None:
        """Start anew with `length` ids from the first on as the prompt, which is read once, as fast
        as it goes."""
        if (length, first) not in self.prompts:
            reader = self.model.moelab.engine.loader.reader
            self.past = None
            self.at = first
            limit = reader.bandwidth
            reader.bandwidth = None
            self._forward(length)
            reader.bandwidth, self.prompts[length, first] = limit, self.past
        with torch.inference_mode():
            self.past = deepcopy(self.prompts[length, first])
            self.at = first + length

    def samples(
        self, arms: Sequence[str], tokens: int, name: str, length: int = 1, times: int = 3
    ) -> list[Turns]:
        """Three prompts of `length` tokens, each so many times: samples of `tokens` an arm."""
        found = []
        for turn in range(3 * times):
            self.begin(length, self.ids.shape[1] // 3 * (turn % 3))
            found.append(self.turns(arms, tokens, f"{name}, {turn + 1} of {3 * times}"))
        return found

    def token(self, arm: str) -> Taken:
        """Decode one more token in this way."""
        with self._way(arm, self.gates[arm]):
            self.model.moelab.reset()
            self._forward(1)
        return Taken(
            list(self.model.moelab.timeline),
            self.model.moelab.forwards[-1],
            self.model.moelab.metrics(),
        )

    def generation(self, arm: str, tokens: int) -> list[float]:
        """Seconds of each of so many tokens after the first one of `ids`, decoded in this way with
        a new gate."""
        self.begin(1)
        with self._way(arm, PrefetchGate()):
            self.model.moelab.reset()
            for _ in range(tokens):
                self._forward(1)
        return [forward.end - forward.start for forward in self.model.moelab.forwards]

    def pairs(self, tokens: int, times: int, name: str) -> dict[str, list[list[float]]]:
        """`generation`s on demand and with hints, the latter first in every second round; one
        before does not count."""
        self.generation(PAIR[0], tokens)
        found = {arm: [] for arm in PAIR}
        for _, arm in measure.turns(PAIR, times, name):
            found[arm].append(self.generation(arm, tokens))
        return found

    def _way(self, arm: str, gate: PrefetchGate) -> Any:
        """A context in which the model decodes in this way."""
        engine = self.model.moelab.engine
        engine.controller.gate = gate
        engine.serial = arm == ARMS[0]
        engine.loader.queue.ahead = self.ahead if arm in MODES else 0
        return Speculation(self.model, self.predictor(), arm) if arm in MODES else nullcontext()

    def turns(self, arms: Sequence[str], tokens: int, name: str) -> Turns:
        """`tokens` for each arm, in turn."""
        found = {arm: [] for arm in arms}
        for _, arm in measure.turns(arms[::-1], tokens + WARM, name, "turns"):
            found[arm].append(self.token(arm))
        return {arm: taken[WARM:] for arm, taken in found.items()}

    def study(
        self, ratios: Sequence[float], tokens: int, length: int, times: int = 3
    ) -> tuple[dict[float, Turns], dict[float, Numbers]]:
        """Every ratio of copying to computing: (the tokens of each arm, figures against the
        bounds)."""
        if self.free is None:
            self.free = pooled(self.samples(ARMS[:1], tokens, "without a limit", length, times))[
                ARMS[0]
            ]
        ran = {}
        against = {}
        for ratio in ratios:
            rate = self.slow_down(ratio, self.free)
            samples = self.samples(
                ARMS, tokens, f"{length} tokens, copying {ratio:g} × computing", length, times
            )
            ran[ratio], against[ratio] = pooled(samples), compare(samples, ratio, rate)[1]
        return ran, against

    def slow_down(self, ratio: float, found: Sequence[Taken]) -> float:
        """Throttle copying to `ratio` × computing, as both were in `found`; returns bytes a
        second."""
        rate = fmean(t.metrics.read_bytes for t in found) / (ratio * copy_and_compute(found)[1])
        reader = self.model.moelab.engine.loader.reader
        reader.mode, reader.bandwidth = (
            "buffered",
            rate,
        )  # the page cache can be faster than the disk
        return rate

    def _forward(self, n: int) -> None:
        ids = self.ids[:, torch.arange(self.at, self.at + n) % self.ids.shape[1]]
        with torch.inference_mode():
            self.past = self.model(
                input_ids=ids, past_key_values=self.past, use_cache=True
            ).past_key_values
        self.at += n


def pooled(samples: Iterable[Turns]) -> Turns:
    """The tokens of each arm in all samples."""
    found: Turns = {}
    for sample in samples:
        for arm, taken in sample.items():
            found.setdefault(arm, []).extend(taken)
    return found


def offloaded(store: ExpertStore) -> Any:
    """A model that keeps no expert: slots for those of one layer and the next, all read from the
    store."""
    K = store.spec.K
    sizes = Sizes.of(store)
    return offload(
        store,
        (2 * K + 2) * sizes.in_flight,
        plan=Pools(),
        staging=K + 2,
        ahead=K,
        mode="buffered",
        verify=False,
    )


def tpot_metrics(ran: Mapping[float, Turns]) -> Numbers:
    """Median TPOT of each ratio and arm, ms, by the names of metrics."""
    return {
        f"tpot_{ratio:g}_{arm.replace(', ', '_').replace(' ', '_')}": 1e3
        * median(one.seconds for one in taken)
        for ratio, found in ran.items()
        for arm, taken in found.items()
    }


def typical(found: Turns) -> dict[str, list[Event]]:
    """The events of each arm's token of median duration."""
    return {
        arm: sorted(taken, key=lambda one: one.seconds)[len(taken) // 2].events
        for arm, taken in found.items()
    }


def waits(tokens: Mapping[str, Sequence[Event]]) -> str:
    """How long each of these tokens waits, in words."""
    took = {
        arm: sum(e.end - e.start for e in events if e.kind == "wait")
        for arm, events in tokens.items()
    }
    return (
        "waiting "
        + ", ".join(f"{arm} {1e3 * seconds:.1f} ms" for arm, seconds in took.items())
        + " (measured)"
    )


def row(found: Sequence[Taken]) -> Numbers:
    """Times and bytes of tokens, as a table has them."""
    ahead = [t.metrics.prefetched for t in found]
    return {
        "TPOT s": median(t.seconds for t in found),
        "mean s": fmean(t.seconds for t in found),
        "best s": min(t.seconds for t in found),
        "MB read": fmean(t.metrics.read_bytes for t in found) / 1e6,
        "MB wasted": fmean(a["wasted"] for a in ahead) / 1e6,
        "hidden reads": fmean(a["used"] for a in ahead),
    }


def compare(samples: Sequence[Turns], ratio: float, rate: float) -> tuple[dict, dict]:
    """(rows of the arms, figures against the bounds)."""
    found = pooled(samples)
    rows = {arm: row(taken) for arm, taken in found.items()}
    over_serial, over_demand = (gains(samples, "speculative", arm) for arm in ARMS[:2])
    copy, compute = copy_and_compute(found[ARMS[0]])
    (share, low, high), hinted = reached(over_serial), reached(gains(samples, "hint"))
    return rows, {
        "copied at GB/s": rate / 1e9,
        "copy ÷ compute, wanted": ratio,
        "copy ÷ compute, found": copy / compute,
        "gain s": fmean(one.seconds for one in over_serial),
        "bound s": fmean(one.bound for one in over_serial),
        "eq. (1) s": fmean(eq1(by_layer(taken)) for taken in found[ARMS[0]]),
        "gain ÷ bound": share,
        "95 % from": low,
        "to": high,
        "hint's gain ÷ bound": hinted[0],
        "hint's 95 % from": hinted[1],
        "hint's to": hinted[2],
        "gain over on demand s": fmean(one.seconds for one in over_demand),
        "left of it s": fmean(one.bound for one in over_demand),
        "speculative ÷ on demand": rows["speculative"]["TPOT s"] / rows["on demand"]["TPOT s"],
        "hint ÷ on demand": rows["hint"]["TPOT s"] / rows["on demand"]["TPOT s"],
    }


def verdict(found: Mapping[str, Sequence[Sequence[float]]], lengths: Iterable[int]) -> Record:
    """Hint ÷ on demand of the first so many tokens of generations in pairs, and whether that is at
    most `AIM`. A pair is one sample, as what disturbs a token mostly disturbs the next one, too."""
    row: Record = {}
    for n in lengths:
        demand, hint = ([sum(one[:n]) for one in found[arm]] for arm in PAIR)
        row |= named(f"{n} tokens", of := ratio_of(hint, demand))
        row[f"{n} tokens: median"] = median(a / b for a, b in zip(hint, demand))
        row[f"{n} tokens: ≤ {AIM}"] = (
            "shown" if of[2] <= AIM else "refuted" if of[1] > AIM else "undecided"
        )
    return row


def run(
    folder: str | Path | None = None,
    budgets: Sequence[float] = BUDGETS,
    ratios: Sequence[float] = RATIOS,
    executors: Sequence[str] = EXECUTORS,
    lengths: Sequence[int] = LENGTHS,
    times: int = 8,
    spec: MoESpec = SPEC,
) -> Record:
    never = {}
    with measure.working(folder) as place:
        source = place / "model"
        store = place / "raw"
        if not source.is_dir():
            synthesize(source, spec)
        if not store.is_dir():
            convert(source, store, codec="raw")
        for file in store.glob("experts-*"):  # into the page cache
            with open(file, "rb", buffering=0) as f:
                while f.read(1 << 24):
                    pass
        for share, executor in product(budgets, executors):
            where = f"budget {share:.0%}, {executor}"
            with opened(store, share, executor) as bench:
                free = bench.turns(PAIR[:1], 8, f"{where}: as fast as it goes")[PAIR[0]]
                for ratio in ratios:
                    bench.slow_down(ratio, free)
                    for kind in ("router", "random")[: 1 + (ratio == ratios[0])]:
                        bench.predictor = partial(make, "predictor", kind, bench.model)
                        title = f"{where}, copying {ratio:g} × computing, {kind}"
                        never[title] = verdict(bench.pairs(max(lengths), times, title), lengths)
    return {f"never slower ({PAIR[1]} ÷ {PAIR[0]})": never}


@contextmanager
def opened(store: Path, share: float, executor: str) -> Iterator[PrefetchBenchmark]:
    """The bench of a model with this share of its experts in memory, as they are after some
    tokens."""
    model = offload(store, share, ahead=None)
    with model.moelab, using(model, executor=executor):
        ids = torch.randint(
            3, model.config.vocab_size, (1, 4096), generator=torch.Generator().manual_seed(0)
        )
        bench = PrefetchBenchmark(model, ids, partial(make, "predictor", "router", model))
        bench.turns(PAIR[:1], 20, f"{share:.0%}: filling the cache")
        yield bench


MEASURES = ENGINE
OPTIONS = {
    "folder": (None, "where the model is kept, for the next time; else it is temporary"),
    "executors": ({"nargs": "+", "choices": EXECUTORS}, "that compute"),
    "budgets": (several(number(above=0)), "shares of the experts"),
    "ratios": (several(number(above=0)), "of copying to computing"),
    "lengths": (several(whole(1)), "of generations, tokens"),
    "times": (whole(1), "that each generation runs in either way"),
}
