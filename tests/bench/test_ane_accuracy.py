"""The bench of accuracy under drops: its plan, its counts, and that all modes answer the same
prompts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moelab import open_model
from moelab.ane.device.published import TABLE_3
from moelab.bench import ane_accuracy
from moelab.evaluation import questions
from moelab.recording import record


@pytest.fixture(scope="module")
def trace():
    model = open_model()
    return record(
        model,
        [p for s in ("needle", "code") for p in questions.prompts(s, 2, tokens=96, split="train")],
    )


def test_the_slack_is_that_which_drops_what_was_wanted(trace):
    plan, slack, rate = ane_accuracy.fitting_plan(trace, 64, 0.12)
    dropped = routed = 0
    for s in range(4):  # token by token, each prompt with chunks of its own
        ids = trace.ids[trace.sequence == s].numpy()
        for chunk in np.split(ids, range(64, len(ids), 64)):
            for l, layer in enumerate(plan.layers):
                routed += chunk[:, l].size
                dropped += sum(
                    max(0, int((chunk[:, l] == e).sum()) - group.capacity)
                    for group in layer.on("ane")
                    for e in group.experts
                )
    assert rate == pytest.approx(dropped / routed) and plan.chunk == 64
    rates = [
        ane_accuracy.fitting_plan(trace, 64, 0.0, factor)[2]
        for factor in (slack - 0.1, slack + 0.1)
    ]
    assert all(abs(rate - 0.12) <= abs(other - 0.12) for other in rates)
    assert ane_accuracy.fitting_plan(trace, 64, 0.12, 1.3)[1] == 1.3


def test_every_mode_answers_the_same_prompts():
    results = ane_accuracy.run(
        tasks=["needle"], prompts=3, tokens=96, chunk=64, calibration=2, drop=0.15
    )
    rows = results["accuracy (measured), drops and padding (exact)"]
    assert set(rows) == {f"needle: {mode}" for mode in ("dense", *ane_accuracy.MODES)}
    dense = rows.pop("needle: dense")
    assert dense["n"] == 3 and "dropped" not in dense
    first = rows["needle: weakest attention (NPUMoE)"]
    for row in rows.values():
        assert 0 < row["dropped"] < 1 and 0 < row["padded"] < 1
        assert row["difference"] == pytest.approx(row["score"] - dense["score"])
        assert row["dropped"] == pytest.approx(
            first["dropped"], abs=0.05
        )  # later layers route what is left
    assert set(results["NPUMoE Table 3 (paper), PhiMoE"]) == set(TABLE_3)
    json.dumps(results, allow_nan=False)


def test_answers_and_losses_of_a_plan():
    model = open_model()
    with_drops = ane_accuracy.recorded(model, 1, 96, "train")
    plan, *_ = ane_accuracy.fitting_plan(with_drops, 64, 0.2)
    answers = ane_accuracy.pruned_answers(
        model, plan, ("needle", "yesno"), n=2, windows=2, tokens=96
    )
    for task in ("needle", "yesno"):
        difference = answers.pruned[task]["score"] - answers.dense[task]["score"]
        assert answers.pruned[task]["difference"] == pytest.approx(difference)
        assert 0 < answers.counts[task].drop_rate < 1
    found = ane_accuracy.loss_by_order(model, with_drops, (0.4, 1.5), 256, 8, windows=2, tokens=96)
    assert set(found.cost) == set(ane_accuracy.MODES)
    for of in found.cost.values():
        assert of[0.4][0] > of[1.5][0]  # less room, more dropped
    ranked = [loss for _, loss, _ in found.at(0.4).values()]
    assert ranked == sorted(ranked) and set(found.at(0.4)) == set(ane_accuracy.MODES.values())
    mean, low, high = found.beside_random[0.4]
    assert low <= mean <= high
