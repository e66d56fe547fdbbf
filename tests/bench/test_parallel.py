"""How even experts placed by one set of counts are under another."""

from itertools import combinations

import pytest
import torch

from moelab.bench import parallel
from moelab.parallel.sharding import owners


def test_placements_are_judged_by_what_they_have_not_seen():
    known = torch.tensor([[8, 1, 1, 1, 1, 1, 1, 2], [4, 4, 4, 4, 1, 1, 1, 1]])
    seen = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 9], [4, 4, 4, 4, 1, 1, 1, 1]])
    found = parallel.placed(known, seen, devices=4, spare=4)
    assert list(found) == ["in order", "EPLB, none spare", "EPLB, 4 spare"]
    assert found["in order"] == [[2, 2, 2, 10], [8, 8, 2, 2]]
    assert found["EPLB, none spare"][1] == [5] * 4  # 4 + 1 on each
    for by_layer in found.values():
        assert [sum(loads) for loads in by_layer] == pytest.approx(seen.sum(1).tolist())


@pytest.mark.parametrize("E, K, W", [(8, 2, 2), (6, 3, 4), (7, 2, 3), (5, 5, 4)])
def test_expected_rows_are_the_mean_over_all_routings(E, K, W):
    """Every set of K experts, from every owner."""
    ids = torch.tensor(list(combinations(range(E), K)))
    pairs = deduplicated = 0
    for row in owners(E, W)[ids].tolist():
        for owner in range(W):
            pairs += sum(r != owner for r in row)
            deduplicated += len(set(row) - {owner})
    n = len(ids) * W
    assert parallel.expected_rows("ep-dedup", E, K, W) == pytest.approx(deduplicated / n)
    assert parallel.expected_rows("ep-a2a", E, K, W) == pytest.approx(pairs / n)
    assert (parallel.expected_rows("ep-a2a", E, K, W) > parallel.expected_rows("ep", E, K, W)) == (
        K > W
    )
