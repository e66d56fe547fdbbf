"""Files for Perfetto: the Trace Event Format as its documentation has it, and every event of the
run, once."""

import json

import pytest

from moelab.base.specs import Event
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.offloading import perfetto
from moelab.offloading.metrics import Forward
from moelab.simulation.costs import Delays, Machine
from moelab.simulation.simulator import simulate

STEPS = [
    [(layer, {(3 * n + layer + e) % 8: 1 for e in range(2)}) for layer in range(3)]
    for n in range(5)
]
DELAYS = Delays(3e-4, 5e-4, 4e-4, 1e-4, 2e-4, 1e-5, e_bytes=300, sm_bytes=500)


def opened(path):
    """The complete events of a file, each of which must have what the format asks for, and the
    names of tracks."""
    rows, tracks = json.loads(path.read_text())["traceEvents"], {}
    for row in rows:
        assert {"ph", "pid", "tid", "name", "args"} <= row.keys() and row["ph"] in "XM"
        if row["name"] == "thread_name":
            tracks[row["tid"]] = row["args"]["name"]
    complete = [row for row in rows if row["ph"] == "X"]
    assert all(row["ts"] >= 0 and row["dur"] >= 0 for row in complete)
    return complete, tracks


def test_every_event_is_there_once_on_the_track_of_its_resource(tmp_path):
    residency, machine = Residency(3, 8, Pools(F=4)), Machine(DELAYS, other=(1e-4, 0.0))
    simulation = simulate(STEPS, [(1, "decode")] * 5, residency, machine)
    rows, tracks = opened(simulation.to_perfetto(tmp_path / "trace.json"))
    found = [
        (tracks[row["tid"]], row["cat"], *row["args"].values(), row["ts"], row["ts"] + row["dur"])
        for row in rows
        if "layer" in row["args"]
    ]
    wanted = [
        (e.resource, e.kind, e.layer, e.expert, e.bytes, 1e6 * e.start, 1e6 * e.end)
        for e in simulation.events
    ]
    for row, event in zip(sorted(found), sorted(wanted), strict=True):
        assert row[:5] == event[:5] and row[5:] == pytest.approx(event[5:], abs=1e-3)
    passes = [row["name"] for row in rows if tracks[row["tid"]] == "forward passes"]
    assert passes == [f"decode {n}" for n in range(5)]


def test_a_run_without_events_says_so(tmp_path):
    with pytest.raises(ValueError, match="no events"):
        perfetto.save(tmp_path / "trace.json", [], [], "measured")
    assert not (tmp_path / "trace.json").exists()


def test_what_began_before_the_first_pass_is_not_before_time_0(tmp_path):
    events = [Event("disk", "read", 0, 1, 5.0, 6.0, 7), Event("compute", "other", -1, -1, 6.0, 7.0)]
    passes = [Forward(6.0, 7.0, 1, "decode")]
    rows, _ = opened(perfetto.save(tmp_path / "t.json", events, passes, "measured"))
    assert min(row["ts"] for row in rows) == 0
