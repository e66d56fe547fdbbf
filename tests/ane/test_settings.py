"""Settings of a plan: counted by loops, each knob does what is said of it, and the fastest is the fastest allowed."""

import pytest

from moelab.cards import load_model
from moelab.ane.settings import Setting, fastest, settings
from moelab.ane.device.synthetic_popularity import assumed_loads


@pytest.fixture(scope="module")
def found():
    return settings("Phi-tiny-MoE", levels=(1, 3), slacks=(0.75, 1.0), groups=(1, 8), chunks=(256,), seed=1)


def test_drops_and_padding_are_those_of_loops_over_unseen_chunks(found):
    assert set(found) == {Setting(t, s, G, 256) for t in (1, 3) for s in (0.75, 1.0) for G in (1, 8)}
    loads = assumed_loads(load_model("Phi-tiny-MoE"), 256, 80, seed=1)[64:]
    for setting, of in found.items():
        routed = executed = rows = 0
        for chunk in loads.tolist():
            for layer, came in zip(of.plan.layers, chunk):
                routed += sum(came)
                for group in layer.groups:
                    tokens = [came[e] for e in group.experts]
                    static = group.unit == "ane" and any(tokens)
                    done = sum(min(n, group.capacity) for n in tokens) if static else sum(tokens)
                    executed, rows = executed + done, rows + (group.capacity * len(tokens) if static else done)
        assert (of.dropped, of.padded) == (pytest.approx(1 - executed / routed), pytest.approx(1 - executed / rows))
        assert of.plan.chunk == setting.chunk and all(
            len(group.experts) <= setting.group_size and len(layer.tiers.levels) <= setting.levels
            for layer in of.plan.layers for group in layer.groups)


def test_each_knob_does_what_is_said_of_it(found):
    for other in found:
        t, s, G = other.levels, other.slack, other.group_size
        if t == 3:
            assert found[other].padded < found[Setting(1, s, G)].padded         # more tiers waste fewer rows
        if s == 1.0:                                                            # more slack drops less, computes more
            less = found[Setting(t, 0.75, G)]
            assert found[other].dropped < less.dropped and found[other].plan.slots > less.plan.slots
        if G == 8:                                                              # larger groups share launches
            assert found[other].plan.launches < found[Setting(t, s, 1)].plan.launches


def test_the_fastest_is_the_fastest_allowed(found):
    limit = sorted(of.dropped for of in found.values())[2]
    best = fastest(found, limit)
    assert found[best[256]].ttft_s == min(of.ttft_s for of in found.values() if of.dropped <= limit)
    assert found[best[256]].ttft_s > min(of.ttft_s for of in found.values()) and fastest(found, -1.0) == {}


@pytest.mark.parametrize("setting, text", [(Setting(), "3 tiers, slack 1, G = 8"),
                                           (Setting(1, 0.75, 2, 512), "1 tier, slack 0.75, G = 2")])
def test_a_setting_says_what_it_is(setting, text):
    assert str(setting) == text
