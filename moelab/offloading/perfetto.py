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
    begin = min(
        [event.start for event in events[:1]] + [forward.start for forward in forwards[:1]],
        default=0.0,
    )
    tracks = list(dict.fromkeys([*TRACKS, *sorted({event.resource for event in events})]))

    def complete(
        track: str, name: str, cat: str, start: float, end: float, **about: Any
    ) -> dict[str, Any]:
        return {
            "ph": "X",
            "pid": 1,
            "tid": tracks.index(track),
            "name": name,
            "cat": cat,
            "ts": 1e6 * (start - begin),
            "dur": 1e6 * (end - start),
            "args": about,
        }

    told = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": f"moelab, {kind}"}}
    ]
    for number, track in enumerate(tracks):
        told += [
            {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": track}},
            {
                "ph": "M",
                "pid": 1,
                "tid": number,
                "name": "thread_sort_index",
                "args": {"sort_index": number},
            },
        ]
    told += [
        complete(
            "forward passes", f"{of.phase} {number}", of.phase, of.start, of.end, tokens=of.tokens
        )
        for number, of in enumerate(forwards)
    ]
    for event in events:
        where = (
            f" {event.layer}" + f".{event.expert}" * (event.expert >= 0) if event.layer >= 0 else ""
        )
        told.append(
            complete(
                event.resource,
                event.kind + where,
                event.kind,
                event.start,
                event.end,
                layer=event.layer,
                expert=event.expert,
                bytes=event.bytes,
            )
        )
    read = 0
    for event in sorted((event for event in events if event.bytes), key=lambda event: event.end):
        read += event.bytes
        told.append(
            {
                "ph": "C",
                "pid": 1,
                "tid": 0,
                "name": "bytes read",
                "ts": 1e6 * (event.end - begin),
                "args": {"bytes": read},
            }
        )
    return {
        "traceEvents": told,
        "displayTimeUnit": "ms",
        "otherData": {"kind": kind, "written by": "moelab"},
    }


def save(path: str | Path, events: Iterable[Event], forwards: Sequence[Forward], kind: str) -> Path:
    """Write a timeline atomically as JSON; returns the path. ValueError: nothing has happened
    yet."""
    found = trace_events(events, forwards, kind)
    if not any(event["ph"] == "X" for event in found["traceEvents"]):
        raise ValueError(
            "this run has no events: run the model first (lm.generate), or do not reset it before"
        )
    return write_json(path, found)
