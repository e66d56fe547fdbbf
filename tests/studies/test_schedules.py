"""The ranking of schedules, and the bound that it measures them by, against brute force."""

import itertools
from math import inf

import numpy as np
import pytest

from moelab.cards import load_model
from moelab.ndp.assumptions import Assumptions
from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import Costs
from moelab.ndp.plans import LayerStep, make_plan
from moelab.ndp.systems import GPUNDP, OnDemand
from notebooks.studies import schedules
from notebooks.studies.ndp_bound import layer_bound


def test_schedules_stay_above_the_bound(monkeypatch):
    monkeypatch.setattr(schedules, "PROMPT", 24)
    monkeypatch.setattr(schedules, "ANSWER", 6)

    class Mine(OnDemand):
        pass

    class Lazy(GPUNDP):
        def plan(self, step, costs):
            return None

    contest = schedules.rank(Mine)
    (same,) = (of for of in contest.standings if of.name == "MoE-OnDemand")
    assert contest.own.scores == same.scores
    for standing in contest.standings:
        assert all(0 < contest.share(standing, model) <= 1 for model in standing.scores)
    assert set(contest.own.scores) == set(schedules.MODELS)
    assert "Lazy.plan" in schedules.rank(Lazy).own.error


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_below_every_split_of_a_layer(seed):
    """Against all ways of putting quarters of experts on units and GPU, by the closed form's own
    account."""
    rng = np.random.default_rng(seed)
    A, N = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    costs = Costs(load_model("Qwen3-30B-A3B"), Assumptions().hardware(N))
    tokens, here = np.sort(rng.integers(1, 60, A))[::-1], rng.random(A) < 0.5
    step = LayerStep(np.arange(A), tokens, np.arange(A) % N, here, int(tokens.sum()), False)
    best = inf
    for y in itertools.product(range(5), repeat=A):
        parts = {"resident": here * np.array(y) / 4, "moved": ~here * np.array(y) / 4}
        best = min(best, layer_seconds(make_plan(step, N, **parts, split=True), costs))
    assert 0 < layer_bound(tokens, here.sum(), costs) <= best
