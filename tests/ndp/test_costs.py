"""Times and sizes by hand, from published rates and published parameter counts; what fits and what
does not."""

from __future__ import annotations

import numpy as np
import pytest

from moelab import cards
from moelab.ndp.costs import Costs, NotSupported
from moelab.ndp.hardware import hardware
from tests.ndp import toy


def test_the_papers_machine_by_hand():
    h = hardware(3, efficiency=(1.0, 1.0), mapping="MOP4CLXOR", clock_ghz=0.8)
    assert h.unit_bandwidth == pytest.approx(4 * 24.0e9) and h.unit_macs == pytest.approx(51.2e9)
    assert h.link == pytest.approx(63e9, rel=1e-3) and h.host_bandwidth == 89.6e9
    assert h.unit_memory == pytest.approx(32 * 2**30, rel=1e-4)
    assert hardware(link_gbs=31.5).link * 2 == pytest.approx(hardware().link)
    assert hardware(gpu_ghz=1.31).gpu_flops * 2 == pytest.approx(hardware().gpu_flops)
    assert hardware(6, host_channels=2, efficiency=(1, 1)).link == 51.2e9


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"gpu_ghz": 0}, "gpu_ghz"),
        ({"gpu": "rtx-a6000", "gpu_ghz": 1.4}, "no figure .*clock_ghz"),
        ({"mapping": "x"}, "MOP4CLXOR"),
        ({"units": 0}, "at least one"),
        ({"units": 2.5}, "whole number"),
        ({"unit": "a100-80gb"}, "no figure .*clock_ghz"),
        ({"gpu": "i7-14700"}, "no figure .*link_bandwidth_gbs"),
        ({"unit": "ndp-dim"}, "Did you mean"),
        ({"clock_ghz": 0}, "clock"),
        ({"host_channels": 0}, "channels"),
        ({"efficiency": (0.5, 1.5)}, "efficiency"),
        ({"link_gbs": -1.0}, "link"),
        ({"latency_us": -1.0}, "latency"),
    ],
)
def test_what_is_no_machine(arguments, says):
    with pytest.raises((ValueError, KeyError), match=says):
        hardware(**arguments)


def test_expert_times_by_hand():
    costs = toy.costs()
    params = 3 * 512 * 1024
    assert costs.transfer() == pytest.approx(2 * params / 1e10)
    assert costs.activation == pytest.approx(1024 / 1e10)
    # one token: 2 bytes a weight at 10 GB/s; ten: a multiplication a weight and token at 5 G/s
    assert np.allclose(costs.unit([0, 1, 10]), [0, 2 * params / 1e10, 10 * params / 5e9])
    assert np.allclose(costs.gpu([1, 1000]), [2 * params / 1e11, 2 * 1000 * params / 1e13])
    assert np.allclose(costs.cpu([1, 100]), [2 * params / 2e10, 2 * 100 * params / 1e11])


@pytest.mark.parametrize(
    "name", ["Qwen3-30B-A3B", "Phi-3.5-MoE", "Mixtral-8x7B", "DeepSeek-MoE-16B"]
)
def test_dense_part_and_experts_make_the_published_total(name):
    spec = cards.load_model(name)
    total = spec.dense_bytes / 2 + spec.experts_bytes / 2
    assert total == pytest.approx(
        cards.load_card(name)["figures"]["total_params"]["value"], rel=0.015
    )


def test_what_does_not_fit_is_not_supported():
    costs = toy.costs(L=4, E=64)  # 64 × 4 × 3.1 MB = 805 MB on two units of 1 GB
    costs.check(100, "units")
    small = {"units": "unit_memory", "host": "host_memory", "GPU": "gpu_memory"}
    for where, memory in small.items():
        machine = toy.machine(2, **{memory: 1e6 if where == "GPU" else 3.9e8})
        with pytest.raises(NotSupported, match=f"for the {where}"):
            Costs(toy.spec(L=4, E=64), machine).check(100, where if where != "GPU" else "units")
    with pytest.raises(NotSupported, match="fullest unit"):
        costs.check(100, "units", fullest=400)
