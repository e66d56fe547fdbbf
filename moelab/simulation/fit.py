"""What everything costs on a machine, found in a recorded run of the engine.

The timeline says how long each read, decoding and computation took, beside all that ran at the same
time. Between its events the engine decides what to load, hands experts to an executor and back, and
wakes threads; that is counted, too. Means are taken, of which what took longer than `LONG` medians
was disturbed and counts as so long."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from moelab.offloading.load_queue import USES
from moelab.offloading.run import EngineRun
from moelab.simulation.costs import Delays, Linear, Machine
from moelab.specs import Event

LONG = 3
DECODES = (*USES, "check")
#: of all n, the share that calls of n experts must have to be believed
OFTEN = 0.1


def fitted(run: EngineRun) -> Machine:
    """The machine of a run; ValueError if the run has read no experts."""
    samples = _Samples()
    for pass_, events in _by_forward(run).items():
        samples.add(
            run.forwards[pass_].tokens,
            run.forwards[pass_].phase == "decode",
            events,
            dict(run.steps[pass_]),
            {layer for layer, _ in run.predictions[pass_]},
        )
    predict = samples.predicting()
    return Machine(
        _delays(run, samples),
        run.settings.workers,
        other=_line(samples.before_layers(predict)),
        head=_line(samples.head),
        decide=_means(samples.decide),
        handover=_mean(samples.handover),
        predict=predict,
    )


def _by_forward(run: EngineRun) -> dict[int, list[Event]]:
    """The events within each forward that has any, in order of their start."""
    starts, found = [forward.start for forward in run.forwards], defaultdict(list)
    for event in sorted(run.timeline, key=lambda event: event.start):
        at = bisect_right(starts, event.start) - 1
        if at >= 0 and event.end <= run.forwards[at].end:
            found[at].append(event)
    return found


@dataclass
class _Samples:
    """Seconds of what compute does, forward by forward.

    other : (tokens, layer, whether a predictor was asked, seconds) before a layer's experts.
    head : by tokens.    decide : by experts to load.    handover : of experts that were waited for.
    alone : one expert by itself, from the end of what was computed before, by its tokens.
    together : experts of one token in one call, by their number.
    """

    other: list[tuple[int, int, bool, float]] = field(default_factory=list)
    head: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    decide: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    handover: list[float] = field(default_factory=list)
    alone: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    together: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(
        self,
        tokens: int,
        decoding: bool,
        events: Sequence[Event],
        steps: Mapping[int, Mapping[int, int]],
        predicted: set[int],
    ) -> None:
        """One forward: its events, what each layer routed, and the layers that were predicted."""
        if decoding:
            self.handover += _handovers(events)
        loads = defaultdict(set)
        for event in events:
            if event.resource != "compute" and event.expert in steps.get(event.layer, ()):
                loads[event.layer].add(event.expert)
        compute = [event for event in events if event.resource == "compute"]
        for event, then in pairwise([*compute, None]):
            if event.kind == "other" and event.layer < 0:
                self.head[tokens].append(event.end - event.start)
            elif event.kind == "other":
                asked = event.layer + 1 in predicted
                self.other.append((tokens, event.layer, asked, event.end - event.start))
                if then is not None and then.layer == event.layer and event.layer in steps:
                    self.decide[len(loads[event.layer])].append(then.start - event.end)
        before = {then: event.end for event, then in pairwise(compute) if event.kind != "other"}
        for layer, routed in steps.items():
            found = [e for e in compute if e.kind == "expert" and e.layer == layer]
            self._experts(found, routed, before)

    def _experts(
        self, found: list[Event], routed: Mapping[int, int], before: Mapping[Event, float]
    ) -> None:
        """A layer's computations; one of expert −1 is of all experts that are not computed alone."""
        for event in found:
            if event.expert >= 0:
                since = before.get(event, event.start)
                self.alone[routed[event.expert]].append(event.end - since)
            elif max(routed.values()) == 1:
                self.together[len(routed) - len(found) + 1].append(event.end - event.start)

    def predicting(self) -> float:
        """How much longer a layer takes in a decode step that asks a predictor; the first, which
        embeds, is left out."""
        least = min((tokens for tokens, *_ in self.other), default=0)
        found: tuple[list[float], list[float]] = [], []
        for tokens, layer, asked, seconds in self.other:
            if tokens == least and layer:
                found[asked].append(seconds)
        return max(_mean(found[True]) - _mean(found[False]), 0.0) if all(found) else 0.0

    def before_layers(self, predict: float) -> dict[int, list[float]]:
        """Seconds before a layer's experts without predicting, the mean layer's, by tokens."""
        by_layer: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for tokens, layer, asked, seconds in self.other:
            by_layer[tokens][layer].append(seconds - predict * asked)
        return {
            tokens: [fmean(map(_mean, layers.values()))] * sum(map(len, layers.values()))
            for tokens, layers in by_layer.items()
        }


def _handovers(events: Sequence[Event]) -> list[float]:
    """Of experts that were waited for, the seconds from the last read to the end of the wait in
    which nobody worked on them or, for want of a worker, could have."""
    reads, decodes, found = {}, [event for event in events if event.kind in DECODES], []
    for event in events:
        if event.kind.startswith("read"):
            reads[event.layer, event.expert] = event.end
    for wait in (event for event in events if event.kind == "wait"):
        key = wait.layer, wait.expert
        if (read := reads.get(key, wait.end)) >= wait.end:
            continue
        mine = [
            i
            for i, one in enumerate(decodes)
            if (one.layer, one.expert) == key and read <= one.start < wait.end
        ]
        if mine and mine[0] and decodes[mine[0] - 1].end > read:
            continue  # it queued for a worker
        since = max(read, wait.start)  # a prefetched one may have been there for long
        begun, ended = since, since
        if mine:
            begun, ended = decodes[mine[0]].start, max(decodes[i].end for i in mine)
        found.append(max(begun - since, 0.0) + max(wait.end - max(ended, since), 0.0))
    return found


def _delays(run: EngineRun, samples: _Samples) -> Delays:
    """An expert's parts, by bytes: what was read and decoded of all experts."""
    rates, decoding, operations, nbytes = defaultdict(list), defaultdict(float), 0, 0
    for event in run.timeline:
        if event.kind.startswith("read") and event.bytes:
            rates[event.kind].append((event.end - event.start) / event.bytes)
            nbytes += event.bytes
        elif event.kind in DECODES:
            decoding[event.kind] += event.end - event.start
            operations += event.kind != "decompress"
    if not nbytes:
        raise ValueError(
            "this run has read no experts, so nothing is known of reading them: give device=, or record "
            "a run in less memory"
        )
    pairs = [pair for layer in run.settings.experts_bytes for pair in layer]
    e_bytes, sm_bytes = (round(fmean(pair[part] for pair in pairs)) for part in (0, 1))
    whole = _mean([rate for of in rates.values() for rate in of])
    loads = nbytes / (e_bytes + sm_bytes)
    decode, apart = sum(decoding.values()) / loads, decoding["decompress"] + decoding["recover"]
    recover = decode * decoding["recover"] / apart if apart else 0.0
    base, token = _line(samples.alone)
    often = OFTEN * sum(map(len, samples.together.values()))
    return Delays(
        e_read=e_bytes * (_mean(rates["read E"]) or whole),
        sm_read=sm_bytes * (_mean(rates["read SM"]) or whole),
        decompress=decode - recover,
        recover=recover,
        expert_base=base,
        expert_token=token,
        N=max(1, round(operations / loads)),
        e_bytes=e_bytes,
        sm_bytes=sm_bytes,
        experts_bytes=run.settings.experts_bytes,
        together=_means(
            {n: of for n, of in samples.together.items() if n > 1 and len(of) >= often}
        ),
    )


def _mean(seconds: Sequence[float]) -> float:
    """The mean, 0 of nothing."""
    longest = LONG * median(seconds) if seconds else 0.0
    return fmean(min(one, longest) for one in seconds) if seconds else 0.0


def _means(samples: Mapping[int, Sequence[float]]) -> tuple[tuple[int, float], ...]:
    return tuple((n, _mean(samples[n])) for n in sorted(samples))


def _line(samples: Mapping[int, Sequence[float]]) -> Linear:
    """(base, per unit) of seconds by a number, neither negative: through the mean of the number
    that came most."""
    points = {n: _mean(seconds) for n, seconds in samples.items()}
    if not points:
        return 0.0, 0.0
    often, each = max(points, key=lambda n: len(samples[n])), 0.0
    if len(points) > 1:
        weights = [len(samples[n]) ** 0.5 for n in points]
        each = max(np.polyfit([*points], [*points.values()], 1, w=weights)[0].item(), 0.0)
    return max(points[often] - each * often, 0.0), each
