"""A timeline as a file that Perfetto opens (https://ui.perfetto.dev), or chrome://tracing: a track
a resource.

Source: the Trace Event Format of Chromium. Complete events ("X") with start and duration in
microseconds, and names of tracks as metadata ("M"). A track must not have two events that overlap
without one holding the other, which holds as a resource does one thing at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from moelab.base.files import write_json
from moelab.base.specs import Event
from moelab.offloading.metrics import Forward

#: tracks from top to bottom; those of further resources follow
TRACKS = ("forward passes", "compute", "disk")


def save(path: str | Path, events: Iterable[Event], forwards: Sequence[Forward], kind: str) -> Path:
    """Write a timeline, whose times are `kind`, "measured" or "simulated", atomically as JSON; time 0
    is its first moment. Returns the path. ValueError: nothing has happened yet."""
    if not forwards and not (events := list(events)):
        raise ValueError(
            "this run has no events: run the model first (lm.generate), or do not reset it before"
        )
    rows = [
        (TRACKS[0], one.start, one.end, one.phase, f"{one.phase} {n}", {"tokens": one.tokens})
        for n, one in enumerate(forwards)
    ]
    for one in sorted(events, key=lambda event: (event.start, -event.end)):
        name = f"{one.kind} {'.'.join(str(n) for n in one[2:4] if n >= 0)}"
        about = {"layer": one.layer, "expert": one.expert, "bytes": one.bytes}
        rows.append((one.resource, one.start, one.end, one.kind, name, about))
    tracks = list(dict.fromkeys([*TRACKS, *sorted({row[0] for row in rows})]))
    zero = min(start for _, start, *_ in rows)
    names = [("process_name", f"moelab, {kind}"), *(("thread_name", name) for name in tracks)]
    found = [
        {"ph": "M", "pid": 1, "tid": max(i, 0), "name": what, "args": {"name": name}}
        for i, (what, name) in enumerate(names, -1)
    ]
    for track, start, end, category, name, about in rows:
        when = {"ts": 1e6 * (start - zero), "dur": 1e6 * (end - start)}
        what = {"name": name, "cat": category, "args": about}
        found.append({"ph": "X", "pid": 1, "tid": tracks.index(track), **what, **when})
    return write_json(path, {"traceEvents": found, "otherData": {"kind": kind}})
