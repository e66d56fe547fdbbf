"""What everything costs on a machine, found in a recorded run of the engine.

The timeline says how long each read, decoding and computation took, beside all that ran at the same
time. Between its events the engine decides what to load, hands experts to an executor and back, and
wakes threads; that is counted, too. Means are taken, of which what took longer than `LONG` medians
was disturbed and counts as so long."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf

from moelab.base.specs import Event
from moelab.offloading.hybrid import line, mean
from moelab.offloading.load_queue import USES
from moelab.offloading.run import EngineRun
from moelab.simulation.costs import Delays, Machine

DECODES = (*USES, "check")


def fitted(run: EngineRun, reads: bool = True) -> Machine:
    """The machine of a run. ValueError if the run has read no experts, unless `reads` is False:
    then reading takes for ever."""
    compute = _Compute()
    for n, events in _by_forward(run).items():
        predicted = {layer for layer, _ in run.predictions[n]}
        compute.add(run.forwards[n].tokens, events, dict(run.steps[n]), predicted)
    predict = compute.predicting()
    before = defaultdict(list)
    for tokens, _, asked, seconds in compute.other:
        before[tokens].append(seconds - predict * asked)
    return Machine(
        _delays(run, compute, reads),
        run.settings.workers,
        other=line(before),
        head=line(compute.head),
        decide=line(compute.decide),
        handover=mean(compute.handover),
        predict=predict,
        far=line(compute.far),
    )


def _by_forward(run: EngineRun) -> dict[int, list[Event]]:
    """The events within each forward that has any, in order of their start."""
    starts = [forward.start for forward in run.forwards]
    found = defaultdict(list)
    for event in sorted(run.timeline, key=lambda event: event.start):
        at = bisect_right(starts, event.start) - 1
        if at >= 0 and event.end <= run.forwards[at].end:
            found[at].append(event)
    return found


class _Compute:
    """Seconds of what compute does, forward by forward.

    other : (tokens, layer, whether a predictor was asked, seconds) before a layer's experts.
    head : by tokens.
    decide : by experts to load.
    handover : of experts that were waited for.
    alone : one expert by itself, from the end of what was computed before, by its tokens.
    together : experts of one token in one call, by their number.
    far : one expert where it lies, by its tokens.
    """

    def __init__(self) -> None:
        self.other: list[tuple[int, int, bool, float]] = []
        self.handover: list[float] = []
        self.head, self.decide, self.alone, self.together, self.far = (
            defaultdict(list) for _ in range(5)
        )

    def add(
        self,
        tokens: int,
        events: Sequence[Event],
        routed: Mapping[int, Mapping[int, int]],
        predicted: set[int],
    ) -> None:
        """One forward: its events, {expert: tokens} of each layer, and the layers that were
        predicted."""
        loaded = self._beside(events, routed)
        compute = [event for event in events if event.resource == "compute"]
        for before, event, after in zip([None, *compute], compute, [*compute[1:], None]):
            seconds = event.seconds
            if event.kind == "wait" and event.expert >= 0:
                since = max(loaded.get(event[2:4], event.end), event.start)
                self.handover.append(max(event.end - since, 0.0))
            elif event.kind == "expert" and event.layer in routed:
                wanted = routed[event.layer]
                if event.expert >= 0:
                    gap = event.start - before.end if before and before.kind != "other" else 0.0
                    self.alone[wanted[event.expert]].append(gap + seconds)
                elif max(wanted.values()) == 1:  # one call, of all that are not computed alone
                    calls = sum(e[1:3] == event[1:3] for e in events)
                    self.together[len(wanted) - calls + 1].append(seconds)
            elif event.kind == "other" and event.layer < 0:
                self.head[tokens].append(seconds)
            elif event.kind == "other":
                asked = event.layer + 1 in predicted
                self.other.append((tokens, event.layer, asked, seconds))
                if after is not None and after.layer == event.layer in routed:
                    loads = sum((event.layer, e) in loaded for e in routed[event.layer])
                    self.decide[loads].append(after.start - event.end)

    def _beside(
        self, events: Sequence[Event], routed: Mapping[int, Mapping[int, int]]
    ) -> dict[tuple[int, int], float]:
        """What is computed where it lies; of what is loaded, (layer, expert) → the end of that."""
        loaded = {}
        for event in events:
            if event.resource == "host":
                tokens = routed[event.layer][event.expert]
                self.far[tokens].append(event.seconds)
            elif event.resource != "compute":
                loaded[event[2:4]] = max(event.end, loaded.get(event[2:4], 0.0))
        return loaded

    def predicting(self) -> float:
        """How much longer a layer takes in a decode step that asks a predictor; the first, which
        embeds, is left out."""
        least = min((tokens for tokens, *_ in self.other), default=0)
        took = defaultdict(list)
        for tokens, layer, asked, seconds in self.other:
            if tokens == least and layer:
                took[asked].append(seconds)
        return max(mean(took[True]) - mean(took[False]), 0.0) if len(took) == 2 else 0.0


def _delays(run: EngineRun, compute: _Compute, reads: bool) -> Delays:
    """An expert's parts, by the bytes of all that was read and decoded."""
    rates = defaultdict(list)
    decoding = defaultdict(float)
    operations = 0
    nbytes = 0
    for event in run.timeline:
        if event.bytes:
            rates[event.kind].append(event.seconds / event.bytes)
            nbytes += event.bytes
        elif event.kind in DECODES:
            decoding[event.kind] += event.seconds
            operations += event.kind != "decompress"
    if reads and not nbytes:
        raise ValueError(
            "this run has read no experts, so nothing is known of reading them: give device=, or "
            "record a run in less memory"
        )
    e_bytes, sm_bytes = run.settings.mean_bytes
    loads = nbytes / (e_bytes + sm_bytes) or 1.0
    decode = sum(decoding.values()) / loads
    apart = decoding["decompress"] + decoding["recover"]
    recover = decode * decoding["recover"] / apart if apart else 0.0
    whole = mean([rate for of in rates.values() for rate in of]) if nbytes else inf
    base, token = line(compute.alone)
    return Delays(
        e_read=e_bytes * (mean(rates["read E"]) or whole),
        sm_read=sm_bytes * (mean(rates["read SM"]) or whole) if sm_bytes else 0.0,
        decompress=decode - recover,
        recover=recover,
        expert_base=base,
        expert_token=token,
        N=max(1, round(operations / loads)),
        e_bytes=round(e_bytes),
        sm_bytes=round(sm_bytes),
        experts_bytes=run.settings.experts_bytes,
        together=tuple((n, mean(compute.together[n])) for n in sorted(compute.together) if n > 1),
    )
