"""Selection probabilities against enumeration of all subsets, leave-one-out programs and the
paper's iteration."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moelab.zipmoe.selection import inclusion, sample, selection_probabilities, whole


def enumerated(q, k):
    """(f, pairs) of independent coins given k, over all subsets; pairs are symmetric."""
    E, total = len(q), 0.0
    f, pairs = np.zeros(E), np.zeros((E, E))
    for chosen in itertools.combinations(range(E), k):
        p = math.prod(q[i] if i in chosen else 1 - q[i] for i in range(E))
        total += p
        for i in chosen:
            f[i] += p
            for j in chosen:
                pairs[i, j] += p
    return f / total, pairs / total


@st.composite
def observed(draw, most=8):
    """(f, k) counted in steps of k experts each: ties, zeros and ones included."""
    E = draw(st.integers(1, most))
    k = draw(st.integers(1, E))
    steps = draw(st.lists(st.permutations(range(E)).map(lambda p: p[:k]), min_size=1, max_size=12))
    return np.bincount(np.concatenate(steps), minlength=E) / len(steps), k


@given(observed())
def test_they_reproduce_what_was_counted(case):
    f, k = case
    q, found_k = selection_probabilities(f)
    assert found_k == k
    truth, true_pairs = enumerated(q, k)
    assert np.abs(truth - f).max() < 1e-8
    found, pairs = inclusion(q, k)
    assert np.allclose(found, truth) and np.triu(pairs).sum() == 0
    assert np.allclose(pairs + pairs.T, true_pairs - np.diag(truth))
    assert ((q == 0) == (f == 0)).all() and ((q == 1) == (f == 1)).all()
    assert abs(q.sum() - k) < 1e-6
    assert all(
        abs(q[i] - q[j]) < 1e-6 for i in range(len(f)) for j in range(len(f)) if f[i] == f[j]
    )


@given(st.lists(st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1)), min_size=1, max_size=30))
def test_whole_gives_the_nearest_k_and_keeps_the_order(f):
    f = np.array(f)
    near, k = whole(f)
    assert k == round(f.sum()) and abs(near.sum() - k) < 1e-9 and ((near >= 0) & (near <= 1)).all()
    assert (np.diff(near[np.argsort(f)]) >= -1e-12).all()
    q, same = selection_probabilities(near)
    assert same == k and abs(q.sum() - k) < 1e-6
    again, same = whole(near)
    assert same == k and np.abs(again - near).max() < 1e-6


def test_samples_have_k_experts_as_often_as_they_are_used():
    f, n = np.array([1.0, 0.9, 0.6, 0.5, 0.5, 0.3, 0.2, 0.0]), 20_000
    q, k = selection_probabilities(f)
    drawn = sample(q, k, n, seed=3)
    assert drawn.shape == (n, 8) and (drawn.sum(1) == 4).all()
    assert (np.abs(drawn.mean(0) - f) <= 5 * np.sqrt(f * (1 - f) / n)).all()
    together = enumerated(q, k)[1]
    assert np.abs(drawn.T.astype(float) @ drawn / n - together)[~np.eye(8, dtype=bool)].max() < 0.02
