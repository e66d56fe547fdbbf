"""Files for Perfetto: the Trace Event Format as its documentation has it, and every event of the
run, once."""

import json

import pytest

from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.offloading import perfetto
from moelab.offloading.metrics import Forward
from moelab.simulation.costs import Delays, Machine
from moelab.simulation.simulator import simulate
from moelab.specs import Event

STEPS = [
    [(layer, {(3 * n + layer + e) % 8: 1 for e in range(2)}) for layer in range(3)]
    for n in range(5)
]
DELAYS = Delays(3e-4, 5e-4, 4e-4, 1e-4, 2e-4, 1e-5, e_bytes=300, sm_bytes=500)


def opened(path):
    """The document as a reader of the format takes it: what each kind of event must have, or it is
    left out."""
    document = json.loads(path.read_text())
    for event in document["traceEvents"]:
        assert {"ph", "pid", "tid", "name", "args"} <= event.keys() and event["ph"] in "XMC"
        if event["ph"] != "M":
            assert event["ts"] >= 0 and isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["dur"] >= 0
    return document


@pytest.fixture
def simulation():
    return simulate(
        STEPS,
        [(1, "decode")] * 5,
        Residency(3, 8, Pools(F=4)),
        Machine(DELAYS, other=(1e-4, 0.0)),
    )


def test_every_event_is_there_once_on_the_track_of_its_resource(simulation, tmp_path):
    document = opened(simulation.to_perfetto(tmp_path / "trace.json"))
    tracks = {
        event["tid"]: event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    found = sorted(
        (
            tracks[e["tid"]],
            e["cat"],
            e["args"]["layer"],
            e["args"]["expert"],
            e["args"]["bytes"],
            round(e["ts"] / 1e6, 9),
            round((e["ts"] + e["dur"]) / 1e6, 9),
        )
        for e in document["traceEvents"]
        if e["ph"] == "X" and "layer" in e["args"]
    )
    assert found == sorted(
        (e.resource, e.kind, e.layer, e.expert, e.bytes, round(e.start, 9), round(e.end, 9))
        for e in simulation.events
    )
    passes = [
        e
        for e in document["traceEvents"]
        if e["ph"] == "X" and tracks[e["tid"]] == "forward passes"
    ]
    assert [e["name"] for e in passes] == [f"decode {n}" for n in range(5)]
    assert document["otherData"]["kind"] == "simulated"


def test_a_run_without_events_says_so(tmp_path):
    with pytest.raises(ValueError, match="no events"):
        perfetto.save(tmp_path / "trace.json", [], [], "measured")
    assert not (tmp_path / "trace.json").exists()


def test_what_began_before_the_first_pass_is_not_before_time_0(tmp_path):
    events = [Event("disk", "read", 0, 1, 5.0, 6.0, 7), Event("compute", "other", -1, -1, 6.0, 7.0)]
    document = opened(
        perfetto.save(tmp_path / "t.json", events, [Forward(6.0, 7.0, 1, "decode")], "measured")
    )
    assert min(event["ts"] for event in document["traceEvents"] if "ts" in event) == 0
