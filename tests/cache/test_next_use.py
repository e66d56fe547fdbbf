"""The policy that learns when experts are used next: against its formulas in loops; what it learns."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.specs import ExpertKey, State
from moelab.cache import next_use
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency

L, E = 3, 6
STEPS = st.lists(
    st.tuples(
        st.integers(0, L - 1),
        st.dictionaries(st.integers(0, E - 1), st.integers(1, 4), min_size=1, max_size=E),
    ),
    max_size=40,
)


class Naive:
    """ln G less the wait of every expert, by the formulas of the module's docstring, in loops."""

    def __init__(self):
        self.G, self.u, self.W, self.rows, self.turn = {}, {}, {}, {}, dict.fromkeys(range(L), 0)
        self.previous = []

    def step(self, now, layer, used):
        decay = 0.5 ** (1 / next_use.HALF_LIFE)
        rows = [("now", e) for e in used] + [("before", e) for e in self.previous]
        new = {}
        for e in range(E):
            key = layer, e
            self.u[key] = decay * self.u.get(key, 0) + (1 - decay) * (e in used)
            learnt = sum(self.W.get((layer, row, e), 0) for row in rows) / math.sqrt(len(rows))
            z = next_use.PRIOR * math.log(self.u[key] + next_use.LEAST) + learnt
            new[e] = 1 / (1 + math.exp(-z))
        old = self.rows.get(layer, [])
        for e in range(E) if old else ():
            came = 1 if e in used else next_use.DISCOUNT * new[e]
            error = (came - self.G[layer, e]) * next_use.RATE / math.sqrt(len(old))
            for row in old:
                self.W[layer, row, e] = self.W.get((layer, row, e), 0) + error
        self.G.update({(layer, e): new[e] for e in range(E)})
        self.rows[layer], self.turn[layer], self.previous = rows, now, used

    def order(self, now, key):
        since = now - self.turn[key[0]]
        wait = L - since if since < L else since
        return math.log(self.G[key]) - next_use.WAIT * wait / L


@given(STEPS, st.integers(1, L * E))
def test_against_loops(steps, capacity):
    """What leaves comes before all that stays, newcomers among them; what was found stays."""
    residency, naive = Residency(L, E, Pools(F=capacity), "next-use"), Naive()
    for now, (layer, tokens) in enumerate(steps):
        before = set(residency.resident(State.FULL))
        used = {ExpertKey(layer, expert) for expert in tokens}
        naive.step(now, layer, sorted(tokens))
        residency.begin(layer, tokens)
        after = set(residency.resident(State.FULL))
        gone, may_go = (before | used) - after, after - (before & used)
        assert len(after) == min(capacity, len(before | used))
        if gone and may_go:
            last = max(naive.order(now, key) for key in gone)
            assert last <= min(naive.order(now, key) for key in may_go) + 1e-4  # W is float32


@pytest.mark.parametrize("scope", ["model", "layer"])
def test_it_learns_what_follows_what(scope):
    """Experts in turn, each as often as all: recency says the contrary of what is needed next."""

    def hits(policy):
        residency = Residency(2, 8, Pools(F=4 if scope == "layer" else 8), policy, scope)
        for turn in range(200):
            if turn == 100:
                residency.reset_counters()
            for layer in range(2):
                residency.begin(layer, {turn % 8: 1})
        return residency.counters.hit_rate()

    assert hits("lru") == 0
    assert hits("next-use") > 0.4  # Belady: 3 of 7


def test_a_layer_that_never_runs_again_leaves():
    """An encoder's experts make room for the decoder's."""
    residency = Residency(2, 8, Pools(F=4), "next-use")
    for _ in range(20):
        residency.begin(0, {0: 1, 1: 1, 2: 1, 3: 1})
    for turn in range(60):
        residency.begin(1, {turn % 2: 1, 2 + turn % 3: 1})
    assert {key.layer for key in residency.resident(State.FULL)} == {1}


def test_a_late_touch_is_no_second_turn():
    """With several pools a policy is told of what a better pool refused, after its victims."""
    plain, late = next_use.NextUse(), next_use.NextUse()
    for policy in (plain, late):
        policy.shape(1, 8)
        for step in range(12):
            for expert in (step % 5, step % 3 + 5):
                policy.touch(ExpertKey(0, expert), step)
            policy.victim({ExpertKey(0, step % 5)})
            if policy is late:
                policy.touch(ExpertKey(0, step % 5), step)
                policy.touch(ExpertKey(0, step % 3 + 5), step)
    keys = [ExpertKey(0, expert) for expert in range(8)]
    while keys:
        victim = plain.victim(keys)
        assert late.victim(keys) == victim
        keys.remove(victim)
        if len(keys) == 1:
            break
