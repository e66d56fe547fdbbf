"""The roofline of a layer's experts: its arithmetic; a tiny bench has every arm and leaves no thread behind."""

import threading

import pytest
import torch

from moelab.bench import roofline
from moelab.bench.roofline import ExpertTimes


def test_the_roofline_of_a_layer():
    found = roofline.least_seconds(3, 10, 2, 4, 5, 2, bandwidth=1e3, rate=1e6)
    assert found == {"weights ÷ bandwidth": pytest.approx(0.36), "FLOPs ÷ rate": pytest.approx(0.0024)}


def test_times_are_read_by_medians():
    of = ExpertTimes({"transformers eager": [4.0, 9.0, 4.0], "transformers grouped_mm": [3.0, 3.0, 8.0],
                      "gemv": [1.0, 2.0, 9.0], "packed": [3.0, 2.5, 2.5],
                      "gemv of split planes": [0.5] * 3}, 1e9, 1e9, {"weights": 0.5, "FLOPs": 1.0})
    assert of.ours == (2.0, "gemv") and of.stock == (3.0, "transformers grouped_mm")
    assert of.speedup == 1.5 and of.reached == 0.5 and of.bound == "FLOPs"


def test_a_tiny_bench_has_every_arm_and_leaves_nothing():
    before, threads = torch.get_num_threads(), threading.active_count()
    bench = roofline.ExpertBenchmark(4, 2, 32, 16, threads=1, cold=0)
    card = bench.machine(1)
    assert card["memory_bandwidth_gbs"] > 0 and card["bf16_tflops"] > 0
    of = bench.executors(3, 2)
    assert not set(of.samples) & {*roofline.LEFT_OUT, "memory"} and {"gemv", "all_experts"} <= set(of.samples)
    assert all(len(samples) == 2 for samples in of.samples.values()) and of.reached > 0
    found = bench.loading((2, 4), 1)
    assert list(found) == [2, 4] and all(set(arms) == set(roofline.LOADING) for arms in found.values())
    bench.close()
    assert torch.get_num_threads() == before and threading.active_count() == threads


def test_where_loading_all_begins_to_pay():
    found = {1: {"selective": [1.0, 1.0, 9.0], "all_experts": [4.0]}, 8: {"selective": [2.0], "all_experts": [1.0]}}
    ratios = roofline.all_over_selective(found)
    assert ratios == {1: 4.0, 8: 0.5} and roofline.crossing(ratios) == 8
    assert roofline.crossing({1: 1.5}) is None
