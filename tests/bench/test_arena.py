"""The arena: rankings and ceilings against brute force, and what raises breaks nothing."""

from collections import OrderedDict

import pytest

from moelab.bench.arena import TEXTS, arena
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


def test_several_memories_are_each_a_contest():
    both = arena(MyLRU, share=(0.25, 0.5), **SMALL)
    for share in (0.25, 0.5):
        one = arena(MyLRU, share=share, **SMALL)
        for text in TEXTS:
            assert both.ceiling[f"{text}, {100 * share:g} %"] == one.ceiling[text]
            assert both.own.scores[f"{text}, {100 * share:g} %"] == one.own.scores[text]


def test_what_raises_is_told_and_breaks_nothing():
    contest = arena(Broken, **SMALL)
    assert "RuntimeError: no idea" in contest.own.error and "in victim" in contest.own.error
    assert contest.place == len(contest.standings) > 5 and not contest.own.scores

    class NeedsMore(MyLRU):
        def __init__(self, size):
            pass

    assert "TypeError" in arena(NeedsMore, **SMALL).own.error

    with pytest.raises(TypeError, match="no cache policy"):
        arena(NextRouter, **SMALL)
