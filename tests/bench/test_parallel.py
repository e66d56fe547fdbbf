"""How even experts placed by one set of counts are under another."""

import pytest
import torch

from moelab.bench import parallel


def test_placements_are_judged_by_what_they_have_not_seen():
    known = torch.tensor([[8, 1, 1, 1, 1, 1, 1, 2], [4, 4, 4, 4, 1, 1, 1, 1]])
    seen = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 9], [4, 4, 4, 4, 1, 1, 1, 1]])
    found = parallel.placed(known, seen, devices=4, spare=4)
    assert list(found) == ["in order", "EPLB, none spare", "EPLB, 4 spare"]
    assert found["in order"] == [[2, 2, 2, 10], [8, 8, 2, 2]]
    assert found["EPLB, none spare"][1] == [5] * 4  # 4 + 1 on each
    for by_layer in found.values():
        assert [sum(loads) for loads in by_layer] == pytest.approx(seen.sum(1).tolist())
