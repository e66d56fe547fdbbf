"""The bench of static shapes: routings of the wanted skew, the roofline, and experts that are limited for a while."""

import pytest
import torch

import moelab
from moelab.bench import static
from moelab.experts.capacity import CapacityFactor
from moelab.models.seam import SeamExperts


def test_routing_names_distinct_experts_and_skews_as_told():
    ids = static.routing(4000, 16, 1, skew=1.0)
    counts = torch.bincount(ids.flatten(), minlength=16).double()
    wanted = 1 / torch.arange(1, 17).double()
    assert torch.allclose(counts / 4000, wanted / wanted.sum(), atol=0.03)
    ids = static.routing(50, 12, 5, skew=2.0, seed=3)
    assert all(len(set(row)) == 5 for row in ids.tolist()) and int(ids.max()) < 12
    assert torch.equal(ids, static.routing(50, 12, 5, skew=2.0, seed=3))


def test_the_roofline_of_a_layer():
    found = static.least_seconds(3, 10, 2, 4, 5, 2, bandwidth=1e3, rate=1e6)
    assert found == {"weights ÷ bandwidth": pytest.approx(0.36), "FLOPs ÷ rate": pytest.approx(0.0024)}


def test_limited_experts_are_those_of_the_block_only_and_are_kept():
    model, kept = moelab.open_model(None), []
    text = ["the red fox and the blue whale and the old man"]
    before, = static.read_all(model, text)
    with static.limited(model, lambda saliency: CapacityFactor(0.5), kept) as executor:
        within, = static.read_all(model, text)
    after, = static.read_all(model, text)
    assert kept == [executor] and executor.tally.dropped > 0
    assert torch.equal(before, after) and not torch.equal(before, within)
    assert not any(isinstance(module, SeamExperts) for module in model.modules())
