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
    begin = min([one.start for one in (*events[:1], *forwards[:1])], default=0.0)
    tracks = list(dict.fromkeys([*TRACKS, *sorted({event.resource for event in events})]))

    def complete(
        track: str, name: str, kind: str, start: float, end: float, about: dict[str, int]
    ) -> dict[str, Any]:
        times = {"ts": 1e6 * (start - begin), "dur": 1e6 * (end - start)}
        return _row("X", tracks.index(track), name, about, cat=kind, **times)

    rows = [_row("M", i, "thread_name", {"name": name}) for i, name in enumerate(tracks)]
    for n, one in enumerate(forwards):
        name, about = f"{one.phase} {n}", {"tokens": one.tokens}
        rows.append(complete(TRACKS[0], name, one.phase, one.start, one.end, about))
    for event in events:
        where = ".".join(str(n) for n in (event.layer, event.expert) if n >= 0)
        about = {"layer": event.layer, "expert": event.expert, "bytes": event.bytes}
        name = f"{event.kind} {where}".strip()
        rows.append(complete(event.resource, name, event.kind, event.start, event.end, about))
    return {
        "traceEvents": [_row("M", 0, "process_name", {"name": f"moelab, {kind}"}), *rows],
        "displayTimeUnit": "ms",
        "otherData": {"kind": kind, "written by": "moelab"},
    }


def _row(ph: str, track: int, name: str, args: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"ph": ph, "pid": 1, "tid": track, "name": name, "args": args, **more}


def save(path: str | Path, events: Iterable[Event], forwards: Sequence[Forward], kind: str) -> Path:
    """Write a timeline atomically as JSON; returns the path. ValueError: nothing has happened
    yet."""
    found = trace_events(events, forwards, kind)
    if not any(event["ph"] == "X" for event in found["traceEvents"]):
        raise ValueError(
            "this run has no events: run the model first (lm.generate), or do not reset it before"
        )
    return write_json(path, found)
