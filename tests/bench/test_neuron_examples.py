"""The guide's examples against plain arithmetic."""

from moelab.bench import neuron_examples


def test_examples_are_what_a_calculator_says():
    told = {(example.section, example.text): example.ours for example in neuron_examples.examples()}
    assert len(told) == 16
    assert [example.follows for example in neuron_examples.examples()].count("no") == 7 and "Seven do not" in neuron_examples.__doc__
    assert told["Router execution", "Size of GPT-OSS-120B's router, 2880 × 128 × 2 bytes"] == "0.74 MB"
    assert "163 expected" in told["All-Experts", "DeepSeek, batch 32, top-8 of 256: experts required"]   # E(1−(1−K/E)³²)
    assert round(256 * (1 - (1 - 8 / 256) ** 32)) == 163
    assert neuron_examples.router_bytes()[:2] == (2880 * 128 * 2, 36 * 2880 * 128 * 2)


def test_the_worst_padding_fills_every_block():
    worst = neuron_examples.worst_padding()
    needed = sum(-(-n // 256) for n in (769, 769, 457, 1, 1, 1, 1, 1))
    assert worst.needed == needed == worst.provisioned == -(-2000 // 256) + 7


def test_gathering_ids_costs_too():
    bytes_before, weights = 128 * 2, 8 * 2
    assert neuron_examples.gather_ratios() == {name: bytes_before / (weights + 8 * size)
                                     for name, size in (("int64", 8), ("int32", 4), ("uint8", 1))}


def test_block_sizes_by_hand():
    first, again, *others = neuron_examples.block_sizes()
    assert (first.device, first.model, first.T, first.reuse, again.reuse) == (again.device, again.model, 4096, True, False)
    assert first.real == 4096 * 4 / 128                         # FLOPs a byte of a bf16 weight that T·K/E tokens use
    assert {one.dtype for one in others} == {"bf16", "fp8"} and len(others) == 2 * len(neuron_examples.ASKED) - 2
    fp8 = next(one for one in others if one.dtype == "fp8")
    assert fp8.real == 2 * 8192 * 4 / 128


def test_ways_of_parallel_execution_use_all_devices():
    for of in neuron_examples.parallel_ways().values():
        assert all(advice.tp * advice.ep == n for n, advice in of.items())


def test_the_guides_six_tokens():
    assert neuron_examples.six_tokens().tokens.tolist()[:3] == [[0, 2, 5, -1], [1, 4, -1, -1], [3, -1, -1, -1]]
