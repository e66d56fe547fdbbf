"""Figures draw the numbers they are given, name their axes, and never tell series apart by colour
alone."""

import numpy as np
import pytest
import torch

pytest.importorskip("plotly.io")

from moelab.viz import figures
from tests.viz.lazily import Lazily

COUNTS = torch.tensor([[6, 0, 2], [1, 1, 2]])
LOADS = torch.tensor([[1, 9], [3, 5], [2, 7]])
MADE = Lazily(
    {
        "heatmap": lambda: figures.heatmap(COUNTS),
        "imbalance": lambda: figures.imbalance({"prefill": [2.25, 1.5], "decode": [1.0, 3.0]}),
        "overlap": lambda: figures.overlap(
            {f"series {i}": [0.5, i / 10] for i in range(6)}, {"top-4": 0.86}, {"top-4": 0.125}
        ),
        "agreement": lambda: figures.agreement(
            [[1, 0.5], [0.25, 1]], ["needle", "code"], ["code", "prose"]
        ),
        "load distribution": lambda: figures.load_distribution(LOADS, {"K·B/E": 6}),
        "inclusion": lambda: figures.inclusion(
            {"batch 1": [0.9, 0.1], "batch 2": torch.tensor([1.0, 0.4])}
        ),
    }
)


def test_the_heatmap_shows_shares_of_a_layer():
    np.testing.assert_allclose(MADE["heatmap"].data[0].z, [[75, 0, 25], [25, 25, 50]])
    np.testing.assert_array_equal(
        figures.heatmap([[0, 0]]).data[0].z, [[0, 0]]
    )  # a layer without tokens


def test_series_are_drawn_by_layer_in_the_unit_of_the_axis():
    np.testing.assert_allclose(MADE["overlap"].data[3].y, [50, 30])
    np.testing.assert_allclose(MADE["imbalance"].data[1].y, [1, 3])
    np.testing.assert_array_equal(MADE["imbalance"].data[1].x, [0, 1])
    agreement = MADE["agreement"].data[0]
    np.testing.assert_allclose(agreement.z, [[100, 50], [25, 100]])
    assert (agreement.y, agreement.x) == (("needle", "code"), ("code", "prose"))
    np.testing.assert_allclose(MADE["inclusion"].data[1].y, [1, 0.4])


def test_the_load_distribution_orders_experts_by_load_and_spans_all_chunks():
    everything, _, median = MADE["load distribution"].data
    np.testing.assert_array_equal(everything.y, [9, 3, 1, 5])  # up the top, down below
    np.testing.assert_array_equal(median.y, [7, 2])
    np.testing.assert_array_equal(median.customdata, [1, 0])
