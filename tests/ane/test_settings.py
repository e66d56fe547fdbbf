"""Settings of a plan: each is what planning and counting it by hand gives, and the fastest is the fastest allowed."""

import pytest

from moelab.ane.accounting import count
from moelab.ane.device_model import DeviceModel
from moelab.ane.plan import make_plan
from moelab.ane.settings import Setting, fastest, settings
from moelab.ane.skew import assumed_counts, assumed_loads
from moelab.specs import MoESpec


def test_settings_are_planned_and_costed_one_by_one():
    found = settings("Phi-tiny-MoE", levels=(1, 3), slacks=(0.75, 1.0), groups=(8,), chunks=(256,), seed=1)
    assert set(found) == {Setting(t, s, 8, 256) for t in (1, 3) for s in (0.75, 1.0)}
    spec, one = MoESpec.from_card("Phi-tiny-MoE"), found[Setting(3, 0.75)]
    unseen = assumed_loads(spec, 256, 80, seed=1)[64:]
    plan = make_plan(spec, *assumed_counts(spec, 256, seed=1), 256, 8, 3, slack=0.75, popularity="assumed")
    cost = DeviceModel.of().prefill(plan, 1024, unseen)
    assert one.plan == plan and one.point == (
        count(plan, unseen).drop_rate, count(plan, unseen).padded_fraction, cost.ttft_s, cost.mj_per_token)
    assert one.dropped > found[Setting(3, 1.0)].dropped
    limit = sorted(of.dropped for of in found.values())[1]
    best = fastest(found, limit)
    assert found[best[256]].ttft_s == min(of.ttft_s for of in found.values() if of.dropped <= limit)
    assert fastest(found, -1.0) == {}


@pytest.mark.parametrize("setting, text", [(Setting(), "3 tiers, slack 1, G = 8"),
                                           (Setting(1, 0.75, 2, 512), "1 tier, slack 0.75, G = 2")])
def test_a_setting_says_what_it_is(setting, text):
    assert str(setting) == text
