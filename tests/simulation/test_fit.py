"""What a run says of the machine, beside timelines that are written by hand."""

from statistics import fmean, median

import pytest
import torch

from moelab import open_model, simulate
from moelab.base.specs import Event, MoESpec
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.offloading.metrics import Forward
from moelab.offloading.run import EngineRun, EngineSettings
from moelab.simulation.fit import fitted

SPEC = MoESpec("m", "m", 2, (0, 1), 8, 3, 8, 8)
#: a read before all forwards: what is not of a forward counts as a read all the same
READ = ("disk", "read", 7, -200, -190)


def run_of(*passes, parts=(8, 0)):
    """A run of (tokens, {expert: tokens}, events as (resource, kind, expert, start, end)) after one
    another, 100 s each; reads are of 8 bytes, the experts of so many in their two parts."""
    every = (((parts,) * 8),) * 2
    settings = EngineSettings(SPEC, Pools(), "lru", "model", 2, 1, 0, every, 0)
    made = EngineRun(settings, Residency(1, 8, Pools()))
    for i, (tokens, experts, events) in enumerate(passes):
        made.begin_forward()
        made.layer(0, experts)
        for resource, kind, expert, start, end in events:
            layer = -1 if kind == "head" else 0
            nbytes = {"read": sum(parts), "read E": parts[0], "read SM": parts[1]}.get(kind, 0)
            kind = kind.replace("head", "other")
            at = start + 100 * i, end + 100 * i
            made.timeline.add(Event(resource, kind, layer, expert, *at, nbytes))
        phase = "decode" if tokens < 5 else "prefill"
        made.end_forward(Forward(100.0 * i, 100.0 * i + 90, tokens, phase))
    return made


def test_what_is_not_of_an_expert_is_fitted():
    """(base, per token) before a layer's experts, from forwards of 1 and 5 tokens; after the last,
    from one only."""
    passes = [
        (tokens, {}, [READ, ("compute", "other", -1, 0, other), ("compute", "head", -1, 5, 7)])
        for tokens, other in ((5, 3.0), (1, 1.0), (1, 1.0))
    ]
    found = fitted(run_of(*passes))
    assert found.other == pytest.approx((0.5, 0.5)) and found.head == pytest.approx((2.0, 0.0))
    assert (found.workers, found.predict, found.decide, found.handover) == (2, 0.0, (0.0, 0.0), 0.0)


LOADING = [  # two experts in one call, a third is loaded; it is decided for 3 s
    ("compute", "other", -1, 0, 1),
    ("compute", "expert", -1, 4, 8),
    ("disk", "read", 2, 3, 8),
    ("worker 0", "decode", 2, 9, 11),
    ("compute", "wait", 2, 8, 14),
    ("compute", "expert", 2, 15, 19),
    ("compute", "head", -1, 19, 20),
]
THERE = [  # three experts in one call; it is decided for 1 s
    ("compute", "other", -1, 0, 1),
    ("compute", "expert", -1, 2, 8),
    ("compute", "head", -1, 8, 9),
]


def test_deciding_waking_reading_decoding_and_computing_by_hand():
    """Computing the third begins with the end of the wait, whatever the engine does until then."""
    found = fitted(run_of((1, {0: 1, 1: 1, 2: 1}, LOADING), (1, {0: 1, 1: 1, 3: 1}, THERE)))
    assert found.decide == pytest.approx((1.0, 2.0)) and found.handover == 14 - 11
    delays = found.delays
    assert (delays.e_read, delays.sm_read, delays.decompress, delays.recover) == (5, 0, 2, 0)
    assert (delays.e_bytes, delays.sm_bytes, delays.N) == (8, 0, 1)
    assert [delays.one_token(n) for n in (1, 2, 3)] == [5.0, 4.0, 6.0]


def test_parts_that_are_read_and_decoded_apart_are_known_apart():
    events = [
        ("disk", "read E", 1, 0, 2),
        ("disk", "read SM", 1, 2, 3),
        ("worker 0", "decompress", 1, 2, 5),
        ("worker 0", "recover", 1, 5, 6),
    ]
    found = fitted(run_of((1, {1: 1}, events), parts=(2, 6))).delays
    assert (found.e_read, found.sm_read, found.decompress, found.recover) == (2, 1, 3, 1)


def test_layers_differ_and_those_that_predict_take_longer():
    """The first layer takes 4 s, the second 2, a prediction 1 more, the last 2; what took 90 counts
    as three medians."""
    made = run_of(*[(1, {}, [READ])] * 4)
    for i, (pass_, asked) in enumerate(
        (([5, 3], (1, 2)), ([4, 2], ()), ([5, 3], (1, 2)), ([4, 90], ()))
    ):
        made.predictions[i] = [(layer, [0]) for layer in asked]
        for layer, (start, seconds) in enumerate(zip((0, 10, 200), (*pass_, 2))):
            at = 1000 * i + start
            made.timeline.add(Event("compute", "other", layer, -1, at, at + seconds))
    made.forwards = [Forward(1000.0 * i, 1000.0 * i + 999, 1, "decode") for i in range(4)]
    found = fitted(made)
    plain = [2.0] * 4 + [2.0, 6.0]  # of both later layers; asked: 3, 3
    assert found.predict == pytest.approx(predict := 3 - sum(plain) / 6)
    every = [5 - predict, 4, 5 - predict, 4] + [3 - predict] * 2 + [2] * 5 + [90]
    every[-1] = 3 * median(every)
    assert found.other[0] == pytest.approx(fmean(every))


def test_what_runs_outside_forwards_is_left_out():
    """A part that was called by itself has no step; a pass that was interrupted has no end."""
    outside = [("compute", "other", -1, 91, 92), ("compute", "expert", 5, 92, 95)]
    inside = [READ, ("compute", "other", -1, 0, 2), ("compute", "expert", 1, 3, 4)]
    assert fitted(run_of((1, {1: 1}, inside + outside))) == fitted(run_of((1, {1: 1}, inside)))


def test_nothing_is_known_of_a_disk_that_was_not_read():
    with pytest.raises(ValueError, match="this run has read no experts"):
        fitted(run_of((1, {1: 1}, THERE)))


def test_a_run_that_needed_no_disk_is_replayed_without_one(qwen):
    with open_model(qwen[1], memory="auto") as lm:
        lm.generate(torch.arange(3, 9)[None], max_new_tokens=3, do_sample=False)
        run = lm.moelab.run
    simulated = simulate(run)
    assert 0 < simulated.tpot < 10 and simulated.hit_rate == 1
    with pytest.raises(ValueError, match="this run has read no experts"):
        simulate(run, pools=Pools(F=2))
