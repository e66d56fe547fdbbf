"""A timeline as a file that Perfetto opens (https://ui.perfetto.dev), or chrome://tracing: a track
a resource.

Source: the Trace Event Format of Chromium. Complete events ("X") with start and duration in
microseconds, and names of tracks as metadata ("M"). A track must not have two events that overlap
without one holding the other, which holds as a resource does one thing at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moelab.files import write_json
from moelab.offloading.metrics import Forward
from moelab.specs import Event

#: tracks from top to bottom; those of further resources follow
TRACKS = ("forward passes", "compute", "disk")


def trace_events(events: Iterable[Event], forwards: Sequence[Forward], kind: str) -> dict[str, Any]:
    """The document of a timeline whose times are `kind`: "measured" or "simulated"; time 0 is its
    first moment."""
    events = sorted(events, key=lambda event: (event.start, -event.end))
    tracks = list(dict.fromkeys([*TRACKS, *sorted({event.resource for event in events})]))
    about_all = [(0, "process_name", f"moelab, {kind}")]
    about_all += [(i, "thread_name", name) for i, name in enumerate(tracks)]
    rows = []
    for n, one in enumerate(forwards):
        about = {"tokens": one.tokens}
        rows.append((TRACKS[0], f"{one.phase} {n}", one.phase, one.start, one.end, about))
    for one in events:
        where = ".".join(str(n) for n in (one.layer, one.expert) if n >= 0)
        about = {"layer": one.layer, "expert": one.expert, "bytes": one.bytes}
        name = f"{one.kind} {where}".strip()
        rows.append((one.resource, name, one.kind, one.start, one.end, about))
    zero = min((start for *_, start, _, _ in rows), default=0.0)
    return {
        "traceEvents": [
            {"ph": "M", "pid": 1, "tid": track, "name": what, "args": {"name": name}}
            for track, what, name in about_all
        ]
        + [
            {
                "ph": "X",
                "pid": 1,
                "tid": tracks.index(track),
                "name": name,
                "cat": category,
                "ts": 1e6 * (start - zero),
                "dur": 1e6 * (end - start),
                "args": about,
            }
            for track, name, category, start, end, about in rows
        ],
        "displayTimeUnit": "ms",
        "otherData": {"kind": kind, "written by": "moelab"},
    }


def save(path: str | Path, events: Iterable[Event], forwards: Sequence[Forward], kind: str) -> Path:
    """Write a timeline atomically as JSON; returns the path. ValueError: nothing has happened
    yet."""
    if not forwards and not (events := list(events)):
        raise ValueError(
            "this run has no events: run the model first (lm.generate), or do not reset it before"
        )
    return write_json(path, trace_events(events, forwards, kind))
