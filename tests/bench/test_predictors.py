"""The contest of predictors: its controls, its names, and that all of it runs on the small
model."""

import pytest
import torch

from moelab import open_model
from moelab.bench.predictors import (
    CONTEST,
    PARTS,
    TASKS,
    TRAINED,
    Contest,
    by_layer,
    mean,
    training_metrics,
)


@pytest.fixture(scope="module")
def contest():
    torch.set_num_threads(1)
    return Contest.of(open_model(), 3, 2, 64, 3, seed=0)


def test_the_controls_come_out(contest):
    found = contest.controls()
    assert found["naive_recall_agrees"]
    control = Contest.control(contest.model, 2, 64, seed=0)
    assert control.model is not contest.model and control.test.spec.E == contest.test.spec.E
    assert {"s", "q"} == set(control.similarity())


def test_estimators_are_taught_scored_and_executed(contest):
    learned, seconds = contest.teach(320, 2, seed=0)
    assert seconds > 0 and {
        kind: [len(of) for of in found.values()] for kind, found in learned.items()
    } == {kind: [2, 2, 1] for kind in learned}
    assert set(training_metrics(learned)) >= {f"recall_residual_{part}" for part in PARTS}
    scored = contest.scores(TRAINED)
    # the hybrid is in each layer what it chose
    router, ours, hybrid = (
        of.recall
        for of in (
            contest.scores(("quasi",))["quasi"],
            scored["residual"],
            scored["residual_hybrid"],
        )
    )
    choice = torch.tensor(contest.choices["residual"][: len(hybrid)])
    assert torch.equal(hybrid, torch.where(choice, ours, router))
    assert learned["residual"][320] == [mean(scored["residual"])]
    assert by_layer("recall_s", scored["residual"])["recall_s_0"] == float(ours[0])
    costs, loss = contest.executed(("quasi", *CONTEST[-1:]), 2, 2, 48, seed=0)
    assert (
        list(costs) == list(TASKS)
        and loss > 0
        and costs["loss"]["quasi"][0] < costs["loss"]["random"][0]
    )
    assert contest.identical([5, 6, 7, 8], 3) == {"hint": True, "router-free": True}
