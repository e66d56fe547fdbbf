"""The guide's examples against plain arithmetic."""

import pytest

from moelab.bench import neuron_examples


def test_figures_are_what_a_calculator_says():
    found = {name: value for name, (value, _) in neuron_examples.figures().items()}
    assert (
        found["router_mb"] == 2880 * 128 * 2 / 1e6
        and found["routers_mb"] == 36 * 2880 * 128 * 2 / 1e6
    )
    assert found["router_share"] == pytest.approx(36 * 2880 * 128 * 2 / 24e9, rel=0.08)  # GB or GiB
    assert (found["blocks_provisioned"], found["blocks_needed"]) == (-(-2000 // 256) + 7, 8)
    assert (
        found["padding_to_provisioned"] == (15 - 8) / 8
        and found["padding_algorithmic"] == (8 * 256 - 2000) / 2000
    )
    assert found["token_skipping_saves"] == 2880 / (4 * 2880 + 3 * 2880**2)
    assert found["intensity_decode_batch_32"] == pytest.approx(
        2 * 32 * 4096 * 12288 / (2 * (32 * 4096 + 32 * 12288 + 4096 * 12288))
    )
    assert {found[f"provisioned_savings_{name}"] for name in ("DeepSeek", "GPT-OSS", "Llama4")} == {
        0.5
    }
    assert found["experts_needed_256_8_32"] == pytest.approx(256 * (1 - (1 - 8 / 256) ** 32))


def test_the_worst_padding_fills_every_block():
    worst = neuron_examples.worst_padding()
    needed = sum(-(-n // 256) for n in (769, 769, 457, 1, 1, 1, 1, 1))
    assert worst.needed == needed == worst.provisioned == -(-2000 // 256) + 7
