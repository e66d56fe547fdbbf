"""Popularity and its overlap, against loops over the recorded ids."""

import pytest

from moelab import open_model
from moelab.bench.popularity import Popularity, by_size
from moelab.trace import PREFILL


@pytest.fixture(scope="module")
def found():
    return Popularity.of(open_model(), ["code", "needle"], 2, 64, 3, 8, seed=0)


def top(trace, layer, k):
    """The k experts of a layer that most prefill tokens visited, and how often each was, by a
    loop."""
    counts = [0] * trace.spec.E
    for row, phase in enumerate(trace.phase.tolist()):
        for expert in trace.ids[row, layer].tolist() if phase == PREFILL else ():
            counts[expert] += 1
    return counts


def test_the_pooled_overlap_is_what_a_loop_counts(found):
    k, L = 4, found.calibration.spec.L
    for n, name in enumerate(found.names):
        for layer in range(L):
            offline, seen = (
                top(found.traces[name, split], layer, k) for split in ("train", "test")
            )
            if (
                sorted(offline)[-k] == sorted(offline)[-k - 1]
                or sorted(seen)[-k] == sorted(seen)[-k - 1]
            ):
                continue  # a tie: which one is of the k is arbitrary
            best = [set(sorted(range(len(c)), key=c.__getitem__)[-k:]) for c in (offline, seen)]
            assert found.pooled(k)[n, layer] == pytest.approx(len(best[0] & best[1]) / k)


def test_overlap_by_size_of_the_calibration(found):
    offline, unseen = (
        {name: found.traces[name, split] for name in ("code", "needle")}
        for split in ("train", "test")
    )
    rows = by_size(offline, unseen, [("code", "needle")], [1, 2], 4)
    assert list(rows) == [1]  # of two prompts there is but one group
    assert rows[1]["groups"] == 2
    rows = by_size(offline, unseen, [("code", "needle"), ("needle", "code")], [1], 4)
    loops = []
    for group in (0, 1):
        agreed = []
        for a, b in (("code", "needle"), ("needle", "code")):
            part = offline[a].select(offline[a].sequence == group)
            layers = [
                len(set(best(part, layer)) & set(best(unseen[b], layer))) / 4
                for layer in range(part.spec.L)
            ]
            agreed.append(
                sorted(layers)[(len(layers) - 1) // 2] / 2 + sorted(layers)[len(layers) // 2] / 2
            )
        loops.append(sum(agreed) / 2)
    assert rows[1]["overlap"] == pytest.approx(sum(loops) / 2)
    assert rows[1]["tokens"] == pytest.approx(
        sum(int((t.phase == PREFILL).sum()) for t in offline.values()) / 4
    )


def best(trace, layer):
    """The four experts that most prefill tokens visited, of equal ones the first."""
    counts = top(trace, layer, 4)
    return sorted(range(len(counts)), key=lambda e: (-counts[e], e))[:4]
