"""What a recorded run says of the machine and the engine by itself, beyond what its experts' parts
take one by one.

`moelab.simulation.profile` measures parts. In a run the engine also decides what to load, hands
experts to an executor and back, and wakes threads; all of that is between the events of its
timeline, or within them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from moelab.offloading.load_queue import USES
from moelab.offloading.requests import Delays
from moelab.offloading.run import EngineRun
from moelab.specs import Event

#: what takes longer than so many medians was disturbed, and counts as so long
LONG = 3
#: seconds as base + per token
Linear = tuple[float, float]


class Observed(NamedTuple):
    """Means in seconds, of which what was disturbed counts as `LONG` medians; (0.0, 0.0), 0.0, ()
    or None of what did not happen.

    other, head : before a layer's experts are decided about, and after the last layer's: (base, per
        token).
    first : how much longer the first layer's `other` takes than the next ones' in a decode step.
    predict : asking a predictor for a layer's experts, which is not in `other`.
    decide : until the first of a layer's experts is computed, or waited for, and handover: as in
        `Delays`.
    expert : an expert by itself, from the end of what was computed before: (base, per token).
    together : as in `Delays`, of those n that came often.
    """

    other: Linear
    head: Linear
    first: float
    predict: float
    decide: tuple[tuple[int, float], ...]
    handover: float
    expert: Linear | None
    together: tuple[tuple[int, float], ...]

    def delays(self, delays: Delays) -> Delays:
        """What was measured by parts, with what the run took."""
        delays = replace(delays, decide=self.decide, handover=self.handover)
        if self.expert is not None:
            base, token = self.expert
            delays = replace(
                delays, expert_base=base, expert_token=token, computed=(), one_thread=None
            )
        return replace(delays, together=self.together)

    def around(self, own: Delays, parts: Delays | None = None) -> Delays:
        """Delays measured by parts, with what the engine took besides in this run, whose own parts
        are known.

        own : of the experts that ran.    parts : of others, in another form perhaps; the engine takes as long for them.
        """
        # They were computed while others were read and, for a part of that time, decoded.
        decoding = min(own.decode_at_once / own.miss_read, 1.0) if own.miss_read else 1.0
        read, decode = (own.beside.get(f"expert beside {what}", 1.0) for what in ("read", "decode"))
        both = own.beside.get("expert beside decode and read", read * decode)
        slowed, parts = read + decoding * (both - read), parts or own
        usual = own.expert(1) if own.one_thread is None else own.one_thread
        alone = max(sum(self.expert) / slowed - usual, 0.0) if self.expert else 0.0
        found = replace(
            parts,
            expert_base=parts.expert_base + alone,
            decide=self.decide,
            handover=self.handover,
            computed=tuple((n, seconds + alone) for n, seconds in parts.computed),
            one_thread=None if parts.one_thread is None else parts.one_thread + alone,
        )
        if own.together and parts.together:  # of all of a token's: then nothing is loaded
            (most, _), ((K, _),) = own.together[-1], parts.together
            more = [
                max(seconds / slowed - own.one_token(n), 0.0)
                for n, seconds in self.together
                if n < most
            ]
            some = ((n, parts.one_token(n) + median(more or [0.0])) for n in range(2, K))
            found = replace(found, together=(*some, *parts.together))
        return found


def observed(run: EngineRun) -> Observed:
    """What a run says; of a resident model's, which has no events, nothing."""
    starts, by_pass = [forward.start for forward in run.forwards], defaultdict(list)
    for event in run.timeline:
        if (at := bisect_right(starts, event.start) - 1) >= 0 and event.end <= run.forwards[at].end:
            by_pass[at].append(event)
    head, decide, alone, several = (defaultdict(list) for _ in range(4))
    other: list[
        tuple[int, int, bool, float]
    ] = []  # tokens, layer, whether a predictor was asked, seconds
    woken: list[float] = []
    for at, events in by_pass.items():
        events.sort(key=lambda event: event.start)
        tokens, steps, asked = (
            run.forwards[at].tokens,
            dict(run.steps[at]),
            dict(run.predictions[at]),
        )
        if run.forwards[at].phase == "decode":
            woken += _handovers(events)
        experts, loads = defaultdict(list), defaultdict(set)
        for event in events:
            if event.kind == "expert":
                experts[event.layer].append(event)
            elif event.resource != "compute" and event.expert in steps.get(event.layer, ()):
                loads[event.layer].add(event.expert)
        compute = [event for event in events if event.resource == "compute"]
        after = {then: event.end for event, then in pairwise(compute) if event.kind != "other"}
        for event, then in pairwise([*compute, None]):
            if event.kind == "other":
                if event.layer < 0:
                    head[tokens].append(event.end - event.start)
                else:
                    other.append(
                        (tokens, event.layer, event.layer + 1 in asked, event.end - event.start)
                    )
                if then is not None and then.layer == event.layer in steps:
                    decide[len(loads[event.layer])].append(then.start - event.end)
        for layer, found in experts.items():
            for event in found:
                if event.expert >= 0:
                    alone[steps[layer][event.expert]].append(
                        event.end - after.get(event, event.start)
                    )
                elif max(steps[layer].values()) == 1:
                    several[len(steps[layer]) - len(found) + 1].append(event.end - event.start)
    predict, often = _asking(other), sum(map(len, several.values())) / 10
    before: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for tokens, layer, asked, seconds in other:
        before[tokens][layer].append(seconds - predict * asked)
    layers = {
        tokens: [fmean(map(_mean, of.values()))] * sum(map(len, of.values()))
        for tokens, of in before.items()
    }
    first, *rest = [_mean(of) for _, of in sorted(before[min(before)].items())] if before else [0.0]
    return Observed(
        _line(layers),
        _line(head),
        max(first - fmean(rest), 0.0) if rest else 0.0,
        predict,
        tuple((n, _mean(decide[n])) for n in sorted(decide)),
        _mean(woken),
        _line(alone) if alone else None,
        tuple((n, _mean(several[n])) for n in sorted(several) if len(several[n]) >= often),
    )


def _asking(other: Iterable[tuple[int, int, bool, float]]) -> float:
    """How much longer a layer takes in a decode step that asks a predictor; the first, which
    embeds, is left out."""
    least, found = min((tokens for tokens, *_ in other), default=0), ([], [])
    for tokens, layer, asked, seconds in other:
        if tokens == least and layer:
            found[asked].append(seconds)
    return max(_mean(found[True]) - _mean(found[False]), 0.0) if all(found) else 0.0


def _mean(seconds: Sequence[float]) -> float:
    longest = LONG * median(seconds) if seconds else 0.0
    return fmean(min(one, longest) for one in seconds) if seconds else 0.0


def _handovers(events: Sequence[Event]) -> list[float]:
    """Of experts that were waited for, the seconds from the last read to the end of the wait in
    which nobody worked on them or, for want of a worker, could have."""
    reads, decodes, found = {}, [event for event in events if event.kind in (*USES, "check")], []
    for event in events:
        if event.kind.startswith("read"):
            reads[event[2:4]] = event.end
    for wait in events:
        read = reads.get(wait[2:4], wait.end)
        mine = [
            i
            for i, one in enumerate(decodes)
            if one[2:4] == wait[2:4] and read <= one.start < wait.end
        ]
        if (
            wait.kind == "wait"
            and read < wait.end
            and not (mine and mine[0] and decodes[mine[0] - 1].end > read)
        ):
            since = max(read, wait.start)  # a prefetched one may have been there for long
            worked = (
                (decodes[mine[0]].start, max(decodes[i].end for i in mine))
                if mine
                else (since, since)
            )
            found.append(max(worked[0] - since, 0.0) + max(wait.end - max(worked[1], since), 0.0))
    return found


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
