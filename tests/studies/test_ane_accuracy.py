"""The bench of accuracy under drops: its plan, its counts, and that all modes answer the same
prompts."""

import json

import numpy as np
import pytest

from moelab import open_model
from notebooks.studies import ane_accuracy
from notebooks.studies.ane_counts import count


@pytest.fixture(scope="module")
def model():
    return open_model()


@pytest.fixture(scope="module")
def trace(model):
    return ane_accuracy.recorded(model, 1, 96, "train")


def test_drops_are_what_a_loop_counts(trace):
    plans = ane_accuracy.plans_of(trace, 64, 8, (0.5, 0.8, 1.4))
    rates = []
    for plan in plans.values():
        dropped = routed = 0
        for s in range(trace.sequences):  # each prompt with chunks of its own
            ids = trace.ids[trace.sequence == s].numpy()
            for chunk in np.split(ids, range(64, len(ids), 64)):
                for l, layer in enumerate(plan.layers):
                    routed += chunk[:, l].size
                    dropped += sum(
                        max(0, int((chunk[:, l] == e).sum()) - group.capacity)
                        for group in layer.on("ane")
                        for e in group.experts
                    )
        rates.append(count(plan, ane_accuracy.prompt_loads(trace, 64)).drop_rate)
        assert rates[-1] == pytest.approx(dropped / routed) and plan.chunk == 64
    assert rates[0] >= rates[1] > rates[2]


def test_every_mode_answers_the_same_prompts():
    few = {"prompts": 3, "tokens": 96, "chunk": 64, "calibration": 2}
    results = ane_accuracy.run(tasks=["needle"], drop=0.15, **few)
    _, rows = results.values()
    assert set(rows) == {f"needle: {mode}" for mode in ("dense", *ane_accuracy.MODES)}
    dense = rows.pop("needle: dense")
    assert dense["n"] == 3 and "dropped" not in dense
    first = rows["needle: weakest attention (NPUMoE)"]
    for row in rows.values():
        assert 0 < row["dropped"] < 1 and 0 < row["padded"] < 1
        assert row["difference"] == pytest.approx(row["score"] - dense["score"])
        # later layers route what is left
        assert row["dropped"] == pytest.approx(first["dropped"], abs=0.05)
    json.dumps(results, allow_nan=False)


def test_less_room_drops_more_in_every_order(model, trace):
    plans = ane_accuracy.plans_of(trace, 256, 8, (0.4, 1.5))
    found, beside = ane_accuracy.loss_by_order(model, plans, windows=2, tokens=96)
    assert set(found) == set(ane_accuracy.MODES.values())
    assert all(of[0.4][0] > of[1.5][0] for of in found.values())
    mean, low, high = beside[0.4]
    assert low <= mean <= high
    random, saliency = (found[order][0.4][1] for order in ("random", "saliency"))
    assert (mean > 0) == (saliency > random)
