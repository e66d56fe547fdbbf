"""The arena: rankings and ceilings against brute force, and what raises breaks nothing."""

import itertools
import re
from collections import OrderedDict
from math import inf

import numpy as np
import pytest

from moelab import open_model
from moelab.bench import arena as contests
from moelab.bench.arena import MODELS, TEXTS, arena
from moelab.cache.policies import LRU
from moelab.cards import load_model
from moelab.ndp.assumptions import Assumptions
from moelab.ndp.bound import layer_bound
from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import Costs
from moelab.ndp.plans import LayerStep, make_plan
from moelab.ndp.systems import GPUNDP, OnDemand
from moelab.speculate.predictors import NextRouter

SMALL = {"tokens": 64, "each": 1}


class MyLRU:
    """As LRU, from its two methods alone."""

    def __init__(self):
        self.order = OrderedDict()

    def touch(self, key, step):
        self.order[key] = step
        self.order.move_to_end(key)

    def victim(self, resident):
        return next(key for key in self.order if key in resident)


class Newest(MyLRU):
    """A bad idea: the expert used last goes."""

    def victim(self, resident):
        return next(key for key in reversed(self.order) if key in resident)


class Broken(MyLRU):
    def victim(self, resident):
        raise RuntimeError("no idea")


def test_a_policy_of_ones_own_is_ranked_under_the_ceiling():
    contest = arena(MyLRU, **SMALL)
    own, lru = contest.own, next(of for of in contest.standings if of.name == "lru")
    assert own.scores == lru.scores and set(own.scores) == set(TEXTS) and not own.error
    assert contest.place <= 1 + contest.standings.index(lru)
    for standing in contest.standings:
        assert all(0 < contest.share(standing, text) <= 1 for text in TEXTS)
    means = [sum(contest.share(of, text) for text in TEXTS) for of in contest.standings]
    assert means == sorted(means, reverse=True)
    bad = arena(Newest, **SMALL)
    assert bad.place == len(bad.standings)
    assert sum(map(len, bad.wrong.values())) > sum(map(len, contest.wrong.values())) > 0


def test_wrong_evictions_against_a_loop_over_the_future():
    trace = contests.texts(open_model(), 64, 1)["prose"]
    _, wrong = contests.play(trace, LRU(), 0.5, judge=True)
    assert trace.sequences == 1
    ids = [(layer, set(experts)) for row in trace.ids.tolist() for layer, experts in enumerate(row)]
    assert wrong == sorted(wrong, key=lambda one: -one.cost)
    for one in wrong[:20]:
        token, layer = map(int, re.findall(r"\d+", one.where))
        now = token * trace.spec.L + layer
        expert, of, after = map(int, re.findall(r"\d+", one.chose))
        later = (n for n, (at, used) in enumerate(ids) if n > now and at == of and expert in used)
        assert next(later) - now == after and one.cost > 0


def test_what_raises_is_told_and_breaks_nothing():
    contest = arena(Broken, **SMALL)
    assert "RuntimeError: no idea" in contest.own.error and "in victim" in contest.own.error
    assert contest.place == len(contest.standings) > 5 and not contest.own.scores

    class NeedsMore(MyLRU):
        def __init__(self, size):
            pass

    assert "TypeError" in arena(NeedsMore, **SMALL).own.error

    with pytest.raises(TypeError, match="neither a cache policy"):
        arena(NextRouter, **SMALL)


def test_schedules_stay_above_the_bound(monkeypatch):
    monkeypatch.setattr(contests, "PROMPT", 24)
    monkeypatch.setattr(contests, "ANSWER", 6)

    class Mine(OnDemand):
        pass

    class Lazy(GPUNDP):
        def plan(self, step, costs):
            return None

    contest = arena(Mine)
    (same,) = (of for of in contest.standings if of.name == "MoE-OnDemand")
    assert contest.lower and contest.own.scores == same.scores
    for standing in contest.standings:
        assert all(0 < contest.share(standing, model) <= 1 for model in standing.scores)
    assert set(contest.own.scores) == set(MODELS) and contest.wrong[MODELS[0]]
    assert "Lazy.plan" in arena(Lazy).own.error


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
