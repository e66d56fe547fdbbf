"""The guide's examples against plain arithmetic."""

from moelab.bench import guide


def test_examples_are_what_a_calculator_says():
    told = {(example.section, example.text): example.ours for example in guide.examples()}
    assert len(told) == 16
    assert told["Router execution", "Size of GPT-OSS-120B's router, 2880 × 128 × 2 bytes"] == "0.74 MB"
    assert "163 expected" in told["All-Experts", "DeepSeek, batch 32, top-8 of 256: experts required"]   # E(1−(1−K/E)³²)
    assert round(256 * (1 - (1 - 8 / 256) ** 32)) == 163
    assert guide.router_bytes()[:2] == (2880 * 128 * 2, 36 * 2880 * 128 * 2)


def test_the_worst_padding_fills_every_block():
    worst = guide.worst_padding()
    needed = sum(-(-n // 256) for n in (769, 769, 457, 1, 1, 1, 1, 1))
    assert worst.needed == needed == worst.provisioned == -(-2000 // 256) + 7


def test_gathering_ids_costs_too():
    bytes_before, weights = 128 * 2, 8 * 2
    assert guide.gather_ratios() == {name: bytes_before / (weights + 8 * size)
                                     for name, size in (("int64", 8), ("int32", 4), ("uint8", 1))}
