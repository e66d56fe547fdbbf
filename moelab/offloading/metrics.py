"""Metrics of a timeline, real or simulated: one piece of code turns `Event`s and forwards into TTFT, TPOT, stall …

A run is a list of events (who did what, when) and a list of forwards (when the model ran, on how many tokens).
Everything here follows from those two lists, so a simulated run and a measured one are compared by the same
definitions. What a process costs beyond its timeline (peak memory, page faults) is `process()`, apart, because a
simulation has none of it.

An event belongs to the last forward that began no later than it did; what came before every forward belongs to none
and counts in the totals only. Left out: time to convert or open a store, and energy.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from moelab.specs import Event


class Forward(NamedTuple):
    """One run of the whole model: when, over how many tokens (of all sequences together), prefill or decode."""

    start: float
    end: float
    tokens: int
    phase: str      # prefill | decode


def check(events: Iterable[Event]) -> list[str]:
    """What is impossible about a timeline, in words; [] for a sound one.

    No event ends before it starts, reads carry bytes and nothing else does, only compute waits, and no resource
    does two things at once. Events that touch do not overlap; an event of no duration overlaps nothing.
    """
    problems, by_resource = [], defaultdict(list)
    for event in events:
        if not (np.isfinite(event.start) and np.isfinite(event.end) and event.start <= event.end):
            problems.append(f"{event} does not end after it starts")
        if (event.bytes > 0) != event.kind.startswith("read"):
            problems.append(f"{event}: reads have bytes, other events have none")
        if event.kind == "wait" and event.resource != "compute":
            problems.append(f"{event}: only compute waits")
        if event.end > event.start:
            by_resource[event.resource].append(event)
    for found in by_resource.values():
        found.sort(key=lambda event: event.start)
        problems += [f"{after} begins before {before} ends" for before, after in pairwise(found)
                     if after.start < before.end]
    return problems


def metrics(events: Sequence[Event], forwards: Sequence[Forward | tuple], counters: Mapping[str, Any] | None = None
            ) -> dict[str, Any]:
    """What a run cost, by definitions that hold for a real clock and for a simulated one.

    Parameters
    ----------
    events : in any order; an event's bytes count where its kind is a read.
    forwards : (start, end, tokens, phase), in order of time; a prompt that is run in chunks is one prefill here.
    counters : of the residency: "hits" ({"F": …, "C": …, "S": …, "E": …}), "misses", "evictions", "rereads" …;
        they are copied, with the rates added that follow from hits and misses.

    Returns
    -------
    A dictionary; times in seconds, None for what the run does not define (no decode, nothing read …):

    ttft_s : median duration of a prefill: the time to the first token, without sampling.
    tpot_s, tpot_p10_s, tpot_p90_s : median and quantiles of the duration of a decode forward, which gives each
        sequence of the batch one token.
    throughput_tok_s : tokens decoded by all sequences over the wall time of decoding, which runs from the end of
        the forward before to the end of this one, so sampling counts.
    between_forwards_s : wall time inside the run that no forward covers: sampling, streaming, the caller.
    wall_s : from the first forward's start to the last one's end.
    prefill_tokens, decode_tokens : tokens that went in.
    read_bytes, read_bytes_per_prefill_token, read_bytes_per_token : all reads; those of prefill over its tokens;
        those of decoding over its tokens.
    stall_s, stall_s_per_step : time in which compute waits; that of decoding, over the decode forwards.
    busy_s, utilisation : {resource: seconds of anything but waiting}, and that over the time of the forwards.
    read_rate_bytes_s : bytes read over the time that the disk is busy.
    overlap_efficiency : 1 − stall ÷ busy time of the disk: 1 when all reading hides behind work, 0 when none does,
        below 0 when compute waits for more than the disk (decompression).
    kind_s : {kind: seconds}, over all resources.
    compute_share : {kind: share of the forwards' time}, of what compute does; "unaccounted" is the rest: gaps
        between events. The shares sum to 1.
    hits, misses, … : the counters; hit_rate: found whole (F); any_hit_rate: found at least in part.

    Raises
    ------
    ValueError : a phase other than "prefill" and "decode", or forwards that overlap or end before they start.
    """
    forwards = [Forward(*forward) for forward in forwards]
    for forward in forwards:
        if forward.phase not in ("prefill", "decode") or forward.end < forward.start:
            raise ValueError(f"{forward}: a forward is 'prefill' or 'decode' and ends after it starts")
    if any(after.start < before.end for before, after in pairwise(forwards)):
        raise ValueError("the forwards overlap or are out of order; give them in order of time")

    starts = [forward.start for forward in forwards]
    tokens, took, read, stall, steps = (defaultdict(float) for _ in range(5))
    for forward in forwards:
        tokens[forward.phase] += forward.tokens
        took[forward.phase] += forward.end - forward.start
        steps[forward.phase] += 1
    busy, kinds, compute = defaultdict(float), defaultdict(float), defaultdict(float)
    for event in events:
        duration = event.end - event.start
        at = bisect_right(starts, event.start) - 1
        phase = forwards[at].phase if at >= 0 else "before"
        kinds[event.kind] += duration
        if event.resource == "compute":
            compute[event.kind] += duration
        if event.kind == "wait":
            stall[phase] += duration
        else:
            busy[event.resource] += duration
        if event.kind.startswith("read"):
            read[phase] += event.bytes

    inside = took["prefill"] + took["decode"]
    decode = [forward.end - forward.start for forward in forwards if forward.phase == "decode"]
    prefill = [forward.end - forward.start for forward in forwards if forward.phase == "prefill"]
    decoding = sum(after.end - before.end for before, after in pairwise(forwards) if after.phase == "decode")
    if forwards and forwards[0].phase == "decode":
        decoding += forwards[0].end - forwards[0].start
    wall = forwards[-1].end - forwards[0].start if forwards else 0.0
    total = sum(read.values())
    low, high = np.quantile(decode, [0.1, 0.9]).tolist() if decode else (None, None)
    result = {
        "ttft_s": median(prefill) if prefill else None,
        "tpot_s": median(decode) if decode else None, "tpot_p10_s": low, "tpot_p90_s": high,
        "throughput_tok_s": _ratio(tokens["decode"], decoding),
        "between_forwards_s": wall - inside, "wall_s": wall,
        "prefill_tokens": int(tokens["prefill"]), "decode_tokens": int(tokens["decode"]),
        "read_bytes": int(total),
        "read_bytes_per_prefill_token": _ratio(read["prefill"], tokens["prefill"]),
        "read_bytes_per_token": _ratio(read["decode"], tokens["decode"]),
        "stall_s": sum(stall.values()), "stall_s_per_step": _ratio(stall["decode"], steps["decode"]),
        "busy_s": dict(sorted(busy.items())),
        "utilisation": {name: _ratio(seconds, inside) for name, seconds in sorted(busy.items())},
        "read_rate_bytes_s": _ratio(total, busy["disk"] if "disk" in busy else 0),
        "overlap_efficiency": 1 - sum(stall.values()) / busy["disk"] if busy.get("disk") else None,
        "kind_s": dict(sorted(kinds.items())),
        "compute_share": {name: seconds / inside for name, seconds in sorted(compute.items())}
                         | {"unaccounted": 1 - sum(compute.values()) / inside} if inside else {},
    }
    return result | _counted(counters or {})


def process() -> dict[str, int | None]:
    """Peak memory and page faults of this process since it began; None where the system does not tell.

    peak_rss_bytes is VmHWM of /proc/self/status, file-backed pages included (on Linux, ru_maxrss would include the
    parent's memory before exec); major_faults are those that had to wait for a disk.
    """
    peak = faults = None
    try:
        peak = 1024 * int(re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1])
    except (OSError, TypeError):
        pass                                    # no /proc (macOS, Windows), or one that lacks the line
    try:
        import resource
        usage = resource.getrusage(resource.RUSAGE_SELF)
        faults = usage.ru_majflt
        if peak is None and sys.platform == "darwin":
            peak = usage.ru_maxrss
    except ImportError:
        pass                                    # Windows
    return {"peak_rss_bytes": peak, "major_faults": faults}


def _counted(counters: Mapping[str, Any]) -> dict[str, Any]:
    """The counters as plain values, with the hit rates."""
    plain = {name: {str(key): n for key, n in value.items()} if isinstance(value, Mapping) else value
             for name, value in counters.items()}
    if "hits" in plain and "misses" in plain:
        hits = Counter(plain["hits"])
        requests = hits.total() + plain["misses"]
        plain |= {"hit_rate": _ratio(hits["F"], requests), "any_hit_rate": _ratio(hits.total(), requests)}
    return plain


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
