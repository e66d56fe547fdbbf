"""A timeline as a file that Perfetto opens (https://ui.perfetto.dev), or chrome://tracing: a track
a resource.

Source: the Trace Event Format of Chromium. Complete events ("X") with start and duration in
microseconds, names of tracks as metadata ("M"), and bytes read so far as a counter ("C"). A track
must not have two events that overlap without one holding the other, which holds as a resource does
one thing at a time."""

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
    begin = min([one.start for one in (*events[:1], *forwards[:1])], default=0.0)
    tracks = list(dict.fromkeys([*TRACKS, *sorted({event.resource for event in events})]))
    rows = [_row("M", 0, "process_name", {"name": f"moelab, {kind}"})]
    for track, name in enumerate(tracks):
        rows.append(_row("M", track, "thread_name", {"name": name}))
        rows.append(_row("M", track, "thread_sort_index", {"sort_index": track}))
    for n, one in enumerate(forwards):
        about = {"tokens": one.tokens}
        rows.append(
            _complete(0, f"{one.phase} {n}", one.phase, one.start - begin, one.end - begin, about)
        )
    for event in events:
        about = {"layer": event.layer, "expert": event.expert, "bytes": event.bytes}
        name, track = event.kind + _where(event), tracks.index(event.resource)
        rows.append(
            _complete(track, name, event.kind, event.start - begin, event.end - begin, about)
        )
    read = 0
    for event in sorted((event for event in events if event.bytes), key=lambda event: event.end):
        read += event.bytes
        rows.append(_row("C", 0, "bytes read", {"bytes": read}, ts=1e6 * (event.end - begin)))
    return {
        "traceEvents": rows,
        "displayTimeUnit": "ms",
        "otherData": {"kind": kind, "written by": "moelab"},
    }


def _row(ph: str, track: int, name: str, args: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"ph": ph, "pid": 1, "tid": track, "name": name, "args": args, **more}


def _complete(
    track: int, name: str, category: str, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    """Something on a track from `start` to `end` in seconds."""
    return _row("X", track, name, args, cat=category, ts=1e6 * start, dur=1e6 * (end - start))


def _where(event: Event) -> str:
    if event.layer < 0:
        return ""
    return f" {event.layer}" + (f".{event.expert}" if event.expert >= 0 else "")


def save(path: str | Path, events: Iterable[Event], forwards: Sequence[Forward], kind: str) -> Path:
    """Write a timeline atomically as JSON; returns the path. ValueError: nothing has happened
    yet."""
    found = trace_events(events, forwards, kind)
    if not any(event["ph"] == "X" for event in found["traceEvents"]):
        raise ValueError(
            "this run has no events: run the model first (lm.generate), or do not reset it before"
        )
    return write_json(path, found)
