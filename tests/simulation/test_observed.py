"""What a run says of the engine, beside timelines that are written by hand."""

import pytest

from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.offloading.metrics import Forward
from moelab.offloading.requests import Delays
from moelab.offloading.run import EngineRun, EngineSettings
from moelab.simulation.observed import Observed, observed
from moelab.specs import Event, MoESpec

SPEC = MoESpec("m", "m", 1, (0,), 8, 3, 8, 8)
DELAYS = Delays(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, computed=((1, 9.0), (2, 9.0)), one_thread=7.0)


def run_of(*passes):
    """A run of (tokens, {expert: tokens}, events as (resource, kind, expert, start, end)) after one
    another."""
    made = EngineRun(
        EngineSettings(SPEC, Pools(), "lru", "model", None, 1, 1, 0, DELAYS, 0),
        Residency(1, 8, Pools()),
    )
    for i, (tokens, experts, events) in enumerate(passes):
        made.begin_forward()
        made.layer(0, experts)
        for resource, kind, expert, start, end in events:
            layer = -1 if kind == "head" else 0
            made.timeline.add(
                Event(
                    resource,
                    kind.replace("head", "other"),
                    layer,
                    expert,
                    100 * i + start,
                    100 * i + end,
                )
            )
        made.end_forward(
            Forward(100.0 * i, 100.0 * i + 90, tokens, "decode" if tokens < 5 else "prefill")
        )
    return made


def test_what_is_measured_besides_experts_is_fitted():
    """(base, per token) before a layer's experts, from forwards of 1 and 5 tokens; after the last,
    from one only."""
    found = observed(
        run_of(
            *(
                (tokens, {}, [("compute", "other", -1, 0, other), ("compute", "head", -1, 5, 7)])
                for tokens, other in ((5, 3.0), (1, 1.0), (1, 1.0))
            )
        )
    )
    assert found == Observed(
        pytest.approx((0.5, 0.5)), pytest.approx((2.0, 0.0)), 0.0, 0.0, (), 0.0, None, ()
    )
    assert found.delays(DELAYS) == DELAYS


def test_deciding_waking_and_computing_by_hand():
    """Experts 0, 1 are in memory and are computed in 4 s; 2 is read until 8, decoded from 9 to 11,
    waited for until 14, and computed a second later; nothing is decided for 3 s with a load, and 1
    s without."""
    loading = [
        ("compute", "other", -1, 0, 1),
        ("compute", "expert", -1, 4, 8),
        ("disk", "read", 2, 3, 8),
        ("worker 0", "decode", 2, 9, 11),
        ("compute", "wait", 2, 8, 14),
        ("compute", "expert", 2, 15, 19),
        ("compute", "head", -1, 19, 20),
    ]
    there = [
        ("compute", "other", -1, 0, 1),
        ("compute", "expert", -1, 2, 8),
        ("compute", "head", -1, 8, 9),
    ]
    found = observed(run_of((1, {0: 1, 1: 1, 2: 1}, loading), (1, {0: 1, 1: 1, 3: 1}, there)))
    assert found.decide == ((0, 1.0), (1, 3.0)) and found.handover == (9 - 8) + (14 - 11)
    assert found.expert == (5.0, 0.0) and found.together == ((2, 4.0), (3, 6.0))
    delays = found.delays(DELAYS)
    assert delays.expert(1) == delays.expert(2) == 5.0 and delays.one_thread is None
    assert [delays.deciding(loads) for loads in (0, 1, 9)] == [1.0, 3.0, 3.0]
    assert [delays.one_token(n) for n in (1, 2, 3)] == [5.0, 4.0, 6.0]


def test_layers_differ_and_those_that_predict_take_longer():
    """The first layer takes 4 s, the second 2, a prediction 1 more, the last 2; what took 90 counts
    as three medians."""

    def of(first, second):
        return [("other", 0, 0, first), ("other", 1, 10, 10 + second), ("other", 2, 200, 202)]

    made = run_of(*[(1, {}, [])] * 4)
    for i, (pass_, asked) in enumerate(
        (([5, 3], (1, 2)), ([4, 2], ()), ([5, 3], (1, 2)), ([4, 90], ()))
    ):
        made.predictions[i] = [(layer, [0]) for layer in asked]
        for kind, layer, start, end in of(*pass_):
            made.timeline.add(Event("compute", kind, layer, -1, 1000 * i + start, 1000 * i + end))
    made.forwards = [Forward(1000.0 * i, 1000.0 * i + 999, 1, "decode") for i in range(4)]
    plain = [2.0] * 4 + [2.0, 6.0]  # of both later layers; asked: 3, 3
    found = observed(made)
    assert found.predict == pytest.approx(predict := 3 - sum(plain) / 6)
    layers = [(5 - predict + 4) / 2, (5 * (3 - predict) + 2) / 4, 2.0]
    assert found.other[0] == pytest.approx(sum(layers) / 3)
    assert found.first == pytest.approx(layers[0] - sum(layers[1:]) / 2)


def test_what_a_prefetched_expert_was_there_before_it_was_waited_for_is_no_handover():
    """It is read at 2 and checked from 8 to 9; compute is busy until 7 and waits for it until
    10."""
    events = [
        ("disk", "read", 1, 1, 2),
        ("compute", "other", -1, 0, 7),
        ("compute", "wait", 1, 7, 10),
        ("worker 0", "check", 1, 8, 9),
        ("compute", "expert", 1, 10, 12),
    ]
    assert observed(run_of((1, {1: 1}, events))).handover == (8 - 7) + (10 - 9)


def test_what_experts_take_besides_is_without_those_they_run_beside():
    """An expert took 9 s, 1.2 times as long for the reads beside it, and 1.25 times for the
    decoding, which takes half as long as the reads and while it runs costs 1.5. Of the 6 s that are
    left, 4 are the product itself."""
    own = Delays(
        1, 1, 0.5, 0.5, 4, 0, beside={"expert beside read": 1.2, "expert beside decode": 1.5}
    )
    found = observed(run_of((1, {0: 1}, [("compute", "expert", 0, 1, 10)]))).around(own)
    assert found.expert(1) == pytest.approx(4 + 2)
    assert (
        observed(run_of((1, {0: 1}, [("compute", "expert", 0, 1, 4)]))).around(own).expert(1) == 4
    )


def test_what_runs_outside_forwards_is_left_out():
    """A part that was called by itself has no step; a pass that was interrupted has no end."""
    outside = [
        ("compute", "other", -1, 91, 92),
        ("compute", "expert", 5, 92, 95),
        ("disk", "read", 5, 91, 93),
    ]
    inside = [("compute", "other", -1, 0, 2), ("compute", "expert", 1, 3, 4)]
    assert observed(run_of((1, {1: 1}, inside + outside))) == observed(run_of((1, {1: 1}, inside)))


def test_a_load_that_queues_for_a_worker_tells_nothing_of_waking():
    """The only worker decodes another expert when this one is read, so what follows is no
    handover."""
    events = [
        ("compute", "other", -1, 0, 1),
        ("disk", "read", 1, 1, 3),
        ("disk", "read", 2, 3, 5),
        ("worker 0", "decode", 1, 4, 9),
        ("worker 0", "decode", 2, 9, 12),
        ("compute", "wait", 1, 2, 10),
        ("compute", "expert", 1, 10, 11),
        ("compute", "wait", 2, 11, 15),
        ("compute", "expert", 2, 15, 16),
    ]
    assert observed(run_of((1, {1: 1, 2: 1}, events))).handover == (4 - 3) + (10 - 9)
