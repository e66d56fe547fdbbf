"""Metrics of a timeline, real or simulated, by the same definitions: from `Event`s and forwards to
TTFT, TPOT, stall …

An event belongs to the last forward that began no later than it did; what came before every forward
belongs to none and counts in the totals only. Left out: time to convert or open a store."""

from __future__ import annotations

import re
import resource
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from moelab.base.specs import Event
from moelab.cache.residency import CacheCounters


class Forward(NamedTuple):
    """One run of the whole model: when, over how many tokens (of all sequences together), prefill
    or decode; of the tokens, how many were drafts, and how many of these were right; seconds that all
    threads of the process computed, and mJ by part of the chip, where that was measured; what a GPU
    ran as one graph, the whole token, a layer or nothing, and seconds a layer for which it had nothing
    to do, as Python had not told it, where that was measured."""

    start: float
    end: float
    tokens: int
    phase: str  # prefill | decode
    drafts: int = 0
    right: int = 0
    cpu: float | None = None
    mj: dict[str, float] | None = None
    path: str = "none"  # token | layer | none
    python: float | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def kept(self) -> int:
        """Tokens without the drafts that were wrong."""
        return self.tokens - self.drafts + self.right


@dataclass(frozen=True, repr=False)
class Metrics:
    """What a run cost; times in seconds, None for what it does not define (no decode, nothing read
    …).

    ttft : median duration of a prefill: the time to the first token, without sampling.
    ttft_split : of a prefill, {"kind on resource": seconds}, medians; resources work at once, so only
        those of one resource add up.
    launches : expert graphs that an accelerator ran (`moelab.ane`).
    cpu_seconds, energy : medians of a prefill: time that the process's threads computed, and mJ by
        part of the chip where a machine tells.
    tpot : median duration of a decode forward, which gives each sequence of the batch one token;
        with drafts, the duration of all over the tokens that they gave.
    throughput : tokens a second decoded by all sequences, over the wall time of decoding, which
        runs from the end of the forward before to the end of this one, so sampling counts.
    prefill_tokens, decode_tokens : tokens that went in; without drafts that were wrong, as in
        all that is said of a token.
    read_bytes, read_bytes_per_token : all reads; those of decoding over its tokens.
    link_bytes : all that went over a link.
    paths : {path of `Forward`: tokens decoded}.
    python_per_layer : seconds of a layer in decoding for which a GPU waited for Python, median.
    stall, stall_per_step : time in which compute waits; that of decoding, over the decode forwards.
    busy : {resource: seconds of anything but waiting}.
    overlap_efficiency : 1 − stall ÷ busy time of the disk, or the link: 1 when all reading hides behind work, 0 when
        none does, below 0 when compute waits for more than the disk (decompression).
    hits, misses, evictions, admissions, away : requests for experts by the state they were found in
        ({"F": …}), and counts of `moelab.cache.residency.CacheCounters`; hit_rate : found whole (F).
    prefetched : counts and bytes of the experts read ahead, and what became of them.
    peak_rss_bytes : of the process, see `process`; None for a simulation.
    """

    ttft: float | None
    tpot: float | None
    throughput: float | None
    prefill_tokens: int
    decode_tokens: int
    read_bytes: int
    read_bytes_per_token: float | None
    stall: float
    stall_per_step: float | None
    busy: dict[str, float]
    overlap_efficiency: float | None
    ttft_split: dict[str, float] | None = None
    link_bytes: int = 0
    paths: dict[str, int] | None = None
    python_per_layer: float | None = None
    launches: int | None = None
    cpu_seconds: float | None = None
    energy: dict[str, float] | None = None
    hits: dict[str, int] | None = None
    misses: int | None = None
    evictions: int | None = None
    admissions: int | None = None
    away: int | None = None
    hit_rate: float | None = None
    prefetched: dict[str, int] | None = None
    peak_rss_bytes: int | None = None

    def __repr__(self) -> str:
        return f"<Metrics: {summary_line(self)}>"


def summary_line(found: Any) -> str:
    """The four figures that are asked for first, as far as there are any, of `Metrics` or what has
    them."""
    parts = [
        found.ttft is not None and f"TTFT {found.ttft:.3f} s",
        found.tpot is not None and f"TPOT {1e3 * found.tpot:.1f} ms",
        found.hit_rate is not None and f"hit rate {found.hit_rate:.0%}",
        found.hit_rate is not None
        and f"{(found.read_bytes_per_token or 0) / 1e6:.2f} MB read a token",
    ]
    return ", ".join(filter(None, parts)) or "no forward pass yet"


def metrics(
    events: Sequence[Event],
    forwards: Sequence[Forward | tuple],
    counters: CacheCounters | None = None,
    prefetched: dict[str, int] | None = None,
    **process: int | None,
) -> Metrics:
    """The `Metrics` of a run.

    events : in any order; an event's bytes count where its kind is a read.
    forwards : (start, end, tokens, phase …) of `Forward`, one after another.
    counters, prefetched, process : of the residency, of prefetching, and `process()`, where there
    are any."""
    forwards = [Forward(*forward) for forward in forwards]
    starts = [forward.start for forward in forwards]
    read, stall, tokens, busy = (defaultdict(float) for _ in range(4))
    split = [defaultdict(float) for _ in forwards]
    launches = 0
    for event in events:
        at = bisect_right(starts, event.start) - 1
        duration = event.end - event.start
        phase = forwards[at].phase if at >= 0 else "before"
        if phase == "prefill":
            split[at][f"{event.kind} on {event.resource}"] += duration
        launches += event.kind == "launch"
        if event.kind == "wait":
            stall[phase] += duration
        else:
            busy[event.resource] += duration
        if event.kind.startswith("read"):
            read[phase] += event.bytes

    ends = [*starts[:1], *(one.end for one in forwards)]
    took = defaultdict(float)
    for one, end_before in zip(forwards, ends):
        tokens[one.phase] += one.kept
        took[one.phase] += one.end - end_before
    decode = [one for one in forwards if one.phase == "decode"]
    waited = sum(stall.values())
    reading = busy.get("disk", 0.0) + busy.get("link", 0.0)
    return Metrics(
        launches=launches or None,
        throughput=_ratio(tokens["decode"], took["decode"]),
        prefill_tokens=int(tokens["prefill"]),
        decode_tokens=int(tokens["decode"]),
        read_bytes=int(sum(read.values())),
        read_bytes_per_token=_ratio(read["decode"], tokens["decode"]),
        link_bytes=sum(event.bytes for event in events if event.resource == "link"),
        stall=waited,
        stall_per_step=_ratio(stall["decode"], len(decode)),
        busy=dict(sorted(busy.items())),
        overlap_efficiency=1 - waited / reading if reading else None,
        prefetched=prefetched,
        **_of_prefills([*zip(forwards, split)]),
        **_of_decoding(decode),
        **_of_cache(counters),
        **process,
    )


def _of_cache(counters: CacheCounters | None) -> dict[str, Any]:
    if counters is None:
        return {}
    hits = {state.value: n for state, n in counters.hits.items()}
    return asdict(counters) | {"hits": hits, "hit_rate": _ratio(hits["F"], counters.requests)}


def _of_prefills(passes: list[tuple[Forward, dict[str, float]]]) -> dict[str, Any]:
    prefills = [(one, split) for one, split in passes if one.phase == "prefill"]
    return {
        "ttft": _median(one.end - one.start for one, _ in prefills),
        "ttft_split": _medians([split for _, split in prefills]),
        "cpu_seconds": _median(one.cpu for one, _ in prefills),
        "energy": _medians([one.mj for one, _ in prefills if one.mj]),
    }


def _medians(rows: list[dict[str, float]]) -> dict[str, float] | None:
    """Of each name, over all rows; 0 where a row lacks it, None without any."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: median(row.get(name, 0.0) for row in rows) for name in names} or None


def _of_decoding(decode: list[Forward]) -> dict[str, Any]:
    took = [one.end - one.start for one in decode]
    tpot = _median(took)
    if any(one.drafts for one in decode):
        tpot = sum(took) / sum(1 + one.right for one in decode)
    paths = Counter()
    for one in decode:
        paths[one.path] += one.kept
    python = _median(one.python for one in decode)
    return {"tpot": tpot, "paths": dict(paths) or None, "python_per_layer": python}


def _median(values: Iterable[float | None]) -> float | None:
    """Of those that there are; None of none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def process() -> dict[str, int | None]:
    """Peak memory of this process since it began; None where the system does not tell. It is VmHWM, file-backed pages included: on Linux, ru_maxrss would include the
    parent's memory before exec."""
    peak = None
    if sys.platform == "darwin":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with suppress(OSError, TypeError):  # no /proc (macOS), or one that lacks the line
        status = Path("/proc/self/status").read_text()
        peak = 1024 * int(re.search(r"^VmHWM:\s*(\d+) kB", status, re.M)[1])
    return {"peak_rss_bytes": peak}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
