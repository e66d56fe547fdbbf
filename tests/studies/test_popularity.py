"""Popularity and its overlap, against loops over the recorded ids."""

import pytest

from moelab import open_model
from moelab.trace import PREFILL
from notebooks.studies.popularity import Popularity, by_size


@pytest.fixture(scope="module")
def found():
    return Popularity.of(open_model(), ["code", "needle"], 2, 64, 3, 8, seed=0)


def best(trace, layer, k=4):
    """The k experts that most prefill tokens visited, by a loop; of equal ones the first."""
    counts = [0] * trace.spec.E
    for row, phase in enumerate(trace.phase.tolist()):
        for expert in trace.ids[row, layer].tolist() if phase == PREFILL else ():
            counts[expert] += 1
    return set(sorted(range(len(counts)), key=lambda e: (-counts[e], e))[:k])


def agreed(one, other):
    """Overlap@4 of two traces, of each layer."""
    return [len(best(one, layer) & best(other, layer)) / 4 for layer in range(one.spec.L)]


def test_overlaps_are_what_a_loop_counts(found):
    for n, name in enumerate(found.names):
        train, test = found.traces[name, "train"], found.traces[name, "test"]
        assert found.pooled(4)[n].tolist() == agreed(train, test)
    a, b = found.names
    across = found.between(found.names, 4, PREFILL)
    assert across[0].tolist() == agreed(found.traces[a, "train"], found.traces[b, "test"])
    assert found.across(4, PREFILL)[0, 1] == across[0].quantile(0.5)


def test_overlap_by_size_of_the_calibration(found):
    offline, unseen = (
        {name: found.traces[name, split] for name in ("code", "needle")}
        for split in ("train", "test")
    )
    pairs = [("code", "needle"), ("needle", "code")]
    rows = by_size(offline, unseen, pairs, [1, 2], 4)
    assert list(rows) == [1] and rows[1]["groups"] == 2  # of two prompts there is but one group
    medians = []
    for group in (0, 1):
        for a, b in pairs:
            layers = sorted(agreed(offline[a].select(offline[a].sequence == group), unseen[b]))
            medians.append((layers[(len(layers) - 1) // 2] + layers[len(layers) // 2]) / 2)
    assert rows[1]["overlap"] == pytest.approx(sum(medians) / 4)
    tokens = sum(int((trace.phase == PREFILL).sum()) for trace in offline.values())
    assert rows[1]["tokens"] == pytest.approx(tokens / 4)
