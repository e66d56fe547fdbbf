"""What prefetching can gain at most, and what it gains (notebook 04).

Each token is decoded by the next of four ways that share the cache: on demand as in Speculating
Experts (all of a layer's experts are copied, then computed) or as the engine does it (each is
computed as it comes), hint and speculative, both with the gate open. No gain can exceed what `least`
leaves of a token's time, which is Eq. (1) made a bound; gains come from three prompts, three times
each, with 95 % intervals. As another way runs the token after, nothing is prefetched across
tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from moelab.base.records import Numbers
from moelab.base.specs import Event
from moelab.cache.pools import Pools
from moelab.evaluation.intervals import Interval
from moelab.offloading.metrics import Forward, Metrics
from moelab.offloading.offload import offload
from moelab.offloading.prefetch_gate import PrefetchGate
from moelab.offloading.slots import Sizes
from moelab.speculate import MODES, Predictor, Speculation
from moelab.store.layout import ExpertStore

from .ratios import ratio as ratio_of
from .timing import turns

ARMS = ("copy, then compute", "on demand", "hint", "speculative")
WARM = 2  # tokens of every arm that are not counted


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


def gains(samples: Sequence[Turns], way: str) -> list[Gain]:
    """Of each sample, against "copy, then compute", whose layers say what can be gained."""
    return [
        Gain(
            fmean(taken.seconds for taken in sample[ARMS[0]])
            - fmean(taken.seconds for taken in sample[way]),
            fmean(hideable(by_layer(taken)) for taken in sample[ARMS[0]]),
        )
        for sample in samples
    ]


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
        run = self.model.moelab
        run.engine.controller.gate = self.gates[arm]
        run.engine.serial = arm == ARMS[0]
        run.engine.loader.queue.ahead = self.ahead if arm in MODES else 0
        hinted = arm in MODES
        with Speculation(self.model, self.predictor(), arm) if hinted else nullcontext():
            run.reset()
            self._forward(1)
        return Taken(list(run.timeline), run.forwards[-1], run.metrics())

    def turns(self, arms: Sequence[str], tokens: int, name: str) -> Turns:
        """`tokens` for each arm, in turn."""
        found = {arm: [] for arm in arms}
        for _, arm in turns(arms[::-1], tokens + WARM, name, "turns"):
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
            self.slow_down(ratio, self.free)
            title = f"{length} tokens, copying {ratio:g} × computing"
            samples = self.samples(ARMS, tokens, title, length, times)
            ran[ratio], against[ratio] = pooled(samples), compare(samples)
        return ran, against

    def slow_down(self, ratio: float, found: Sequence[Taken]) -> None:
        """Throttle copying to `ratio` × computing, as both were in `found`; from the page cache,
        which can be faster than the disk."""
        rate = fmean(t.metrics.read_bytes for t in found) / (ratio * copy_and_compute(found)[1])
        reader = self.model.moelab.engine.loader.reader
        reader.mode, reader.bandwidth = "buffered", rate

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
    sizes = Sizes.of(store, False if store.few_bits else None)
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


def compare(samples: Sequence[Turns]) -> Numbers:
    """What samples gain of what they can gain, with 95 % intervals, and Eq. (1) as reached."""
    serial = pooled(samples)[ARMS[0]]
    found = gains(samples, "speculative")
    copy, compute = copy_and_compute(serial)
    share, low, high = reached(found)
    hinted = reached(gains(samples, "hint"))
    return {
        "copy ÷ compute, found": copy / compute,
        "gain s": fmean(one.seconds for one in found),
        "bound s": fmean(one.bound for one in found),
        "eq. (1) s": fmean(eq1(by_layer(taken)) for taken in serial),
        "gain ÷ bound": share,
        "95 % from": low,
        "to": high,
        "hint's gain ÷ bound": hinted[0],
        "hint's 95 % from": hinted[1],
    }
