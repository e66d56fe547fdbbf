"""Eq. (1) of Speculating Experts on cards, against a loop over layers and matrices."""

import pytest

from moelab.base.specs import DeviceSpec, Figure, MoESpec
from moelab.cards import load_device
from notebooks.studies.overlap import overlap, run

SPEC = MoESpec(
    "s", "qwen3_moe", 3, (0, 1, 2), 8, 2, 64, 32, vocab=100, heads=4, kv_heads=2, head_dim=16
)


def card(link, memory):
    figures = {"link_bandwidth_gbs": link, "memory_bandwidth_gbs": memory, "bf16_tflops": 1.0}
    units = {"link_bandwidth_gbs": "GB/s", "memory_bandwidth_gbs": "GB/s", "bf16_tflops": "TFLOPS"}
    return DeviceSpec("d", {n: Figure(v, units[n], "published", "") for n, v in figures.items()})


@pytest.mark.parametrize("context", [0, 1000])
def test_it_is_the_sum_over_layers_of_what_is_shorter(context):
    H, I, K, heads, kv, head = 64, 32, 2, 4, 2, 16
    copy = compute = gain = 0.0
    for _ in range(SPEC.L):
        experts = K * 3 * H * I * 2
        attention = 2 * (2 * H * heads * head + 2 * H * kv * head)
        router, cache = 2 * H * SPEC.E, 2 * 2 * kv * head * context
        one, other = experts / 2e9, (experts + attention + router + cache) / 5e9
        copy, compute, gain = copy + one, compute + other, gain + min(one, other)
    found = overlap(SPEC, card(2.0, 5.0), context)
    expected = pytest.approx((copy, compute, gain, copy + compute))
    assert (found.copy, found.compute, found.gain, found.tpot) == expected


def test_no_more_than_half_is_saved_and_longer_contexts_save_more_where_copying_is_slow():
    for rows in run().values():
        saved = [row["largest saving"] for row in rows.values()]
        assert saved == sorted(saved) and max(saved) <= 0.5
    even = overlap(SPEC, card(1.0, 1e9), 0)
    assert even.gain < 1e-6 * even.tpot
    with pytest.raises(ValueError, match="no host link"):
        overlap(SPEC, load_device("trn2"))
